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

import torch
from torch import Tensor

from engine.penalties import TokenCounts
from engine.sequence import GREEDY_BELOW
from engine.types import SamplingParams, Token

_MASK = (1 << 64) - 1
_NUCLEUS_GUESS = 256
"""Most nuclei are smaller; a larger one costs a sort of the whole row."""


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
    best, ids = logits.max(dim=-1)
    fine = torch.isfinite(best)
    if bool(fine.all()):
        found: list[int | None] = ids.tolist()
        return found
    return [token if ok else None for token, ok in zip(ids.tolist(), fine.tolist(), strict=True)]


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[Token | None]:
    """One token per row of float32 (rows, vocab), which is not changed; None for a row with NaN or infinite logits."""
    adjusted = _adjusted(logits, rows)
    ids = greedy(adjusted)
    drawn = [i for i, row in enumerate(rows) if row.sampling.temperature >= GREEDY_BELOW and ids[i] is not None]
    if drawn:
        for i, token in zip(drawn, _draw(adjusted[drawn], [rows[i] for i in drawn]), strict=True):
            ids[i] = token
    asked = [i for i, row in enumerate(rows) if row.sampling.logprobs is not None and ids[i] is not None]
    told = _told(logits, rows, asked, ids)
    return [None if token is None else told.get(i) or Token(token) for i, token in enumerate(ids)]


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


def _draw(logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """Steps 6 to 8 for rows with a temperature."""
    temperatures = torch.tensor([row.sampling.temperature for row in rows], device=logits.device)
    # Against the largest first: a tiny temperature must not overflow.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperatures[:, None]
    weights = torch.exp(scaled)
    for i, row in enumerate(rows):
        weights[i] = _truncated(weights[i], row.sampling)
    running = weights.double().cumsum(dim=-1)
    draws = [uniform(row.sampling.seed, row.sequence_index, row.position) for row in rows]
    total = running[:, -1:]
    targets = torch.tensor(draws, dtype=torch.float64, device=logits.device)[:, None] * total
    # Rounding may reach the total, beyond which there is no token.
    targets = torch.minimum(targets, torch.nextafter(total, torch.zeros_like(total)))
    ids = torch.searchsorted(running, targets, right=True).squeeze(-1)
    drawn: list[int] = ids.tolist()
    return drawn


def _truncated(weights: Tensor, sampling: SamplingParams) -> Tensor:
    """Step 7: unnormalised probabilities (vocab,), largest 1, with zeros where a token is out."""
    edge = 0.0
    if 0 < sampling.top_k < len(weights):
        edge = float(_best(weights, sampling.top_k)[-1])
    if sampling.top_p < 1.0:
        edge = max(edge, _nucleus_edge(torch.where(weights >= edge, weights, 0.0) if edge else weights, sampling.top_p))
    edge = max(edge, sampling.min_p)
    return torch.where(weights >= edge, weights, 0.0) if edge else weights


def _nucleus_edge(weights: Tensor, top_p: float) -> float:
    """The smallest weight in the smallest set that holds `top_p` of the mass."""
    wanted = top_p * float(weights.double().sum())
    for size in (min(_NUCLEUS_GUESS, len(weights)), len(weights)):
        best = _best(weights, size)
        before = best.double().cumsum(dim=-1) - best
        inside = int((before < wanted).sum())
        if inside < size:
            break
    return float(best[max(inside, 1) - 1])


def _best(weights: Tensor, size: int) -> Tensor:
    return torch.topk(weights, size, sorted=True).values


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
