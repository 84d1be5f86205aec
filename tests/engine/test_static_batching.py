"""Static batching, the baseline: a fixed batch, finished rows computed on, nobody joins until all have ended."""

from __future__ import annotations

import pytest
from fakes import Story, expected, make_engine, make_request, prompt_of, run_all, runner_of

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError
from engine.types import Request, StepPlan

LENGTHS = (3, 30, 7, 12, 9, 5)


def plans(engine: Engine) -> list[StepPlan]:
    return runner_of(engine).plans


def names(plan: StepPlan) -> set[str]:
    return {chunk.request_id for chunk in plan.chunks}


def static(blocks: int = 64, **settings: object) -> Engine:
    return make_engine(blocks, batching="static", max_num_seqs=3, **settings)


def submitted(engine: Engine) -> Story:
    return run_all(
        engine, *(make_request(prompt_of(20, i), f"r{i}", max_tokens=most) for i, most in enumerate(LENGTHS))
    )


def test_a_batch_stays_whole_until_its_longest_has_ended_and_nobody_joins() -> None:
    engine = static()
    story = submitted(engine)
    batches = [names(plan) for plan in plans(engine)]
    assert batches == [{"r0", "r1", "r2"}] * 30 + [{"r3", "r4", "r5"}] * 12
    for i, most in enumerate(LENGTHS):
        assert story.tokens(f"r{i}") == expected(prompt_of(20, i), most)
        assert sum(one.finish is not None for one in story.progress[f"r{i}"]) == 1
    load = engine.load(0.0)
    assert (load.live_blocks, load.running) == (0, 0)


def test_continuous_batching_needs_fewer_steps_for_the_same_tokens() -> None:
    engine = make_engine(max_num_seqs=3)
    story = submitted(engine)
    assert story.steps == 30
    for i, most in enumerate(LENGTHS):
        assert story.tokens(f"r{i}") == expected(prompt_of(20, i), most)


def test_prompts_of_a_batch_are_computed_before_any_row_decodes() -> None:
    engine = static(max_num_batched_tokens=16)
    submitted(engine)
    sizes = [{len(chunk.token_ids) > 1 for chunk in plan.chunks if chunk.start < 20} for plan in plans(engine)]
    first_decode = next(i for i, plan in enumerate(plans(engine)) if any(chunk.start >= 20 for chunk in plan.chunks))
    assert sum(plan.num_tokens for plan in plans(engine)[:first_decode]) == 3 * 20
    assert all(sizes[:first_decode])


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_tight_pool_drops_finished_rows_first_and_changes_no_output(preemption: str) -> None:
    engine = static(11, preemption=preemption, swap_slots=20)
    requests = [make_request(prompt_of(30, i), f"r{i}", max_tokens=most) for i, most in enumerate((10, 100, 70, 90))]
    story = run_all(engine, *requests)
    for request in requests:
        most = request.sampling.max_tokens
        assert story.tokens(request.request_id) == expected(request.token_ids, most)
    assert engine.load(0.0).live_blocks == 0


def test_a_finished_row_cannot_be_aborted_and_leaves_with_the_last_one() -> None:
    engine = static()
    for i, most in enumerate((2, 50)):
        engine.submit(make_request(prompt_of(20, i), f"r{i}", max_tokens=most))
    story = Story(engine)
    for _ in range(5):
        story.step()
    assert story.last("r0").finish is not None
    assert not engine.abort("r0")
    assert engine.load(0.0).running == 2
    assert engine.abort("r1")
    assert not story.run().step()
    assert engine.load(0.0).live_blocks == 0


def test_an_unknown_way_of_batching_is_refused() -> None:
    with pytest.raises(ConfigError, match="continuous, static"):
        EngineConfig(model="m", batching="dynamic")


def handed_over(prefill: Engine, decode: Engine, request: Request) -> None:
    prefill.submit(request, hold=True)
    first = tuple(Story(prefill).run().full(request.request_id))
    lease = decode.lease(request)
    assert lease is not None
    runner_of(prefill).copy(prefill.block_table(request.request_id), runner_of(decode), lease.block_ids)
    decode.adopt(request, first)
    prefill.release(request.request_id)


def test_handed_over_requests_beyond_the_seats_wait_for_their_batch() -> None:
    prefill, decode = make_engine(prefix_caching=False), static(prefix_caching=False)
    for i in range(7):
        handed_over(prefill, decode, make_request(prompt_of(20, i), f"r{i}", max_tokens=5 + i))
    story = Story(decode).run()
    for i in range(7):
        assert story.tokens(f"r{i}") == expected(prompt_of(20, i), 5 + i)[1:]
    batches = [{"r0", "r1", "r2"}] * 6 + [{"r3", "r4", "r5"}] * 9 + [{"r6"}] * 10
    assert [names(plan) for plan in plans(decode)] == batches


@pytest.mark.parametrize("blocks", [64, 11])
def test_whom_another_worker_hands_over_is_in_the_next_batch(blocks: int) -> None:
    prefill, decode = make_engine(prefix_caching=False), static(blocks, prefix_caching=False)
    story = Story(decode)
    for i in range(2):
        handed_over(prefill, decode, make_request(prompt_of(20, i), f"r{i}", max_tokens=10 + 100 * i))
    story.step()
    for i in range(2, 4):
        handed_over(prefill, decode, make_request(prompt_of(20, i), f"r{i}", max_tokens=10))
    story.run()
    for i, most in enumerate((10, 110, 10, 10)):
        assert story.tokens(f"r{i}") == expected(prompt_of(20, i), most)[1:]
    assert decode.load(0.0).live_blocks == 0
    if blocks == 64:
        assert [names(plan) for plan in plans(decode)] == [{"r0", "r1"}] * 109 + [{"r2", "r3"}] * 9
    else:
        assert decode.load(0.0).preemptions > 0
