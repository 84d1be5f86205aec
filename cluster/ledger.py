"""What the router has promised and no report has shown yet.

Every placement is written down at once, so that a burst sees its own weight. An entry has a *side* on each worker it
uses, and a side goes one way:

    unseen ──(a report lists the request)──▶ seen ──(a later report does not)──▶ over
       └──────── finished, worker lost, or never seen within `unseen_limit_s` ───▶ over

The decode side's end is the request's end, unless it has another: a request that moves between decode workers has a
side on both until reports no longer list it at the one that it left, or did not get to. A request that a report lists
and the ledger does not know was placed by an earlier router: it is written down as seen, with the promise that is
assumed for such; so a restarted router knows the load again after one report of each worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from cluster.index import Slots, Underway
from cluster.snapshot import Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What one request will use on one worker. `keys`: the prefix it computes there (none where it only decodes)."""

    worker: str
    decode: bool
    prefill_tokens: int = 0
    blocks: int = 0
    context_tokens: int = 0
    siblings: int = 0
    itl_s: float | None = None
    keys: tuple[bytes, ...] = field(default=(), repr=False)


@dataclass(slots=True)
class _Side:
    claim: Claim
    seen: bool = False


@dataclass(slots=True)
class _Entry:
    placed_s: float
    sides: dict[str, _Side]


class _Sum:
    """A running total of claims."""

    def __init__(self) -> None:
        self._amounts = [0, 0, 0, 0, 0]
        self._promises: Counter[float] = Counter()

    def change(self, claim: Claim, sign: int) -> None:
        amounts = (1, claim.prefill_tokens, claim.blocks, claim.context_tokens, claim.siblings)
        self._amounts = [total + sign * amount for total, amount in zip(self._amounts, amounts, strict=True)]
        if claim.decode and claim.itl_s is not None:
            self._promises[claim.itl_s] += sign
            if not self._promises[claim.itl_s]:
                del self._promises[claim.itl_s]

    def tally(self) -> Tally:
        requests, prefill_tokens, blocks, context_tokens, siblings = self._amounts
        itl_s = min(self._promises, default=None)
        return Tally(requests, prefill_tokens, blocks, context_tokens, itl_s, siblings)


_NOTHING = Tally()


class Ledger:
    """Claims by request and by worker. `adopted_itl_s` is the promise assumed for requests of an earlier router."""

    def __init__(self, slots: Slots, *, unseen_limit_s: float = 30.0, adopted_itl_s: float | None = None) -> None:
        self.underway = Underway(slots)
        self._unseen_limit_s = unseen_limit_s
        self._adopted_itl_s = adopted_itl_s
        self._entries: dict[str, _Entry] = {}
        self._here: dict[str, set[str]] = {}
        self._unseen: dict[str, _Sum] = {}
        self._promised: dict[str, _Sum] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def unseen(self, worker: str) -> Tally:
        total = self._unseen.get(worker)
        return total.tally() if total else _NOTHING

    def promised(self, worker: str) -> Tally:
        total = self._promised.get(worker)
        return total.tally() if total else _NOTHING

    def place(self, request_id: str, claims: Iterable[Claim], now: float) -> None:
        """Write a placement down. The same id again replaces the earlier one."""
        self.finished(request_id)
        self._entries[request_id] = _Entry(now, {})
        for claim in claims:
            self._open(request_id, _Side(claim))

    def moves(self, request_id: str, claim: Claim) -> None:
        """A request of one decode worker may go on at another, where it has this claim from now on."""
        entry = self._entries.get(request_id)
        if entry is not None and claim.worker not in entry.sides:
            self._open(request_id, _Side(claim))

    def stays(self, request_id: str, worker: str) -> None:
        """It does not go on at that worker after all."""
        entry = self._entries.get(request_id)
        if entry is not None and worker in entry.sides:
            self._end_side(request_id, worker)

    def decoding_on(self, worker: str) -> tuple[tuple[str, Claim], ...]:
        """Requests whose one decode side is there and was seen, and their claims; the first placed come first."""
        found = [(self._entries[request_id], request_id) for request_id in self._here.get(worker, ())]
        claims = [
            (entry.placed_s, request_id, entry.sides[worker].claim)
            for entry, request_id in found
            if entry.sides[worker].seen and sum(side.claim.decode for side in entry.sides.values()) == 1
        ]
        ordered = sorted(claims, key=lambda each: each[:2])
        return tuple((request_id, claim) for _, request_id, claim in ordered if claim.decode)

    def finished(self, request_id: str) -> bool:
        """The request is over everywhere. False when it was not known."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return False
        for side in entry.sides.values():
            self._close(request_id, side)
        return True

    def reported(self, worker: str, request_ids: Iterable[str], *, decode: bool, now: float) -> None:
        """A worker's newest report lists these requests (reports in order, one incarnation: the router sees to it)."""
        listed = set(request_ids)
        here = self._here.get(worker, set())
        for request_id in here - listed:
            if self._entries[request_id].sides[worker].seen:
                self._end_side(request_id, worker)
        for request_id in here & listed:
            self._see(self._entries[request_id].sides[worker])
        for request_id in listed - here:
            self._adopt(request_id, Claim(worker=worker, decode=decode, itl_s=self._adopted_itl_s), now)

    def lost(self, worker: str) -> None:
        """The worker is gone with all that it held."""
        for request_id in tuple(self._here.get(worker, ())):
            self._end_side(request_id, worker)

    def sweep(self, now: float) -> tuple[str, ...]:
        """Drop placements that no worker has shown in time: their dispatcher died. Returns their ids."""
        dead = tuple(
            request_id
            for request_id, entry in self._entries.items()
            if now - entry.placed_s > self._unseen_limit_s and not any(side.seen for side in entry.sides.values())
        )
        for request_id in dead:
            self.finished(request_id)
        return dead

    def check(self) -> None:
        """Totals equal the sum of the entries; no prefix is underway for nobody. Raises AssertionError."""
        unseen: dict[str, _Sum] = {}
        promised: dict[str, _Sum] = {}
        underway: Counter[tuple[str, bytes]] = Counter()
        for request_id, entry in self._entries.items():
            assert entry.sides, f"{request_id} is on no worker and still in the ledger"
            for worker, side in entry.sides.items():
                assert request_id in self._here[worker], f"{request_id} is missing from the list of {worker}"
                promised.setdefault(worker, _Sum()).change(side.claim, 1)
                underway.update((worker, key) for key in side.claim.keys)
                if not side.seen:
                    unseen.setdefault(worker, _Sum()).change(side.claim, 1)
        for name, totals, expected in (("unseen", self._unseen, unseen), ("promised", self._promised, promised)):
            for worker in totals.keys() | expected.keys():
                have, want = (s[worker].tally() if worker in s else _NOTHING for s in (totals, expected))
                assert have == want, f"{name} on {worker}: {have}, the entries say {want}"
        assert len(self.underway) == len(underway), f"{len(self.underway)} prefixes underway, not {len(underway)}"

    def _adopt(self, request_id: str, claim: Claim, now: float) -> None:
        self._entries.setdefault(request_id, _Entry(now, {}))
        side = _Side(claim)
        self._open(request_id, side)
        self._see(side)

    def _open(self, request_id: str, side: _Side) -> None:
        claim = side.claim
        self._entries[request_id].sides[claim.worker] = side
        self._here.setdefault(claim.worker, set()).add(request_id)
        self._unseen.setdefault(claim.worker, _Sum()).change(claim, 1)
        self._promised.setdefault(claim.worker, _Sum()).change(claim, 1)
        self.underway.add(claim.worker, claim.keys)

    def _see(self, side: _Side) -> None:
        if not side.seen:
            side.seen = True
            self._unseen[side.claim.worker].change(side.claim, -1)

    def _close(self, request_id: str, side: _Side) -> None:
        self._see(side)
        claim = side.claim
        self._promised[claim.worker].change(claim, -1)
        self._here[claim.worker].discard(request_id)
        self.underway.remove(claim.worker, claim.keys)

    def _end_side(self, request_id: str, worker: str) -> None:
        entry = self._entries[request_id]
        decodes = any(side.claim.decode for name, side in entry.sides.items() if name != worker)
        if (entry.sides[worker].claim.decode and not decodes) or len(entry.sides) == 1:
            self.finished(request_id)
        else:
            self._close(request_id, entry.sides.pop(worker))
