"""Which bytes go where when the two ends cut the same KV differently: pure, and the same numbers at both ends.

A block of `block_size` tokens is page-first: `(kv_heads, layers, 2, block_size, head_dim)`. Ranks divide the heads:
rank r of R holds heads [r * heads / R, (r + 1) * heads / R) of every block, in a pool of its own. So two ends may
differ in two ways, and both in multiples:

- **ranks.** A head is one run of bytes in its block, and so are the heads that a rank of one end shares with a rank of
  the other. With equal block sizes they are one span.
- **block size.** The tokens of a block lie inside each (head, layer, keys or values); where sizes differ, the smaller
  block fills a part of each of those rows, and each part is a span: right, but many small ones. Keep sizes equal where
  speed matters.

Neither end knows the other's blocks, so what they agree on is a sequence cut into *pieces*, as many tokens each as the
smaller of the two block sizes; a `Side` says where the pieces lie in its own pool. The destination opens a lease with
its spans and the source pushes its own, to each pair of ranks that share heads. What a token is nobody here knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

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


def sizes_fit(one: int, other: int) -> bool:
    """Whether KV can move between blocks of these sizes."""
    small, large = sorted((one, other))
    return small > 0 and large % small == 0


@dataclass(frozen=True, slots=True)
class Side:
    """One rank's side of what moves between it and `peer_rank` of the other end.

    Raises `ValueError` when heads or block sizes do not divide.
    """

    shape: KvShape
    cut: Cut
    peer: Cut
    rank: int = 0
    peer_rank: int = 0

    def __post_init__(self) -> None:
        for cut in (self.cut, self.peer):
            if self.shape.kv_heads % cut.ranks:
                raise ValueError(f"{self.shape.kv_heads} heads do not divide over {cut.ranks} ranks")
        mine, theirs = self.cut.block_size, self.peer.block_size
        if not sizes_fit(mine, theirs):
            raise ValueError(f"blocks of {mine} and of {theirs} tokens: the larger must be a multiple of the smaller")

    @property
    def piece_tokens(self) -> int:
        return min(self.cut.block_size, self.peer.block_size)

    @property
    def spans_per_piece(self) -> int:
        if not self.heads:
            return 0
        return 1 if self.cut.block_size == self.peer.block_size else len(self.heads) * self.shape.rows_per_head

    @property
    def piece_bytes(self) -> int:
        return len(self.heads) * self.shape.rows_per_head * self.piece_tokens * self.shape.row_bytes

    @property
    def heads(self) -> range:
        """Those that both ranks hold."""
        mine, theirs = self._held(self.cut, self.rank), self._held(self.peer, self.peer_rank)
        return range(max(mine.start, theirs.start), min(mine.stop, theirs.stop))

    def pieces(self, tokens: int) -> int:
        """How many hold the first `tokens`; the last may be partly filled."""
        return -(-tokens // self.piece_tokens)

    def full_pieces(self, tokens: int) -> int:
        return tokens // self.piece_tokens

    def blocks(self, first_piece: int, num_pieces: int) -> range:
        """Which blocks of a sequence those pieces lie in, counted from its first."""
        size = self.cut.block_size
        start, end = (piece * self.piece_tokens for piece in (first_piece, first_piece + num_pieces))
        return range(start // size, -(-end // size))

    def spans(self, blocks: Sequence[int], first_piece: int, num_pieces: int) -> Spans:
        """Where pieces `first_piece` … lie in this rank's pool: `spans_per_piece` each, in the same order at both ends.

        `blocks`: the ids of the sequence's blocks, from its first token on; block i begins at i times its bytes. Raises
        `IndexError` when they are too few.
        """
        tokens = np.arange(first_piece, first_piece + num_pieces) * self.piece_tokens
        size, row_bytes = self.cut.block_size, self.shape.row_bytes
        held = self._held(self.cut, self.rank)
        row, each = size * row_bytes, self.spans_per_piece
        block_bytes = len(held) * self.shape.rows_per_head * row
        first_row = (self.heads.start - held.start) * self.shape.rows_per_head
        starts = np.asarray(blocks, np.int64)[tokens // size] * block_bytes + tokens % size * row_bytes
        offsets = starts[:, None] + (first_row + np.arange(each)) * row
        return Spans(offsets.ravel(), np.full(num_pieces * each, self.piece_bytes // each if each else 0))

    def _held(self, cut: Cut, rank: int) -> range:
        heads = self.shape.kv_heads
        return range(rank * heads // cut.ranks, (rank + 1) * heads // cut.ranks)


class PoolFacts(Protocol):
    """Whoever describes a pool, of one rank, so that a `Side` can be made for it."""

    @property
    def kv_heads(self) -> int: ...

    @property
    def layers(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...


def side_of(pool: PoolFacts, peer_block_size: int) -> Side:
    """The side of a pool in a transfer with one whose blocks have `peer_block_size` tokens. Raises as `Side` does."""
    rows = pool.kv_heads * pool.layers * 2 * pool.block_size
    shape = KvShape(pool.kv_heads, pool.layers, pool.block_bytes // rows)
    return Side(shape, Cut(pool.block_size), Cut(peer_block_size))


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
    """All takes that move the pieces with tokens [first_token, num_tokens), between all ranks that share heads.

    Both lists hold the sequence from token 0, the same on each rank of an end. Raises `ValueError` when heads or block
    sizes do not divide, or a list is too short.
    """
    for name, cut, blocks in (("source", source, source_blocks), ("destination", destination, destination_blocks)):
        if len(blocks) * cut.block_size < num_tokens:
            raise ValueError(f"{len(blocks)} blocks of {cut.block_size} at the {name} do not hold {num_tokens} tokens")
    if not 0 <= first_token < num_tokens:
        raise ValueError(f"no tokens in [{first_token}, {num_tokens})")
    takes = []
    for to in range(destination.ranks):
        for rank in range(source.ranks):
            here, there = Side(shape, source, destination, rank, to), Side(shape, destination, source, to, rank)
            if here.heads:
                first = here.full_pieces(first_token)
                count = here.pieces(num_tokens) - first
                reads, writes = here.spans(source_blocks, first, count), there.spans(destination_blocks, first, count)
                takes.append(Takes(rank, to, reads, writes))
    return tuple(takes)
