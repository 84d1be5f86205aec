"""Checksums of spans: XXH3, 64 bits (Y. Collet, xxHash specification 0.1.1), fast enough to check every block."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from kvtransfer.types import Span


def checksum(data: memoryview | bytes) -> int:
    """XXH3-64 of contiguous bytes, seed 0."""
    return int(xxhash.xxh3_64_intdigest(data))


def span_checksums(region: memoryview, spans: Sequence[Span]) -> tuple[int, ...]:
    """One checksum per span, in order."""
    return tuple(checksum(region[span.offset : span.offset + span.length]) for span in spans)
