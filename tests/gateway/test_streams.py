"""The hub gives each request its own news, in order and once, and ends a stream that cannot go on."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from cluster.streams import FrameHub, TokenStream
from engine.types import FinishReason, Token
from tandem.messages import Code, Delta, Frame, WorkerRef

DECODE = WorkerRef("decode-0", "1", "local")


def _delta(seq: int, *token_ids: int, finish: FinishReason | None = None, request_id: str = "a") -> Delta:
    return Delta(request_id, seq, tuple(map(Token, token_ids)), finish)


def _frame(*deltas: Delta, incarnation: str = "1") -> Frame:
    return Frame("decode-0", incarnation, 0, deltas)


async def _all(stream: TokenStream) -> list[Delta]:
    async with asyncio.timeout(2):
        return [delta async for delta in stream]


async def test_a_frame_is_split_among_the_requests_it_is_about() -> None:
    hub = FrameHub()
    first, second = hub.expect("a", DECODE), hub.expect("b", DECODE)
    hub.deliver(
        _frame(
            _delta(0, 1),
            _delta(0, 5, 6, finish=FinishReason.STOP, request_id="b"),
            _delta(0, 9, request_id="nobody's"),
        )
    )
    hub.deliver(_frame(_delta(1, 2, finish=FinishReason.LENGTH)))
    assert [token.token_id for delta in await _all(first) for token in delta.tokens] == [1, 2]
    assert [token.token_id for delta in await _all(second) for token in delta.tokens] == [5, 6]


async def test_a_repeated_delta_is_trimmed_and_a_missing_one_ends_the_stream() -> None:
    hub = FrameHub()
    stream = hub.expect("a", DECODE)
    hub.deliver(_frame(_delta(0, 1, 2)))
    hub.deliver(_frame(_delta(1, 2, 3)))
    hub.deliver(_frame(_delta(5, 6)))
    hub.deliver(_frame(_delta(3, 4)))
    *told, last = await _all(stream)
    assert [token.token_id for delta in told for token in delta.tokens] == [1, 2, 3]
    assert last.error is not None
    assert (last.error.code, last.error.by) == (Code.UNAVAILABLE, "decode-0")
    assert "2 tokens" in last.error.message


async def test_frames_of_an_old_incarnation_are_not_believed() -> None:
    hub = FrameHub()
    stream = hub.expect("a", DECODE)
    hub.deliver(_frame(_delta(0, 66), incarnation="0"))
    hub.lost("decode-0", "0", "restarted")
    hub.deliver(_frame(_delta(0, 1, finish=FinishReason.LENGTH)))
    assert [delta.tokens for delta in await _all(stream)] == [(Token(1),)]


async def test_a_lost_worker_ends_exactly_the_streams_it_feeds() -> None:
    hub = FrameHub()
    fed, other = hub.expect("a", DECODE), hub.expect("b", WorkerRef("decode-1", "1", "local"))
    hub.lost("decode-0", "1", "heartbeat")
    assert [delta.error and delta.error.code for delta in await _all(fed)] == [Code.UNAVAILABLE]
    other.put(_delta(0, 1, finish=FinishReason.STOP, request_id="b"))
    assert len(await _all(other)) == 1


async def test_a_released_stream_wakes_its_reader_and_hears_nothing_more() -> None:
    hub = FrameHub()
    stream = hub.expect("a", DECODE)
    reader = asyncio.create_task(_all(stream))
    await asyncio.sleep(0)
    hub.release("a")
    hub.release("a")
    hub.deliver(_frame(_delta(0, 1)))
    assert await reader == []
    assert len(hub) == 0


async def test_an_id_has_one_stream() -> None:
    hub = FrameHub()
    hub.expect("a", DECODE)
    with pytest.raises(ValueError, match="already"):
        hub.expect("a", DECODE)


def _of(index: int, seq: int, *token_ids: int, finish: FinishReason | None = None) -> Delta:
    return Delta("a", seq, tuple(map(Token, token_ids)), finish, index=index)


async def test_several_sequences_are_counted_each_and_the_stream_ends_with_the_last() -> None:
    hub = FrameHub()
    stream = hub.expect("a", DECODE, 2)
    hub.deliver(_frame(_of(0, 0, 1), _of(1, 0, 5)))
    hub.deliver(_frame(_of(0, 0, 1, 2, finish=FinishReason.STOP), _of(1, 1, 6)))
    hub.deliver(_frame(_of(0, 2, 3), _of(1, 2, 7, finish=FinishReason.LENGTH), _of(1, 3, 8)))
    told = await _all(stream)
    assert [(delta.index, [token.token_id for token in delta.tokens]) for delta in told] == [
        (0, [1]),
        (1, [5]),
        (0, [2]),
        (1, [6]),
        (1, [7]),
    ]


@pytest.mark.parametrize("finish", [FinishReason.DEADLINE, FinishReason.ABORT, FinishReason.ERROR])
async def test_what_is_no_end_of_a_sequence_ends_all_of_them_even_after_its_own(finish: FinishReason) -> None:
    hub = FrameHub()
    stream = hub.expect("a", DECODE, 2)
    hub.deliver(_frame(_of(0, 0, 1, finish=FinishReason.STOP), _of(0, 1, finish=finish), _of(1, 0, 5)))
    assert [delta.finish for delta in await _all(stream)] == [FinishReason.STOP, finish]


async def test_a_hole_in_one_sequence_ends_the_stream() -> None:
    hub = FrameHub()
    stream = hub.expect("a", DECODE, 2)
    hub.deliver(_frame(_of(0, 0, 1), _of(1, 2, 5)))
    *_, last = await _all(stream)
    assert last.error is not None
    assert last.error.code is Code.UNAVAILABLE


async def test_a_skipped_sequence_says_nothing_more_and_is_not_waited_for() -> None:
    hub = FrameHub()
    stream = hub.expect("a", DECODE, 2)
    hub.deliver(_frame(_of(0, 0, 1), _of(1, 0, 5)))
    stream.skip(0)
    hub.deliver(_frame(_of(0, 1, 2), _of(1, 1, 6, finish=FinishReason.LENGTH)))
    assert [delta.index for delta in await _all(stream)] == [1, 1]


# -- moves --------------------------------------------------------------------------------------------------------

OTHER = WorkerRef("decode-1", "7", "there")


def _there(*deltas: Delta) -> Frame:
    return Frame(OTHER.name, OTHER.incarnation, 0, deltas)


def _moved(delta: Delta, move: int = 4) -> Delta:
    return replace(delta, move=move)


def _word(seq: int, move: int = 4) -> Delta:
    return Delta("a", seq, moved=OTHER, move=move)


def _ids(deltas: list[Delta]) -> list[int]:
    return [token.token_id for delta in deltas for token in delta.tokens]


async def test_a_moved_stream_goes_on_after_the_sources_word_whatever_came_first() -> None:
    hub = FrameHub()
    stream = hub.expect("a", DECODE)
    hub.deliver(_frame(_delta(0, 1)))
    hub.deliver(_there(_moved(_delta(2, 3))))
    hub.deliver(_frame(_delta(1, 2)))
    hub.deliver(_there(_moved(_delta(3, 4))))
    assert len(stream._deltas) == 2
    hub.deliver(_frame(_word(2)))
    hub.deliver(_frame(_delta(2, 99)))
    hub.deliver(_there(_moved(_delta(4, 5, finish=FinishReason.LENGTH))))
    told = await _all(stream)
    assert _ids(told) == [1, 2, 3, 4, 5]
    assert [delta.moved for delta in told if delta.moved] == [OTHER]


async def test_news_of_a_move_that_came_to_nothing_are_never_told() -> None:
    hub = FrameHub()
    stream = hub.expect("a", DECODE)
    hub.deliver(_there(_moved(_delta(0, 98, 99), move=3), _moved(_delta(2, finish=FinishReason.ABORT), move=3)))
    hub.deliver(_frame(_delta(0, 1)))
    hub.deliver(_frame(_word(1)))
    hub.deliver(_there(_moved(_delta(1, 97), move=3)))
    hub.deliver(_there(_moved(_delta(1, 2, finish=FinishReason.STOP))))
    assert _ids(await _all(stream)) == [1, 2]


async def test_what_was_missed_after_a_move_is_told_again() -> None:
    hub = FrameHub()
    stream = hub.expect("a", DECODE)
    hub.deliver(_frame(_delta(0, 1), _word(1)))
    hub.deliver(_there(_moved(_delta(2, 3))))  # before it nobody listened
    hub.deliver(_there(_moved(_delta(1, 2)), _moved(_delta(2, 3)), _moved(_delta(3, 4))))
    hub.deliver(_there(_moved(_delta(2, 3))))
    hub.deliver(_there(_moved(_delta(4, 5))))
    hub.deliver(_there(_moved(_delta(6, 7))))
    told = await _all(stream)
    assert _ids(told) == [1, 2, 3, 4, 5]
    assert all(delta.tokens or delta.moved or delta.error for delta in told)
    assert told[-1].error is not None
    assert told[-1].error.by == OTHER.name


async def test_after_a_move_the_new_worker_is_the_one_whose_loss_matters() -> None:
    hub = FrameHub()
    stream = hub.expect("a", DECODE)
    hub.deliver(_frame(_delta(0, 1), _word(1)))
    hub.lost(DECODE.name, DECODE.incarnation, "killed")
    assert len(stream._deltas) == 2
    hub.lost(OTHER.name, OTHER.incarnation, "killed")
    *_, last = await _all(stream)
    assert last.error is not None
    assert last.error.by == OTHER.name
