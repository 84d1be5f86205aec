"""From a path to a model that may be served.

A *source* is an opened checkpoint: it knows its tensors' names and shapes without reading them, and its digest. Loading
is one story for every format: describe, allocate, fill each part, refuse whatever is missing, of another shape, or
left over. Nothing is served that the checkpoint did not state.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from engine.errors import ModelError
from engine.loaders.gguf import GgufSource
from engine.loaders.hf import HfSource
from engine.model_config import ModelConfig
from engine.models import Decoder
from engine.weights import allocate

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Source(Protocol):
    """An opened checkpoint. Names are those of Hugging Face, whatever the file calls them."""

    config: ModelConfig
    shapes: dict[str, tuple[int, ...]]

    def read(self, name: str) -> torch.Tensor:
        """The tensor's values in a floating dtype, on the host."""

    def content_digest(self) -> str:
        """Names the bytes of the checkpoint, wherever they lie."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """`digest` names the checkpoint's content and description, not its path."""

    model: Decoder
    config: ModelConfig
    digest: str


def load_model(path: str | Path, *, dtype: str = "float32", device: str | torch.device = "cpu") -> LoadedModel:
    """Load a Hugging Face directory or a .gguf file.

    `dtype`: float32, bfloat16 or float16, in which weights are kept and products run. Raises ModelError naming what
    is wrong: unsupported description, missing, truncated, mismatched or left-over tensor, missing file.

    The digest covers every byte of the weight files (XXH3-128 per file, about 10 GB/s, of pages that loading reads
    anyway) and the parsed description.
    """
    source = _open(Path(path))
    config = _settle_tying(source)
    weights, parts = allocate(config, dtype=_DTYPES[dtype], device=torch.device(device))
    _check(source.shapes, {part.name: tuple(part.rows.shape) for part in parts}, tied=config.tied_embeddings)
    for part in parts:
        part.rows.copy_(source.read(part.name))
    return LoadedModel(model=Decoder(config, weights), config=config, digest=_digest(source, config))


def _open(path: Path) -> Source:
    if path.is_dir():
        return HfSource(path)
    if path.suffix == ".gguf" and path.is_file():
        return GgufSource(path)
    kind = "is neither a directory nor a .gguf file" if path.exists() else "does not exist"
    raise ModelError(f"model path {path} {kind}")


def _settle_tying(source: Source) -> ModelConfig:
    """A tied model whose file holds another head is served with that head: the file wins, as in transformers."""
    config, head, embedding = source.config, "lm_head.weight", "model.embed_tokens.weight"
    if not config.tied_embeddings or not {head, embedding} <= source.shapes.keys():
        return config
    return dataclasses.replace(config, tied_embeddings=torch.equal(source.read(head), source.read(embedding)))


def _check(found: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]], *, tied: bool) -> None:
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ModelError(f"{_some('tensor', missing)} missing from the checkpoint")
    for name, shape in wanted.items():
        if found[name] != shape:
            raise ModelError(f"tensor {name} has shape {list(found[name])}; the description asks for {list(shape)}")
    copies = {"lm_head.weight"} if tied else set()
    left_over = [name for name in found if name not in wanted and name not in copies]
    if left_over:
        raise ModelError(f"{_some('tensor', left_over)} in the checkpoint but not part of the described model")


def _some(noun: str, names: list[str]) -> str:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{noun}{'s' if len(names) > 1 else ''} {shown} {'are' if len(names) > 1 else 'is'}"


def _digest(source: Source, config: ModelConfig) -> str:
    return hashlib.blake2b(f"{source.content_digest()} {config!r}".encode(), digest_size=16).hexdigest()
