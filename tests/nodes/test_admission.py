"""Who gets room on a decode worker."""

from __future__ import annotations

import pytest

from decode_node.admission import (
    Claim,
    Room,
    Wish,
    claim_key,
    decide,
    growth_blocks,
    growth_of_several,
    still_claimed,
    without,
)

SMALL = Wish("small", arrival_s=5.0, blocks=2, growth_blocks=0)
BIG = Wish("big", arrival_s=1.0, blocks=8, growth_blocks=0)


def test_room_under_the_watermark_is_granted_and_above_it_denied_with_the_sum() -> None:
    assert decide(SMALL, Room(20, 15, 1), (), watermark=0.9).granted
    verdict = decide(SMALL, Room(20, 15, 2), (), watermark=0.9)
    assert not verdict.granted
    assert "live 15 + growth 2 + asked 2 + older claims 0 = 19 of 18" in verdict.reason


def test_small_requests_cannot_starve_a_big_one_that_was_denied() -> None:
    claims = (Claim(BIG, until_s=9.0),)
    room = Room(10, 4, 0)
    assert decide(SMALL, room, (), watermark=1.0).granted
    assert not decide(SMALL, room, claims, watermark=1.0).granted
    assert decide(BIG, Room(10, 2, 0), claims, watermark=1.0).granted


def test_a_claim_leaves_alone_what_it_does_not_need() -> None:
    assert decide(SMALL, Room(20, 4, 0), (Claim(BIG, 9.0),), watermark=1.0).granted


def test_a_younger_claim_does_not_hold_back_an_older_request() -> None:
    assert decide(BIG, Room(10, 2, 0), (Claim(SMALL, 9.0),), watermark=1.0).granted


def test_an_empty_pool_serves_the_oldest_whatever_the_forecast() -> None:
    huge = Wish("huge", 0.0, blocks=10, growth_blocks=50)
    assert decide(huge, Room(10, 0, 0), (), watermark=0.9).granted
    assert not decide(Wish("young", 2.0, 10, 0), Room(10, 0, 0), (Claim(BIG, 9.0),), watermark=0.9).granted
    assert not decide(Wish("over", 0.0, 11, 0), Room(10, 0, 0), (), watermark=1.0).granted


def test_a_claim_that_is_given_up_holds_nobody_back() -> None:
    claims, room = (Claim(BIG, 9.0), Claim(SMALL, 4.0)), Room(10, 4, 0)
    assert not decide(SMALL, room, claims, watermark=1.0).granted
    assert without(claims, "big") == (Claim(SMALL, 4.0),)
    assert decide(SMALL, room, without(claims, "big"), watermark=1.0).granted


def test_claims_run_out() -> None:
    assert still_claimed((Claim(BIG, 9.0), Claim(SMALL, 4.0)), now=4.0) == (Claim(BIG, 9.0),)


@pytest.mark.parametrize(
    ("attempt", "key"), [("id", "id"), ("id~1", "id"), ("id~12", "id"), ("a~b", "a~b"), ("~1", "~1")]
)
def test_the_attempts_of_a_request_share_one_claim(attempt: str, key: str) -> None:
    assert claim_key(attempt) == key


@pytest.mark.parametrize(("context", "left", "blocks"), [(16, 0, 0), (16, 1, 1), (15, 1, 0), (16, 999, 4), (30, -3, 0)])
def test_growth_is_forecast_to_the_horizon_or_the_end(context: int, left: int, blocks: int) -> None:
    assert growth_blocks(context, left, horizon_tokens=64, block_size=16) == blocks


@pytest.mark.parametrize(
    ("prompt", "generated", "blocks"),
    [
        (32, (0, 0, 0), 3 * 4),
        (40, (0, 0, 0), 3 * 4 + 2),  # two copies of the block that holds the prompt's end
        (40, (1, 1, 1), 3 * 4 + 2),
        (40, (9, 9), 2 * 4),  # they have parted
        (40, (100, 0), 0 + 4),  # one is at its end
        (40, (), 0),
    ],
)
def test_several_sequences_each_grow_and_part_with_a_copy(prompt: int, generated: tuple[int, ...], blocks: int) -> None:
    assert growth_of_several(prompt, generated, 100, horizon_tokens=64, block_size=16) == blocks
