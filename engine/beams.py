"""Beam search, the bookkeeping: which continuations live, which have ended, and when it is over. Pure arithmetic.

Each step takes the best continuations of all running beams together, `candidates_kept` of them, so that `width` live on
even if every stop id ends one. Those among the first `width` that end compete with the finished ones; the best `width`
that do not end go on. Scores are sums of log-probabilities; a finished one's is divided by length ** length_penalty.
(Graves 2012 with the stopping rules of Hugging Face `transformers`, whose results it reproduces.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.types import Branching, FinishReason, Token


@dataclass(frozen=True, slots=True)
class Beam:
    """A continuation: the running beam that it continues, its token and the sum of log-probabilities with it."""

    parent: int
    token_id: int
    score: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished beam: its generated tokens, its score by the length penalty, and why it ended."""

    token_ids: tuple[int, ...]
    score: float
    finish: FinishReason


@dataclass(slots=True)
class BeamSearch:
    """`scores` are those of the running beams, best first; `finished` the best ones, best first."""

    branching: Branching
    max_tokens: int
    scores: list[float] = field(default_factory=lambda: [0.0])
    finished: list[Hypothesis] = field(default_factory=list)
    over: bool = False

    def advance(
        self,
        told: Sequence[Sequence[Token]],
        generated: Sequence[Sequence[int]],
        ends: Callable[[int, int], FinishReason | None],
    ) -> list[Beam]:
        """One step: `told` are the likeliest next tokens of each running beam with their log-probabilities,
        `generated` what it has generated, `ends(token, length)` says whether a token, the `length`-th, ends a beam.

        Returns the beams that run on, best first; meaningless once `over`.
        """
        width = self.branching.beam_width
        length = len(generated[0]) + 1
        best = self._best(told)
        reasons = [ends(beam.token_id, length) for beam in best]
        for beam, reason in list(zip(best, reasons, strict=True))[:width]:
            if reason is not None:
                self._finish(
                    Hypothesis((*generated[beam.parent], beam.token_id), self._normal(beam.score, length), reason)
                )
        running = [beam for beam, reason in zip(best, reasons, strict=True) if reason is None][:width]
        self.scores = [beam.score for beam in running]
        self.over = not running or self._closed() or not self._can_improve(length)
        return running

    def _best(self, told: Sequence[Sequence[Token]]) -> list[Beam]:
        beams = [
            Beam(parent, token.token_id, score + (token.logprob or 0.0))
            for parent, (score, tokens) in enumerate(zip(self.scores, told, strict=True))
            for token in tokens
        ]
        return sorted(beams, key=lambda beam: -beam.score)[: max(len(tokens) for tokens in told)]

    def _finish(self, hypothesis: Hypothesis) -> None:
        kept = sorted([*self.finished, hypothesis], key=lambda one: -one.score)
        self.finished = kept[: self.branching.beam_width]

    def _normal(self, score: float, length: int) -> float:
        return float(score / length**self.branching.length_penalty)

    def _full(self) -> bool:
        return len(self.finished) == self.branching.beam_width

    def _closed(self) -> bool:
        return self._full() and self.branching.early_stopping == "yes"

    def _can_improve(self, length: int) -> bool:
        """Whether the best running beam might still beat the worst finished one."""
        if not self._full():
            return True
        if self.branching.early_stopping == "never" and self.branching.length_penalty > 0:
            length = self.max_tokens
        return self._normal(self.scores[0], length) > self.finished[-1].score


def candidates_kept(width: int, stop_ids: int) -> int:
    """Continuations to consider when `stop_ids` different tokens may end a beam."""
    return max(2, 1 + stop_ids) * width
