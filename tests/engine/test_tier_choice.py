"""Load or compute: the cheaper way, by measured terms, printable."""

from __future__ import annotations

from engine.swap import CopyRate
from engine.tier_choice import Prompt, TierSpeed, choose
from engine.types import StepTimes

TIMES = StepTimes(prefill=(0.01, 0.001, 1e-7))
PROMPT = Prompt(tokens=321, held=0, block_size=16, block_bytes=1 << 20, step_tokens=128)
SPEEDS = {"host": TierSpeed(0.001, 1 << 30), "disk": TierSpeed(0.01, 1 << 24)}


def test_a_fast_tier_is_loaded_from_a_slow_one_is_not_and_both_costs_are_told() -> None:
    quick = choose(PROMPT, ("host",) * 20, SPEEDS, TIMES)
    assert quick.blocks == 20
    assert quick.load_s == 0.001 + 20 / 1024
    assert abs(quick.compute_s - (2 * 0.01 + 320 * 0.001 + 1e-7 * (321 * 160.5 - 320.5))) < 1e-9
    slow = choose(PROMPT, ("disk",) * 20, SPEEDS, TIMES)
    assert slow.blocks == 0
    assert slow.load_s == 0.01 + 20 / 16
    assert slow.told("r", ("disk",) * 20) == (
        "r computes of the next 20 blocks (20 in disk): load 1260.0 ms, compute 345.1 ms"
    )
    assert "loads 20 of the next 20 blocks (20 in host)" in quick.told("r", ("host",) * 20)


def test_of_a_prefix_in_both_tiers_only_the_part_that_pays_is_loaded() -> None:
    assert choose(PROMPT, ("host",) * 8 + ("disk",) * 12, SPEEDS, TIMES).blocks == 8
    assert choose(PROMPT, ("disk",) * 1 + ("host",) * 19, SPEEDS, TIMES).blocks == 20
    assert choose(PROMPT, ("disk",) * 19 + ("host",) * 1, SPEEDS, TIMES).blocks == 0


def test_what_is_held_already_is_not_counted_and_an_estimate_must_win_by_a_margin() -> None:
    held = Prompt(tokens=321, held=304, block_size=16, block_bytes=1 << 20, step_tokens=128)
    tie = TierSpeed(0.0, (1 << 20) / 0.0155)
    assert choose(held, ("x",), {"x": tie}, StepTimes(prefill=(0.0, 0.001, 0.0))).blocks == 0
    assert choose(held, ("x",), {"x": TierSpeed(0.0, 2 * tie.bytes_per_s)}, TIMES).blocks == 1


def test_modes_overrule_the_estimate() -> None:
    assert choose(PROMPT, ("disk",) * 20, SPEEDS, TIMES, "always").blocks == 20
    assert choose(PROMPT, ("host",) * 20, SPEEDS, TIMES, "never").blocks == 0


def test_a_tier_that_was_slow_once_is_tried_again_after_a_while() -> None:
    rate = CopyRate(1e9)
    rate.observe(1 << 20, 10.0)
    slow = rate.bytes_per_s
    for _ in range(200):
        rate.relax(0.02)
    assert slow < 1e6
    assert 0.9e9 < rate.bytes_per_s <= 1e9
