"""A pool for 1.2 requests and six that need most of it: all finish, in bounded work, whatever the way of preemption.

Bounded work is counted: steps, and tokens computed, against the same requests one after the other.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fakes import expected, make_engine, make_request, prompt_of, run_all, runner_of

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import InvalidRequest
from engine.toy import make_toy_checkpoint
from engine.types import Request, StepPlan

BLOCKS = 12
PROMPT, NEW = 77, 77
"""80 % of the pool of 192 tokens."""


def six() -> list[Request]:
    return [make_request(prompt_of(PROMPT, i), f"r{i}", max_tokens=NEW, priority=i % 2) for i in range(6)]


def work(plans: list[StepPlan]) -> int:
    return sum(plan.num_tokens for plan in plans)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize(
    ("preemption", "batching"),
    [
        ("recompute", "continuous"),
        ("swap", "continuous"),
        ("auto", "continuous"),
        ("recompute", "static"),
    ],
)
def test_six_requests_in_a_pool_for_one_finish_in_bounded_work(
    preemption: str, batching: str, chunked: bool, caching: bool
) -> None:
    settings = {
        "preemption": preemption,
        "batching": batching,
        "chunked_prefill": chunked,
        "prefix_caching": caching,
        "max_num_batched_tokens": 32,
        "swap_slots": 30,
    }
    serial = make_engine(BLOCKS, **settings)
    serial_steps = sum(run_all(serial, request).steps for request in six())
    engine = make_engine(BLOCKS, **settings)
    story = run_all(engine, *six())
    for request in six():
        assert story.tokens(request.request_id) == expected(request.token_ids, NEW)
    assert story.steps < 1.5 * serial_steps
    assert work(runner_of(engine).plans) < 1.5 * work(runner_of(serial).plans)
    load = engine.load(0.0)
    assert load.preemptions <= 6
    assert load.live_blocks == load.swap_used_blocks == 0


def test_six_requests_in_a_pool_for_one_on_a_real_model(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    path = str(make_toy_checkpoint(tmp_path))

    def opened() -> Engine:
        return Engine.open(EngineConfig(model=path, num_blocks=BLOCKS, prefix_caching=False))

    alone, engine = opened(), opened()
    one_by_one = [run_all(alone, request) for request in six()]
    story = run_all(engine, *six())
    assert story.steps < 1.5 * sum(one.steps for one in one_by_one)
    for request, one in zip(six(), one_by_one, strict=True):
        assert story.tokens(request.request_id) == one.tokens(request.request_id)


def test_what_can_never_fit_is_refused_at_once_even_by_a_full_pool() -> None:
    engine = make_engine(BLOCKS, max_model_len=4096)
    engine.submit(six()[0])
    engine.step(0.0)
    with pytest.raises(InvalidRequest, match="192 tokens"):
        engine.submit(make_request(prompt_of(200), "too long"))
    with pytest.raises(InvalidRequest, match="192 tokens"):
        engine.submit(make_request(prompt_of(100), "too much", max_tokens=93))
    assert engine.load(0.0).waiting == 0


def test_with_chunks_off_a_prompt_has_a_step_of_its_own() -> None:
    engine = make_engine(64, chunked_prefill=False, max_num_batched_tokens=512)
    run_all(engine, make_request(prompt_of(40), "a", max_tokens=30), make_request(prompt_of(300, 1), "b", max_tokens=5))
    kinds = [{len(chunk.token_ids) > 1 for chunk in plan.chunks} for plan in runner_of(engine).plans]
    assert all(len(kind) == 1 for kind in kinds)
    assert kinds.count({True}) == 1
