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
from engine.kernels import pointwise_for
from engine.linear import four_bit
from engine.loaders.gguf import GgufSource
from engine.loaders.hf import HfSource
from engine.model_config import ModelConfig
from engine.models import Decoder
from engine.quantised import Quantised
from engine.weights import allocate, with_four_bit

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Source(Protocol):
    """An opened checkpoint. Names are those of Hugging Face, whatever the file calls them."""

    config: ModelConfig
    shapes: dict[str, tuple[int, ...]]

    def read(self, name: str) -> torch.Tensor:
        """The tensor's values in a floating dtype, on the host."""

    def read_quantised(self, name: str) -> Quantised | None:
        """The tensor as the file has it, when that is codes in groups; else None."""

    def content_digest(self) -> str:
        """Names the bytes of the checkpoint, wherever they lie."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint of which every tensor is known to be there and of the right shape; no weight is read yet.

    `digest` names the content and description, not the path.
    """

    source: Source
    config: ModelConfig
    digest: str

    def read(self, name: str) -> torch.Tensor:
        """A tensor by its Hugging Face name, floating, on the host."""
        return self.source.read(name)

    def read_kept(self, name: str) -> torch.Tensor | Quantised:
        """A tensor as the file has it: quantised where it is, and where its groups can be kept."""
        quantised = self.source.read_quantised(name)
        return self.source.read(name) if quantised is None else quantised


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """`digest` names the checkpoint's content and description, not its path."""

    model: Decoder
    config: ModelConfig
    digest: str


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a Hugging Face directory or a .gguf file.

    Raises ModelError naming what is wrong: unsupported description, missing, truncated, mismatched or left-over tensor,
    missing file. The digest covers every byte of the weight files (XXH3-128 per file, about 10 GB/s, of pages that
    loading reads anyway) and the parsed description.
    """
    source = _open(Path(path))
    config = _settle_tying(source)
    _, parts = allocate(config, dtype=torch.float32, device=torch.device("meta"))
    _check(source.shapes, {part.name: tuple(part.rows.shape) for part in parts}, tied=config.tied_embeddings)
    return Checkpoint(source, config, _digest(source, config))


def decoder_of(
    checkpoint: Checkpoint, *, dtype: str = "float32", device: str | torch.device = "cpu", packed: bool = False
) -> Decoder:
    """The torch model. `dtype`: float32, bfloat16 or float16, in which weights are kept and products run.

    `packed` keeps 4-bit codes beside the dense weights, for steps of few tokens; on the host only.
    """
    weights, parts = allocate(checkpoint.config, dtype=_DTYPES[dtype], device=torch.device(device))
    for part in parts:
        part.rows.copy_(checkpoint.read(part.name))
    if packed:
        weights = with_four_bit(
            weights, lambda names: four_bit([checkpoint.read_kept(name) for name in names], _DTYPES[dtype])
        )
    return Decoder(checkpoint.config, weights, pointwise_for(weights.embedding.device))


def load_model(path: str | Path, *, dtype: str = "float32", device: str | torch.device = "cpu") -> LoadedModel:
    """`open_checkpoint` and `decoder_of` in one."""
    checkpoint = open_checkpoint(path)
    model = decoder_of(checkpoint, dtype=dtype, device=device)
    return LoadedModel(model=model, config=checkpoint.config, digest=checkpoint.digest)


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
