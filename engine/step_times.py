"""How long a step takes, learnt from the steps themselves.

    a step with prompt work:     a + b * tokens + c * tokens * context      plus, for decodes beside it, b' and c'
    a step of decodes alone:     a' + b' * batch + c' * context

`context` of prompt work is the mean number of positions its tokens look back at (`start + tokens / 2`), of decodes the
sum over the batch. The six numbers are one weighted least-squares problem: errors count relative to the measured time,
old samples fade as new ones of their kind come (so a thousand steps of decodes do not make prompts forgotten), a weak
ridge pulls towards the priors what was never seen apart, and none may be negative (a shape taken from DistServe's and
Mooncake's cost models). Each error told is of a prediction made before its step. Pure arithmetic; times are handed in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from engine.types import Chunk, StepTimes

_FADE = 0.98
"""What a sample still counts after the next one of its kind: a memory of about fifty."""
_FADE_WHEN_WRONG, _WRONG = 0.9, 0.25
"""The same while recent predictions err by more than this: the machine has changed, and a slow step weighs little."""
_RIDGE = 0.01
"""Weight of the priors, in samples."""
_ERROR_STEP = 0.1
_OUTLIER = 4.0
"""A step this many times slower than predicted was disturbed from outside; it counts as this many times. What was
predicted for a shape unlike those seen may be next to nothing: at least the quickest step of its kind is expected."""
_TRUST_AFTER = 20
_SMALL = (1e-2, 1e-3, 1e-6, 1e-2, 1e-3, 1e-5)
"""The scale of a coefficient whose prior is nothing."""

Vector = tuple[float, float, float, float, float, float]


@dataclass(frozen=True, slots=True)
class StepShape:
    """A step in numbers. `prefill_work` is the sum of tokens * context over its prompt chunks."""

    prefill_tokens: int = 0
    prefill_work: float = 0.0
    decodes: int = 0
    decode_context: int = 0

    def features(self) -> Vector:
        if self.prefill_tokens:
            return (1.0, self.prefill_tokens, self.prefill_work, 0.0, self.decodes, self.decode_context)
        return (0.0, 0.0, 0.0, 1.0, self.decodes, self.decode_context)


def shape_of(chunks: Iterable[Chunk]) -> StepShape:
    """A chunk of one token costs what a decode costs, whatever it is called."""
    tokens = decodes = context = 0
    work = 0.0
    for chunk in chunks:
        size = len(chunk.token_ids)
        if size == 1:
            decodes += 1
            context += chunk.start
        else:
            tokens += size
            work += size * (chunk.start + size / 2)
    return StepShape(tokens, work, decodes, context)


def predict_s(times: StepTimes, shape: StepShape) -> float:
    """Seconds that a step of this shape takes."""
    return _dot((*times.prefill, *times.decode), shape.features())


class StepTimeModel:
    """Fits `StepTimes` online: `observe` after each step, `times` for the current numbers."""

    def __init__(self, priors: StepTimes | None = None) -> None:
        self._times = priors or StepTimes()
        self._priors: Vector = (*self._times.prefill, *self._times.decode)
        self._scales = tuple(prior or small for prior, small in zip(self._priors, _SMALL, strict=True))
        self._evidence = (_Evidence(), _Evidence())
        self._errors = [self._times.prefill_error, self._times.decode_error]
        self._quickest_s = [math.inf, math.inf]
        self._samples = 0
        self._stale = False

    @property
    def times(self) -> StepTimes:
        if self._stale:
            self._times = self._fit()
            self._stale = False
        return self._times

    def predict_s(self, shape: StepShape) -> float:
        return predict_s(self.times, shape)

    def observe(self, shape: StepShape, duration_s: float) -> None:
        """A step of `shape` took `duration_s`. Empty steps and times that are not positive are ignored."""
        if duration_s <= 0 or not (shape.prefill_tokens or shape.decodes):
            return
        expected = self.predict_s(shape)
        self._note_error(shape, expected, duration_s)
        kind = 0 if shape.prefill_tokens else 1
        self._quickest_s[kind] = min(self._quickest_s[kind], duration_s)
        if self._samples >= _TRUST_AFTER:
            duration_s = min(duration_s, _OUTLIER * max(expected, self._quickest_s[kind]))
        scaled = (value * scale / duration_s for value, scale in zip(shape.features(), self._scales, strict=True))
        self._evidence[kind].add(tuple(scaled), _FADE if self._errors[kind] < _WRONG else _FADE_WHEN_WRONG)
        self._samples += 1
        # A fit costs about 100 microseconds: often while little is known, then every few steps.
        self._stale = self._stale or self._samples <= _TRUST_AFTER or self._samples % 8 == 0

    def _note_error(self, shape: StepShape, expected: float, actual: float) -> None:
        error = abs(expected - actual) / actual
        for kind, concerned in enumerate((shape.prefill_tokens, shape.decodes)):
            if concerned:
                self._errors[kind] += _ERROR_STEP * (min(error, 1.0) - self._errors[kind])

    def _fit(self) -> StepTimes:
        """The ridged normal equations of both kinds together, solved without negative numbers."""
        prompts, decodes = self._evidence
        gram = [[x + y for x, y in zip(*rows, strict=True)] for rows in zip(prompts.gram, decodes.gram, strict=True)]
        moment = [x + y for x, y in zip(prompts.moment, decodes.moment, strict=True)]
        for i, (prior, scale) in enumerate(zip(self._priors, self._scales, strict=True)):
            gram[i][i] += _RIDGE
            moment[i] += _RIDGE * prior / scale
        solution = _solved_above_zero(gram, moment)
        a, b, c, d, e, f = (value * scale for value, scale in zip(solution, self._scales, strict=True))
        return StepTimes((a, b, c), (d, e, f), self._errors[0], self._errors[1], self._samples)


class _Evidence:
    """What the steps of one kind have taught: normal equations whose target is always 1, since errors are relative."""

    def __init__(self) -> None:
        self.gram = [[0.0] * len(_SMALL) for _ in _SMALL]
        self.moment = [0.0] * len(_SMALL)

    def add(self, row: tuple[float, ...], fade: float) -> None:
        for i, left in enumerate(row):
            self.moment[i] = fade * self.moment[i] + left
            line = self.gram[i]
            for j, right in enumerate(row):
                line[j] = fade * line[j] + left * right


def _solved_above_zero(gram: list[list[float]], moment: list[float]) -> list[float]:
    """Solves gram · x = moment; what comes out negative, the most negative first, is set to nothing and left out."""
    free = list(range(len(moment)))
    while free:
        solution = _solved([[gram[i][j] for j in free] for i in free], [moment[i] for i in free])
        least = min(solution)
        if least >= 0:
            by_index = dict(zip(free, solution, strict=True))
            return [by_index.get(i, 0.0) for i in range(len(moment))]
        del free[solution.index(least)]
    return [0.0] * len(moment)


def _solved(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gaussian elimination of a positive definite system, which needs no pivots; both arguments are used up."""
    size = len(right)
    for i, line in enumerate(matrix):
        for j in range(i + 1, size):
            share = matrix[j][i] / line[i]
            if share:
                matrix[j] = [x - share * y for x, y in zip(matrix[j], line, strict=True)]
                right[j] -= share * right[i]
    for i in reversed(range(size)):
        right[i] = (right[i] - sum(matrix[i][j] * right[j] for j in range(i + 1, size))) / matrix[i][i]
    return right


def _dot(left: Vector, right: Vector) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))
