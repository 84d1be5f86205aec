"""The default model through the whole path, in float32, answers as transformers does on the same dequantised weights.

Gateway, dispatch, router, prefill, transfer and decode are the real ones, in one process; at the end once more as rank
processes over UCX. The workers of one process share one copy of the weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers
from parity_reference import Answer, Reference, prompts

from cluster.config import ModelSection, PoolSection, PoolsSection, RoutingSection, TandemConfig, TimeoutsSection
from cluster.control import Control, ControlSettings
from cluster.http_server import HttpSettings, build_app
from cluster.ipc import RankSettings
from cluster.local import LocalCluster
from cluster.node_client import NodeClient
from cluster.outcome import Outcome
from cluster.streams import FrameHub
from cluster.text import Text
from cluster.worker import WorkerSettings
from engine import assemble
from engine.config import EngineConfig
from engine.types import Request, SamplingParams, Token
from kvtransfer.select import ucx_available
from tandem.messages import Expect, Expected, HandedOver, Submit

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]
COUNT = 12
THREADS = min(2, os.cpu_count() or 1)
"""Of the workers of one process, and of the reference: they hardly ever compute at once."""
MORE = "<|im_end|>\n<|im_start|>user\nPlease go on, and tell me a little more about it.<|im_end|>\n"
NO_HURRY = TimeoutsSection(
    heartbeat_s=1.0, suspect_s=300.0, fence_s=600.0, lease_s=300.0, connect_s=300.0, request_s=600.0
)
"""One process computes a chunk of 1,500 tokens and hears nothing meanwhile."""


@dataclass(frozen=True, slots=True)
class Case:
    prompt: tuple[int, ...]
    answer: Answer
    second_prompt: tuple[int, ...]
    second_answer: Answer


@pytest.fixture(scope="module")
def reference(transformers_twin: transformers.LlamaForCausalLM) -> Reference:
    return Reference(transformers_twin)


@pytest.fixture(scope="module")
def cases(smollm2_path: Path, reference: Reference) -> tuple[Case, ...]:
    text = Text.load(smollm2_path)
    more = text.encode(MORE)
    made = []
    for prompt in prompts(text):
        first, second = reference.turns(prompt, more, COUNT)
        made.append(Case(prompt, first, (*prompt, *first.token_ids, *more), second))
    return tuple(made)


@pytest.fixture(scope="module", autouse=True)
def _torch_has_its_threads_back() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def _one_copy_of_the_weights() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        once = lru_cache(maxsize=1)(assemble.open_checkpoint)
        patch.setattr(assemble, "open_checkpoint", once)
        decoders: dict[str, object] = {}
        read = assemble.decoder_of

        def decoder_of(checkpoint: Any, **how: Any) -> object:
            key = f"{checkpoint.digest} {how}"
            if key not in decoders:
                decoders[key] = read(checkpoint, **how)
            return decoders[key]

        patch.setattr(assemble, "decoder_of", decoder_of)
        patch.setattr("cluster.local.ASK_S", NO_HURRY.connect_s)
        yield


def config(*, budget: int = 4096, blocks: int = 512, prefill: int = 1, decode: int = 1) -> TandemConfig:
    pool = PoolSection(num_blocks=blocks, max_num_batched_tokens=budget, max_num_seqs=32, threads=THREADS)
    return TandemConfig(
        model=ModelSection(dtype="float32"),
        pools=PoolsSection(prefill=replace(pool, count=prefill), decode=replace(pool, count=decode)),
        routing=RoutingSection(local_prefill="never" if prefill else "auto"),
        timeouts=NO_HURRY,
    )


@contextlib.asynccontextmanager
async def running(path: Path, settings: TandemConfig) -> AsyncIterator[LocalCluster]:
    async with LocalCluster(settings, path) as cluster:
        yield cluster
        await cluster.settled(60)
        cluster.check()


def request(name: str, token_ids: Sequence[int], **sampling: Any) -> Request:
    params = SamplingParams(**({"max_tokens": COUNT, "temperature": 0.0, "ignore_eos": True, "logprobs": 0} | sampling))
    return Request(request_id=name, token_ids=tuple(token_ids), sampling=params, arrival_s=time.monotonic())


def ids(tokens: Sequence[Token]) -> list[int]:
    return [token.token_id for token in tokens]


def same(tokens: Sequence[Token], answer: Answer) -> None:
    """Equal tokens, and log-probabilities within 1e-3, as far as the best token is clearly the best."""
    assert len(tokens) == COUNT
    assert ids(tokens)[: answer.clear] == list(answer.token_ids[: answer.clear])
    logprobs = [token.logprob for token in tokens[: answer.clear]]
    assert logprobs == pytest.approx(answer.logprobs[: answer.clear], abs=1e-3)


def through_both(outcome: Outcome) -> None:
    assert (outcome.code, outcome.prefill, outcome.decode) == (None, "prefill-0", "decode-0"), outcome.message
    assert outcome.report.transport == "inproc" or outcome.report.decode_held_tokens


async def ask(cluster: LocalCluster, name: str, token_ids: Sequence[int], answer: Answer) -> Outcome:
    tokens, outcome = await cluster.generate(request(name, token_ids))
    through_both(outcome)
    same(tokens, answer)
    return outcome


def test_eighteen_of_the_twenty_prompts_can_be_compared_to_the_end(cases: tuple[Case, ...]) -> None:
    first = sum(case.answer.clear == COUNT for case in cases)
    second = sum(case.second_answer.clear == COUNT for case in cases)
    print(f"compared for the full length: {first} of {len(cases)}; second turns: {second}")
    assert len(cases) == 20
    assert first >= 18
    assert second >= 16
    assert all(case.answer.clear for case in cases)


async def test_cold_then_warm_then_the_next_turn_with_a_budget_of_4096(
    smollm2_path: Path, cases: tuple[Case, ...]
) -> None:
    async with running(smollm2_path, config()) as cluster:
        for i, case in enumerate(cases):
            length = len(case.prompt)
            cold = await ask(cluster, f"cold-{i}", case.prompt, case.answer)
            assert (cold.cached_tokens, cold.report.decode_held_tokens) == (0, 0)
            warm = await ask(cluster, f"warm-{i}", case.prompt, case.answer)
            assert warm.cached_tokens <= length - 1
            assert (warm.cached_tokens > 0) == (length > 16)
            assert warm.report.decode_held_tokens == length // 16 * 16
            turn = await ask(cluster, f"turn-{i}", case.second_prompt, case.second_answer)
            held = turn.report.decode_held_tokens
            assert held >= (length + COUNT - 1) // 16 * 16, "decode holds the answer's own blocks too"


@pytest.mark.parametrize("budget", [16, 64])
async def test_alone_in_small_chunks(smollm2_path: Path, cases: tuple[Case, ...], budget: int) -> None:
    async with running(smollm2_path, config(budget=budget)) as cluster:
        for i, case in enumerate(cases):
            await ask(cluster, f"r{i}", case.prompt, case.answer)


@pytest.mark.parametrize("budget", [16, 64, 4096])
async def test_twenty_at_once(smollm2_path: Path, cases: tuple[Case, ...], budget: int) -> None:
    """Each has 19 neighbours, of all lengths."""
    async with running(smollm2_path, config(budget=budget)) as cluster:
        await asyncio.gather(*(ask(cluster, f"r{i}", case.prompt, case.answer) for i, case in enumerate(cases)))


# -- sampled ----------------------------------------------------------------------------------------------------------

SAMPLED = {"seed": 42, "temperature": 0.8, "max_tokens": 24}


async def sampled(cluster: LocalCluster, case: Case, name: str = "r") -> tuple[list[int], Outcome]:
    tokens, outcome = await cluster.generate(request(name, case.prompt, **SAMPLED))
    assert outcome.code is None, outcome.message
    return ids(tokens), outcome


async def test_a_seed_says_the_same_whatever_runs_beside_it_and_wherever(
    smollm2_path: Path, cases: tuple[Case, ...]
) -> None:
    case, others = cases[10], cases[4:10]
    async with running(smollm2_path, config()) as cluster:
        alone, _ = await sampled(cluster, case)
        assert alone[:COUNT] != list(case.answer.token_ids), "it is sampled, not greedy"
        beside, *_ = await asyncio.gather(
            sampled(cluster, case, "again"),
            *(cluster.generate(request(f"n{i}", one.prompt, max_tokens=24)) for i, one in enumerate(others)),
        )
        assert beside[0] == alone
    async with running(smollm2_path, config(prefill=0)) as cluster:
        locally, outcome = await sampled(cluster, case)
        assert (locally, outcome.prefill) == (alone, "")
    async with running(smollm2_path, config(prefill=2, decode=2)) as cluster:
        first, one = await sampled(cluster, case)
        cluster.kill(one.prefill)
        cluster.kill(one.decode)
        second, other = await sampled(cluster, case, "elsewhere")
        assert (first, second) == (alone, alone)
        assert one.prefill != other.prefill
        assert one.decode != other.decode


# -- prompt log-probabilities -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [16, 4096])
@pytest.mark.parametrize("prefill", [0, 1])
async def test_echoed_logprobs_are_the_references_whatever_is_cached(
    smollm2_path: Path, reference: Reference, cases: tuple[Case, ...], budget: int, prefill: int
) -> None:
    prompt = cases[18].prompt[:70]  # plain English: tokens that are half a character would share a text
    async with running(smollm2_path, config(budget=budget, prefill=prefill)) as cluster:
        app = build_app(cluster.gateway, HttpSettings())
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://tandem", timeout=300
        ) as client:
            body = {"prompt": list(prompt), "echo": True, "max_tokens": 2, "temperature": 0}
            for top in (2, 2, 3):
                response = await client.post("/v1/completions", json=body | {"logprobs": top})
                assert response.status_code == 200, response.text
                _is_the_references(response.json()["choices"][0]["logprobs"], prompt, top, reference)


def _is_the_references(said: dict[str, Any], prompt: tuple[int, ...], top: int, reference: Reference) -> None:
    assert len(said["tokens"]) == len(said["token_logprobs"]) == len(prompt) + 2
    assert said["token_logprobs"][0] is None
    rows = reference.logprobs(prompt)
    expected = [float(rows[i, token]) for i, token in enumerate(prompt[1:])]
    assert said["token_logprobs"][1 : len(prompt)] == pytest.approx(expected, abs=1e-3)
    best = rows[-1].max().item()
    assert said["token_logprobs"][len(prompt)] == pytest.approx(best, abs=1e-3)
    for i, listed in enumerate(said["top_logprobs"][1 : len(prompt)]):
        values = sorted(listed.values(), reverse=True)
        assert values[0] == pytest.approx(rows[i].max().item(), abs=1e-3)
        assert top - 1 <= len(values) <= top + 1, "two ids may share a text; the token itself is added"


# -- real processes ---------------------------------------------------------------------------------------------------


@pytest.mark.e2e
async def test_through_rank_processes_over_ucx(smollm2_path: Path, cases: tuple[Case, ...]) -> None:
    there, why = ucx_available()
    if not there:
        pytest.skip(why)
    secret = secrets.token_hex(8)
    workers = [_control(name, smollm2_path, secret) for name in ("prefill", "decode")]
    await asyncio.gather(*(worker.start() for worker in workers))
    hub = FrameHub()
    client = NodeClient(secret, hub=hub, gateway_id="g")
    try:
        prefill, decode = (worker.info.ref for worker in workers if worker.info)
        await client.open(decode)
        for i in (0, 2, 6, 10, 17, 18, 6):
            name = f"r{time.monotonic_ns()}"
            req = replace(request(name, cases[i].prompt), deadline_s=time.monotonic() + 300)
            stream = hub.expect(name, decode)
            assert isinstance(await client.ask(decode, Expect(req, "g", prefill), 60), Expected)
            submit = asyncio.create_task(client.ask(prefill, Submit(req, decode), 300))
            tokens = [token async for delta in stream for token in delta.tokens]
            answer = await submit
            assert isinstance(answer, HandedOver), answer
            same(tokens, cases[i].answer)
            assert answer.report.transport == "ucx" or answer.report.decode_held_tokens
    finally:
        await client.close()
        await asyncio.gather(*(worker.stop() for worker in workers))


def _control(role: str, path: Path, secret: str) -> Control:
    engine = EngineConfig(model=str(path), num_blocks=256, max_num_batched_tokens=256, max_num_seqs=8, threads=1)
    worker = WorkerSettings(name=f"{role}-0", incarnation="", role=role, address="")
    rank = RankSettings(worker=worker, engine=engine, transports=("ucx",), checksums=True)
    return Control(ControlSettings(secret=secret, silence_s=120.0), rank)
