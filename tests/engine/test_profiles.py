"""Profiles are presets that give way, and a context far above the lengths seen is said to cost nothing."""

from __future__ import annotations

import logging

import pytest
from fakes import make_engine, make_request, prompt_of, run_all

from engine.errors import ConfigError
from engine.lengths import SAY_AFTER, LengthWatch
from engine.profiles import PROFILES, profile_settings, profiled


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_profile_is_a_config_and_what_is_given_beside_it_wins(name: str, role: str) -> None:
    config = profiled(name, role=role, model="m")
    for setting, value in profile_settings(name, role).items():
        assert getattr(config, setting) == value
    assert profiled(name, role=role, model="m", max_num_seqs=3).max_num_seqs == 3


def test_latency_and_throughput_pull_the_step_apart() -> None:
    sizes = [profiled(name, model="m").max_num_batched_tokens for name in ("low-latency", "balanced", "throughput")]
    assert sizes == sorted(set(sizes))
    prefill, decode = (profiled("disaggregated", role=role, model="m") for role in ("prefill", "decode"))
    assert prefill.max_num_batched_tokens > decode.max_num_batched_tokens
    assert prefill.max_num_seqs < decode.max_num_seqs


def test_unknown_profiles_and_missing_roles_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="low-latency, balanced"):
        profiled("fast", model="m")
    with pytest.raises(ConfigError, match="prefill, decode"):
        profiled("disaggregated", model="m")


def test_a_context_far_above_the_lengths_takes_no_blocks_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(8, max_model_len=1_000_000, prefix_caching=False)
    with caplog.at_level(logging.INFO, logger="engine.engine"):
        for i in range(SAY_AFTER + 20):
            run_all(engine, make_request(prompt_of(20, i), max_tokens=2))
    told = [record.getMessage() for record in caplog.records if "max_model_len" in record.getMessage()]
    assert len(told) == 1
    assert "1000000" in told[0]
    assert "22 tokens" in told[0]


def test_a_context_that_is_used_is_not_worth_a_word() -> None:
    watch = LengthWatch(100)
    assert [watch.ended(50, 1, 8) for _ in range(2 * SAY_AFTER)] == [None] * (2 * SAY_AFTER)
