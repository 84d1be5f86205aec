"""Step times are learnt from steps, and budgets solved from them."""

from __future__ import annotations

import random

import pytest

from engine.budget import MOST_AGED, least_share, prompt_tokens_within, step_limit_s
from engine.step_times import StepShape, StepTimeModel, predict_s, shape_of
from engine.types import Chunk, StepTimes

TRUE = StepTimes(prefill=(0.004, 0.0006, 2e-7), decode=(0.012, 0.0011, 3e-6))


def shapes(count: int, seed: int = 0) -> list[StepShape]:
    chance = random.Random(seed)
    made = []
    for _ in range(count):
        tokens = chance.choice([0, 0, 16, 64, 200, 512])
        decodes = chance.randint(0 if tokens else 1, 32)
        work = tokens * chance.uniform(tokens / 2, 2000)
        made.append(StepShape(tokens, work, decodes, decodes * chance.randint(10, 1500)))
    return made


def learnt(truth: StepTimes, count: int, noise: float = 0.05, model: StepTimeModel | None = None) -> StepTimeModel:
    chance = random.Random(1)
    model = model or StepTimeModel()
    for shape in shapes(count):
        model.observe(shape, predict_s(truth, shape) * chance.uniform(1 - noise, 1 + noise))
    return model


def test_predictions_come_near_the_truth_from_far_priors() -> None:
    model = learnt(TRUE, 300)
    errors = [abs(model.predict_s(shape) / predict_s(TRUE, shape) - 1) for shape in shapes(100, seed=9)]
    assert sum(errors) / len(errors) < 0.05
    assert max(errors) < 0.3
    assert model.times.prefill_error < 0.1
    assert model.times.decode_error < 0.1
    assert model.times.samples > 290


def test_a_machine_that_got_slower_is_learnt_anew() -> None:
    model = learnt(TRUE, 200)
    slower = StepTimes(tuple(3 * x for x in TRUE.prefill), tuple(3 * x for x in TRUE.decode))  # type: ignore[arg-type]
    learnt(slower, 400, model=model)
    shape = StepShape(decodes=8, decode_context=4000)
    assert model.predict_s(shape) == pytest.approx(predict_s(slower, shape), rel=0.15)


def test_one_disturbed_step_hardly_matters() -> None:
    model = learnt(TRUE, 200)
    shape = StepShape(decodes=8, decode_context=4000)
    before = model.predict_s(shape)
    model.observe(shape, 60.0)
    for _ in range(8):
        model.observe(shape, predict_s(TRUE, shape))
    assert model.predict_s(shape) == pytest.approx(before, rel=0.25)


@pytest.mark.parametrize("kind", ["prompts", "decodes"])
def test_what_is_rare_is_not_forgotten_among_a_thousand_steps_of_the_other_kind(kind: str) -> None:
    model = learnt(TRUE, 200)
    rare, often = StepShape(512, 512 * 256.0), StepShape(decodes=8, decode_context=4000)
    rare, often = (rare, often) if kind == "prompts" else (often, rare)
    for _ in range(1500):
        model.observe(often, predict_s(TRUE, often))
    assert model.predict_s(rare) == pytest.approx(predict_s(TRUE, rare), rel=0.05)


def test_noise_and_disturbed_steps_leave_the_error_told_near_the_error_made() -> None:
    """Times vary by 10 %; a step in twenty is disturbed and takes up to eight times as long."""
    chance, model = random.Random(4), StepTimeModel()
    made: dict[bool, list[float]] = {True: [], False: []}
    for i, shape in enumerate(shapes(600, seed=2)):
        truth_s = predict_s(TRUE, shape)
        if i >= 100:
            made[shape.prefill_tokens > 0].append(abs(model.predict_s(shape) / truth_s - 1))
        disturbance = chance.uniform(2, 8) if chance.random() < 0.05 else 1.0
        model.observe(shape, truth_s * chance.uniform(0.9, 1.1) * disturbance)
    for errors in made.values():
        assert sum(errors) / len(errors) < 0.08
        assert max(errors) < 0.25
    told = (model.times.prefill_error, model.times.decode_error)
    assert all(0.01 < error < 0.25 for error in told), told
    assert min(*model.times.prefill, *model.times.decode) >= 0


def test_no_coefficient_is_ever_negative_and_unseen_shapes_keep_their_priors() -> None:
    model = StepTimeModel()
    chance = random.Random(3)
    for _ in range(200):
        model.observe(StepShape(decodes=4, decode_context=chance.randint(0, 9000)), chance.uniform(0.001, 0.01))
    assert min(*model.times.prefill, *model.times.decode) >= 0
    assert model.times.prefill == pytest.approx(StepTimes().prefill)


def test_empty_steps_and_broken_clocks_teach_nothing() -> None:
    model = StepTimeModel()
    model.observe(StepShape(), 1.0)
    model.observe(StepShape(decodes=1), 0.0)
    model.observe(StepShape(decodes=1), -1.0)
    assert model.times == StepTimes()


def test_a_plan_in_numbers() -> None:
    chunks = (
        Chunk("decode", (1,), 40, (0, 1, 2)),
        Chunk("prompt", tuple(range(20)), 10, (3, 4)),
        Chunk("other", (1,), 5, (5,)),
    )
    assert shape_of(chunks) == StepShape(20, 20 * 20.0, 2, 45)


@pytest.mark.parametrize("start", [0, 100, 4000])
@pytest.mark.parametrize("limit_s", [0.02, 0.05, 0.2])
def test_the_budget_is_the_largest_whose_predicted_time_keeps_the_limit(start: int, limit_s: float) -> None:
    decodes = StepShape(decodes=3, decode_context=900)

    def step_s(tokens: int) -> float:
        return predict_s(TRUE, StepShape(tokens, tokens * (start + tokens / 2), 3, 900))

    tokens = prompt_tokens_within(TRUE, decodes, start, limit_s)
    assert tokens == 0 or step_s(tokens) <= limit_s * (1 + 1e-9)
    assert step_s(tokens + 1) > limit_s * (1 - 1e-9)


def test_the_least_share_is_a_block_and_grows_with_the_wait_up_to_a_bound() -> None:
    assert least_share(16, 0.0, 1.0) == 16
    assert least_share(16, 1.5, 1.0) == 32
    assert least_share(16, 4.0, None) == 16
    assert least_share(16, 1e9, 1.0) == 16 * MOST_AGED
    assert least_share(16, -5.0, 1.0) == 16


def test_a_model_that_errs_gets_less_of_the_promise() -> None:
    sure, unsure = StepTimes(prefill_error=0.0), StepTimes(prefill_error=0.5)
    assert step_limit_s(0.1, sure) < 0.1
    assert step_limit_s(0.1, unsure) * 1.5 == pytest.approx(step_limit_s(0.1, sure))


def test_a_shape_for_which_nothing_was_predicted_is_learnt_from_its_first_steps() -> None:
    """Contexts that grow with the noise leave a fit by context alone, so that a prompt of one token costs nothing."""
    model = StepTimeModel()
    for step in range(40):
        model.observe(StepShape(decodes=1, decode_context=600 + 10 * step), 0.001 * (1 + step / 30))
    assert model.predict_s(StepShape(decodes=1)) == 0.0
    for context in range(8):
        model.observe(StepShape(decodes=1, decode_context=context), 0.001)
    assert model.predict_s(StepShape(decodes=1)) == pytest.approx(0.001, rel=0.1)
