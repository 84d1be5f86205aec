"""Time to first token of a prompt whose prefix lies at another worker: fetched from there, or computed again.

    python -m bench.fetch [--model NAME_OR_PATH] [--lengths 128,512,1500] [--rounds 5] [--transports shm,ucx,tcp]

Two prefill workers as a cluster runs them: control, rank process, gRPC, events to a router, KV over the first transport
that joins them. Each round one computes a new prompt; then the other gets it with another last block, once as the
router says (fetch or compute, by its estimate; the decisions are printed) and, another prompt of the same length,
without a fetch. TTFT is from the question to the first token at that worker. A ratio is the median TTFT of computing
by that of the router's choice, so above 1 is a gain; `peer_vs_recompute` is that of the longest prompts. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import secrets
import statistics
import time
from dataclasses import replace
from typing import NamedTuple

from cluster import models
from cluster.config import ModelSection, PoolSection, PoolsSection, RoutingSection, TandemConfig, TransferSection
from cluster.control import Control
from cluster.events import Subscriber
from cluster.node_client import NodeClient
from cluster.router import RouterState
from cluster.snapshot import Placement, RequestView
from cluster.wiring import control_settings, hasher_for, rank_settings
from engine.types import Request, SamplingParams
from tandem.messages import Fetch, FinishedEarly, KvEvents, LoadReport, Submit, WorkerInfo, WorkerRef

TAIL = 16
"""Tokens in which a prompt differs from the one before."""
STEP_TOKENS = 256
LONG = 4 * STEP_TOKENS
LEARN_STEPS = 32
"""Steps more, after which a worker's own step times are believed."""
PATIENCE_S = 60.0


class Round(NamedTuple):
    """TTFT as the router says, and computed; tokens fetched, and the router's words."""

    chosen_s: float
    computed_s: float
    fetched: int
    decision: str


class Bench:
    """Two workers, and a router that hears them; decode is a name that nobody asks."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.config = config_of(args)
        self.router = RouterState(self.config)
        self.chance = random.Random(0)
        secret = secrets.token_hex(8)
        path = models.resolve(args.model)
        settings = control_settings(self.config, secret)
        names = ("prefill-0", "prefill-1")
        self.controls = [Control(settings, rank_settings(self.config, name, path)) for name in names]
        self.client = NodeClient(secret)
        self.subscriber = Subscriber(secret)
        self.heard = asyncio.Event()
        self.asked = 0

    async def start(self) -> None:
        await asyncio.gather(*(control.start() for control in self.controls))
        for control in self.controls:
            self.subscriber.connect(control.events_address)
            assert control.info is not None
            assert self.router.register(control.info, time.monotonic()) is None
        self.holder, self.other = (info_of(control) for control in self.controls)
        self.nobody = WorkerRef("decode-0", "none", "127.0.0.1:1")
        decode = replace(self.holder, role="decode", ref=self.nobody)
        assert self.router.register(decode, time.monotonic()) is None
        self.hasher = hasher_for(self.config, self.holder)
        self.listening = asyncio.create_task(self.listen())

    async def stop(self) -> None:
        self.listening.cancel()
        self.subscriber.close()
        await self.client.close()
        await asyncio.gather(*(control.stop() for control in self.controls))

    async def listen(self) -> None:
        while True:
            event = await self.subscriber.receive()
            if isinstance(event, LoadReport):
                self.router.report(event, time.monotonic())
            else:
                assert isinstance(event, KvEvents)
                self.router.kv_events(event)
            self.heard.set()

    async def until_held(self, request: Request, worker: str, tokens: int) -> None:
        """The router knows that a worker holds so much of a prompt, and that it is idle."""
        async with asyncio.timeout(PATIENCE_S):
            while not self.knows(request, worker, tokens):
                self.heard.clear()
                await self.heard.wait()

    def knows(self, request: Request, worker: str, tokens: int) -> bool:
        snapshot = self.router.snapshot(self.view(request), frozenset(), time.monotonic())
        load = self.router.loads()[worker].load
        return snapshot.held.get(worker, 0) >= tokens and not load.queued_prefill_tokens and not load.running

    def prompt(self, length: int) -> tuple[int, ...]:
        return tuple(self.chance.randrange(100, 40_000) for _ in range(length))

    def request(self, prompt: tuple[int, ...]) -> Request:
        self.asked += 1
        now = time.monotonic()
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        return Request(
            request_id=f"r{self.asked}", token_ids=prompt, sampling=sampling, arrival_s=now, deadline_s=now + PATIENCE_S
        )

    def view(self, request: Request) -> RequestView:
        return RequestView.of(request, self.hasher.chain(request.token_ids, request.cache_salt))

    async def answered(self, worker: WorkerInfo, request: Request, fetch: Fetch | None = None) -> tuple[float, int]:
        """Seconds to the first token, and the tokens that were fetched."""
        started_s = time.perf_counter()
        answer = await self.client.ask(worker.ref, Submit(request, self.nobody, fetch), PATIENCE_S)
        took_s = time.perf_counter() - started_s
        assert isinstance(answer, FinishedEarly), answer
        return took_s, answer.report.fetched_tokens

    async def learn(self) -> None:
        """Let both measure steps of all sizes; with the first prompts the memory they use becomes theirs."""
        for length in (LONG, *(self.chance.randrange(TAIL, STEP_TOKENS) for _ in range(LEARN_STEPS))):
            for worker in (self.holder, self.other):
                await self.answered(worker, self.request(self.prompt(length)))

    async def round(self, length: int) -> Round:
        prompt = self.prompt(length)
        known = self.request(prompt)
        await self.answered(self.holder, known)
        await self.until_held(known, "prefill-0", length // 16 * 16)
        again = self.request((*prompt[:-TAIL], *self.prompt(TAIL)))
        decision = self.router.place(self.view(again), frozenset({"prefill-0"}), time.monotonic())
        assert isinstance(decision, Placement), decision
        chosen_s, fetched = await self.answered(self.other, again, decision.fetch)
        self.router.finished(again.request_id)
        computed_s, _ = await self.answered(self.other, self.request(self.prompt(length)))
        return Round(chosen_s, computed_s, fetched, decision.explain())


def info_of(control: Control) -> WorkerInfo:
    assert control.info is not None
    return control.info


def config_of(args: argparse.Namespace) -> TandemConfig:
    longest = max(args.lengths)
    pool = PoolSection(
        count=2,
        threads=args.threads,
        num_blocks=8 * longest // 16 + 64,
        max_num_batched_tokens=STEP_TOKENS,
        max_num_seqs=8,
    )
    return TandemConfig(
        model=ModelSection(name=args.model, dtype=args.dtype),
        pools=PoolsSection(prefill=pool, decode=replace(pool, count=1)),
        routing=RoutingSection(local_prefill="never"),
        transfer=TransferSection(transports=tuple(args.transports), checksums=args.checksums),
    )


async def run(args: argparse.Namespace) -> dict[str, float]:
    bench, ratios = Bench(args), dict[str, float]()
    try:
        await bench.start()
        await bench.learn()
        await bench.round(max(args.lengths))  # links are dialled and pools mapped with the first transfer
        for length in args.lengths:
            rounds = [await bench.round(length) for _ in range(args.rounds)]
            chosen_s = statistics.median(one.chosen_s for one in rounds)
            computed_s = statistics.median(one.computed_s for one in rounds)
            fetched = statistics.mean(one.fetched for one in rounds)
            print(f"{length} tokens: {chosen_s * 1e3:.1f} ms as the router says, {computed_s * 1e3:.1f} ms computed;")
            print(f"  {fetched:.0f} tokens fetched in the mean; last decision: {rounds[-1].decision}")
            ratios[f"peer_{length}_vs_recompute"] = computed_s / chosen_s
        ratios["peer_vs_recompute"] = ratios[f"peer_{max(args.lengths)}_vs_recompute"]
    finally:
        await bench.stop()
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=models.DEFAULT)
    parser.add_argument(
        "--lengths", type=lambda text: [int(part) for part in text.split(",")], default=[128, 512, 1500]
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--transports", type=lambda text: text.split(","), default=["shm", "ucx", "tcp"])
    parser.add_argument("--checksums", action="store_true")
    args = parser.parse_args()
    ratios = asyncio.run(run(args))
    print(json.dumps({"bench": "fetch", "ratios": {name: round(value, 3) for name, value in ratios.items()}}))


if __name__ == "__main__":
    main()
