"""A gateway over scripted workers: no engine, no network, one event loop.

`ScriptedWorkers` answers as a prefill and a decode worker would, with the tokens that `reply` gives for a request.
Whatever a test wants to go wrong it sets on it beforehand; whatever was asked is in `asked`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from cluster.config import SlaClass
from cluster.dispatch import Dispatch, Limits
from cluster.gateway import Gateway, GatewaySettings
from cluster.outcome import Outcome
from cluster.snapshot import Estimates, Placement, Refusal, RequestView
from cluster.streams import FrameHub
from cluster.text import Text
from decode_node.admission import claim_key
from engine.hashing import PrefixHasher, hash_root
from engine.types import FinishReason, Request, Token
from tandem.messages import (
    Abort,
    Aborted,
    Answer,
    Code,
    Declined,
    Delta,
    Expect,
    Expected,
    FinishedEarly,
    Follow,
    Followed,
    Frame,
    HandedOver,
    HandoffReport,
    Question,
    Submit,
    WorkerInfo,
    WorkerRef,
)

MODEL = "toy"
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS = 258
PIECES = (" quick", "ick br", "own", " fox", "the")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB = 512


def toy_text(**settings: object) -> Text:
    """Ids 0 … 255 are bytes, 256 … 258 specials, then a few longer pieces that encoding never yields."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=_byte)
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    vocabulary |= {token: 256 + index for index, token in enumerate(SPECIALS)}
    vocabulary |= {piece.replace(" ", "Ġ"): 259 + index for index, piece in enumerate(PIECES)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIALS])
    known = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "add_bos_token": False, "chat_template": TEMPLATE}
    return Text(tokenizer, known | settings)


@cache
def _plain_text() -> Text:
    return toy_text()


def _byte(character: str) -> int:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    code = ord(character)
    return code if code in printable and code < 256 else others[code - 256]


def ids(text: str) -> list[int]:
    return list(text.encode())


def worker(
    name: str, role: str, *, total_blocks: int = 64, max_model_len: int = 512, vocab_size: int = VOCAB
) -> WorkerInfo:
    return WorkerInfo(
        ref=WorkerRef(name, "1", "local"),
        role=role,
        model=MODEL,
        model_digest="digest",
        layout="layers=2 kv_heads=2 head_dim=16 dtype=float32",
        numerics="float32",
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        block_bytes=1024,
        total_blocks=total_blocks,
        max_num_seqs=8,
        block_size=16,
        kv_heads=2,
        layers=2,
    )


@dataclass
class ScriptedRouter:
    """Places on the first prefill and decode worker that is not excluded."""

    infos: tuple[WorkerInfo, ...] = (worker("prefill-0", "prefill"), worker("decode-0", "decode"))
    refusal: Refusal | None = None
    local_prefill: bool = False
    placed: list[RequestView] = field(default_factory=list)
    done: list[tuple[str, Outcome]] = field(default_factory=list)
    suspects: list[str] = field(default_factory=list)

    async def place(self, request: RequestView, exclude: frozenset[str]) -> Placement | Refusal:
        self.placed.append(request)
        if self.refusal is not None:
            return self.refusal
        prefill, decode = (self._pick(role, exclude) for role in ("prefill", "decode"))
        if decode is None or prefill is None:
            return Refusal(Code.UNAVAILABLE, "no worker is left")
        chosen = None if self.local_prefill or request.resumed else prefill
        return Placement(
            request_id=request.request_id, prefill=chosen, decode=decode, estimates=Estimates(), reason="scripted"
        )

    def _pick(self, role: str, exclude: frozenset[str]) -> WorkerRef | None:
        return next((one.ref for one in self.infos if one.role == role and one.ref.name not in exclude), None)

    async def finished(self, request_id: str, outcome: Outcome) -> None:
        self.done.append((request_id, outcome))

    async def suspect(self, worker: WorkerRef, why: str) -> None:
        self.suspects.append(worker.name)

    async def workers(self) -> tuple[WorkerInfo, ...]:
        return self.infos

    async def not_ready(self) -> str:
        return "" if self.infos else "no decode worker is ready"


REPORT = HandoffReport(prefill_cached_tokens=16, computed_tokens=4, kv_bytes=4096, kv_blocks=4, transport="inproc")


@dataclass
class ScriptedWorkers:
    """`reply(request)` are the token ids of the answer; the last one ends it with `finish`.

    A request's sequences all say the same, in turn; those that are told at the end come whole, with a score.
    `declines` are taken one by one by (worker, kind of question). `early`: prefill ends the request with its first
    token. `hold`: streams stay open after their first token until `go` is set.
    """

    hub: FrameHub
    reply: Callable[[Request], Sequence[int]] = lambda request: ids("Hello, world")[: request.sampling.max_tokens]
    finish: FinishReason | None = None
    declines: dict[tuple[str, type], list[Declined]] = field(default_factory=dict)
    early: bool = False
    hold: bool = False
    silent: bool = False
    go: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[tuple[str, Question]] = field(default_factory=list)
    aborted: set[str] = field(default_factory=set)
    cut: set[tuple[str, int]] = field(default_factory=set)
    """Sequences that were ended while others of their request ran on."""
    claims: set[tuple[str, str]] = field(default_factory=set)
    """(decode worker, request) of those that found no room there, until they say that they are over."""
    running: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    heard: asyncio.Event = field(default_factory=asyncio.Event)
    """Set with every question; a test clears it and waits."""

    async def open(self, worker: WorkerRef) -> None: ...

    async def ask(self, worker: WorkerRef, question: Question, timeout_s: float) -> Answer:
        self.asked.append((worker.name, question))
        self.heard.set()
        if waiting := self.declines.get((worker.name, type(question))):
            declined = waiting.pop(0)
            self._keep_a_place(worker, question, declined)
            return declined
        if isinstance(question, Abort) and question.index is not None:
            self.cut.add((question.request_id, question.index))
            return Aborted(question.request_id, True)
        if isinstance(question, Abort):
            self.aborted.add(question.request_id)
            if not question.again:
                self.claims.discard((worker.name, claim_key(question.request_id)))
            task = self.running.pop(question.request_id, None)
            if task is not None:
                task.cancel()
            return Aborted(question.request_id, task is not None)
        if isinstance(question, Expect):
            if question.prefill is None:
                self._start(worker, question.request, len(question.generated))
            return Expected(question.request.request_id)
        if isinstance(question, Follow):
            return Followed(question.request_id)
        assert isinstance(question, Submit)
        return await self._submitted(question)

    def _keep_a_place(self, asked: WorkerRef, question: Question, declined: Declined) -> None:
        if declined.code is not Code.NO_ROOM or not isinstance(question, Expect | Submit):
            return
        decode = question.decode if isinstance(question, Submit) else asked
        if (declined.by or asked.name) == decode.name:
            self.claims.add((decode.name, claim_key(question.request.request_id)))

    async def _submitted(self, question: Submit) -> Answer:
        request = question.request
        prompt = tuple(Token(i, None if n == 0 else -1.0) for n, i in enumerate(request.token_ids))
        prompt_logprobs = prompt if request.sampling.prompt_logprobs is not None else ()
        if self.early:
            tokens = tuple(self._tokens(request)[:1])
            told = tuple(
                Delta(request.request_id, 0, tokens, FinishReason.LENGTH, index=i) for i in range(request.answers)
            )
            return FinishedEarly(request.request_id, told, REPORT, prompt_logprobs)
        self._start(question.decode, request)
        return HandedOver(request.request_id, REPORT, prompt_logprobs)

    def _start(self, worker: WorkerRef, request: Request, first: int = 0) -> None:
        streaming = self._stream(worker, request, first)
        self.running[request.request_id] = asyncio.get_running_loop().create_task(streaming)

    async def _stream(self, worker: WorkerRef, request: Request, first: int) -> None:
        tokens = self._tokens(request)
        finish = self.finish or (
            FinishReason.LENGTH if len(tokens) >= request.sampling.max_tokens else FinishReason.STOP
        )
        together = request.branching is not None and request.branching.withheld
        for seq, token in enumerate(tokens[first:], first):
            if self.silent or (seq > first and self.hold):
                await self.go.wait()
            last = seq == len(tokens) - 1
            for index in range(0 if together else request.answers):
                if (request.request_id, index) not in self.cut:
                    told = Delta(request.request_id, seq, (token,), finish if last else None, index=index)
                    self.deliver(worker, told)
            await asyncio.sleep(0)
        for rank in range(request.answers if together else 0):
            self.deliver(worker, Delta(request.request_id, 0, tuple(tokens), finish, index=rank, score=-0.5 - rank))
        self.running.pop(request.request_id, None)

    def _tokens(self, request: Request) -> list[Token]:
        asked = request.sampling.logprobs
        top = tuple((index, -2.0 - index) for index in range(asked or 0))
        return [Token(i, None if asked is None else -0.5, top) for i in self.reply(request)]

    def deliver(self, worker: WorkerRef, delta: Delta) -> None:
        self.hub.deliver(Frame(worker.name, worker.incarnation, 0, (delta,)))

    def kinds(self) -> list[tuple[str, str]]:
        return [(name, type(question).__name__) for name, question in self.asked]


@dataclass
class Bench:
    """All the parts of one gateway, for a test to look at."""

    gateway: Gateway
    dispatch: Dispatch
    router: ScriptedRouter
    workers: ScriptedWorkers
    hub: FrameHub
    outcomes: list[Outcome]
    refused: list[Code]

    def check(self) -> None:
        """Nothing is left of any request, and every attempt was reported exactly once."""
        assert len(self.hub) == 0
        assert self.gateway._streams == 0
        assert not self.gateway._running
        told = [request_id for request_id, _ in self.router.done]
        assert len(told) == len(set(told))
        still = set(self.workers.running) - self.workers.aborted
        assert not still, f"workers still run {still}"
        assert not self.workers.claims, "a place is kept for a request that is over"


LIMITS = Limits()
IMPATIENT = Limits(backoff_s=0.001, max_backoff_s=0.002, resume_s=0.02)
"""An answer that loses its decode worker waits hardly at all for one to go on at."""
NOBODY = Refusal(Code.UNAVAILABLE, "no decode worker takes requests")


@asynccontextmanager
async def bench(
    *, text: Text | None = None, router: ScriptedRouter | None = None, limits: Limits = LIMITS, **settings: object
) -> AsyncIterator[Bench]:
    """A gateway that is checked when the test is over."""
    router = router or ScriptedRouter()
    hub = FrameHub()
    workers = ScriptedWorkers(hub)
    outcomes: list[Outcome] = []
    refused: list[Code] = []
    dispatch = Dispatch(router, workers, hub, "gateway-0", limits=limits, on_outcome=outcomes.append)
    classes = {
        "default": SlaClass(timeout_s=20.0),
        "fast": SlaClass(name="fast", ttft_s=0.2, itl_s=0.05, priority=5, timeout_s=5.0),
    }
    chosen = replace(
        GatewaySettings(
            model=MODEL,
            classes=classes,
        ),
        **settings,
    )  # type: ignore[arg-type]
    root = hash_root(name="builtin", seed=0, model_digest="digest", kv_dtype="float32", numerics="float32")
    numbers = iter(range(1_000_000))
    gateway = Gateway(
        chosen,
        text or _plain_text(),
        router,
        dispatch,
        lambda info: PrefixHasher("builtin", root),
        new_id=lambda: f"r{next(numbers)}",
        new_seed=lambda: 7,
        on_refused=refused.append,
    )
    made = Bench(gateway, dispatch, router, workers, hub, outcomes, refused)
    yield made
    await asyncio.wait_for(dispatch.drained(), 5)
    made.check()


async def until(condition: Callable[[], bool], *, within_s: float = 5.0) -> None:
    """Let the loop turn until the condition holds."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - it may be about anything
            await asyncio.sleep(0.002)
