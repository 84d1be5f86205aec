"""Several sequences of one request through the whole cluster: the prompt is computed once and sent once, and what comes
out is what one engine would say."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cluster.local import LocalCluster
from cluster.validate import Ask
from engine.config import EngineConfig
from engine.engine import Engine
from engine.toy import IM_END_ID
from engine.types import Branching, FinishReason, Progress, Request, SamplingParams
from tandem.messages import Code, Delta, FaultInjected, FaultKind, InjectFault
from tests.cluster.local_rig import config, request, running

Answers = dict[int, tuple[tuple[int, ...], FinishReason | None, float | None]]
"""By index: tokens, why it ended, score."""

SEVERAL = {
    "n": Branching(n=4),
    "best_of": Branching(n=2, best_of=4),
    "beams": Branching(n=4, beam_width=4),
    "two beams": Branching(n=1, beam_width=2, length_penalty=0.0, early_stopping="yes"),
}


def answers(told: tuple[Delta | Progress, ...]) -> Answers:
    out: Answers = {}
    for one in told:
        tokens, _, _ = out.get(one.index, ((), None, None))
        out[one.index] = ((*tokens, *(token.token_id for token in one.tokens)), one.finish, one.score)
    return out


def same(got: Answers, want: Answers) -> bool:
    """Scores may differ in the last bits: a batch of another shape sums in another order."""
    return got.keys() == want.keys() and all(
        got[index][:2] == want[index][:2] and got[index][2] == pytest.approx(want[index][2], abs=1e-4) for index in want
    )


@pytest.fixture(scope="module")
def truth(toy: Path) -> Callable[[Request], Answers]:
    """What one engine by itself answers."""
    engine = Engine.open(EngineConfig(model=str(toy), num_blocks=256))

    def answer(req: Request) -> Answers:
        engine.submit(replace(req, deadline_s=None))
        told: list[Progress] = []
        while engine.has_work():
            result = engine.step(0.0)
            assert result is not None
            told += result.progress
        engine.check()
        return answers(tuple(one for one in told if one.tokens or one.finish))

    return answer


Truth = Callable[[Request], Answers]


def several(request_id: str, branching: Branching, length: int = 60, **sampling: object) -> Request:
    params = {"max_tokens": 12, "temperature": 1.0, "seed": 7, "ignore_eos": True} | sampling
    return replace(request(request_id, length, **params), branching=branching)


# -- the same, once -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", SEVERAL)
async def test_one_engine_would_say_the_same_and_the_prompt_is_computed_and_sent_once(
    toy: Path, truth: Truth, how: str
) -> None:
    req = several("r", SEVERAL[how], 150)
    async with running(toy, config()) as cluster:
        told, outcome = await cluster.generate_several(req)
        assert same(answers(told), truth(req))
        assert outcome.completion_tokens == 12 * SEVERAL[how].n
        prefill, decode = (cluster.slots[name].worker for name in ("prefill-0", "decode-0"))
        assert (prefill.engine.load(0.0).prompt_tokens, decode.engine.load(0.0).prompt_tokens) == (150, 0)
        (stats,) = prefill.transfers.stats()
        assert outcome.report.kv_blocks == -(-150 // 16)
        assert stats.push_bytes == outcome.report.kv_blocks * prefill.info.block_bytes


async def test_n_answers_are_what_n_requests_with_the_same_seed_would_be(toy: Path) -> None:
    req = several("r", Branching(n=3), temperature=0.8, seed=42)
    async with running(toy, config()) as cluster:
        told, _ = await cluster.generate_several(req)
        got = answers(told)
        for index in range(3):
            alone = replace(req, request_id=f"s{index}", branching=None, sequence_index=index)
            tokens, _ = await cluster.generate(alone)
            assert got[index][0] == tuple(token.token_id for token in tokens)
        assert len({tokens for tokens, _, _ in got.values()}) == 3


@pytest.mark.parametrize("how", SEVERAL)
async def test_local_prefill_says_the_same(toy: Path, truth: Truth, how: str) -> None:
    req = several("r", SEVERAL[how])
    async with running(toy, config(prefill=0, local="auto")) as cluster:
        told, outcome = await cluster.generate_several(req)
        assert same(answers(told), truth(req))
        assert outcome.report.kv_blocks == 0


async def test_many_kinds_at_once_read_as_each_alone(toy: Path, truth: Truth) -> None:
    kinds = [*SEVERAL.values(), None]
    reqs = [replace(several(f"r{i}", Branching(), 20 + 13 * i), branching=kinds[i % 5]) for i in range(10)]
    async with running(toy, config()) as cluster:
        all_told = await asyncio.gather(*(cluster.generate_several(req) for req in reqs))
        for req, (told, outcome) in zip(reqs, all_told, strict=True):
            assert same(answers(told), truth(req)), outcome


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("how", ["n", "best_of", "beams"])
async def test_a_small_pool_preempts_and_says_the_same(toy: Path, truth: Truth, how: str, caching: bool) -> None:
    reqs = [several(f"r{i}", SEVERAL[how] if i == 1 else Branching(), 40 + i, max_tokens=150) for i in range(4)]
    reqs = [replace(req, priority=-1) if i == 1 else replace(req, branching=None) for i, req in enumerate(reqs)]
    async with running(toy, config(decode_blocks=48, prefix_caching=caching)) as cluster:
        all_told = await asyncio.gather(*(cluster.generate_several(req) for req in reqs))
        for req, (told, outcome) in zip(reqs, all_told, strict=True):
            assert same(answers(told), truth(req)), outcome
        assert cluster.slots["decode-0"].worker.engine.load(0.0).preemptions > 0, "the several go first"


@pytest.mark.parametrize("branching", [Branching(n=12), Branching(n=3, best_of=12), Branching(n=10, beam_width=10)])
async def test_more_sequences_than_a_step_has_seats_take_turns(toy: Path, truth: Truth, branching: Branching) -> None:
    reqs = [several(f"r{i}", branching, 40 + i) for i in range(2)]
    async with running(toy, config()) as cluster:
        assert cluster.config.pools.decode.max_num_seqs < branching.size
        for req, (told, _) in zip(reqs, await asyncio.gather(*map(cluster.generate_several, reqs)), strict=True):
            assert same(answers(told), truth(req))


# -- against transformers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("penalty", "early", "word"), [(1.0, "no", False), (2.0, "never", "never"), (0.0, "yes", True)]
)
async def test_beams_through_two_workers_are_those_of_transformers(
    toy: Path, penalty: float, early: str, word: bool | str
) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM.from_pretrained(toy, dtype=torch.float32).eval()
    async with running(toy, config()) as cluster:
        for length in (21, 48):
            branching = Branching(n=4, beam_width=4, length_penalty=penalty, early_stopping=early)
            req = several(f"r{length}", branching, length, ignore_eos=False)
            with torch.no_grad():
                want = model.generate(
                    torch.tensor([req.token_ids]),
                    attention_mask=torch.ones(1, length, dtype=torch.long),
                    num_beams=4,
                    num_return_sequences=4,
                    max_new_tokens=12,
                    length_penalty=penalty,
                    early_stopping=word,
                    do_sample=False,
                    output_scores=True,
                    return_dict_in_generate=True,
                )
            told, _ = await cluster.generate_several(req)
            got = answers(told)
            for rank, (tokens, score) in enumerate(
                zip(want.sequences.tolist(), want.sequences_scores.tolist(), strict=True)
            ):
                assert list(got[rank][0]) == tokens[length : length + len(got[rank][0])]
                assert got[rank][2] == pytest.approx(score, abs=1e-3)


# -- ends -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", SEVERAL)
async def test_when_every_first_token_ends_the_request_decode_is_never_started(
    toy: Path, truth: Truth, how: str
) -> None:
    req = several("r", SEVERAL[how], max_tokens=1)
    async with running(toy, config()) as cluster:
        told, outcome = await cluster.generate_several(req)
        assert same(answers(told), truth(req))
        assert (outcome.decode, outcome.completion_tokens) == ("", SEVERAL[how].n)
        assert cluster.slots["decode-0"].worker.engine.load(0.0).generated_tokens == 0


@pytest.mark.parametrize("how", ["n", "best_of"])
async def test_those_whose_first_token_ends_them_are_told_and_the_others_go_on(
    toy: Path, truth: Truth, how: str
) -> None:
    found = 0
    async with running(toy, config()) as cluster:
        for seed in range(6):
            bias = ((IM_END_ID, 8.5),)
            req = several(f"r{seed}", SEVERAL[how], ignore_eos=False, seed=seed, logit_bias=bias)
            told, outcome = await cluster.generate_several(req)
            want = truth(req)
            assert same(answers(told), want)
            assert outcome.completion_tokens == sum(len(tokens) for tokens, _, _ in want.values())
            lengths = {len(tokens) for tokens, _, _ in want.values()}
            found += 1 in lengths and len(lengths) > 1
    assert found or how == "best_of", "the bias makes some end at once and not all; the best may be the long ones"


@pytest.mark.parametrize("how", SEVERAL)
@pytest.mark.parametrize("after", range(2, 38, 7))
async def test_a_client_that_leaves_at_any_moment_leaves_nothing_behind(toy: Path, how: str, after: int) -> None:
    async with running(toy, config()) as cluster:
        task = asyncio.create_task(cluster.generate_several(several("r", SEVERAL[how], 200, max_tokens=300)))
        for _ in range(after):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("how", SEVERAL)
async def test_a_deadline_in_the_middle_ends_all_of_them(toy: Path, how: str) -> None:
    async with running(toy, config()) as cluster:
        req = several("r", SEVERAL[how], max_tokens=300)
        _, outcome = await cluster.generate_several(replace(req, deadline_s=time.monotonic() + 0.1))
        assert outcome.code is Code.DEADLINE


@pytest.mark.parametrize("how", SEVERAL)
async def test_a_failed_transfer_is_tried_again_and_says_the_same(toy: Path, truth: Truth, how: str) -> None:
    req = several("r", SEVERAL[how], 150)
    async with running(toy, config()) as cluster:
        assert await cluster.ask(cluster.info("prefill-0").ref, InjectFault(FaultKind.FAIL)) == FaultInjected()
        told, outcome = await cluster.generate_several(req)
        assert same(answers(told), truth(req))
        assert outcome.attempts == 2


async def test_a_lost_decode_worker_ends_all_of_them_or_they_are_said_elsewhere(toy: Path, truth: Truth) -> None:
    reqs = [several(f"r{i}", list(SEVERAL.values())[i % 4], 100 + i, max_tokens=60) for i in range(4)]
    async with running(toy, config(1, 2)) as cluster:
        tasks = [asyncio.create_task(cluster.generate_several(req)) for req in reqs]
        await cluster.until(lambda: cluster.slots["decode-0"].worker.engine.load(0.0).running > 2)
        cluster.kill("decode-0")
        for req, (told, outcome) in zip(reqs, await asyncio.gather(*tasks), strict=True):
            if outcome.code is None:
                assert same(answers(told), truth(req))
            else:
                assert outcome.code is Code.UNAVAILABLE


# -- stop strings, and what can never run ----------------------------------------------------------------------------


async def test_a_stop_string_ends_its_own_sequence_on_the_worker_and_no_other(toy: Path) -> None:
    sampling = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)
    ask = Ask(prompts=("the quick brown fox",), n=4, sampling=sampling, seed=3)
    async with running(toy, config()) as cluster:
        free = await _texts(cluster, ask)
        generated = cluster.slots["decode-0"].worker.engine.load(0.0).generated_tokens
        stop = next(text[i] for text in free for i in range(4) if sum(text[i] in other for other in free) == 1)
        cut = await _texts(cluster, replace(ask, sampling=replace(sampling, stop=(stop,))))
        assert cut == [text.split(stop)[0] for text in free]
        assert cluster.outcomes[-1].code is None
        more = cluster.slots["decode-0"].worker.engine.load(0.0).generated_tokens - generated
        assert more < generated - 10, "the one that was cut did not run on"


async def _texts(cluster: LocalCluster, ask: Ask) -> list[str]:
    job = await cluster.gateway.prepare(ask)
    texts = [""] * ask.n
    async for index, piece in cluster.gateway.answers(job):
        texts[index] += piece.text
    await cluster.settled()
    return texts


async def test_beams_that_the_pool_can_never_hold_are_refused_by_name(toy: Path) -> None:
    async with running(toy, config(decode_blocks=12)) as cluster:
        _, outcome = await cluster.generate_several(several("r", SEVERAL["beams"], 64, max_tokens=60))
        assert outcome.code is Code.INVALID
        assert "beam_width" in outcome.message
        told, _ = await cluster.generate_several(several("s", SEVERAL["n"], 64, max_tokens=60))
        assert len(answers(told)) == 4, "n sequences need not be in the pool at once"
