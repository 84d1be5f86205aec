"""Both ends of a link's probe: how fast a pair moves KV, known before anybody waits for it.

    router ── ProbeLink ──▶ destination: free blocks, lease open ── SendProbe ──▶ source: free blocks
                           throws the bytes away              ◀══ a few rounds ═══╛

The rounds go into the same blocks, so that the first pays for joining the pair and for fresh memory, and the others are
samples of the source's `kvtransfer.rates`, which the source logs and reports with its load. A probe may cost a request
nothing: it takes free blocks alone, is declined where there is anything to do, and ends at either end when something
comes, or at its deadline; then one round is under way at most. What fails is not measured, and no error to anybody.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from engine.engine import Engine
from engine.hashing import GRANULE
from kvtransfer import types as kv
from kvtransfer.engine import TransferEngine
from kvtransfer.errors import TransferError
from kvtransfer.layout import block_spans, cut
from kvtransfer.outgoing import Parting
from kvtransfer.rates import SAMPLE_BYTES
from kvtransfer.select import choose
from tandem.messages import (
    Answer,
    Code,
    Declined,
    ProbeLink,
    ProbeSent,
    ProbingLink,
    Question,
    SendProbe,
    WorkerInfo,
    WorkerRef,
)

ROUNDS = 4
ROUND_BYTES = 2 * SAMPLE_BYTES
DEADLINE_S = 0.3
LAST = 2
"""Priority of the pushes: after hand-overs and fetches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeLimits:
    deadline_s: float = DEADLINE_S
    quiet_patience_s: float = 5.0


@dataclass(slots=True)
class _Probe:
    """At either end. `rounds` are still to come; `parting`: it is over and we wait for `Quiet`."""

    key: kv.LeaseKey
    peer: str
    scheme: str
    blocks: tuple[int, ...]
    spans: kv.Spans
    """Of the lease; at the source, of one round."""
    rounds: int
    deadline_s: float
    parting: Parting | None = None


class LinkProbe:
    """One thread, the step loop's; no I/O of its own. One probe at a time, as a source or as a destination.

    `busy`: whether this worker has anything to do. `ask` sends a question and returns its number.
    """

    def __init__(
        self,
        info: WorkerInfo,
        engine: Engine,
        transfers: TransferEngine,
        *,
        ask: Callable[[WorkerRef, Question], int],
        reply: Callable[[int, Answer], None],
        busy: Callable[[], bool],
        limits: ProbeLimits = ProbeLimits(),
    ) -> None:
        self._info = info
        self._engine = engine
        self._transfers = transfers
        self._ask = ask
        self._reply = reply
        self._busy = busy
        self._limits = limits
        self._probe: _Probe | None = None
        self._sends = False
        self._asked: set[int] = set()
        self._generations = count(1)

    # -- questions and answers ------------------------------------------------------------------------------------

    def probe_link(self, ask_id: int, question: ProbeLink, now: float) -> None:
        """As the destination: make room and ask the source to send."""
        self._reply(ask_id, self._refusal(question.source) or self._receive(question.source, now))

    def send_probe(self, ask_id: int, question: SendProbe, now: float) -> None:
        """As the source: send the first round; each next one follows the one before."""
        self._reply(ask_id, self._refusal(question.destination) or self._send(question, now))

    def answered(self, ask_id: int, answer: Answer, now: float) -> bool:
        """False: not an answer to a question of ours."""
        ours = ask_id in self._asked
        self._asked.discard(ask_id)
        if ours and isinstance(answer, Declined) and self._probe is not None and not self._sends:
            self._end(self._probe, now)
        return ours

    # -- the loop's calls -------------------------------------------------------------------------------------------

    def transferred(self, event: kv.TransferEvent, now: float) -> bool:
        """An event of the transfer engine; False: not of our probe."""
        probe = self._probe
        if isinstance(event, kv.PeerLost):
            if probe is not None and probe.peer == event.peer:
                self._end(probe, now)
            return False
        if probe is None or event.key != probe.key:
            return False
        match event:
            case kv.Received():
                probe.rounds -= 1
                if not probe.rounds:
                    self._end(probe, now)
            case kv.PushDone():
                probe.rounds -= 1
                if probe.parting is None and not (probe.rounds and self._push(probe, now)):
                    self._end(probe, now)
            case kv.ReceiveFailed() | kv.PushFailed():
                self._end(probe, now)
            case kv.Quiet():
                self._engine.unretain(probe.blocks)
                self._probe = None
        return True

    def tick(self, now: float) -> None:
        """Give way to work, keep the deadline, cut off who never falls silent."""
        probe = self._probe
        if probe is None:
            return
        if now >= probe.deadline_s or self._busy():
            self._end(probe, now)
        if probe.parting is not None:
            probe.parting.tick(now)

    def idle(self) -> bool:
        return self._probe is None

    def check(self) -> None:
        """Raises AssertionError when a probe is over and kept."""
        probe = self._probe
        assert probe is None or probe.rounds or probe.parting is not None, f"{probe} has no rounds left"

    # -- inside ---------------------------------------------------------------------------------------------------

    def _refusal(self, peer: WorkerRef) -> Declined | None:
        name = self._info.ref.name
        if peer == self._info.ref:
            return Declined(Code.INVALID, f"{name} has no link to itself", by=name)
        if self._probe is not None or self._busy():
            return Declined(Code.NO_ROOM, f"{name} has something to do", by=name)
        return None

    def _receive(self, source: WorkerRef, now: float) -> Answer:
        me, unit = self._info, self._info.block_bytes // (self._info.block_size // GRANULE)
        blocks = self._engine.scratch(-(-ROUND_BYTES // me.block_bytes))
        if not blocks:
            return Declined(Code.NO_ROOM, f"{me.ref.name} has too few free blocks to probe a link", by=me.ref.name)
        key = kv.LeaseKey(f"probe {source.peer}>{me.ref.peer}", next(self._generations))
        spans = cut(block_spans(blocks * ROUNDS, me.block_bytes), unit)
        try:
            self._transfers.open(key, source.peer, spans)
        except TransferError as error:
            self._engine.unretain(blocks)
            return Declined(Code.UNAVAILABLE, str(error), by=me.ref.name)
        self._probe = _Probe(key, source.peer, "", blocks, spans, ROUNDS, now + self._limits.deadline_s)
        self._sends = False
        addresses = self._transfers.addresses()
        each = len(spans) // ROUNDS
        question = SendProbe(key.lease_id, key.generation, each, ROUNDS, me.ref, addresses, unit)
        self._asked.add(self._ask(source, question))
        return ProbingLink(spans.num_bytes)

    def _send(self, question: SendProbe, now: float) -> Answer:
        me, peer = self._info, question.destination.peer
        if question.span_bytes <= 0 or me.block_bytes % question.span_bytes:
            sizes = f"spans of {question.span_bytes} bytes do not divide blocks of {me.block_bytes} here"
            return Declined(Code.MISMATCH, sizes, by=me.ref.name)
        theirs = dict(question.transports)
        try:
            scheme = choose(dict(self._transfers.addresses()), theirs)
            self._transfers.connect(peer, scheme, theirs[scheme])
        except TransferError as error:
            return Declined(Code.UNAVAILABLE, f"no way to {question.destination.name}: {error}", by=me.ref.name)
        blocks = self._engine.scratch(-(-question.num_spans * question.span_bytes // me.block_bytes))
        if not blocks:
            return Declined(Code.NO_ROOM, f"{me.ref.name} has too few free blocks to probe a link", by=me.ref.name)
        key = kv.LeaseKey(question.probe_id, question.generation)
        spans = cut(block_spans(blocks, me.block_bytes), question.span_bytes)[: question.num_spans]
        probe = _Probe(key, peer, scheme, blocks, spans, question.rounds, now + self._limits.deadline_s)
        if not self._push(probe, now):
            self._engine.unretain(blocks)
            return Declined(Code.UNAVAILABLE, f"cannot push to {question.destination.name}", by=me.ref.name)
        self._probe, self._sends = probe, True
        return ProbeSent(question.probe_id)

    def _push(self, probe: _Probe, now: float) -> bool:
        """The next round; where it lies in the lease follows from how many are left."""
        first, left_s = (ROUNDS - probe.rounds) * len(probe.spans), probe.deadline_s - now
        try:
            self._transfers.push(
                probe.key, probe.peer, first, probe.spans, scheme=probe.scheme, priority=LAST, deadline_s=left_s
            )
        except TransferError:
            return False
        return True

    def _end(self, probe: _Probe, now: float) -> None:
        """`Quiet` follows, and then the blocks are free again."""
        if probe.parting is not None:
            return
        probe.parting = Parting(self._transfers, probe.peer, now, self._limits.quiet_patience_s)
        if self._sends:
            self._transfers.withdraw(probe.key)
        else:
            self._transfers.close(probe.key)
