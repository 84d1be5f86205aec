"""Who gets room on a decode worker, decided from numbers.

A lease is granted when live blocks, the prompt's own blocks, what running requests are forecast to grow and what older
requests were denied stay together under a watermark. The last term is fairness: a request that was once denied has the
first claim on room that comes free, so that a stream of small requests cannot starve a large one. A claim is a number
with an end: its request asks again in time or loses it, and loses it at once when dispatch says that it is over.
Dispatch tries a declined request as `id`, `id~1`, `id~2` …: attempts of one request share one claim, aged by the
request's arrival. An empty pool always serves the oldest claim, whatever the forecast says, so the oldest request
always progresses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wish:
    """A request that wants a lease. `blocks` is for its whole prompt, `growth_blocks` the forecast beyond it,
    `landing_bytes` what has to arrive, for a pool that bytes reach by way of other memory."""

    key: str
    arrival_s: float
    blocks: int
    growth_blocks: int
    landing_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Claim:
    """A denied wish; it counts against younger ones until `until_s`."""

    wish: Wish
    until_s: float


@dataclass(frozen=True, slots=True)
class Room:
    """The pool in blocks: `live` are leased, running or in a transfer; `growth` is forecast for those."""

    total: int
    live: int
    growth: int


@dataclass(frozen=True, slots=True)
class Verdict:
    granted: bool
    reason: str


def claim_key(request_id: str) -> str:
    """The request behind an attempt: `id` for `id`, `id~1`, `id~2` …"""
    base, separator, attempt = request_id.rpartition("~")
    return base if base and separator and attempt.isdigit() else request_id


def growth_blocks(context_tokens: int, tokens_left: int, *, horizon_tokens: int, block_size: int) -> int:
    """Blocks that a sequence will add to those of its context within the horizon (or before its end)."""
    after = context_tokens + min(max(0, tokens_left), horizon_tokens)
    return -(-after // block_size) - -(-context_tokens // block_size)


def growth_of_several(
    prompt_tokens: int, generated: Sequence[int], max_tokens: int, *, horizon_tokens: int, block_size: int
) -> int:
    """The same for sequences that share a prompt, by what each has generated. When they part all but one copy the
    prompt's last block, unless it is full."""
    grown = sum(
        growth_blocks(prompt_tokens + count, max_tokens - count, horizon_tokens=horizon_tokens, block_size=block_size)
        for count in generated
    )
    parting = sum(count <= 1 for count in generated) if prompt_tokens % block_size else 0
    return grown + max(0, parting - 1)


def decide(wish: Wish, room: Room, claims: Iterable[Claim], *, watermark: float) -> Verdict:
    """Whether this wish gets its lease now."""
    older = [claim for claim in claims if _is_ahead(claim, wish)]
    promised = sum(claim.wish.blocks for claim in older)
    if room.live == 0 and not older:
        fits = wish.blocks <= room.total
        return Verdict(fits, "the pool is empty" if fits else f"{wish.blocks} blocks asked of a pool of {room.total}")
    wanted = room.live + room.growth + wish.blocks + wish.growth_blocks + promised
    limit = int(room.total * watermark)
    sums = (
        f"live {room.live} + growth {room.growth + wish.growth_blocks} + asked {wish.blocks} + "
        f"older claims {promised} = {wanted} of {limit} blocks"
    )
    return Verdict(wanted <= limit, sums)


def landing_ahead(wish: Wish, claims: Iterable[Claim]) -> int:
    """Bytes of older wishes that were denied, which land before this one's."""
    return sum(claim.wish.landing_bytes for claim in claims if _is_ahead(claim, wish))


def still_claimed(claims: Sequence[Claim], now: float) -> tuple[Claim, ...]:
    """The claims that have not run out."""
    return tuple(claim for claim in claims if claim.until_s > now)


def without(claims: Sequence[Claim], key: str) -> tuple[Claim, ...]:
    """The claims of all other requests."""
    return tuple(claim for claim in claims if claim.wish.key != key)


def _is_ahead(claim: Claim, wish: Wish) -> bool:
    one = claim.wish
    return one.key != wish.key and (one.arrival_s, one.key) < (wish.arrival_s, wish.key)
