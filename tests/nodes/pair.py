"""Two or more workers wired by hand in one thread: no sockets, no sleeps, time moves when the test says so."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import count

from cluster.streams import TokenStream
from cluster.worker import Worker, WorkerSettings
from engine.engine import Engine
from engine.types import FinishReason, Request, SamplingParams, Token
from kvtransfer.engine import TransferEngine
from kvtransfer.inproc import InprocHub, InprocTransport
from tandem.messages import (
    Abort,
    Answer,
    Code,
    Declined,
    Delta,
    Expect,
    FinishedEarly,
    Follow,
    Forward,
    Frame,
    FrameFor,
    HandedOver,
    KvEvents,
    LoadReport,
    Question,
    Submit,
    WorkerRef,
)
from tandem.wire import decode_envelope, encode_envelope
from tests.nodes.ledger_model import ledger_engine

GATEWAY = "g"


@dataclass
class Told:
    """What the gateway heard of one request."""

    tokens: list[int] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)
    finish: FinishReason | None = None
    error: Declined | None = None


@dataclass
class Net:
    """Workers by name. `lose(question, worker)` True: that question, or with `lose_answers` its answer, is lost."""

    now: float = 100.0
    workers: dict[str, Worker] = field(default_factory=dict)
    frozen: set[str] = field(default_factory=set)
    hub: InprocHub = field(default_factory=InprocHub)
    told: dict[str, Told] = field(default_factory=lambda: defaultdict(Told))
    answers: dict[int, Answer] = field(default_factory=dict)
    asked: list[tuple[str, Question]] = field(default_factory=list)
    lost_answers: list[type] = field(default_factory=list)
    reports: list[LoadReport] = field(default_factory=list)
    kv_events: list[KvEvents] = field(default_factory=list)
    frame_numbers: dict[str, int] = field(default_factory=dict)
    streams: dict[str, TokenStream] = field(default_factory=dict)
    moves: list[tuple[str, str]] = field(default_factory=list)
    """(request, destination), as the gateway was told."""
    _ids: count[int] = field(default_factory=lambda: count(1))
    _forwards: dict[tuple[str, int], tuple[str, int, type]] = field(default_factory=dict)

    def add(self, name: str, role: str, engine: Engine | None = None, **settings: object) -> Worker:
        """A fresh worker, or a new incarnation of one."""
        incarnation = f"i{next(self._ids)}"
        engine = engine or ledger_engine()
        address = f"{name}.{incarnation}:1"
        peer = f"{name}#{incarnation}"
        region = engine.pool_bytes()
        transport = InprocTransport(peer, region, self.hub)
        transfers = TransferEngine(peer, region, [transport], clock=lambda: self.now, checksums=True)
        fixed = WorkerSettings(name=name, incarnation=incarnation, role=role, address=address, allow_faults=True)
        worker = self.workers[name] = Worker(replace(fixed, **settings), engine, transfers)
        return worker

    def kill(self, name: str) -> None:
        """Gone without a word: its memory and its questions with it."""
        self.workers.pop(name).transfers.shutdown()

    # -- the gateway's side --------------------------------------------------------------------------------------

    def ask(self, name: str, question: Question) -> int:
        ask_id = next(self._ids)
        self.asked.append((name, question))
        self.workers[name].receive(ask_id, _over_the_wire(question, self.now), self.now)
        return ask_id

    def start(self, request: Request, prefill: str | None, decode: str) -> int | None:
        """Expect and, with a prefill worker, Submit; its ask id."""
        source = self.workers[prefill].info.ref if prefill else None
        if request.branching is None:
            self.streams[request.request_id] = TokenStream(request.request_id, self.workers[decode].info.ref)
        expected = self.ask(decode, Expect(request, GATEWAY, source))
        self.turn()
        answer = self.answers[expected]
        if isinstance(answer, Declined):
            self.told[request.request_id].error = answer
            return None
        return self.ask(prefill, Submit(request, self.workers[decode].info.ref)) if prefill else None

    def abort(self, request_id: str, *, again: bool = False) -> None:
        for name in tuple(self.workers):
            self.ask(name, Abort(request_id, again=again))

    # -- time ----------------------------------------------------------------------------------------------------

    def turn(self, dt: float = 0.001) -> None:
        """One round of every worker's loop."""
        self.now += dt
        for name in tuple(self.workers):
            if name in self.workers and name not in self.frozen:
                self.workers[name].prepare(self.now)
                self._carry(name)
                self.workers[name].tick(self.now)
                self._carry(name)
        for worker in self.workers.values():
            worker.engine.check()
            worker.prefill.check()
            worker.decode.check()

    def run(self, *, turns: int = 2000, dt: float = 0.001) -> None:
        """Turn until every worker is idle."""
        for _ in range(turns):
            self.turn(dt)
            if all(worker.idle() for name, worker in self.workers.items() if name not in self.frozen):
                return
        stories = {name: worker.request_ids() for name, worker in self.workers.items()}
        raise AssertionError(f"not idle after {turns} turns: {stories}")

    def until(self, condition: object, *, turns: int = 500) -> None:
        for _ in range(turns):
            if condition():  # type: ignore[operator]
                return
            self.turn()
        raise AssertionError("the condition did not come true")

    def check(self) -> None:
        """Nothing is held by anybody, everywhere."""
        for worker in self.workers.values():
            assert worker.idle()
            worker.check()
            load = worker.engine.load(self.now)
            assert load.free_blocks + load.cached_blocks == load.total_blocks

    # -- the road ------------------------------------------------------------------------------------------------

    def _carry(self, name: str) -> None:
        outbox, self.workers[name].outbox = self.workers[name].outbox, []
        for ask_id, value in outbox:
            _, carried = decode_envelope(encode_envelope(ask_id, value, self.now), self.now)
            match carried:
                case Forward(to=to, question=question):
                    self._forward(name, ask_id, to, question)
                case FrameFor(frame=frame):
                    number = self.frame_numbers.get(name, 0) + 1
                    assert frame.number == number
                    self.frame_numbers[name] = number
                    for delta in frame.deltas:
                        self._tell(frame, delta)
                case LoadReport():
                    self.reports.append(carried)
                case KvEvents():
                    self.kv_events.append(carried)
                case _:
                    self._answer(name, ask_id, carried)

    def _forward(self, name: str, ask_id: int, to: WorkerRef, question: Question) -> None:
        target = self.workers.get(to.name)
        self.asked.append((to.name, question))
        if target is None or target.info.ref != to:
            declined = Declined(Code.UNAVAILABLE, f"{to.name} is gone", by=to.name)
            self.workers[name].answered(ask_id, declined, self.now)
            return
        number = next(self._ids)
        self._forwards[to.name, number] = (name, ask_id, type(question))
        target.receive(number, question, self.now)

    def _answer(self, name: str, ask_id: int, answer: Answer) -> None:
        asker, their_id, kind = self._forwards.pop((name, ask_id), ("", 0, object))
        if not asker:
            self.answers[ask_id] = answer
            return
        if kind in self.lost_answers:
            self.lost_answers.remove(kind)
            answer = Declined(Code.UNAVAILABLE, "the answer was lost", by=name)
        if asker in self.workers:
            self.workers[asker].answered(their_id, answer, self.now)

    def _tell(self, frame: Frame, delta: Delta) -> None:
        """As the gateway hears it: only from the worker whose turn it is."""
        stream = self.streams.get(delta.request_id)
        if stream is None:
            self._note(delta)
            return
        stream.hear(frame.worker, frame.incarnation, delta)
        while stream._deltas:
            self._note(stream._deltas.popleft())

    def _note(self, delta: Delta) -> None:
        told = self.told[delta.request_id]
        assert told.finish is None, "it was told of after its end"
        assert told.error is None, "it was told of after its failure"
        assert delta.seq == len(told.tokens), "a hole or a repetition in the stream"
        if delta.moved is not None:
            self.moves.append((delta.request_id, delta.moved.name))
            if delta.moved.name in self.workers:
                self.ask(delta.moved.name, Follow(delta.request_id, GATEWAY))
        told.deltas.append(delta)
        told.tokens += [token.token_id for token in delta.tokens]
        told.finish = delta.finish or told.finish
        told.error = delta.error or told.error


def _over_the_wire(question: Question, now: float) -> Question:
    carried: Question = decode_envelope(encode_envelope(1, question, now), now)[1]
    return carried


def prompt(length: int, salt: int = 0) -> tuple[int, ...]:
    return tuple((7 * i + 13 * salt) % 400 + 20 for i in range(length))


def request(request_id: str, token_ids: tuple[int, ...], **sampling: object) -> Request:
    deadline = sampling.pop("deadline_s", None)
    arrival = sampling.pop("arrival_s", 100.0)
    params = SamplingParams(**({"max_tokens": 8, "temperature": 0.0} | sampling))  # type: ignore[arg-type]
    return Request(request_id=request_id, token_ids=token_ids, sampling=params, arrival_s=arrival, deadline_s=deadline)


def single(req: Request) -> list[int]:
    """What one engine alone answers."""
    engine = ledger_engine(num_blocks=256)
    engine.submit(replace(req, deadline_s=None))
    tokens: list[Token] = []
    while engine.has_work():
        result = engine.step(0.0)
        assert result is not None
        tokens += [token for progress in result.progress for token in progress.tokens]
    return [token.token_id for token in tokens]


def handed_over(answer: Answer) -> HandedOver:
    assert isinstance(answer, HandedOver), answer
    return answer


def finished_early(answer: Answer) -> FinishedEarly:
    assert isinstance(answer, FinishedEarly), answer
    return answer


def declined(answer: Answer) -> Declined:
    assert isinstance(answer, Declined), answer
    return answer
