"""A sequence leaves one engine and goes on in another, or stays after all: the same tokens, no block lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.engine import Engine
from engine.errors import InvalidRequest
from engine.types import Branching, FinishReason, Request, Token
from tests.engine.fakes import expected, make_engine, make_request, runner_of

PROMPT = list(range(1, 40))


def tokens_of(engine: Engine, steps: int = 10_000) -> list[int]:
    told: list[int] = []
    while engine.has_work() and steps:
        result = engine.step(0.0)
        steps -= 1
        if result is not None:
            told += [token.token_id for one in result.progress for token in one.tokens]
    return told


def moved(here: Engine, there: Engine, request: Request, spare_blocks: int = 2, during: int = 0) -> list[int]:
    """Lease, go on for so many steps, pause, copy, adopt; the tokens of those steps."""
    lease = there.lease(request, here.generated(request.request_id) or (), spare_blocks=spare_blocks)
    assert lease is not None
    told = tokens_of(here, during)
    generated = here.pause(request.request_id)
    assert generated is not None
    source = here.block_table(request.request_id)
    computed = len(request.token_ids) + len(generated) - 1
    used = -(-computed // here.info.block_size)
    runner_of(here).copy(source[:used], runner_of(there), lease.block_ids[:used])
    there.adopt(request, tuple(Token(token_id) for token_id in generated))
    here.abort(request.request_id)
    return told


@pytest.mark.parametrize("before", [1, 9, 10, 25, 41])
@pytest.mark.parametrize("during", [0, 7, 20])
def test_it_goes_on_as_if_it_had_not_moved(before: int, during: int) -> None:
    here, there = make_engine(), make_engine()
    request = make_request(PROMPT, "r", max_tokens=80, ignore_eos=True)
    here.submit(request)
    told = tokens_of(here, before)
    told += moved(here, there, request, during=during)
    assert len(there.block_table("r")) == -(-(len(PROMPT) + before + during) // 16), "spare blocks go back"
    told += tokens_of(there)
    assert told == expected(PROMPT, 80)
    for engine in (here, there):
        engine.check()
        assert engine.load(0.0).live_blocks == 0


def test_counts_go_on_where_they_were() -> None:
    whole = expected(PROMPT, 30)
    stop = whole[20]
    first = whole.index(stop)
    here, there = make_engine(), make_engine()
    request = make_request(
        PROMPT, "r", max_tokens=30, min_tokens=min(first, 12), stop_token_ids=(stop,), ignore_eos=True
    )
    here.submit(request)
    told = tokens_of(here, 5)
    moved(here, there, request)
    finishes = []
    while there.has_work():
        result = there.step(0.0)
        assert result is not None
        told += [token.token_id for one in result.progress for token in one.tokens]
        finishes += [one.finish for one in result.progress if one.finish]
    assert told == whole[: first + 1]
    assert finishes == [FinishReason.STOP]


def test_a_paused_sequence_keeps_its_blocks_and_goes_on_when_resumed() -> None:
    engine = make_engine()
    request = make_request(PROMPT, "r", max_tokens=20, ignore_eos=True)
    engine.submit(request)
    told = tokens_of(engine, 4)
    assert engine.pause("r") == tuple(told)
    table = engine.block_table("r")
    assert engine.step(0.0) is None
    assert engine.pause("r") is None, "it does not decode now"
    assert engine.block_table("r") == table
    engine.resume("r")
    told += tokens_of(engine)
    assert told == expected(PROMPT, 20)
    engine.resume("r")
    engine.check()
    assert engine.load(0.0).live_blocks == 0


def test_a_deadline_that_passed_during_the_pause_is_met_after_it() -> None:
    engine = make_engine()
    engine.submit(make_request(PROMPT, "r", max_tokens=20, ignore_eos=True, deadline_s=50.0))
    tokens_of(engine, 4)
    engine.pause("r")
    assert engine.step(60.0) is None
    engine.resume("r")
    result = engine.step(60.0)
    assert result is not None
    assert [one.finish for one in result.progress] == [FinishReason.DEADLINE]
    engine.check()


def test_only_one_sequence_that_decodes_can_be_paused() -> None:
    engine = make_engine(max_num_batched_tokens=16)
    engine.submit(make_request(PROMPT, "r", max_tokens=20, ignore_eos=True))
    assert engine.pause("r") is None
    engine.step(0.0)
    assert engine.pause("r") is None, "its prompt is not computed"
    assert engine.pause("nobody") is None
    tokens_of(engine)
    engine.check()


def test_what_was_not_leased_is_not_adopted() -> None:
    here, there = make_engine(), make_engine()
    request = make_request(PROMPT, "r", max_tokens=80, ignore_eos=True)
    here.submit(request)
    so_far = tuple(tokens_of(here, 4))
    assert there.lease(request, so_far) is not None
    with pytest.raises(ValueError, match="other tokens"):
        there.adopt(request, tuple(Token(token_id + 1) for token_id in so_far))
    with pytest.raises(ValueError, match="outgrown"):
        there.adopt(request, tuple(Token(token_id) for token_id in (*so_far, *range(40))))
    there.abort("r")
    here.abort("r")
    there.check()


@pytest.mark.parametrize("before", [1, 9, 10, 25, 79])
def test_what_a_lost_engine_generated_is_computed_again_and_gone_on_with(before: int) -> None:
    whole = expected(PROMPT, 80)
    engine = make_engine()
    engine.submit(make_request(PROMPT, "r", max_tokens=80, ignore_eos=True), tuple(whole[:before]))
    assert tokens_of(engine) == whole[before:]
    engine.check()
    assert engine.load(0.0).live_blocks == 0


def test_a_request_is_not_gone_on_with_behind_its_end_or_as_several() -> None:
    engine, whole = make_engine(), tuple(expected(PROMPT, 8))
    ended = make_request(PROMPT, "r", max_tokens=8, ignore_eos=True)
    with pytest.raises(InvalidRequest, match="generated: has ended the request"):
        engine.submit(ended, whole)
    with pytest.raises(InvalidRequest, match="generated"):
        engine.submit(ended, (-1,))
    with pytest.raises(InvalidRequest, match="generated: must be empty for several"):
        engine.submit(replace(ended, branching=Branching(n=2)), whole[:2])
    assert not engine.has_work()
    engine.check()
