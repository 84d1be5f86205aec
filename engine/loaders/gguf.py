"""GGUF files, through the `gguf` package, dequantised to the compute dtype.

Conversion to GGUF interleaves the rows of q and k for architecture `llama` (its rotary convention pairs neighbours);
that is undone here. Tensor names are translated to those of Hugging Face, shapes to rows first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from engine.errors import ModelError
from engine.gguf_file import GgufFile
from engine.loaders.digest import content_digest
from engine.model_config import parse_gguf_config
from engine.quantised import Quantised, from_blocks

ROPE_DIVISORS = "rope_freqs.weight"
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TENSOR = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<kind>weight|bias)")


class GgufSource:
    """An opened file. Raises ModelError for a bad one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        reader = _read(path)
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        shapes = {name: _shape(tensor) for name, tensor in self._tensors.items()}
        self.config = parse_gguf_config(_metadata(reader), shapes, self._divisors())
        self._permuted = str(_metadata(reader)["general.architecture"]) == "llama"
        self._original = {hf_name(name): name for name in shapes if name != ROPE_DIVISORS}
        self.shapes = {name: shapes[original] for name, original in self._original.items()}

    def read(self, name: str) -> torch.Tensor:
        tensor = self._tensors[self._original[name]]
        try:
            values = dequantize(tensor.data, tensor.tensor_type).reshape(self.shapes[name])
        except (NotImplementedError, ValueError) as error:
            kind = tensor.tensor_type.name
            raise ModelError(f"{self._path.name}: tensor {tensor.name} ({kind}) cannot be read: {error}") from error
        heads = self._interleaved_heads(name)
        values = _half_split(values, heads) if heads else values
        return torch.from_numpy(np.array(values, dtype=np.float32))

    def read_quantised(self, name: str) -> Quantised | None:
        tensor = self._tensors[self._original[name]]
        if len(self.shapes[name]) != 2:
            return None
        outputs, inputs = self.shapes[name]
        blocks = torch.from_numpy(np.array(tensor.data).view(np.uint8).reshape(outputs, -1))
        quantised = from_blocks(tensor.tensor_type.name, blocks, inputs)
        heads = self._interleaved_heads(name)
        if quantised is None or not heads:
            return quantised
        return quantised.rows(torch.from_numpy(_half_split(np.arange(outputs), heads)))

    def content_digest(self) -> str:
        return content_digest([self._path])

    def _interleaved_heads(self, name: str) -> int:
        if not self._permuted:
            return 0
        if ".q_proj." in name:
            return self.config.num_heads
        return self.config.num_kv_heads if ".k_proj." in name else 0

    def _divisors(self) -> tuple[float, ...]:
        if ROPE_DIVISORS not in self._tensors:
            return ()
        tensor = self._tensors[ROPE_DIVISORS]
        return tuple(float(value) for value in dequantize(tensor.data, tensor.tensor_type).reshape(-1))


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; one that has none keeps its own."""
    match = _TENSOR.fullmatch(name)
    if match is None or match["part"] not in _NAMES:
        return name
    layer = "" if match["layer"] is None else f"model.layers.{match['layer']}."
    return f"{layer}{_NAMES[match['part']]}.{match['kind']}"


def _half_split(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of each head from (x0, y0, x1, y1, …) to (x0, x1, …, y0, y1, …)."""
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


class _CheckedReader(GgufFile):
    """Names the tensor that a truncated file lost, which the package's own reader does not."""

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        for field in fields:
            _, name, _, dims, kind, offset = field.parts
            per_block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind[0])]
            num_bytes = int(np.prod(dims)) * block_bytes // per_block
            if start_offs + int(offset[0]) + num_bytes > len(self.data):
                raise ModelError(f"truncated: tensor {bytes(name).decode()} ends beyond the file")
        super()._build_tensors(start_offs, fields)


def _read(path: Path) -> GgufFile:
    try:
        return _CheckedReader(path)
    except ModelError as error:
        raise ModelError(f"{path.name} is {error}") from error
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise ModelError(f"{path.name} is not a readable GGUF file: {error}") from error


def _metadata(reader: GgufFile) -> Mapping[str, Any]:
    """Key-value pairs, without the tokenizer's long lists."""
    kept = {key: field for key, field in reader.fields.items() if not key.startswith("tokenizer.ggml.")}
    ids = {key: field for key, field in reader.fields.items() if key.endswith("_token_id")}
    return {key: field.contents() for key, field in (kept | ids).items()}


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(tensor.shape))
