"""The runner for CPUs with the compiled step: same plans, same pool, same answers as `engine.runner`, fewer bytes read.

Built from a checkpoint's own weights: quantised tensors stay quantised, dense ones are kept in bf16. Everything that
C++ takes on trust (shapes, block tables, token ids) is checked here before it is called.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.kernels.batch import batch_of
from engine.kernels.cpu import abi, build
from engine.kernels.cpu.weights import PackedWeights, Reader
from engine.kv import KVPool
from engine.model_config import ModelConfig
from engine.quantised import GROUP
from engine.rope import Rotary
from engine.runner import wanted_rows
from engine.types import StepPlan

_POOL_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_MOST_HEADS_TOGETHER, _MOST_HEAD_DIM = 32, 256


@dataclass(slots=True)
class StepSeconds:
    """Where the time of steps went, summed since it was made."""

    products: float = 0.0
    attention: float = 0.0
    rest: float = 0.0


def refusal(config: ModelConfig) -> str | None:
    """Why the compiled step cannot serve this model, or None."""
    sizes = (config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)
    if any(size % GROUP for size in sizes):
        return f"sizes {sizes} are not all multiples of {GROUP}"
    if config.head_dim % 16 or config.head_dim > _MOST_HEAD_DIM:
        return f"head_dim {config.head_dim} is not a multiple of 16 up to {_MOST_HEAD_DIM}"
    if config.num_heads // config.num_kv_heads > _MOST_HEADS_TOGETHER:
        return f"more than {_MOST_HEADS_TOGETHER} query heads share a KV head"
    return None


class CpuRunner:
    """Runs a decoder over the KV of `pool`, on `threads` threads of its own. Raises build.Unavailable.

    `seconds` tells where the time went.
    """

    def __init__(self, config: ModelConfig, read: Reader, pool: KVPool, *, threads: int) -> None:
        reason = refusal(config)
        if reason is not None:
            raise build.Unavailable(reason)
        self.config, self.pool = config, pool
        self.seconds = StepSeconds()
        self._rotary = Rotary(config, torch.device("cpu"))
        self._weights = PackedWeights(config, read)
        self._library = build.load()
        self._library.cpu_step_open.restype = ctypes.c_void_p
        self._handle = ctypes.c_void_p(self._library.cpu_step_open(ctypes.byref(self._weights.model), threads))
        layout = pool.layout
        self._pool = abi.Pool(
            pool.tensor.data_ptr(),
            _POOL_TYPES[pool.tensor.dtype],
            layout.kv_heads,
            layout.layers,
            layout.block_size,
            layout.head_dim,
        )

    @property
    def step_bytes(self) -> int:
        """Bytes of weights that a step reads, however few its tokens."""
        return self._weights.step_bytes(self.config)

    def close(self) -> None:
        """End the threads. The runner is of no use afterwards."""
        if self._handle:
            self._library.cpu_step_close(self._handle)
            self._handle = ctypes.c_void_p()

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self.close()

    def run(self, plan: StepPlan) -> torch.Tensor:
        """As `ModelRunner.run`."""
        chunks = plan.chunks
        batch = batch_of([(c.start, len(c.token_ids), c.block_ids) for c in chunks], self.pool.layout.block_size)
        spans = np.array([(s.first, s.query, s.start, 0) for s in batch.spans], dtype=np.int32)
        lengths = [len(span.blocks) for span in batch.spans]
        spans[1:, 3] = np.cumsum(lengths)[:-1]
        tables = _within([block for s in batch.spans for block in s.blocks], self.pool.layout.num_blocks, "block")
        tokens = _within([token for c in chunks for token in c.token_ids], self.config.vocab_size, "token id")
        cos, sin = self._angles(spans)
        rows = np.array(wanted_rows(chunks), dtype=np.int32)
        logits = torch.empty(len(rows), self.config.vocab_size)
        seconds = np.zeros(3)
        arrays = (tokens, cos, sin, spans, tables.astype(np.int32), rows, logits.numpy(), seconds)
        step = abi.Step(*(array.ctypes.data for array in arrays), self._pool, len(tokens), len(spans), len(rows), 0)
        self._library.cpu_step_run(self._handle, ctypes.byref(step))
        self.seconds.products += seconds[0]
        self.seconds.attention += seconds[1]
        self.seconds.rest += seconds[2]
        return logits

    def _angles(self, spans: NDArray[np.int32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        query, start = spans[:, 1].astype(np.int64), spans[:, 2].astype(np.int64)
        positions = np.arange(query.sum()) + np.repeat(start - spans[:, 0], query)
        lengths = np.repeat(start + query, query)
        cos, sin = self._rotary.angles(torch.from_numpy(positions), torch.from_numpy(lengths))
        return cos.contiguous().numpy(), sin.contiguous().numpy()


def _within(values: Sequence[int], count: int, what: str) -> NDArray[np.int64]:
    array = np.array(values, dtype=np.int64)
    if len(array) and not 0 <= array.min() <= array.max() < count:
        raise ValueError(f"a {what} is outside 0 … {count - 1}")
    return array
