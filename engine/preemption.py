"""How a preempted sequence gets its KV back: computed again, or copied to swap space and in again. The cheaper way.

    recompute: the tokens whose KV nobody else keeps, at the measured rate of prompt work
    swap:      the bytes of its blocks out, and in again those that nobody else keeps, at the measured copy rate

Blocks that others hold too stay findable in the prefix cache, so they are free both ways. Its own full blocks are
findable as well, until their turn to be handed out comes; that they will be is what a preemption is for, so they do
not count. (The rule is Mooncake's and vLLM's, with measured terms.)
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.types import StepTimes


@dataclass(frozen=True, slots=True)
class PreemptionCost:
    """Seconds of each way."""

    recompute_s: float
    swap_s: float


def cost_of(
    computed: int, kept: int, block_size: int, block_bytes: int, times: StepTimes, bytes_per_s: float
) -> PreemptionCost:
    """For a sequence with `computed` tokens in the pool, the first `kept` of them (whole blocks) held by others too."""
    lost = computed - kept
    blocks, kept_blocks = -(-computed // block_size), kept // block_size
    recompute_s = times.prefill_s(lost, round(kept + lost / 2)) if lost else 0.0
    return PreemptionCost(recompute_s, (2 * blocks - kept_blocks) * block_bytes / bytes_per_s)


def swaps(mode: str, cost: PreemptionCost, *, room: bool) -> bool:
    """Whether to swap, under `EngineConfig.preemption`; never without `room` in swap space."""
    return room and (mode == "swap" or (mode == "auto" and cost.swap_s < cost.recompute_s))


def told(request_id: str, cost: PreemptionCost, *, swapped: bool) -> str:
    """One clause for the plan's reason."""
    way = "swapped out" if swapped else "to be computed again"
    return f"{request_id} {way} (swap {cost.swap_s * 1e3:.1f} ms, recompute {cost.recompute_s * 1e3:.1f} ms)"
