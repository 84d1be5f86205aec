"""From logits to tokens.

For each row, in this order:

1. `logprobs` are read from the raw distribution, before anything below.
2. Repetition penalty: logits of tokens seen in prompt or output are divided by it when positive, multiplied otherwise
   (CTRL, Keskar et al. 2019).
3. Frequency and presence penalty: minus `frequency * count`, minus `presence` once, for generated tokens.
4. `logit_bias` is added.
5. Before `min_tokens`, EOS and the stop ids are out of the question.
6. Greedy: the largest logit, the lowest id among equals. Otherwise divide by the temperature, then
7. keep the `top_k` most probable tokens, of those the smallest set that holds `top_p` of their mass (nucleus sampling,
   Holtzman et al. 2019), of those the ones at least `min_p` times as probable as the most probable one. Tokens as
   probable as the last one kept are kept too.
8. Draw: one uniform number from (seed, sequence index, position) picks from the cumulative distribution in id order.

The number in 8 is a hash, not a generator's state: a request draws the same tokens on any worker, in any batch and
after any preemption. Each row is computed from its own logits and parameters alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, nextafter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.penalties import TokenCounts
from engine.sequence import GREEDY_BELOW
from engine.types import SamplingParams, Token

_MASK = (1 << 64) - 1
_STRIPE = 256
"""Rows are searched in stripes of (a divisor of) this width."""
_SORT_BELOW = 256
_MOST_SPLITS = 40


@dataclass(frozen=True, slots=True)
class SampleRow:
    """How one row of logits becomes a token. `position` is where the token will stand in its sequence."""

    sampling: SamplingParams
    sequence_index: int
    position: int
    counts: TokenCounts | None = None
    forbidden: tuple[int, ...] = ()


def greedy(logits: Tensor) -> list[int | None]:
    """The largest logit of each row of float32 (rows, vocab); None for a row that has no finite largest one."""
    if logits.device.type == "cpu":
        return _greedy_on_cpu(logits.numpy())
    best, ids = _largest(logits)
    fine = torch.isfinite(best)
    return [token if ok else None for token, ok in zip(ids.tolist(), fine.tolist(), strict=True)]


def _greedy_on_cpu(logits: NDArray[np.float32]) -> list[int | None]:
    """One pass over the logits; torch searches an index ten times slower than numpy."""
    ids = logits.argmax(axis=-1)
    fine = np.isfinite(logits[np.arange(len(ids)), ids])
    return [token if ok else None for token, ok in zip(ids.tolist(), fine.tolist(), strict=True)]


def _largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Largest value and its first index per row. In two stages: searching an index costs ten times a mere maximum."""
    width = gcd(logits.shape[-1], _STRIPE)
    stripes = logits.reshape(len(logits), -1, width)
    stripe = stripes.amax(dim=-1).argmax(dim=-1)
    inside = stripes[torch.arange(len(logits), device=logits.device), stripe]
    best, offset = inside.max(dim=-1)
    return best, stripe * width + offset


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[Token | None]:
    """One token per row of float32 (rows, vocab), which is not changed; None for a row with NaN or infinite logits."""
    adjusted = _adjusted(logits, rows)
    ids = greedy(adjusted)
    for i, row in enumerate(rows):
        if row.sampling.temperature >= GREEDY_BELOW and ids[i] is not None:
            ids[i] = _draw(adjusted[i], row)
    asked = [i for i, row in enumerate(rows) if row.sampling.logprobs is not None and ids[i] is not None]
    told = _told(logits, rows, asked, ids)
    return [None if token is None else told.get(i) or Token(token) for i, token in enumerate(ids)]


def likeliest(row: Tensor, count: int, forbidden: Sequence[int] = ()) -> tuple[Token, ...] | None:
    """The `count` most probable tokens of float32 (vocab,) without the forbidden ones, best first, with their
    log-probabilities; None when the logits are not finite."""
    logprobs = torch.log_softmax(row, dim=-1)
    if not bool(torch.isfinite(logprobs).all()):
        return None
    if forbidden:
        logprobs[torch.tensor(forbidden, device=row.device)] = -torch.inf
    values, ids = torch.topk(logprobs, min(count, len(row) - len(forbidden)))
    return tuple(Token(token, value) for token, value in zip(ids.tolist(), values.tolist(), strict=True))


def prompt_logprobs(logits: Tensor, followers: Sequence[int], top: int) -> tuple[Token, ...]:
    """Log-probabilities of the token that followed each row of float32 (len(followers), vocab), with the `top` best."""
    return tuple(_tokens(torch.log_softmax(logits, dim=-1), list(followers), [top] * len(followers)))


def uniform(seed: int, sequence_index: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but the three integers (the SplitMix64 mixer, Steele et al. 2014)."""
    state = _mix(seed & _MASK)
    state = _mix(state ^ _mix((sequence_index + 0x632BE59BD9B4E019) & _MASK))
    state = _mix(state ^ _mix((position + 0x9E3779B97F4A7C15) & _MASK))
    return (state >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _adjusted(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Steps 2 to 5, on a copy when any row needs them."""
    touched = [i for i, row in enumerate(rows) if row.counts is not None or row.sampling.logit_bias or row.forbidden]
    if not touched:
        return logits
    logits = logits.clone()
    for i in touched:
        _adjust(logits[i], rows[i])
    return logits


def _adjust(row: Tensor, how: SampleRow) -> None:
    sampling = how.sampling
    if how.counts is not None:
        ids = torch.from_numpy(how.counts.ids).to(row.device)
        times = torch.from_numpy(how.counts.generated).to(row.device)
        seen = row[ids]
        repeated = torch.where(seen > 0, seen / sampling.repetition_penalty, seen * sampling.repetition_penalty)
        row[ids] = repeated - sampling.frequency_penalty * times - sampling.presence_penalty * (times > 0)
    if sampling.logit_bias:
        biased, amounts = zip(*sampling.logit_bias, strict=True)
        row.index_add_(0, torch.tensor(biased, device=row.device), torch.tensor(amounts, device=row.device))
    if how.forbidden:
        row[torch.tensor(how.forbidden, device=row.device)] = -torch.inf


def _draw(row: Tensor, how: SampleRow) -> int:
    """Steps 6 to 8 for one row with a temperature. By itself, so that its working set stays in the cache."""
    sampling = how.sampling
    # Against the largest first: a tiny temperature must not overflow.
    weights = _truncated(torch.exp((row - row.amax()) / sampling.temperature), sampling)
    stripes = weights.reshape(-1, gcd(len(weights), _STRIPE))
    sums = stripes.sum(dim=-1, dtype=torch.float64)
    stripe, rest = _pick(sums, uniform(sampling.seed, how.sequence_index, how.position) * float(sums.sum()))
    inside, _ = _pick(stripes[stripe].double(), rest)
    return stripe * int(stripes.shape[-1]) + inside


def _pick(weights: Tensor, target: float) -> tuple[int, float]:
    """The first index whose cumulative weight exceeds `target`, and how far `target` reaches into it."""
    running = weights.cumsum(dim=-1)
    # Rounding may put the target at the total, beyond which there is no token.
    target = min(target, nextafter(float(running[-1]), 0.0))
    index = int(torch.searchsorted(running, target, right=True))
    return index, target - (float(running[index - 1]) if index else 0.0)


def _truncated(weights: Tensor, sampling: SamplingParams) -> Tensor:
    """Step 7: unnormalised probabilities (vocab,), largest 1, with zeros where a token is out."""
    edge = 0.0
    if 0 < sampling.top_k < len(weights):
        edge = float(torch.topk(weights, sampling.top_k).values[-1])
    if sampling.top_p < 1.0:
        edge = _nucleus_edge(weights[weights >= edge] if edge else weights, sampling.top_p)
    edge = max(edge, sampling.min_p)
    return torch.where(weights >= edge, weights, 0.0) if edge else weights


def _nucleus_edge(weights: Tensor, top_p: float) -> float:
    """The smallest weight in the smallest set that holds `top_p` of the mass.

    Quickselect by mass: sorting a whole vocabulary costs ten times as much.
    """
    missing = top_p * float(weights.sum(dtype=torch.float64))
    for _ in range(_MOST_SPLITS):
        if len(weights) <= _SORT_BELOW:
            break
        above = weights > weights.mean()
        upper = weights[above]
        mass = float(upper.sum(dtype=torch.float64))
        if mass < missing:
            missing -= mass
            weights = weights[~above]
        else:
            weights = upper
    ordered = weights.sort(descending=True).values.double()
    inside = int((ordered.cumsum(dim=-1) - ordered < missing).sum())
    return float(ordered[max(inside, 1) - 1])


def _told(logits: Tensor, rows: Sequence[SampleRow], asked: list[int], ids: list[int | None]) -> dict[int, Token]:
    if not asked:
        return {}
    raw = torch.log_softmax(logits[asked] if len(asked) < len(rows) else logits, dim=-1)
    chosen = [ids[i] or 0 for i in asked]
    tops = [rows[i].sampling.logprobs or 0 for i in asked]
    return dict(zip(asked, _tokens(raw, chosen, tops), strict=True))


def _tokens(logprobs: Tensor, chosen: list[int], tops: list[int]) -> list[Token]:
    """Tokens with their log-probabilities and the best of each row; `logprobs` is (len(chosen), vocab)."""
    index = torch.tensor(chosen, dtype=torch.int64, device=logprobs.device)
    own = logprobs.gather(-1, index[:, None]).squeeze(-1).tolist()
    values, ids = torch.topk(logprobs, min(max(tops, default=0), logprobs.shape[-1]), dim=-1)
    best = [tuple(zip(*pair, strict=True)) for pair in zip(ids.tolist(), values.tolist(), strict=True)]
    return [Token(t, p, row[:top]) for t, p, row, top in zip(chosen, own, best, tops, strict=True)]
