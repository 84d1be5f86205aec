"""How many prompt tokens fit into a step without breaking a promise to those who decode in it. Pure."""

from __future__ import annotations

from math import sqrt

from engine.step_times import StepShape, predict_s
from engine.types import StepTimes

MARGIN = 0.9
"""Of the promised time between tokens, what a step may take at all; the rest is for sending."""
PATIENCE_S = 5.0
"""Prompt work without a TTFT promise may wait this long before its least share grows."""
MOST_AGED = 4


def step_limit_s(promise_s: float, times: StepTimes) -> float:
    """What a step may be predicted to take, so that it keeps the promise even when the prediction errs as usual."""
    return MARGIN * promise_s / (1 + min(times.prefill_error, 1.0))


def prompt_tokens_within(times: StepTimes, decodes: StepShape, start: int, limit_s: float) -> int:
    """The most prompt tokens, beginning at position `start`, whose step with `decodes` is predicted within `limit_s`.

    Solves c/2 n² + (b + c start) n + base = limit for n, where base is the step without them. 0 when there is none.
    """
    _, per_token, per_pair = times.prefill
    beside = StepShape(1, 0.0, decodes.decodes, decodes.decode_context)
    base = predict_s(times, beside) - per_token
    slack = limit_s - base
    if slack <= 0:
        return 0
    slope = per_token + per_pair * start
    # The root in the form that stays exact when the quadratic term is nothing.
    root = slope + sqrt(slope * slope + 2 * per_pair * slack)
    return int(min(2 * slack / root, 1 << 30)) if root else 1 << 30


def least_share(block_size: int, waited_s: float, ttft_s: float | None) -> int:
    """Prompt tokens that a step always has room for: one block, and one more each time the promise is outlasted."""
    return block_size * min(MOST_AGED, 1 + int(max(0.0, waited_s) / (ttft_s or PATIENCE_S)))
