"""How a request went: one frozen value for the client's usage, metrics, the router's ledger and the demo's table."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.types import FinishReason
from tandem.messages import Code, HandoffReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of one request; exactly one per request. `code` None: it finished, and `finish` says why; of several
    sequences that is the first's, and `completion_tokens` and `itl_s` are those of all that were returned.

    Durations in seconds, measured in the gateway from the request's arrival: `placed_s` to the router's answer,
    `ttft_s` to the first token, `e2e_s` to the end. `itl_s` holds the times between tokens; tokens that arrived
    together share their gap. `report` is prefill's own account (queue, compute, transfer).
    """

    request_id: str
    sla_class: str
    code: Code | None = None
    message: str = ""
    finish: FinishReason | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that nobody computed for this request. What decode held already is in `report`: it was not sent."""
    prefill: str = ""
    """Empty: the decode worker computed the prompt itself."""
    decode: str = ""
    """Empty: the request ended with its first token (or before); decode was never started."""
    placement_reason: str = ""
    placement_detail: str = ""
    """The router's: one of a few phrases (for metrics), and more for people."""
    fetch: str = ""
    """Of the prompt's prefix, when a peer held more of it: "chosen" or "forgone" by the router's estimate."""
    attempts: int = 0
    moves: int = 0
    """How often it moved while it ran; `decode` is the last worker."""
    placed_s: float | None = None
    ttft_s: float | None = None
    itl_s: tuple[float, ...] = ()
    e2e_s: float = 0.0
    report: HandoffReport = field(default_factory=HandoffReport)

    @property
    def queue_s(self) -> float:
        """Time in prefill's queue, by prefill's clock."""
        return self.report.queue_s

    def itl_quantile(self, q: float) -> float | None:
        """The q-quantile (0 … 1, nearest rank) of the times between tokens; None with fewer than two tokens."""
        if not self.itl_s:
            return None
        ordered = sorted(self.itl_s)
        return ordered[min(len(ordered) - 1, int(q * len(ordered)))]
