"""What attention must know about a step, worked out once and used by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's tokens in the flat batch.

    Tokens `first` … `first + query - 1` of the batch stand at positions `start` … `start + query - 1` of the sequence
    whose KV is in `blocks`, which cover `context` = start + query positions.
    """

    first: int
    query: int
    start: int
    blocks: tuple[int, ...]

    @property
    def context(self) -> int:
        return self.start + self.query


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The sequences of one step, in batch order."""

    spans: tuple[Span, ...]
    block_size: int

    @property
    def num_tokens(self) -> int:
        return sum(span.query for span in self.spans)

    def slots(self) -> list[int]:
        """Where each token's KV goes: block * block_size + offset in the block."""
        size = self.block_size
        return [
            span.blocks[position // size] * size + position % size
            for span in self.spans
            for position in range(span.start, span.context)
        ]

    def tables(self, spans: Sequence[Span]) -> list[tuple[int, ...]]:
        """Block tables of equal length; a short one is filled up with its own first block, which is masked later."""
        width = max(len(span.blocks) for span in spans)
        return [span.blocks + (span.blocks[0],) * (width - len(span.blocks)) for span in spans]


def batch_of(pieces: Sequence[tuple[int, int, Sequence[int]]], block_size: int) -> AttentionBatch:
    """A batch from (start, tokens, block table) per sequence. Raises ValueError for a table that is too short."""
    spans, first = [], 0
    for start, query, table in pieces:
        needed = -(-(start + query) // block_size)
        if query <= 0 or len(table) < needed:
            raise ValueError(
                f"{query} tokens at position {start} need {max(needed, 1)} blocks; the table has {len(table)}"
            )
        spans.append(Span(first, query, start, tuple(table[:needed])))
        first += query
    return AttentionBatch(tuple(spans), block_size)
