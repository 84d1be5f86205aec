"""What cannot be served is refused by the name of the field."""

from __future__ import annotations

import subprocess
import sys

import pytest
from fakes import make_request

from engine.errors import InvalidRequest
from engine.validate import validate

NAN, INF = float("nan"), float("inf")
NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


def check(prompt: tuple[int, ...] = (1, 2, 3), **fields) -> None:  # type: ignore[no-untyped-def]
    validate(make_request(prompt, **fields), vocab_size=100, max_model_len=50)


def refused_field(prompt: tuple[int, ...] = (1, 2, 3), **fields) -> str:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidRequest) as caught:
        check(prompt, **fields)
    assert str(caught.value).startswith(caught.value.field)
    return caught.value.field


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [NAN, INF, -INF, 1e9])
def test_numbers_without_sense_are_refused_by_name(name: str, value: float) -> None:
    assert refused_field(**{name: value}) == name


@pytest.mark.parametrize("token", [-1, 100, 200, 2**31, 2**63])
def test_token_ids_out_of_range_are_refused_wherever_they_stand(token: int) -> None:
    assert refused_field((1, token, 2)) == "token_ids"
    assert refused_field(stop_token_ids=(5, token)) == "stop_token_ids"
    assert refused_field(logit_bias=((token, 1.0),)) == "logit_bias"


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("temperature", {"temperature": -1.0}),
        ("top_p", {"top_p": 0.0}),
        ("top_k", {"top_k": -2}),
        ("repetition_penalty", {"repetition_penalty": 0.0}),
        ("max_tokens", {"max_tokens": 0}),
        ("min_tokens", {"min_tokens": 9, "max_tokens": 8}),
        ("min_tokens", {"min_tokens": -1}),
        ("logprobs", {"logprobs": -1}),
        ("logprobs", {"logprobs": 21}),
        ("prompt_logprobs", {"prompt_logprobs": 1000}),
        ("logit_bias", {"logit_bias": ((1, NAN),)}),
        ("logit_bias", {"logit_bias": ((1, 101.0),)}),
        ("stop", {"stop": ("a", "")}),
        ("itl_s", {"itl_s": 0.0}),
        ("ttft_s", {"ttft_s": NAN}),
        ("deadline_s", {"deadline_s": NAN}),
        ("max_tokens", {"max_tokens": 48}),
    ],
    ids=str,
)
def test_everything_else_is_refused_by_name(field: str, fields: dict[str, object]) -> None:
    assert refused_field(**fields) == field


def test_an_empty_prompt_and_one_that_fills_the_context_are_refused() -> None:
    assert refused_field(()) == "token_ids"
    assert refused_field((1,) * 50, max_tokens=1) == "token_ids"


def test_what_is_documented_is_allowed() -> None:
    check(max_tokens=47)
    check(temperature=1e-9, top_k=-1)
    check(top_k=10**7, top_p=1e-9, min_p=1.0, logprobs=20, prompt_logprobs=0)
    check(min_tokens=8, max_tokens=8, logit_bias=((99, -100.0),), stop_token_ids=(0, 99), seed=-(2**63))


def test_a_prefill_worker_needs_no_room_for_what_another_generates() -> None:
    request = make_request((1,) * 40, max_tokens=1000)
    validate(request, vocab_size=100, max_model_len=50, prompt_only=True)
    with pytest.raises(InvalidRequest, match="50 tokens"):
        validate(request, vocab_size=100, max_model_len=50)


def test_the_deciding_modules_need_no_torch() -> None:
    names = ("hashing", "blocks", "prefix_cache", "roster", "scheduler", "budget", "step_times", "validate", "info")
    script = f"import sys\nfor name in {names}: __import__('engine.' + name)\nassert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
