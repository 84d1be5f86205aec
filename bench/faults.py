"""Random faults on a served cluster: `python -m bench.faults [--minutes M] [--prefill N] [--decode N] [--seed S]`.

Readers ask without a pause. Meanwhile ranks, controls, the router and the gateway are killed or stopped (SIGSTOP), and
workers drained and taken back, one thing every few seconds. Each answer is compared with that of the undisturbed
cluster, greedy ones and seeded samples alike. A few may part on a CPU: KV of more than 512 tokens that was written step
by step and is computed again as a prompt differs in its last bits, which shows at a near tie. Everything else that a
reader may see is an error that says why.

At the end nobody is harmed any more, and every worker must come back, every block be free and every answer be the one
from before the faults; the command fails when that does not happen in time. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.serving import serving
from cluster import processes, run_state
from cluster.show import ask_gateway
from engine.errors import TandemError
from tandem import AsyncClient
from tandem.client import Options
from tandem.errors import RequestError

SLA = """
version: 1
pools:
  prefill: {{count: {prefill}, threads: 1, kv_memory: 64MiB}}
  decode: {{count: {decode}, threads: 1, kv_memory: 96MiB}}
timeouts: {{start: 60s, restart_backoff: 200ms, drain: 2s}}
"""
BACK_S, ANSWER_S = 180.0, 90.0
READERS, LONGEST = 6, 160
FIRST_S, LAST_S = 2.0, 11.0
"""Between two faults."""
VICTIMS = ("rank", "control", "RouterActor", "GatewayActor")


@dataclass(frozen=True)
class Asked:
    """A prompt and how its answer is drawn."""

    number: int
    temperature: float

    @property
    def text(self) -> str:
        items = (1, 3, 10, 25, 40, 60, 80, 2)[self.number]
        facts = (f"Item {self.number}.{i} is {'red' if i * self.number % 3 else 'blue'}." for i in range(items))
        return " ".join(facts) + " Now tell a story."


ALL_ASKED = [Asked(number, temperature) for number in range(8) for temperature in (0.0, 0.8)]
Told = dict[Asked, tuple[int, ...]]


@dataclass
class Tally:
    """What readers saw."""

    same: int = 0
    parted: int = 0
    left: int = 0
    errors: Counter[str] = field(default_factory=Counter)


async def answer(client: AsyncClient, asked: Asked, tokens: int = LONGEST) -> tuple[int, ...]:
    """Token ids. Raises RequestError."""
    ids: list[int] = []
    async for piece in client.generate(asked.text, stream=True, **_options(asked, tokens)):
        ids += piece.token_ids
    return tuple(ids)


def _options(asked: Asked, tokens: int) -> Options:
    return Options(max_tokens=tokens, temperature=asked.temperature, seed=7, ignore_eos=True, timeout_s=ANSWER_S)


async def read(client: AsyncClient, chance: random.Random, told: Told, tally: Tally, over: asyncio.Event) -> None:
    """One reader: of any prompt so many tokens, or it leaves in the middle."""
    while not over.is_set():
        asked, tokens = chance.choice(ALL_ASKED), chance.choice((4, 20, 60, LONGEST))
        try:
            if chance.random() < 0.25:
                pieces = client.generate(asked.text, stream=True, **_options(asked, tokens))
                async with contextlib.aclosing(pieces):
                    await anext(pieces)
                tally.left += 1
            elif await answer(client, asked, tokens) == told[asked][:tokens]:
                tally.same += 1
            else:
                tally.parted += 1
        except RequestError as error:
            tally.errors[f"{type(error).__name__}: {str(error).split(' (before')[0][:90]}"] += 1
            await asyncio.sleep(0.3)


async def status() -> dict[str, Any]:
    """See `cluster.cluster_status.ClusterStatus`. Raises TandemError while the gateway or the router is away."""
    return await asyncio.to_thread(ask_gateway, run_state.load(), "/status")


async def harm(serve: int, chance: random.Random, drained: set[str]) -> str:
    """One fault; what it was. Raises TandemError or StopIteration when the victim is not there."""
    victim = chance.choice((*VICTIMS, "drain"))
    name = chance.choice([worker["name"] for worker in (await status())["workers"]])
    if victim == "drain":
        await take_back(drained)
        await asyncio.to_thread(ask_gateway, run_state.load(), f"/drain/{name}", method="POST")
        drained.add(name)
        return f"{name} is drained"
    number = chance.choice((signal.SIGKILL, signal.SIGSTOP))
    if victim.endswith("Actor"):
        name, pid = victim, _child(serve, f"ray::{victim}")
    else:
        control = next(worker["pid"] for worker in (await status())["workers"] if worker["name"] == name)
        if control is None:
            raise TandemError(f"{name} is not there")
        pid = control if victim == "control" else _child(control, "cluster.rank")
    os.kill(pid, number)
    return f"{number.name} for {name} ({pid})"


async def take_back(drained: set[str]) -> None:
    for name in tuple(drained):
        await asyncio.to_thread(ask_gateway, run_state.load(), f"/undrain/{name}", method="POST")
        drained.discard(name)


def _child(parent: int, words: str) -> int:
    def line(pid: int) -> str:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        return ""

    return next(one.pid for one in processes.descendants(parent) if words in line(one.pid))


async def until_back(drained: set[str]) -> float:
    """Seconds until every worker is alive and holds nothing. Raises TimeoutError."""
    began_s = time.monotonic()
    async with asyncio.timeout(BACK_S):
        while True:
            with contextlib.suppress(TandemError):
                await take_back(drained)
                workers = (await status())["workers"]
                loads = [worker["load"] for worker in workers if worker["health"] == "alive"]
                held = [load["live_blocks"] + load["running"] + load["waiting"] for load in loads]
                if len(loads) == len(workers) and not any(held):
                    return time.monotonic() - began_s
            await asyncio.sleep(0.5)


async def play(serve: int, minutes: float, seed: int) -> dict[str, float]:
    """All of it, on a cluster that serves."""
    chance, tally, over, drained = random.Random(seed), Tally(), asyncio.Event(), set[str]()
    async with AsyncClient(run_state.load().grpc) as client:
        told = {asked: await answer(client, asked) for asked in ALL_ASKED}
        readers = [
            asyncio.create_task(read(client, random.Random(f"{seed}.{number}"), told, tally, over))
            for number in range(READERS)
        ]
        faults, end_s = 0, time.monotonic() + 60.0 * minutes
        while time.monotonic() < end_s:
            await asyncio.sleep(chance.uniform(FIRST_S, LAST_S))
            with contextlib.suppress(TandemError, StopIteration, ProcessLookupError):
                what = await harm(serve, chance, drained)
                faults += 1
                print(
                    f"{what:45}{tally.same:6} same {tally.parted:3} parted {tally.errors.total():5} errors", flush=True
                )
        over.set()
        await asyncio.gather(*readers)
        back_s = await until_back(drained)
        after = [await answer(client, asked) == told[asked] for asked in ALL_ASKED]
    for error, times in tally.errors.most_common(12):
        print(f"{times:5} {error}")
    return {
        "faults": faults,
        "same": tally.same,
        "parted": tally.parted,
        "left": tally.left,
        "errors": tally.errors.total(),
        "back_s": back_s,
        "same_afterwards": sum(after) / len(after),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.faults", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="of faults")
    parser.add_argument("--prefill", type=int, default=1, help="workers")
    parser.add_argument("--decode", type=int, default=2, help="workers")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        file, log = Path(name) / "faults.sla.yaml", Path(name) / "serve.log"
        file.write_text(SLA.format(prefill=chosen.prefill, decode=chosen.decode))
        os.environ["TANDEM_RUN_DIR"] = str(Path(name) / "run")
        with serving([sys.executable, "-m", "cluster.cli", "serve", "--config", str(file)], log, os.environ) as serve:
            row = asyncio.run(play(serve, chosen.minutes, chosen.seed))
    for name, value in row.items():
        print(f"{name:20}{value:10.2f}")
    answered = row["same"] + row["parted"]
    ratios = {
        "same_of_answered": round(row["same"] / answered, 4),
        "answered": round(answered / (answered + row["errors"]), 4),
        "same_afterwards": round(row["same_afterwards"], 4),
    }
    print(json.dumps({"bench": "faults", "ratios": ratios} | {name: round(value, 3) for name, value in row.items()}))


if __name__ == "__main__":
    main()
