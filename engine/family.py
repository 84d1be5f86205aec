"""The sequences of one request that asks for several: `n`, `best_of`, or beams.

They begin as one sequence, which computes the prompt; at its first token they fork, sharing its blocks, and whoever
writes into a shared block copies that block first. Sequences of `n` go their own ways from there. Beams go in step: one
that has its continuations pauses until all have theirs, so any of them may be preempted meanwhile. The results of beams
and of `best_of` are told at the end, best first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.beams import BeamSearch, Hypothesis
from engine.types import Branching, FinishReason, Progress, Request, Token

if TYPE_CHECKING:
    from engine.sequence import Sequence


class Family:
    """`members` are the sequences still here; beams best first."""

    def __init__(self, request: Request, branching: Branching) -> None:
        self.request = request
        self.branching = branching
        self.members: list[Sequence] = []
        self.forked = False
        self.search = BeamSearch(branching, request.sampling.max_tokens) if branching.beam_width else None
        self.ready: dict[str, tuple[Token, ...]] = {}
        """Continuations of the beams that pause."""
        self.numbered = 0
        self._ended: list[tuple[float, FinishReason, tuple[Token, ...]]] = []
        self._outputs: dict[int, list[Token]] = {}

    @property
    def withheld(self) -> bool:
        """Whether results are told at the end only."""
        return self.branching.withheld

    @property
    def size(self) -> int:
        """Sequences that are generated."""
        return self.branching.size

    def collect(self, index: int, token: Token, finish: FinishReason | None) -> None:
        """Keep what is told at the end."""
        output = self._outputs.setdefault(index, [])
        output.append(token)
        if finish is not None:
            score = sum(one.logprob or 0.0 for one in output) / len(output)
            self._ended.append((score, finish, tuple(output)))

    def results(self) -> tuple[Progress, ...]:
        """The best `n`, once all have ended."""
        n = self.branching.n
        if self.search is not None:
            return tuple(self._told(i, one) for i, one in enumerate(self.search.finished[:n]))
        best = sorted(self._ended, key=lambda one: -one[0])[:n]
        prompt = len(self.request.token_ids)
        asked = self.request.sampling.logprobs is not None
        return tuple(
            Progress(
                self.request.request_id,
                prompt + len(tokens) - 1,
                tokens if asked else tuple(Token(token.token_id) for token in tokens),
                finish,
                index=i,
                score=score,
            )
            for i, (score, finish, tokens) in enumerate(best)
        )

    def _told(self, rank: int, one: Hypothesis) -> Progress:
        tokens = tuple(Token(token_id) for token_id in one.token_ids)
        computed = len(self.request.token_ids) + len(tokens) - 1
        return Progress(self.request.request_id, computed, tokens, one.finish, index=rank, score=one.score)
