"""A prompt waits for the KV that another engine has computed, and goes on with as much of it as came."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.engine import Engine
from engine.types import FinishReason
from tests.engine.fakes import Story, expected, make_engine, make_request, prompt_of, run_all, runner_of

PROMPT = prompt_of(100)
KEPT = 6
"""Full blocks of the prompt before its last token."""


@pytest.fixture
def source() -> Iterator[Engine]:
    """An engine that has answered `PROMPT`."""
    engine = make_engine(num_blocks=32)
    run_all(engine, make_request(PROMPT, "before"))
    yield engine
    engine.check()


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = make_engine(num_blocks=16)
    yield engine
    engine.check()
    assert engine.load(0.0).live_blocks == 0


def bring(source: Engine, engine: Engine, request_id: str, blocks: int, tokens: int = len(PROMPT)) -> tuple[int, ...]:
    """Begin a fetch and let the first `blocks` arrive; the blocks that it fills."""
    room = engine.fetch(request_id, tokens)
    assert room is not None
    lent = source.retain_prefix(room.keys)
    assert len(lent) == len(room.keys)
    runner_of(source).copy(lent[:blocks], runner_of(engine), room.block_ids[:blocks])
    source.unretain(lent)
    if blocks:
        assert engine.fetched(request_id, blocks)
    return room.block_ids


@pytest.mark.parametrize("blocks", range(KEPT + 1))
def test_what_came_is_not_computed_and_the_answer_is_the_same(source: Engine, engine: Engine, blocks: int) -> None:
    engine.submit(make_request(PROMPT, "r"))
    bring(source, engine, "r", blocks)
    story = Story(engine)
    assert not story.step(), "it waits"
    assert not engine.has_work(), "an engine that waits for others does not spin"
    engine.fetch_over("r")
    assert engine.has_work()
    story.run()
    assert story.tokens("r") == expected(PROMPT, 8)
    assert engine.load(0.0).prompt_tokens == len(PROMPT) - 16 * blocks
    assert story.last("r").cached_tokens == 16 * blocks


def test_others_run_while_one_waits(source: Engine, engine: Engine) -> None:
    engine.submit(make_request(PROMPT, "r"))
    bring(source, engine, "r", 0)
    other = prompt_of(20, seed=1)
    story = run_all(engine, make_request(other, "other"))
    assert story.tokens("other") == expected(other, 8)
    assert engine.fetching("r")
    engine.fetch_over("r")
    story.run()
    assert story.tokens("r") == expected(PROMPT, 8)


def test_one_with_the_same_prefix_waits_for_the_same_blocks(source: Engine, engine: Engine) -> None:
    engine.submit(make_request(PROMPT, "r"))
    engine.submit(make_request((*PROMPT, 1, 2, 3), "twin"))
    bring(source, engine, "r", KEPT - 1)
    assert engine.fetch("twin", len(PROMPT)) is None, "it is on its way already"
    story = Story(engine)
    assert not story.step()
    engine.fetch_over("r")
    story.run()
    assert story.tokens("twin") == expected((*PROMPT, 1, 2, 3), 8)
    assert engine.load(0.0).prompt_tokens < 2 * (len(PROMPT) - 16 * (KEPT - 1)) + 3


def test_nothing_is_fetched_that_is_there_or_that_must_be_computed(source: Engine, engine: Engine) -> None:
    run_all(engine, make_request(PROMPT[:50], "first"))
    engine.submit(make_request(PROMPT, "r"))
    assert engine.fetch("r", 48) is None
    room = engine.fetch("r", 64)
    assert room is not None
    assert (room.held_blocks, len(room.block_ids), len(room.keys)) == (3, 1, 4)
    assert engine.fetch("r", 96) is None, "one fetch at a time"
    assert engine.fetch("nobody", 96) is None
    engine.submit(make_request(PROMPT, "told", prompt_logprobs=1))
    assert engine.fetch("told", 96) is None, "log-probabilities of the prompt come out of computing it"
    engine.fetch_over("r")
    assert Story(engine).run().tokens("r") == expected(PROMPT, 8)


def test_without_room_there_is_no_fetch(source: Engine, engine: Engine) -> None:
    long = prompt_of(200, seed=3)
    engine.submit(make_request(long, "long"))
    engine.submit(make_request(PROMPT, "r"))
    assert engine.fetch("r", 96) is None, "the first in the queue has first call"
    story = Story(engine).run()
    assert story.tokens("r") == expected(PROMPT, 8)


@pytest.mark.parametrize("end", ["abort", "deadline", "reset"])
def test_the_end_of_the_prompt_ends_its_fetch_and_late_bytes_have_blocks_of_their_own(
    source: Engine, engine: Engine, end: str
) -> None:
    engine.submit(make_request(PROMPT, "r", deadline_s=5.0))
    blocks = bring(source, engine, "r", 2)
    engine.retain(blocks)  # what the transfer does while it may write there
    story = Story(engine)
    if end == "abort":
        assert engine.abort("r")
    elif end == "deadline":
        story.step(6.0)
        assert story.last("r").finish is FinishReason.DEADLINE
    else:
        engine.reset_prefix_cache()
    assert not engine.fetching("r")
    assert not engine.fetched("r", 3)
    other = prompt_of(40, seed=5)
    engine.submit(make_request(other, "other"))
    story.step(0.0)
    assert not set(engine.block_table("other")) & set(blocks)
    engine.check()
    engine.unretain(blocks)
    story.run()
    assert story.tokens("other") == expected(other, 8)
