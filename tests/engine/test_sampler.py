"""Sampling against a naive reading of its order of operations, row by row."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.penalties import TokenCounts
from engine.sampler import SampleRow, greedy, prompt_logprobs, sample, uniform
from engine.types import SamplingParams

VOCAB = 40


def logits_for(seed: int, rows: int = 1, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def row(position=0, *, counts=None, forbidden=(), **params) -> SampleRow:  # type: ignore[no-untyped-def]
    return SampleRow(SamplingParams(**params), 0, position, counts, forbidden)


def draws(logits: torch.Tensor, count: int, **params) -> list[int]:  # type: ignore[no-untyped-def]
    rows = [row(position, **params) for position in range(count)]
    tokens = sample(logits.expand(count, -1), rows)
    return [token.token_id for token in tokens if token is not None]


def naive_kept(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    weights = [math.exp((value - max(logits)) / temperature) for value in logits]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    if top_k > 0:
        order = order[:top_k]
    mass, nucleus = sum(weights[i] for i in order), []
    so_far = 0.0
    for i in order:
        if so_far >= top_p * mass:
            break
        nucleus.append(i)
        so_far += weights[i]
    return {i for i in nucleus if weights[i] >= min_p}


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    temperature=st.sampled_from([0.3, 0.8, 1.0, 3.0]),
    top_k=st.sampled_from([-1, 0, 1, 3, 10, VOCAB, 10**7]),
    top_p=st.sampled_from([1e-9, 0.3, 0.77, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.31, 1.0]),
)
def test_only_tokens_that_survive_truncation_are_drawn(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = logits_for(seed)
    kept = naive_kept(logits[0].double().tolist(), temperature, top_k, top_p, min_p)
    drawn = draws(logits, 60, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    assert set(drawn) <= kept
    if len(kept) == 1:
        assert set(drawn) == kept


@pytest.mark.parametrize(
    "params",
    [{}, {"top_k": 6}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 8, "top_p": 0.9, "min_p": 0.05}],
    ids=str,
)
def test_draws_follow_the_truncated_distribution(params: dict[str, float]) -> None:
    logits, count = logits_for(3, vocab=12), 6000
    full = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **params}
    kept = naive_kept(logits[0].double().tolist(), 1.3, **full)  # type: ignore[arg-type]
    weights = torch.exp(logits[0].double() / 1.3)
    wanted = {i: float(weights[i]) / sum(float(weights[j]) for j in kept) for i in kept}
    drawn = draws(logits, count, temperature=1.3, seed=11, **params)
    assert set(drawn) <= kept
    chi_square = sum((drawn.count(i) - count * p) ** 2 / (count * p) for i, p in wanted.items())
    assert chi_square < 2.5 * len(kept) + 15


def test_a_nucleus_larger_than_the_first_guess_is_found() -> None:
    logits = logits_for(5, vocab=3000) * 0.01
    drawn = draws(logits, 3000, temperature=1.0, top_p=0.5, seed=2)
    order = torch.argsort(logits[0], descending=True).tolist()
    ranks = [order.index(token) for token in set(drawn)]
    assert max(ranks) <= 1500
    assert max(ranks) > 1200


@pytest.mark.parametrize("neighbours", [0, 1, 7])
def test_a_row_draws_the_same_among_any_neighbours(neighbours: int) -> None:
    mine = logits_for(1)
    others = logits_for(2, max(neighbours, 1))[:neighbours]
    how = row(17, temperature=0.8, top_p=0.9, seed=42)
    alone = sample(mine, [how])[0]
    rows = [row(17, temperature=[0.0, 2.0][i % 2], seed=i, top_k=i, logprobs=i) for i in range(neighbours)]
    among = sample(torch.cat([others, mine]), [*rows, how])[-1]
    assert among == alone


def test_uniform_depends_on_seed_index_and_position_only_and_is_flat() -> None:
    assert uniform(1, 2, 3) == uniform(1, 2, 3)
    values = [uniform(seed, index, at) for seed in (-1, 0, 2**63, 2**64 - 2) for index in (0, 1) for at in range(500)]
    assert len(set(values)) == len(values)
    assert all(0 <= value < 1 for value in values)
    tenths = [sum(int(value * 10) == tenth for value in values) for tenth in range(10)]
    assert max(tenths) - min(tenths) < 120


def test_greedy_takes_the_lowest_id_of_equals_and_refuses_what_is_not_finite() -> None:
    logits = torch.zeros(4, 6)
    logits[1, 3] = torch.nan
    logits[2, 2] = torch.inf
    logits[3] = -torch.inf
    assert greedy(logits) == [0, None, None, None]
    assert greedy(logits[:1]) == [0]


def test_a_spoilt_row_harms_no_neighbour() -> None:
    logits = logits_for(1, 3)
    rows = [row(i, temperature=1.0, seed=5, logprobs=2) for i in range(3)]
    whole = sample(logits, rows)
    spoilt = logits.clone()
    spoilt[1, 7] = torch.nan
    assert sample(spoilt, rows) == [whole[0], None, whole[2]]


def test_a_temperature_near_zero_is_greedy_and_a_tiny_one_overflows_nothing() -> None:
    logits = logits_for(8) * 100
    best = int(logits.argmax())
    assert draws(logits, 5, temperature=1e-9) == [best] * 5
    assert draws(logits, 5, temperature=1e-4) == [best] * 5


def test_penalties_count_prompt_and_output_as_documented() -> None:
    logits = logits_for(4)
    counts = TokenCounts([1, 2, 2])
    for token in (2, 3, 3, 30):
        counts.add(token)
    params = SamplingParams(
        temperature=0.0, repetition_penalty=1.5, presence_penalty=0.4, frequency_penalty=0.3, logit_bias=((5, 4.0),)
    )
    wanted = logits[0].tolist()
    for token in (1, 2, 3, 30):
        wanted[token] = wanted[token] / 1.5 if wanted[token] > 0 else wanted[token] * 1.5
    for token, times in ((2, 1), (3, 2), (30, 1)):
        wanted[token] -= 0.3 * times + 0.4
    wanted[5] += 4.0
    order = sorted(range(VOCAB), key=lambda i: -wanted[i])
    for i in range(3):
        token = sample(logits, [SampleRow(params, 0, 9, counts, tuple(order[:i]))])[0]
        assert token is not None
        assert token.token_id == order[i]


def test_counts_grow_past_their_first_room() -> None:
    counts = TokenCounts([7, 7, 8])
    for token in range(100):
        counts.add(token)
        counts.add(token)
    assert dict(zip(counts.ids.tolist(), counts.generated.tolist(), strict=True)) == dict.fromkeys(range(100), 2.0)


def test_logprobs_come_from_the_raw_distribution() -> None:
    logits = logits_for(6)
    raw = torch.log_softmax(logits[0], -1)
    how = row(temperature=0.0, logit_bias=((9, 100.0),), logprobs=3)
    token = sample(logits, [how])[0]
    assert token is not None
    assert token.token_id == 9
    assert token.logprob == pytest.approx(float(raw[9]), abs=1e-6)
    best = torch.topk(raw, 3)
    assert [i for i, _ in token.top] == best.indices.tolist()
    assert [p for _, p in token.top] == pytest.approx(best.values.tolist(), abs=1e-6)
    bare = sample(logits, [row(temperature=0.0, logprobs=0)])[0]
    assert bare is not None
    assert bare.top == ()
    assert bare.logprob is not None


def test_prompt_logprobs_tell_each_follower() -> None:
    logits = logits_for(2, 3)
    told = prompt_logprobs(logits, [4, 5, 6], 2)
    raw = torch.log_softmax(logits, -1)
    assert [token.token_id for token in told] == [4, 5, 6]
    assert [token.logprob for token in told] == pytest.approx([float(raw[i, 4 + i]) for i in range(3)], abs=1e-6)
    assert all(len(token.top) == 2 for token in told)
    assert prompt_logprobs(logits[:0], [], 2) == ()


def test_the_logits_are_not_changed() -> None:
    logits = logits_for(2, 2)
    before = logits.clone()
    sample(logits, [row(temperature=0.7, logit_bias=((1, 5.0),), top_k=3), row(forbidden=(1, 2))])
    assert torch.equal(logits, before)
