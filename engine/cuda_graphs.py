"""Decode steps replayed as captured graphs: a GPU is given a whole step at once, instead of some ten calls per layer.

A graph reads its inputs where they lay when it was captured, and its shapes never change. So there is one graph per
padded batch size, all reading the front of the same tensors (`StaticInputs`), and a step is: choose the size, fill the
inputs, replay. Rows that pad a batch write no KV and see none. Only a step with one token for every sequence is taken;
anything else runs as it comes, and so does everything on a CPU. Graphs share one memory pool, because no two run at
once; the largest is captured first, so that the others find its memory. What "capture" means is handed in: tests
capture a function by keeping it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.kernels import MakeDecodeAttention, decode_attention_for
from engine.kernels.batch import AttentionBatch, batch_of
from engine.kernels.decode_batch import DecodeBatch
from engine.kv import KVPool
from engine.models import Decoder
from engine.types import StepPlan

_log = logging.getLogger(__name__)

Step = Callable[[], torch.Tensor]
"""Computes logits (padded batch, vocab_size) from the static inputs."""
Capture = Callable[[Step], Step]
"""From a step to what repeats it, with the same result tensor each time."""


def padded_sizes(most: int) -> tuple[int, ...]:
    """Batch sizes with a graph: 1, 2, 4, then every multiple of 8, the last one at least `most`."""
    sizes = (1, 2, 4, *range(8, most + 8, 8))
    return tuple(size for place, size in enumerate(sizes) if place == 0 or sizes[place - 1] < most)


class StaticInputs:
    """A step's inputs, at addresses that never change, for up to `rows` sequences of up to `width` blocks.

    They are filled on the host (pinned beside a GPU) and copied over. Of the block tables, which are long and hardly
    change from step to step, only what changed is written on the host.
    """

    def __init__(self, rows: int, width: int, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        pinned = device.type == "cuda"
        self._host = torch.zeros(4, rows, dtype=torch.int64, pin_memory=pinned)
        self._host_tables = torch.zeros(rows, width, dtype=torch.int32, pin_memory=pinned)
        self._host_longest = torch.zeros(1, dtype=torch.int64, pin_memory=pinned)
        self._values, self._tables = self._host.numpy(), self._host_tables.numpy()
        self._written: list[tuple[int, ...]] = [()] * rows
        """Per row the block table that host and device have."""
        self._device = self._host.to(device, copy=True)
        self._device_tables = self._host_tables.to(device, copy=True)
        self._device_longest = self._host_longest.to(device, copy=True)
        self._order = torch.arange(rows, device=device)
        event: Any = torch.cuda.Event
        self._copied: Any = event() if pinned else None

    def tokens(self, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Token ids, positions and lengths, each (size,) int64."""
        token_ids, positions, lengths, _ = self._device[:, :size].unbind(0)
        return token_ids, positions, lengths

    def batch(self, size: int) -> DecodeBatch:
        """What attention reads, for the first `size` rows."""
        return DecodeBatch(
            rows=self._order[:size],
            lengths=self._device[2, :size],
            slots=self._device[3, :size],
            tables=self._device_tables[:size],
            longest=self._device_longest,
        )

    def clear(self, size: int) -> None:
        """Make the first `size` rows padding."""
        self._ready()
        _pad(self._values[:, :size])
        self._host_longest[0] = 0
        self._copy()

    def fill(self, token_ids: Sequence[int], batch: AttentionBatch, size: int) -> None:
        """One row per sequence of `batch`, padding up to `size`. Every span is a single token."""
        self._ready()
        spans, count = batch.spans, len(batch.spans)
        starts = np.array([span.start for span in spans], dtype=np.int64)
        last = np.array([span.blocks[span.start // self._block_size] for span in spans], dtype=np.int64)
        values = self._values
        values[0, :count], values[1, :count], values[2, :count] = token_ids, starts, starts + 1
        values[3, :count] = last * self._block_size + starts % self._block_size
        _pad(values[:, count:size])
        for row, span in enumerate(spans):
            if span.blocks != self._written[row]:
                self._write_table(row, span.blocks)
        self._host_longest[0] = int(starts.max()) + 1
        self._copy()

    def _write_table(self, row: int, blocks: tuple[int, ...]) -> None:
        written = self._written[row]
        begin = len(written) if blocks[: len(written)] == written else 0
        changed = slice(begin, len(blocks))
        self._tables[row, changed] = blocks[changed]
        self._device_tables[row, changed].copy_(self._host_tables[row, changed], non_blocking=True)
        self._written[row] = blocks

    def _ready(self) -> None:
        """The last step's copies have left the host."""
        if self._copied is not None:
            self._copied.synchronize()

    def _copy(self) -> None:
        self._device.copy_(self._host, non_blocking=True)
        self._device_longest.copy_(self._host_longest, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


def _pad(values: NDArray[np.int64]) -> None:
    values[:3], values[3] = 0, -1


class DecodeGraphs:
    """The graphs of one model over one pool, for batches of up to `max_batch` and contexts of up to `max_context`.

    `make_attention` None: the device's own.
    """

    def __init__(
        self,
        model: Decoder,
        pool: KVPool,
        *,
        max_batch: int,
        max_context: int,
        capture: Capture,
        make_attention: MakeDecodeAttention | None = None,
    ) -> None:
        self._model, self._pool, self._capture = model, pool, capture
        self._max_batch, self._max_context = max_batch, max_context
        self._sizes = padded_sizes(max_batch)
        width = -(-max_context // pool.layout.block_size)
        self._inputs = StaticInputs(self._sizes[-1], width, pool.layout.block_size, pool.device)
        self._make_attention = make_attention or decode_attention_for(pool.device)
        self._replays: dict[int, Step] = {}

    @property
    def captured(self) -> tuple[int, ...]:
        """Batch sizes that have a graph."""
        return tuple(sorted(self._replays))

    def warm_up(self) -> None:
        """Capture every size, the largest first. Nothing is written to the pool."""
        for size in reversed(self._sizes):
            self._inputs.clear(size)
            self._replay_of(size)
        _log.info("captured decode graphs for batches of %s", ", ".join(map(str, self.captured)))

    def size_of(self, plan: StepPlan) -> int | None:
        """The batch size whose graph runs this plan; None: it runs as it comes."""
        chunks = plan.chunks
        if not 0 < len(chunks) <= self._max_batch:
            return None
        if any(len(chunk.token_ids) != 1 or chunk.rows != 1 or chunk.start >= self._max_context for chunk in chunks):
            return None
        return next(size for size in self._sizes if size >= len(chunks))

    def run(self, plan: StepPlan, size: int) -> torch.Tensor:
        """As `ModelRunner.run`, through the graph of `size_of(plan)`."""
        chunks = plan.chunks
        batch = batch_of([(chunk.start, 1, chunk.block_ids) for chunk in chunks], self._pool.layout.block_size)
        if size not in self._replays:
            self._inputs.clear(size)
        replay = self._replay_of(size)
        self._inputs.fill([chunk.token_ids[0] for chunk in chunks], batch, size)
        return replay()[: len(chunks)].clone()  # the next replay overwrites it

    def _replay_of(self, size: int) -> Step:
        if size not in self._replays:
            self._replays[size] = self._capture(self._step(size))
        return self._replays[size]

    def _step(self, size: int) -> Step:
        inputs, model = self._inputs, self._model
        scale = model.config.head_dim**-0.5
        attend = self._make_attention(self._pool, inputs.batch(size), scale, self._max_context)

        def step() -> torch.Tensor:
            return model.logits(model.hidden_states(*inputs.tokens(size), attend))

        return step


class CudaCapture:
    """Captures steps into CUDA graphs that share one memory pool. A step runs once as it comes before it is captured:
    kernels are compiled and libraries opened then."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: Any = None

    def __call__(self, step: Step) -> Step:
        with torch.cuda.device(self._device):
            side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                step()
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            graph: Any = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._memory):
                result = step()
        self._memory = self._memory or graph.pool()

        def replay(_kept: Step = step) -> torch.Tensor:  # the graph reads and writes what the step owns
            graph.replay()
            return result

        return replay


def decode_graphs_for(model: Decoder, pool: KVPool, *, max_batch: int, max_context: int) -> DecodeGraphs | None:
    """Captured graphs on a GPU, nothing elsewhere."""
    if pool.device.type != "cuda":
        return None
    capture = CudaCapture(pool.device)
    with torch.inference_mode():
        graphs = DecodeGraphs(model, pool, max_batch=max_batch, max_context=max_context, capture=capture)
        graphs.warm_up()
    return graphs
