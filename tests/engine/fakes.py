"""A runner without a model: logits are a hash of the whole history, read back through block tables.

It keeps its own paged "KV": one number per position, a running hash of the tokens up to there. A wrong table, a block
reused too early or a chunk at the wrong position changes the numbers and with them the output, as in a real model.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.engine import Engine, ModelFacts
from engine.errors import TandemError
from engine.types import Branching, Progress, Request, SamplingParams, StepPlan, Token

VOCAB = 97
EOS = 95
OTHER_EOS = 96
MIXER = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1


def mixed(history: int, token: int) -> int:
    value = ((history ^ (token + 1)) * MIXER) & MASK
    return value ^ (value >> 29)


def logits_of(history: int, vocab: int = VOCAB) -> Tensor:
    generator = torch.Generator().manual_seed(history >> 1)
    return torch.randn(vocab, generator=generator) * 3


def expected(prompt: Sequence[int], count: int) -> list[int]:
    """Greedy output of the fake model, without any engine."""
    history, out = 0, list[int]()
    for token in prompt:
        history = mixed(history, token)
    for _ in range(count):
        out.append(int(logits_of(history).argmax()))
        history = mixed(history, out[-1])
    return out


class FakeRunner:
    """`broken` raises in the next run, `nan_for` spoils the logits of one request. Every plan is checked and kept."""

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        self.block_size = block_size
        self.memory = [[-1] * block_size for _ in range(num_blocks)]
        self.plans: list[StepPlan] = []
        self.broken: Exception | None = None
        self.nan_for = ""

    def run(self, plan: StepPlan) -> Tensor:
        self.plans.append(plan)
        if self.broken is not None:
            broken, self.broken = self.broken, None
            raise broken
        rows = [row for chunk in plan.chunks for row in self._rows(chunk)]
        return torch.stack(rows) if rows else torch.empty(0, VOCAB)

    def _rows(self, chunk) -> list[Tensor]:  # type: ignore[no-untyped-def]
        end = chunk.start + len(chunk.token_ids)
        assert len(chunk.block_ids) == -(-end // self.block_size), "the table must cover the positions exactly"
        history = self._read(chunk.block_ids, chunk.start - 1) if chunk.start else 0
        rows = []
        for position, token in enumerate(chunk.token_ids, chunk.start):
            history = mixed(history, token)
            self.memory[chunk.block_ids[position // self.block_size]][position % self.block_size] = history
            rows.append(logits_of(history))
        if chunk.request_id == self.nan_for:
            rows = [torch.full_like(row, torch.nan) for row in rows]
        return {"all": rows, "last": rows[-1:], "none": []}[chunk.logits]

    def _read(self, table: tuple[int, ...], position: int) -> int:
        value = self.memory[table[position // self.block_size]][position % self.block_size]
        assert value >= 0, "read of KV that was never written"
        return value

    def copy(self, source: Sequence[int], other: FakeRunner, target: Sequence[int]) -> None:
        """Send blocks to another runner's memory, as a transfer would."""
        for here, there in zip(source, target, strict=True):
            other.memory[there] = list(self.memory[here])


class FakeSwap:
    """Swap space for the numbers of a `FakeRunner`. `broken` raises at the next copy."""

    def __init__(self, runner: FakeRunner, slots: int) -> None:
        self.runner = runner
        self.memory = [[-1] * runner.block_size for _ in range(slots)]
        self.broken: Exception | None = None

    def out(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._fail()
        for block, slot in pairs:
            self.memory[slot] = list(self.runner.memory[block])

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._fail()
        for source, target in pairs:
            self.runner.memory[target] = list(self.runner.memory[source])

    def back(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._fail()
        for block, slot in pairs:
            self.runner.memory[block] = list(self.memory[slot])

    def _fail(self) -> None:
        broken, self.broken = self.broken, None
        if broken is not None:
            raise broken


class Clock:
    """Time that passes only when told, and a little with each look, so that durations are positive."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


def make_engine(  # type: ignore[no-untyped-def]
    num_blocks: int = 64, *, clock: Clock | None = None, max_model_len: int = 4096, swap_slots: int = 0, **settings
) -> Engine:
    config = EngineConfig(model="fake", **settings)
    runner = FakeRunner(num_blocks, config.block_size)
    facts = ModelFacts(
        model="fake",
        model_digest="digest",
        layout="fake",
        kv_heads=1,
        layers=1,
        max_model_len=max_model_len,
        vocab_size=VOCAB,
        block_bytes=8 * config.block_size,
        total_blocks=num_blocks,
        eos_token_ids=(EOS, OTHER_EOS),
    )
    mover = FakeSwap(runner, swap_slots)
    return Engine(config, runner, facts, mover=mover, swap_slots=swap_slots, clock=clock or Clock())


def runner_of(engine: Engine) -> FakeRunner:
    runner = engine._runner
    assert isinstance(runner, FakeRunner)
    return runner


def swap_of(engine: Engine) -> FakeSwap:
    mover = engine._mover
    assert isinstance(mover, FakeSwap)
    return mover


_ids = itertools.count()


def make_request(prompt: Sequence[int], request_id: str = "", **fields) -> Request:  # type: ignore[no-untyped-def]
    """Greedy and past EOS unless told otherwise; sampling fields and request fields in one list."""
    several = {name: fields.pop(name) for name in tuple(fields) if name in Branching.__dataclass_fields__}
    if several:
        fields["branching"] = Branching(**several)
    own = {name: fields.pop(name) for name in tuple(fields) if name in Request.__dataclass_fields__}
    sampling = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 8, **fields}
    request_id = request_id or f"r{next(_ids)}"
    return Request(request_id=request_id, token_ids=tuple(prompt), sampling=SamplingParams(**sampling), **own)


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    """Distinct tokens enough that two seeds share no prefix."""
    return tuple((seed * 31 + i * i * 7 + i) % 90 for i in range(length))


class Story:
    """What an engine said about each request."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.progress: dict[str, list[Progress]] = {}
        self.steps = 0

    def step(self, now: float | None = None) -> bool:
        """One step, checked; False when there was nothing to do."""
        result = self.engine.step(self.engine._clock() if now is None else now)
        self.engine.check()
        if result is None:
            return False
        self.steps += 1
        self.hear(result.progress)
        return True

    def hear(self, progress: Iterable[Progress]) -> None:
        for one in progress:
            self.progress.setdefault(one.request_id, []).append(one)

    def run(self, most: int = 5000) -> Story:
        for _ in range(most):
            if not self.engine.has_work():
                return self
            self.step()
        raise TandemError(f"not done after {most} steps")

    def tokens(self, request_id: str) -> list[int]:
        return [token.token_id for token in self.full(request_id)]

    def full(self, request_id: str) -> list[Token]:
        return [token for one in self.progress.get(request_id, ()) for token in one.tokens]

    def last(self, request_id: str) -> Progress:
        return self.progress[request_id][-1]


def run_all(engine: Engine, *requests: Request) -> Story:
    for request in requests:
        engine.submit(request)
    return Story(engine).run()
