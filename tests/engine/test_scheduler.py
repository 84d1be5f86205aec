"""The scheduler's promises, seen in its plans."""

from __future__ import annotations

import pytest
from fakes import Clock, Story, expected, make_engine, make_request, prompt_of, run_all, runner_of
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.engine import Engine
from engine.scheduler import MOST_PASSES
from engine.sequence import AGEING_S
from engine.types import StepPlan


def plans(engine: Engine) -> list[StepPlan]:
    return runner_of(engine).plans


def shares(plan: StepPlan) -> dict[str, int]:
    return {chunk.request_id: len(chunk.token_ids) for chunk in plan.chunks}


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=8),
    budget=st.integers(1, 100),
    seats=st.integers(1, 6),
    blocks=st.integers(8, 30),
    chunked=st.booleans(),
)
def test_budgets_are_never_exceeded_and_everybody_gets_the_models_tokens(
    lengths: list[int], budget: int, seats: int, blocks: int, chunked: bool
) -> None:
    engine = make_engine(blocks, max_num_batched_tokens=budget, max_num_seqs=seats, chunked_prefill=chunked)
    requests = [make_request(prompt_of(length, length), max_tokens=10 + i) for i, length in enumerate(lengths)]
    story = run_all(engine, *requests)
    for plan in plans(engine):
        assert plan.num_tokens <= budget
        assert len(plan.chunks) <= seats
    for request in requests:
        assert story.tokens(request.request_id) == expected(request.token_ids, request.sampling.max_tokens)


def test_newcomers_join_running_decodes_at_once_and_the_finished_leave() -> None:
    engine = make_engine()
    story = Story(engine)
    engine.submit(make_request(prompt_of(20), "first", max_tokens=4))
    story.step()
    engine.submit(make_request(prompt_of(20, 1), "second", max_tokens=20))
    story.run()
    together = [set(shares(plan)) for plan in plans(engine)]
    assert together[1] == {"first", "second"}
    assert together[4:] == [{"second"}] * 17


def test_without_chunks_prompts_have_steps_of_their_own_and_decodes_go_on_between() -> None:
    engine = make_engine(256, chunked_prefill=False, max_num_batched_tokens=64)
    engine.submit(make_request(prompt_of(20), "a", max_tokens=30))
    story = Story(engine)
    story.step()
    for i in range(5):
        engine.submit(make_request(prompt_of(60, i + 1), max_tokens=2))
    story.run()
    for before, after in zip(plans(engine)[1:], plans(engine)[2:], strict=False):
        kinds = [{size > 1 for size in shares(plan).values()} for plan in (before, after)]
        assert all(len(kind) == 1 for kind in kinds)
        assert kinds != [{True}, {True}], "two prompt steps in a row beside a decode"
    assert all(size in (1, 20, 60) for plan in plans(engine) for size in shares(plan).values())


def test_a_short_prompt_does_not_wait_behind_a_long_one() -> None:
    engine = make_engine(256, max_num_batched_tokens=32)
    story = Story(engine)
    engine.submit(make_request(prompt_of(10), "decoding", max_tokens=200))
    story.step()
    engine.submit(make_request(prompt_of(2000, 1), "long", max_tokens=2))
    for _ in range(3):
        story.step()
    engine.submit(make_request(prompt_of(8, 2), "short", max_tokens=2))
    story.step()
    assert story.tokens("short"), "answered in its first step"
    story.run()
    gaps = [i for i, plan in enumerate(plans(engine)) if "decoding" in shares(plan)]
    assert gaps == list(range(gaps[0], gaps[-1] + 1)), "the decode is in every step"
    assert story.tokens("long") == expected(prompt_of(2000, 1), 2)


def test_a_stream_of_short_prompts_does_not_starve_a_long_one() -> None:
    engine = make_engine(256, max_num_batched_tokens=32, max_num_seqs=8)
    story = Story(engine)
    engine.submit(make_request(prompt_of(1000), "long", max_tokens=1))
    steps = 0
    while not story.tokens("long"):
        for i in range(5):
            engine.submit(make_request(prompt_of(8, 10 * steps + i), max_tokens=1))
        story.step()
        steps += 1
    assert steps <= 2 * 1000 / 32 + 2


def test_urgent_requests_go_first_and_age_makes_up_for_priority() -> None:
    clock = Clock()
    engine = make_engine(max_num_seqs=1, clock=clock)
    engine.submit(make_request(prompt_of(8), "running", max_tokens=3))
    story = Story(engine)
    story.step()
    engine.submit(make_request(prompt_of(8, 1), "old", max_tokens=1))
    clock.now += AGEING_S
    engine.submit(make_request(prompt_of(8, 2), "new", max_tokens=1))
    engine.submit(make_request(prompt_of(8, 3), "urgent", max_tokens=1, priority=9))
    clock.now += AGEING_S
    engine.submit(make_request(prompt_of(8, 4), "one level up, one too late", max_tokens=1, priority=1))
    story.run()
    order = list(dict.fromkeys(name for plan in plans(engine) for name in shares(plan)))
    assert order == ["running", "urgent", "old", "new", "one level up, one too late"]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("chunked", [True, False])
def test_six_requests_of_most_of_a_tight_pool_all_finish_unchanged(caching: bool, chunked: bool) -> None:
    engine = make_engine(12, prefix_caching=caching, chunked_prefill=chunked, max_num_batched_tokens=64)
    requests = [make_request(prompt_of(80, i), max_tokens=80, priority=i % 2) for i in range(6)]
    story = run_all(engine, *requests)
    for request in requests:
        assert story.tokens(request.request_id) == expected(request.token_ids, 80)
    load = engine.load(0.0)
    assert load.live_blocks == 0
    assert load.preemptions <= 6
    serial = 6 * (2 + 80)
    assert story.steps < 1.5 * serial


def test_when_blocks_run_out_the_least_urgent_goes_back_and_the_oldest_never_does() -> None:
    engine = make_engine(14, prefix_caching=False)
    shared = prompt_of(64)
    requests = [make_request((*shared, i), f"r{i}", max_tokens=96) for i in range(4)]
    story = run_all(engine, *requests)
    preempted = [name for plan in plans(engine) for name in plan.preempted]
    assert preempted
    assert "r0" not in preempted
    assert engine.load(0.0).preemptions == len(preempted)
    for request in requests:
        assert story.tokens(request.request_id) == expected(request.token_ids, 96)
        computed = [one.computed_tokens for one in story.progress[request.request_id]]
        assert computed[-1] == 65 + 95


def test_a_blocked_request_lets_only_so_many_pass() -> None:
    engine = make_engine(20)
    engine.submit(make_request(prompt_of(100), "holder", max_tokens=60))
    story = Story(engine)
    story.step()
    engine.submit(make_request(prompt_of(250, 1), "large", max_tokens=2))
    for i in range(3 * MOST_PASSES):
        engine.submit(make_request(prompt_of(10, i + 2), f"small{i}", max_tokens=2))
    story.run()
    order = list(dict.fromkeys(name for plan in plans(engine) for name in shares(plan)))
    assert order.index("large") == 1 + MOST_PASSES


def test_a_step_beside_decodes_keeps_the_tightest_promise() -> None:
    engine = make_engine(512, max_num_batched_tokens=512)
    for i, itl_s in enumerate((None, 0.2, 0.08)):
        engine.submit(make_request(prompt_of(10, i), max_tokens=400, itl_s=itl_s))
    story = Story(engine)
    story.step()
    engine.submit(make_request(prompt_of(3000, 7), "long", max_tokens=1))
    while not story.tokens("long"):
        story.step()
    beside = [plan for plan in plans(engine) if len(plan.chunks) == 4]
    assert beside
    for plan in beside:
        prompt_tokens = plan.num_tokens - 3
        assert plan.predicted_s <= 0.08 or prompt_tokens <= 16
        assert "ITL 80 ms" in plan.reason


def test_nobodys_promise_leaves_the_whole_budget() -> None:
    engine = make_engine(512, max_num_batched_tokens=512)
    engine.submit(make_request(prompt_of(10), max_tokens=50))
    story = Story(engine)
    story.step()
    engine.submit(make_request(prompt_of(2000, 7), "long", max_tokens=1))
    story.step()
    assert shares(plans(engine)[-1])["long"] == 511


def test_a_promise_that_cannot_be_kept_still_lets_a_block_pass_and_more_with_age() -> None:
    clock = Clock()
    engine = make_engine(512, clock=clock)
    engine.submit(make_request(prompt_of(10), max_tokens=400, itl_s=1e-6))
    story = Story(engine)
    story.step()
    engine.submit(make_request(prompt_of(1000, 7), "long", max_tokens=1, ttft_s=1.0))
    story.step()
    assert shares(plans(engine)[-1])["long"] == 16
    clock.now += 2.5
    story.step()
    assert shares(plans(engine)[-1])["long"] == 48


def test_a_prefix_that_a_neighbour_is_computing_is_waited_for_not_computed_twice() -> None:
    engine = make_engine(256, max_num_batched_tokens=4096)
    system = prompt_of(320)
    requests = [make_request((*system, *prompt_of(10, i + 1)), max_tokens=3) for i in range(6)]
    story = run_all(engine, *requests)
    assert engine.load(0.0).prompt_tokens == 330 + 5 * 10
    for request in requests:
        assert story.tokens(request.request_id) == expected(request.token_ids, 3)


def test_the_neighbour_that_an_urgent_request_waits_for_is_not_starved_by_short_ones() -> None:
    engine = make_engine(256, max_num_batched_tokens=32, max_num_seqs=8)
    story = Story(engine)
    engine.submit(make_request((*prompt_of(640), 1), "computing", max_tokens=1))
    story.step()
    engine.submit(make_request((*prompt_of(640), 2), "urgent", max_tokens=1, priority=50))
    for step in range(50):
        for i in range(5):
            engine.submit(make_request(prompt_of(8, 10 * step + i), max_tokens=1, priority=10))
        story.step()
    assert story.tokens("urgent") == expected((*prompt_of(640), 2), 1)


def test_who_waits_for_a_neighbours_prefix_goes_on_when_the_neighbour_is_gone() -> None:
    engine = make_engine(256, max_num_batched_tokens=32)
    engine.submit(make_request((*prompt_of(320), 1), "computing"))
    engine.submit(make_request((*prompt_of(320), 2), "waiting"))
    story = Story(engine)
    story.step()
    assert shares(plans(engine)[0]) == {"computing": 32}
    engine.abort("computing")
    story.run()
    assert story.tokens("waiting") == expected((*prompt_of(320), 2), 8)


def test_a_newcomer_leaves_each_running_sequence_a_block_to_grow() -> None:
    engine = make_engine(6)
    engine.submit(make_request(prompt_of(30), "running", max_tokens=8))
    story = Story(engine)
    story.step()
    assert engine.lease(make_request(prompt_of(64, 1), "leased")) is None
    engine.submit(make_request(prompt_of(64, 1), "newcomer", max_tokens=4))
    story.run()
    assert engine.load(0.0).preemptions == 0
    together = [shares(plan) for plan in plans(engine) if len(plan.chunks) == 2]
    assert not together
