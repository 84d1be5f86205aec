"""What lower tiers gain: chats of several turns whose KV is several times what the device holds.

    python -m bench.pool [--model NAME_OR_PATH] [--chats 8] [--turns 4] [--question 100] [--excess 4] [--dir FOLDER]

All chats take turns, so that a chat's blocks have left the pool when its next turn comes. Every contender answers the
same prompts one after the other, each with an engine of its own: `recompute` has no tiers; `host` has room for all KV
in host memory; `disk` has a host tier of a few blocks and the rest on disk, whose pages are dropped from the system's
cache before each turn (`--warm` leaves them). Loading or computing is the estimator's choice; its decisions are
printed. TTFT is of the turns after a chat's first; a ratio is the median TTFT of `recompute` by the contender's, so
above 1 is a gain. The last line is JSON.

A new contender is one more entry in `CONTENDERS`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cluster import models
from cluster.tiers import fingerprint
from engine.config import EngineConfig
from engine.engine import Engine
from engine.types import Request, SamplingParams
from kvtransfer.tiers.store import TierStore
from kvtransfer.tiers.types import TierSettings

ANSWER_TOKENS = 24
BLOCK_SIZE = 16
SMALL_HOST_BLOCKS = 48
WAIT_S = 30.0


@dataclass(slots=True)
class Contender:
    """`settle` is called before each turn; `bell` rings when the engine should be asked again whether it has work."""

    name: str
    engine: Engine
    bell: threading.Event
    settle: Callable[[], None] = lambda: None
    close: Callable[[], None] = lambda: None
    ttft_s: list[float] = field(default_factory=list)
    """Of next turns."""

    def answer(self, prompt: tuple[int, ...], name: str) -> tuple[float, tuple[int, ...]]:
        """Seconds to the first token, and the answer."""
        sampling = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
        started_s, ttft_s, answer = time.perf_counter(), 0.0, list[int]()
        self.engine.submit(Request(request_id=name, token_ids=prompt, sampling=sampling))
        while len(answer) < ANSWER_TOKENS:
            if not self.engine.has_work():
                self.bell.wait(WAIT_S)
                self.bell.clear()
            result = self.engine.step(time.monotonic())
            tokens = [token.token_id for one in (result.progress if result else ()) for token in one.tokens]
            if tokens and not answer:
                ttft_s = time.perf_counter() - started_s
            answer += tokens
        return ttft_s, tuple(answer)


# -- contenders --------------------------------------------------------------------------------------------------------


def recompute(args: argparse.Namespace, folder: Path) -> Contender:
    """No tiers: what left the pool is computed again."""
    return Contender("recompute", opened(args), threading.Event())


def host(args: argparse.Namespace, folder: Path) -> Contender:
    """All KV finds room in host memory."""
    return tiered(args, "host", lambda size: TierSettings(host_bytes=2 * total_blocks(args) * size))


def disk(args: argparse.Namespace, folder: Path) -> Contender:
    """Nearly all of it goes through to disk."""

    def settings(size: int) -> TierSettings:
        return TierSettings(
            host_bytes=SMALL_HOST_BLOCKS * size,
            disk_path=str(folder),
            disk_bytes=2 * total_blocks(args) * (size + 4096),
            fsync=not args.warm,
            io_timeout_s=10.0,
        )

    contender = tiered(args, "disk", settings)
    if not args.warm:
        settle = contender.settle
        contender.settle = lambda: (settle(), drop_pages(folder))[0]
    return contender


CONTENDERS: tuple[Callable[[argparse.Namespace, Path], Contender], ...] = (recompute, host, disk)


def tiered(args: argparse.Namespace, name: str, settings_for: Callable[[int], TierSettings]) -> Contender:
    """An engine with a store; `settings_for` is given the bytes of a block."""
    engine, bell = opened(args), threading.Event()
    size = engine.info.block_bytes
    store = TierStore(size, settings_for(size), fingerprint=fingerprint(engine.info), wake=bell.set)
    engine.attach_tiers(store)

    def settle() -> None:
        """Write-behind has ended: the contenders share this process, and one's writes are not another's load."""
        until_s = time.monotonic() + WAIT_S
        while store.busy() and time.monotonic() < until_s:
            bell.wait(0.05)
            bell.clear()
            store.poll(time.monotonic())

    settle()
    return Contender(name, engine, bell, settle, store.shutdown)


def drop_pages(folder: Path) -> None:
    """Reads of these files come from the disk again, not from the system's cache."""
    for path in folder.rglob("*.kv"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


# -- the load ----------------------------------------------------------------------------------------------------------


def total_blocks(args: argparse.Namespace) -> int:
    """Blocks that all chats have at their end."""
    return args.chats * -(-args.turns * (args.question + ANSWER_TOKENS) // BLOCK_SIZE)


def opened(args: argparse.Namespace) -> Engine:
    return Engine.open(
        EngineConfig(
            model=str(models.resolve(args.model)),
            dtype=args.dtype,
            block_size=BLOCK_SIZE,
            num_blocks=max(total_blocks(args) // args.excess, total_blocks(args) // args.chats + 2),
            max_num_batched_tokens=256,
            threads=args.threads,
        )
    )


def converse(args: argparse.Namespace, contenders: list[Contender]) -> int:
    """How often all gave the same answer. Beyond 512 tokens they need not: a decode's attention is then summed in
    another order than a prompt's, so an answer's KV differs in its last bits from the same tokens computed again."""
    same = 0
    chance = random.Random(0)
    chats: list[tuple[int, ...]] = [() for _ in range(args.chats)]
    for turn in range(args.turns):
        for chat, said in enumerate(chats):
            prompt = (*said, *(chance.randrange(100, 40_000) for _ in range(args.question)))
            answers = []
            for contender in contenders:
                contender.settle()
                ttft_s, answer = contender.answer(prompt, f"{chat}.{turn}")
                answers.append(answer)
                if turn:
                    contender.ttft_s.append(ttft_s)
            same += len(set(answers)) == 1
            chats[chat] = (*prompt, *answers[0])
    return same


def report(args: argparse.Namespace, contenders: list[Contender], same: int) -> None:
    blocks = contenders[0].engine.info.total_blocks
    print(f"{args.chats} chats of {args.turns} turns: {total_blocks(args)} blocks of KV, {blocks} fit into the pool")
    print(f"{same} of {args.chats * args.turns} answers were the same from all")
    for contender in contenders:
        load = contender.engine.load(0.0)
        median, p90 = statistics.median(contender.ttft_s), statistics.quantiles(contender.ttft_s, n=10)[-1]
        print(f"{contender.name:10} TTFT median {median * 1e3:7.1f} ms, p90 {p90 * 1e3:7.1f} ms;", end=" ")
        print(f"{load.prefix_hits / load.prefix_queries:.0%} of prompt tokens found,", end=" ")
        print(f"{load.tier_loads} loads, {load.tier_recomputes} times computing was estimated faster")
        for line in contender.engine.tier_decisions()[-args.decisions :]:
            print(f"    {line}")
        for tier in load.tiers:
            rate = tier.loaded_bytes / tier.load_seconds / 1e9 if tier.load_seconds else 0.0
            print(f"    {tier.name}: {tier.stored} blocks stored, {tier.hits} loaded at {rate:.2f} GB/s,", end=" ")
            print(f"{tier.misses} missed, {tier.failed} failed, {tier.evicted} evicted, {tier.dropped} dropped")
    base = statistics.median(contenders[0].ttft_s)
    ratios = {f"{one.name}_vs_recompute": round(base / statistics.median(one.ttft_s), 3) for one in contenders[1:]}
    print(json.dumps({"bench": "pool", "ratios": ratios}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=models.DEFAULT)
    parser.add_argument("--chats", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--question", type=int, default=100)
    parser.add_argument("--excess", type=int, default=4, help="KV of all chats by what the pool holds")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--decisions", type=int, default=8, help="the estimator's last decisions to print")
    parser.add_argument("--dir", help="where the disk tier lies; a temporary folder if not given")
    parser.add_argument("--warm", action="store_true", help="let the system's cache keep what is on disk")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        contenders = [make(args, Path(folder)) for make in CONTENDERS]
        try:
            report(args, contenders, converse(args, contenders))
        finally:
            for contender in contenders:
                contender.close()


if __name__ == "__main__":
    main()
