"""Preemption: by swap or by computing again, whichever costs less; nobody's output knows of it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from fakes import Story, expected, make_engine, make_request, prompt_of, run_all, runner_of, swap_of

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError
from engine.preemption import PreemptionCost, cost_of, swaps
from engine.swap import CopyRate
from engine.types import FinishReason, Request, StepPlan, StepTimes

TIMES = StepTimes(prefill=(0.01, 0.001, 0.0))


def four_on_a_shared_prefix(**fields: object) -> list[Request]:
    return [make_request((*prompt_of(64), i), f"r{i}", max_tokens=96, **fields) for i in range(4)]


def plans(engine: Engine) -> list[StepPlan]:
    return runner_of(engine).plans


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("preemption", ["auto", "recompute", "swap"])
def test_every_way_of_preemption_gives_the_unpreempted_output(preemption: str, caching: bool, chunked: bool) -> None:
    engine = make_engine(
        15, preemption=preemption, swap_slots=40, prefix_caching=caching, chunked_prefill=chunked, max_num_seqs=8
    )
    requests = four_on_a_shared_prefix(temperature=0.7, seed=3)
    wanted = run_all(make_engine(64), *requests)
    story = run_all(engine, *requests)
    load = engine.load(0.0)
    assert load.preemptions > 0
    swapped = {"recompute": {0}, "swap": {load.preemptions}, "auto": set(range(load.preemptions + 1))}
    assert load.swap_preemptions in swapped[preemption]
    for request in requests:
        assert story.tokens(request.request_id) == wanted.tokens(request.request_id)
        assert len(story.tokens(request.request_id)) == 96
    assert (load.swapped, load.swap_used_blocks, load.live_blocks) == (0, 0, 0)


def test_a_swapped_sequence_computes_nothing_again_and_one_recomputed_does() -> None:
    computed = {}
    for preemption in ("recompute", "swap"):
        engine = make_engine(15, preemption=preemption, swap_slots=40, prefix_caching=False)
        run_all(engine, *four_on_a_shared_prefix())
        computed[preemption] = sum(plan.num_tokens for plan in plans(engine))
    assert computed["swap"] == 4 * (65 + 95)
    assert computed["recompute"] > computed["swap"]


def test_swap_space_that_is_full_leaves_the_others_to_be_computed_again() -> None:
    engine = make_engine(15, preemption="swap", swap_slots=6, prefix_caching=False)
    story = run_all(engine, *four_on_a_shared_prefix())
    load = engine.load(0.0)
    assert 0 < load.swap_preemptions < load.preemptions
    assert load.swap_total_blocks == 6
    for i in range(4):
        assert story.tokens(f"r{i}") == expected((*prompt_of(64), i), 96)


def test_running_come_before_swapped_and_swapped_before_waiting() -> None:
    engine = make_engine(10, preemption="swap", swap_slots=20, prefix_caching=False)
    for i in range(2):
        engine.submit(make_request(prompt_of(60, i), f"r{i}", max_tokens=60))
    story = Story(engine)
    while not engine.load(0.0).swapped:
        story.step()
    engine.submit(make_request(prompt_of(8, 5), "late but urgent", max_tokens=4, priority=100))
    story.run()
    order = [{chunk.request_id for chunk in plan.chunks} for plan in plans(engine)]
    first = next(i for i, names in enumerate(order) if "late but urgent" in names)
    back = next(i for i, plan in enumerate(plans(engine)) if plan.swap_in)
    assert back <= first
    between = next(i for i, plan in enumerate(plans(engine)) if plan.swap_out)
    assert all("r0" in names for names in order[between:back]), "who runs goes on meanwhile"


def test_nobody_swaps_in_and_out_in_one_step() -> None:
    engine = make_engine(15, preemption="swap", swap_slots=40)
    run_all(engine, *four_on_a_shared_prefix())
    assert any(plan.swap_out for plan in plans(engine))
    assert not any(plan.swap_out and plan.swap_in for plan in plans(engine))
    assert all(plan.preempted for plan in plans(engine) if plan.swap_out)


def test_the_plan_says_who_was_preempted_how_and_at_what_cost() -> None:
    for preemption, words in (("swap", "swapped out (swap "), ("recompute", "to be computed again (swap ")):
        engine = make_engine(15, preemption=preemption, swap_slots=40)
        run_all(engine, *four_on_a_shared_prefix())
        told = [plan.reason for plan in plans(engine) if plan.preempted]
        assert told
        assert all(words in reason and "recompute " in reason for reason in told)


def test_what_the_prefix_cache_still_holds_is_not_copied_back() -> None:
    engine = make_engine(15, preemption="swap", swap_slots=40)
    run_all(engine, *four_on_a_shared_prefix())
    out = {swap.request_id: swap.pairs for plan in plans(engine) for swap in plan.swap_out}
    back = {swap.request_id: swap.pairs for plan in plans(engine) for swap in plan.swap_in}
    assert out.keys() == back.keys()
    assert all(len(back[name]) <= len(out[name]) - 4 for name in out), "the shared prefix stayed"


def test_a_prompt_in_the_middle_is_swapped_and_goes_on_with_its_logprobs() -> None:
    want = run_all(make_engine(64), make_request(prompt_of(60, 1), "x", prompt_logprobs=1))
    tight = make_engine(8, max_num_batched_tokens=2, preemption="swap", swap_slots=20)
    got = run_all(
        tight, make_request(prompt_of(30), max_tokens=90), make_request(prompt_of(60, 1), "x", prompt_logprobs=1)
    )
    assert tight.load(0.0).swap_preemptions > 0
    told = [[one.prompt_logprobs for one in s.progress["x"] if one.prompt_logprobs] for s in (want, got)]
    assert told[0] == told[1]
    computed = [one.computed_tokens for one in got.progress["x"]]
    assert all(before < after for before, after in pairwise(computed)), "progress never falls back"


@pytest.mark.parametrize("by_deadline", [True, False])
def test_abort_and_deadline_reach_who_is_swapped_out(by_deadline: bool) -> None:
    engine = make_engine(10, preemption="swap", swap_slots=20)
    for i in range(2):
        deadline_s = engine._clock() + 50 if i else None
        engine.submit(make_request(prompt_of(60, i), f"r{i}", max_tokens=60, deadline_s=deadline_s))
    story = Story(engine)
    while not engine.load(0.0).swapped:
        story.step()
    assert engine.block_table("r1") == ()
    if by_deadline:
        story.step(engine._clock() + 100)
        assert story.last("r1").finish is FinishReason.DEADLINE
    else:
        assert engine.abort("r1")
    engine.check()
    load = engine.load(0.0)
    assert (load.swapped, load.swap_used_blocks) == (0, 0)
    assert story.run().tokens("r0") == expected(prompt_of(60), 60)


def test_a_copy_that_fails_ends_those_it_concerned_and_the_engine_goes_on() -> None:
    engine = make_engine(10, preemption="swap", swap_slots=20)
    requests = [make_request(prompt_of(60, i), f"r{i}", max_tokens=60) for i in range(2)]
    for request in requests:
        engine.submit(request)
    swap_of(engine).broken = RuntimeError("link down")
    story = Story(engine).run()
    assert [story.last(f"r{i}").finish for i in range(2)] == [FinishReason.ERROR] * 2
    assert "link down" in story.last("r1").error
    load = engine.load(0.0)
    assert (load.live_blocks, load.swap_used_blocks) == (0, 0)
    assert run_all(engine, make_request(prompt_of(60), "again")).tokens("again") == expected(prompt_of(60), 8)


# -- the choice ----------------------------------------------------------------------------------------------------


def test_what_others_keep_is_free_both_ways() -> None:
    alone = cost_of(100, 0, 16, 1000, TIMES, 1e6)
    assert alone == PreemptionCost(pytest.approx(0.11), pytest.approx(14 * 1000 / 1e6))
    shared = cost_of(100, 64, 16, 1000, TIMES, 1e6)
    assert shared == PreemptionCost(pytest.approx(0.046), pytest.approx(10 * 1000 / 1e6))


@pytest.mark.parametrize(
    ("mode", "swap_s", "room", "swapped"),
    [
        ("auto", 0.9, True, True),
        ("auto", 1.1, True, False),
        ("auto", 0.9, False, False),
        ("swap", 9.0, True, True),
        ("swap", 0.1, False, False),
        ("recompute", 0.1, True, False),
    ],
)
def test_the_cheaper_way_is_taken_unless_one_is_forced(mode: str, swap_s: float, room: bool, swapped: bool) -> None:
    assert swaps(mode, PreemptionCost(1.0, swap_s), room=room) is swapped


def test_a_slow_link_makes_the_engine_compute_again() -> None:
    engine = make_engine(15, swap_slots=40)
    engine._copy_rate.bytes_per_s = 100.0
    run_all(engine, *four_on_a_shared_prefix())
    load = engine.load(0.0)
    assert load.preemptions > 0
    assert load.swap_preemptions == 0


def test_the_copy_rate_is_what_was_measured() -> None:
    rate = CopyRate()
    rate.observe(1000, 0.0)
    rate.observe(1000, 1.0)
    assert rate.bytes_per_s == pytest.approx(1000)
    for _ in range(50):
        rate.observe(8000, 1.0)
    assert rate.seconds(8000) == pytest.approx(1.0, rel=0.01)


def test_settings_that_contradict_each_other_are_refused() -> None:
    for settings in ({"preemption": "never"}, {"swap_bytes": -1}, {"preemption": "swap", "swap_bytes": 0}):
        with pytest.raises(ConfigError):
            EngineConfig(model="m", **settings)  # type: ignore[arg-type]
