"""Checksums of spans: XXH3, 64 bits (Y. Collet, xxHash specification 0.1.1), fast enough to check every block."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from kvtransfer.layout import views_of
from kvtransfer.types import Numbers, Span


def checksum(data: memoryview | bytes) -> int:
    """XXH3-64 of contiguous bytes, seed 0."""
    return int(xxhash.xxh3_64_intdigest(data))


def span_checksums(region: memoryview, spans: Sequence[Span]) -> Numbers:
    """One checksum per span, in order."""
    return Numbers([checksum(view) for view in views_of(region, spans)])
