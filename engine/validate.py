"""Refuses a request that cannot be served as it is written, naming the field. Needs no torch and no engine."""

from __future__ import annotations

from math import isfinite

from engine.errors import InvalidRequest
from engine.types import Branching, Request, SamplingParams

MOST_LOGPROBS = 20
MOST_SEQUENCES = 128
EARLY_STOPPING = ("yes", "no", "never")

RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
}
"""Inclusive, except that `top_p` 0 is refused (it would keep nothing)."""
BIAS_RANGE = (-100.0, 100.0)


def validate(request: Request, *, vocab_size: int, max_model_len: int, prompt_only: bool = False) -> None:
    """Raises InvalidRequest for the first thing wrong. `prompt_only`: another worker generates after the first token,
    so that `max_tokens` need not fit here."""
    prompt = len(request.token_ids)
    if not prompt:
        raise InvalidRequest("token_ids", "the prompt is empty")
    check_token_ids("token_ids", request.token_ids, vocab_size)
    validate_sampling(request.sampling, vocab_size=vocab_size)
    if request.branching is not None:
        validate_branching(request.branching, request.sampling)
    for name in ("ttft_s", "itl_s", "arrival_s", "deadline_s"):
        value = getattr(request, name)
        if value is not None and not isfinite(value):
            raise InvalidRequest(name, f"is {value}; it must be a finite number")
    for name in ("ttft_s", "itl_s"):
        value = getattr(request, name)
        if value is not None and value <= 0:
            raise InvalidRequest(name, f"is {value}; it must be positive")
    check_fits(request, max_model_len, "the model's context", prompt_only=prompt_only)


def check_fits(request: Request, capacity: int, what: str, *, prompt_only: bool = False) -> None:
    """The prompt and at least one token, and `max_tokens` unless `prompt_only`, must fit `capacity` tokens."""
    prompt, most = len(request.token_ids), request.sampling.max_tokens
    if prompt + 1 > capacity:
        raise InvalidRequest("token_ids", f"{prompt} prompt tokens and one more do not fit {what} of {capacity} tokens")
    if not prompt_only and prompt + most > capacity:
        message = f"{most} after {prompt} prompt tokens does not fit {what} of {capacity} tokens"
        raise InvalidRequest("max_tokens", message)


def validate_sampling(sampling: SamplingParams, *, vocab_size: int) -> None:
    """Raises InvalidRequest for the first sampling parameter out of its range."""
    for name, (low, high) in RANGES.items():
        check_range(name, getattr(sampling, name), low, high)
    if sampling.top_p <= 0:
        raise InvalidRequest("top_p", "is 0; it must be above 0 and at most 1")
    if sampling.top_k < -1:
        raise InvalidRequest("top_k", f"is {sampling.top_k}; it must be positive, or 0 or -1 for no limit")
    if sampling.max_tokens < 1:
        raise InvalidRequest("max_tokens", f"is {sampling.max_tokens}; it must be at least 1")
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        raise InvalidRequest(
            "min_tokens", f"is {sampling.min_tokens}; it must be from 0 to max_tokens, which is {sampling.max_tokens}"
        )
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(sampling, name)
        if value is not None:
            check_range(name, value, 0, MOST_LOGPROBS)
    check_token_ids("stop_token_ids", sampling.stop_token_ids, vocab_size)
    check_token_ids("logit_bias", tuple(token for token, _ in sampling.logit_bias), vocab_size)
    for _, bias in sampling.logit_bias:
        check_range("logit_bias", bias, *BIAS_RANGE)
    if any(not text for text in sampling.stop):
        raise InvalidRequest("stop", "holds an empty string, which would stop before the first token")


def validate_branching(branching: Branching, sampling: SamplingParams) -> None:
    """Raises InvalidRequest for several sequences, or beams, that make no sense together."""
    check_range("n", branching.n, 1, MOST_SEQUENCES)
    check_range("beam_width", branching.beam_width, 0, MOST_SEQUENCES)
    check_range("length_penalty", branching.length_penalty, -10.0, 10.0)
    if branching.early_stopping not in EARLY_STOPPING:
        raise InvalidRequest("early_stopping", f"is {branching.early_stopping!r}; it must be yes, no or never")
    if branching.best_of is not None:
        check_range("best_of", branching.best_of, branching.n, MOST_SEQUENCES)
    if branching.beam_width:
        _validate_beams(branching, sampling)


def _validate_beams(branching: Branching, sampling: SamplingParams) -> None:
    if branching.n > branching.beam_width:
        raise InvalidRequest("n", f"is {branching.n}; of {branching.beam_width} beams at most as many can be returned")
    if branching.best_of is not None:
        raise InvalidRequest("best_of", "has no meaning in beam search")
    plain = SamplingParams()
    for name in _NOT_WITH_BEAMS:
        if getattr(sampling, name) != getattr(plain, name):
            raise InvalidRequest(name, "has no meaning in beam search")


_NOT_WITH_BEAMS = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "logprobs",
    "prompt_logprobs",
)


def check_token_ids(field: str, token_ids: tuple[int, ...], vocab_size: int) -> None:
    # The two extremes first: one pass in C each, for prompts of many thousand tokens.
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        bad = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise InvalidRequest(field, f"holds token id {bad}; ids are from 0 to {vocab_size - 1}")


def check_range(field: str, value: float, low: float, high: float) -> None:
    if not isfinite(value) or not low <= value <= high:
        raise InvalidRequest(field, f"is {value}; it must be a number from {low:g} to {high:g}")
