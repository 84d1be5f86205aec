"""`make demo`: a real cluster on this machine, a dozen chats at once, and a table of what happened to each.

It ends with 0 only when every answer came, came in time, is right where that can be checked, and its KV cache moved
from prefill to decode over UCX.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from statistics import quantiles

from rich import box
from rich.console import Console, JustifyMethod
from rich.table import Table

from cluster import launch
from cluster.config import TandemConfig
from cluster.demo_prompts import CAPITAL, PROMPTS, DemoPrompt
from engine.errors import TandemError
from tandem import AsyncClient
from tandem.client import Piece, ServedBy, Usage

LATE_S = 60.0
"""An answer that is not whole by then is late."""
TRANSPORT = "ucx"


@dataclass(slots=True)
class Seen:
    """What a client sees of one answer. Times are seconds from the moment all prompts were sent."""

    prompt: DemoPrompt
    text: str = ""
    arrivals_s: list[float] = field(default_factory=list)
    """One for each token."""
    finish: str = ""
    usage: Usage = field(default_factory=Usage)
    served_by: ServedBy = field(default_factory=ServedBy)
    error: str = ""

    def take(self, piece: Piece, now_s: float) -> None:
        self.text += piece.text
        self.arrivals_s += [now_s] * len(piece.token_ids)
        if piece.finish_reason is not None:
            self.finish, self.usage, self.served_by = piece.finish_reason, piece.usage, piece.served_by

    @property
    def ttft_s(self) -> float | None:
        return self.arrivals_s[0] if self.arrivals_s else None

    def itl_s(self) -> list[float]:
        return [late - early for early, late in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)]


def problems(answers: Sequence[Seen]) -> list[str]:
    """Why the demo has failed; empty when it has not."""
    found = [problem for seen in answers for problem in _problems_of(seen)]
    if not any(seen.served_by.kv_bytes for seen in answers):
        found.append("no KV cache moved from a prefill to a decode worker")
    return found


def _problems_of(seen: Seen) -> list[str]:
    label = seen.prompt.label
    if seen.error:
        return [f"{label}: {seen.error}"]
    if seen.finish not in ("stop", "length") or not seen.text.strip():
        return [f"{label}: the answer is missing (finish {seen.finish or 'none'})"]
    found = []
    if seen.prompt.expects not in seen.text:
        found.append(f"{label}: the answer {seen.text.strip()!r} does not hold {seen.prompt.expects!r}")
    if seen.arrivals_s and seen.arrivals_s[-1] > LATE_S:
        found.append(f"{label}: the answer took {seen.arrivals_s[-1]:.1f} s, more than {LATE_S:.0f} s")
    if seen.served_by.transport not in ("", TRANSPORT):
        found.append(f"{label}: its KV cache moved over {seen.served_by.transport}, not {TRANSPORT}")
    return found


# -- asking --------------------------------------------------------------------------------------------------------


async def ask_all(
    target: str, prompts: Sequence[DemoPrompt], *, show: DemoPrompt, write: Callable[[str], None]
) -> list[Seen]:
    """All prompts at once; the text of `show` is written out as it comes."""
    started_s = time.monotonic()
    async with AsyncClient(target) as client:
        asked = [_ask(client, prompt, started_s, write if prompt is show else None) for prompt in prompts]
        return await asyncio.gather(*asked)


async def _ask(client: AsyncClient, prompt: DemoPrompt, started_s: float, write: Callable[[str], None] | None) -> Seen:
    seen = Seen(prompt)
    messages = [{"role": role, "content": content} for role, content in prompt.messages]
    try:
        pieces = client.chat(
            messages, stream=True, max_tokens=prompt.max_tokens, temperature=0.0, timeout_s=LATE_S + 5.0
        )
        async with aclosing(pieces):
            async for piece in pieces:
                seen.take(piece, time.monotonic() - started_s)
                if write is not None:
                    write(piece.text)
    except TandemError as error:
        seen.error = str(error)
    return seen


# -- showing -------------------------------------------------------------------------------------------------------


def table_of(answers: Sequence[Seen]) -> Table:
    """One row for each request; 80 columns wide."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name, justify in _COLUMNS:
        table.add_column(name, justify=justify, no_wrap=True)
    for seen in answers:
        table.add_row(*_row(seen))
    return table


_COLUMNS: tuple[tuple[str, JustifyMethod], ...] = (
    ("request", "left"),
    ("tokens\nin+out", "right"),
    ("TTFT\nms", "right"),
    ("ITL ms\np50/p99", "right"),
    ("served by", "left"),
    ("\nreused", "right"),
    ("KV moved", "right"),
    ("over", "left"),
)


def _row(seen: Seen) -> tuple[str, ...]:
    by, gaps = seen.served_by, seen.itl_s()
    prefill = by.prefill_worker or ("local" if by.decode_worker else "-")
    return (
        seen.prompt.label,
        f"{seen.usage.prompt_tokens}+{seen.usage.completion_tokens}",
        _ms(seen.ttft_s),
        f"{_ms(percentile(gaps, 50))}/{_ms(percentile(gaps, 99))}",
        f"{prefill}→{by.decode_worker}" if by.decode_worker else prefill,
        str(max(seen.usage.cached_tokens, by.prefill_cached_tokens, by.decode_held_tokens)),
        f"{by.kv_bytes / 1e6:.1f} MB" if by.kv_bytes else "-",
        by.transport or "-",
    )


def percentile(values: Sequence[float], percent: int) -> float | None:
    if len(values) < 2:
        return values[0] if values else None
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.0f}"


# -- the whole -----------------------------------------------------------------------------------------------------


def run(config: TandemConfig) -> int:
    """Start, ask, show, stop. The exit code."""
    console, started_s = Console(highlight=False), time.monotonic()
    config = replace(config, gateway=replace(config.gateway, http_port=0, grpc_port=0, api_key_env=None, tls=None))

    def say(line: str) -> None:
        console.print(f"[dim]{time.monotonic() - started_s:5.1f} s[/dim]  {line}")

    with launch.running(config, say=say) as cluster:
        say(f"asking {len(PROMPTS)} questions at once; here is the answer to: {CAPITAL.messages[-1][1]}")
        console.print()

        def write(text: str) -> None:
            console.print(text, end="", style="bold green", markup=False, soft_wrap=True)

        answers = asyncio.run(ask_all(cluster.grpc, PROMPTS, show=CAPITAL, write=write))
        console.print("\n")
        console.print(table_of(answers))
        say("stopping")
    failed = problems(answers)
    for problem in failed:
        console.print(f"[red]failed:[/red] {problem}", soft_wrap=True)
    if not failed:
        say(f"all {len(answers)} answers are right and in time; every process is stopped")
    return int(bool(failed))
