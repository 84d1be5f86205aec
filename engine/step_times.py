"""How long a step takes, learnt from the steps themselves.

    a step with prompt work:     a + b * tokens + c * tokens * context      plus, for decodes beside it, b' and c'
    a step of decodes alone:     a' + b' * batch + c' * context

`context` of prompt work is the mean number of positions its tokens look back at (`start + tokens / 2`), of decodes the
sum over the batch. The six numbers are one weighted least-squares problem: errors count relative to the measured time,
old samples fade, a weak ridge pulls towards the priors what was never seen apart, and none may be negative (a shape
taken from DistServe's and Mooncake's cost models). Pure arithmetic; times are handed in.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.types import Chunk, StepTimes

_FADE = 0.99
"""What a sample still counts after the next one: a memory of about a hundred steps."""
_RIDGE = 0.01
"""Weight of the priors, in samples."""
_ERROR_STEP = 0.2
_OUTLIER = 4.0
"""A step this many times slower than predicted was disturbed from outside; it counts as this many times."""
_TRUST_AFTER = 20
_SMALL = (1e-2, 1e-3, 1e-6, 1e-2, 1e-3, 1e-5)
"""The scale of a coefficient whose prior is nothing."""
_SWEEPS = 25

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
        size = len(self._priors)
        self._gram = [[0.0] * size for _ in range(size)]
        self._moment = [0.0] * size
        self._errors = [self._times.prefill_error, self._times.decode_error]
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
        if self._samples >= _TRUST_AFTER:
            duration_s = min(duration_s, _OUTLIER * expected)
        self._accumulate(shape.features(), duration_s)
        self._samples += 1
        # A fit costs about 100 microseconds: often while little is known, then every few steps.
        self._stale = self._stale or self._samples <= _TRUST_AFTER or self._samples % 8 == 0

    def _note_error(self, shape: StepShape, expected: float, actual: float) -> None:
        error = abs(expected - actual) / actual
        for kind, concerned in enumerate((shape.prefill_tokens, shape.decodes)):
            if concerned:
                self._errors[kind] += _ERROR_STEP * (min(error, 1.0) - self._errors[kind])

    def _accumulate(self, features: Vector, duration_s: float) -> None:
        scaled = [value * scale / duration_s for value, scale in zip(features, self._scales, strict=True)]
        for row, left in enumerate(scaled):
            self._moment[row] = _FADE * self._moment[row] + left
            line = self._gram[row]
            for column, right in enumerate(scaled):
                line[column] = _FADE * line[column] + left * right

    def _fit(self) -> StepTimes:
        """Coordinate descent on the non-negative, ridged normal equations, from the last solution."""
        scales, gram, moment = self._scales, self._gram, self._moment
        pulls = [prior / scale for prior, scale in zip(self._priors, scales, strict=True)]
        last = (*self._times.prefill, *self._times.decode)
        solution = [value / scale for value, scale in zip(last, scales, strict=True)]
        for _ in range(_SWEEPS):
            for i, line in enumerate(gram):
                rest = sum(line[j] * value for j, value in enumerate(solution) if j != i)
                solution[i] = max(0.0, (moment[i] - rest + _RIDGE * pulls[i]) / (line[i] + _RIDGE))
        a, b, c, d, e, f = (value * scale for value, scale in zip(solution, scales, strict=True))
        return StepTimes((a, b, c), (d, e, f), self._errors[0], self._errors[1], self._samples)


def _dot(left: Vector, right: Vector) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))
