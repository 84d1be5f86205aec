"""Which bytes go where when the two ends cut the same KV differently: pure, exact, and in as few takes as possible.

A block of `block_size` tokens of one worker is page-first: `(kv_heads, layers, 2, block_size, head_dim)`. Ranks divide
the heads: rank r of R holds heads [r * heads / R, (r + 1) * heads / R) of every block, in a pool of its own. So two
ends may differ in two ways, and both in multiples:

- **ranks.** A head is one run of bytes in its block; heads that both ranks hold move, and neighbours among them move as
  one. With equal block sizes a whole rank slice of a block is one take.
- **block size.** The tokens of a block lie inside each (head, layer, keys or values); where sizes differ, the smaller
  block fills a part of each of those rows, and a take is one row's part: right, but many small takes. Keep sizes equal
  where speed matters.

Tandem's own workers do not use it yet: they register only with equal layouts, so their hand-over sends whole blocks.
It is for whoever connects pools that are cut differently: open a lease with each `Takes.writes`, push its `reads`.

The planner knows token ranges and block lists, not what a token is. Takes come ordered by place, source rank by source
rank; every byte of the range is taken exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvtransfer.layout import group, shared_runs
from kvtransfer.types import Spans


@dataclass(frozen=True, slots=True)
class KvShape:
    """What both ends must have in common. `row_bytes` is one token's keys (or values) of one head in one layer."""

    kv_heads: int
    layers: int
    row_bytes: int

    @property
    def rows_per_head(self) -> int:
        return self.layers * 2


@dataclass(frozen=True, slots=True)
class Cut:
    """How one end cuts it: tokens per block, and over how many ranks the heads are divided."""

    block_size: int
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class Takes:
    """What one destination rank takes from one source rank; `reads[i]` goes into `writes[i]`, of the same length."""

    source_rank: int
    destination_rank: int
    reads: Spans
    writes: Spans


def plan(
    shape: KvShape,
    source: Cut,
    destination: Cut,
    source_blocks: Sequence[int],
    destination_blocks: Sequence[int],
    num_tokens: int,
    first_token: int = 0,
) -> tuple[Takes, ...]:
    """The takes that move tokens [first_token, num_tokens) between two pools.

    `source_blocks` and `destination_blocks` hold the sequence from token 0, the same list on each rank of an end;
    offsets count from the start of a rank's pool. Raises `ValueError` when heads or block sizes do not divide, or a
    list is too short.
    """
    _check(shape, source, destination, source_blocks, destination_blocks, num_tokens, first_token)
    takes = []
    for source_rank, destination_rank, heads in _pairs(shape, source.ranks, destination.ranks):
        pieces = _pieces(source.block_size, destination.block_size, first_token, num_tokens)
        reads = _places(shape, source, source_rank, source_blocks, heads, pieces)
        writes = _places(shape, destination, destination_rank, destination_blocks, heads, pieces)
        counts = shared_runs(reads, writes)
        takes.append(Takes(source_rank, destination_rank, group(reads, counts), group(writes, counts)))
    return tuple(takes)


def _check(
    shape: KvShape,
    source: Cut,
    destination: Cut,
    source_blocks: Sequence[int],
    destination_blocks: Sequence[int],
    num_tokens: int,
    first_token: int,
) -> None:
    for name, cut, blocks in (("source", source, source_blocks), ("destination", destination, destination_blocks)):
        if shape.kv_heads % cut.ranks:
            raise ValueError(f"{shape.kv_heads} heads do not divide over {cut.ranks} ranks of the {name}")
        if len(blocks) * cut.block_size < num_tokens:
            raise ValueError(f"{len(blocks)} blocks of {cut.block_size} at the {name} do not hold {num_tokens} tokens")
    small, large = sorted((source.block_size, destination.block_size))
    if large % small:
        raise ValueError(f"block sizes {source.block_size} and {destination.block_size}: one must divide the other")
    if not 0 <= first_token < num_tokens:
        raise ValueError(f"no tokens in [{first_token}, {num_tokens})")


def _pairs(shape: KvShape, sources: int, destinations: int) -> Iterator[tuple[int, int, range]]:
    """(source rank, destination rank, heads that both hold)."""
    for destination in range(destinations):
        for source in range(sources):
            ours, theirs = (
                range(rank * shape.kv_heads // ranks, (rank + 1) * shape.kv_heads // ranks)
                for rank, ranks in ((destination, destinations), (source, sources))
            )
            heads = range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))
            if heads:
                yield source, destination, heads


def _pieces(source_size: int, destination_size: int, first_token: int, num_tokens: int) -> list[range]:
    """The token ranges that lie in one block at both ends."""
    step = min(source_size, destination_size)
    starts = [first_token, *range((first_token // step + 1) * step, num_tokens, step)]
    return [range(start, end) for start, end in zip(starts, [*starts[1:], num_tokens], strict=True)]


def _places(shape: KvShape, cut: Cut, rank: int, blocks: Sequence[int], heads: range, pieces: Sequence[range]) -> Spans:
    """Where each (piece, head, layer, keys or values) lies in a rank's pool; the order is the same at both ends."""
    own_heads = shape.kv_heads // cut.ranks
    line_bytes = cut.block_size * shape.row_bytes
    block_bytes = own_heads * shape.rows_per_head * line_bytes
    first_line = (heads.start - rank * own_heads) * shape.rows_per_head
    lines = (first_line + np.arange(len(heads) * shape.rows_per_head)) * line_bytes
    starts = np.array([piece.start for piece in pieces])
    sizes = np.array([len(piece) for piece in pieces]) * shape.row_bytes
    bases = np.asarray(blocks)[starts // cut.block_size] * block_bytes + starts % cut.block_size * shape.row_bytes
    offsets = bases[:, None] + lines[None, :]
    return Spans(offsets.ravel(), np.repeat(sizes, len(lines)))
