"""Whether a prefix that lies in a lower tier is loaded or computed again: whichever is estimated to be over sooner.

    compute: the tokens left after the prefix that is there, at the measured rate of prompt work
    load:    a set-up and the blocks' bytes at each tier's measured rate, then the computing of the rest

Every point where the tier changes is a way to cut: load up to there, compute from there. The best cut wins, if it beats
computing by a margin. (The rule is Mooncake's and MemServe's, with measured terms.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from engine.types import StepTimes

MARGIN = 0.9
"""Loading must take less than this share of the time that it saves: estimates err."""
MODES = ("auto", "always", "never")


@dataclass(frozen=True, slots=True)
class TierSpeed:
    """What loading from a tier costs."""

    setup_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Prompt:
    """`tokens` in all, of which `held` need no computing."""

    tokens: int
    held: int
    block_size: int
    block_bytes: int
    step_tokens: int
    """Prompt tokens that fit into one step."""


@dataclass(frozen=True, slots=True)
class TierChoice:
    """Load the first `blocks` of what the tiers hold; seconds of loading them, and of computing their tokens."""

    blocks: int
    load_s: float
    compute_s: float

    def told(self, request_id: str, tiers: Sequence[str]) -> str:
        """One line for the log."""
        held = ", ".join(f"{count} in {tier}" for tier, count in _counted(tiers))
        way = f"loads {self.blocks}" if self.blocks else "computes"
        times = f"load {self.load_s * 1e3:.1f} ms, compute {self.compute_s * 1e3:.1f} ms"
        return f"{request_id} {way} of the next {len(tiers)} blocks ({held}): {times}"


def choose(
    prompt: Prompt, tiers: Sequence[str], speeds: Mapping[str, TierSpeed], times: StepTimes, mode: str = "auto"
) -> TierChoice:
    """For a prompt whose next blocks lie in `tiers`, one name per block."""
    cuts = [TierChoice(cut, *_costs(prompt, tiers[:cut], speeds, times)) for cut in _cuts(tiers)]
    whole = cuts[-1]
    if mode == "always":
        return whole
    best = min(cuts, key=lambda cut: cut.load_s - cut.compute_s)
    if mode == "never" or best.load_s >= MARGIN * best.compute_s:
        return TierChoice(0, whole.load_s, whole.compute_s)
    return best


def compute_s(prompt: Prompt, begin: int, times: StepTimes) -> float:
    """Seconds to compute the prompt from position `begin` to its end, in full steps."""
    tokens = prompt.tokens - begin
    per_step, per_token, per_context = times.prefill
    steps = -(-tokens // prompt.step_tokens)
    return per_step * steps + per_token * tokens + per_context * tokens * (begin + tokens / 2)


def _costs(
    prompt: Prompt, tiers: Sequence[str], speeds: Mapping[str, TierSpeed], times: StepTimes
) -> tuple[float, float]:
    counted = _counted(tiers)
    load_s = sum(
        speeds[tier].setup_s + count * prompt.block_bytes / speeds[tier].bytes_per_s for tier, count in counted
    )
    end = prompt.held + len(tiers) * prompt.block_size
    return load_s, compute_s(prompt, prompt.held, times) - compute_s(prompt, end, times)


def _cuts(tiers: Sequence[str]) -> list[int]:
    changes = [index for index, (one, other) in enumerate(pairwise(tiers), 1) if one != other]
    return [*changes, len(tiers)]


def _counted(tiers: Sequence[str]) -> list[tuple[str, int]]:
    return [(tier, tiers.count(tier)) for tier in dict.fromkeys(tiers)]
