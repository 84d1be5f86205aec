"""The router's index at the size of a large cluster: how long a match takes while events keep coming in.

    python -m bench.index [--blocks 1000000] [--workers 64] [--prompt 512] [--events 10000] [--seconds 3]

Filled with `--blocks` held blocks: chains as long as the prompt, each held by one to eight workers, whole or in part.
Then batches of events, as a worker sends them after a step (`STEP_KEYS` stored, as many removed), are applied in turn
with matches of prompts that somebody holds. Ratios are limits over measurements, 1 or more is kept: `match` 300 us for
the longest prefixes on all workers (median; `match_p99` beside it), `events` the rate at which batches can be applied
over `--events`, `stall` 1 ms over what a batch keeps placement waiting (p99), `leave` 50 ms over the time to forget a
worker that is lost, with all that it holds. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator

from cluster.index import PrefixIndex, Slots
from tandem.messages import KvEvents

MATCH_LIMIT_S, STALL_LIMIT_S, LEAVE_LIMIT_S = 300e-6, 1e-3, 50e-3
STEP_KEYS = 32
"""Keys that one step of a worker stores; as many are evicted."""


class Cluster:
    """Workers that fill an index and keep telling it news."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.chance = random.Random(args.seed)
        self.index = PrefixIndex(Slots())
        self.names = [f"prefill-{number}" for number in range(args.workers)]
        self.numbers = dict.fromkeys(self.names, 0)
        self.chains: list[list[bytes]] = []
        self.fresh: dict[str, list[bytes]] = {name: [] for name in self.names}
        for name in self.names:
            self.index.add(name, "i1")
        held = 0
        while held < args.blocks:
            chain = [self.chance.randbytes(16) for _ in range(args.prompt)]
            self.chains.append(chain)
            for name in self.chance.sample(self.names, min(len(self.names), self.chance.choice((1, 1, 1, 2, 4, 8)))):
                part = chain[: self.chance.choice((len(chain), len(chain), len(chain) // 2, 16))]
                self.tell(name, part)
                held += len(part)
        self.held = held

    def tell(self, name: str, stored: list[bytes], removed: tuple[bytes, ...] = ()) -> None:
        self.numbers[name] += 1
        assert self.index.apply(KvEvents(name, "i1", self.numbers[name], tuple(stored), removed))

    def news(self) -> Iterator[KvEvents]:
        """Without end: each step of a worker stores some keys and evicts those of an earlier one."""
        while True:
            name = self.chance.choice(self.names)
            stored, removed = [self.chance.randbytes(16) for _ in range(STEP_KEYS)], tuple(self.fresh[name])
            self.fresh[name] = stored
            self.numbers[name] += 1
            yield KvEvents(name, "i1", self.numbers[name], tuple(stored), removed)


def measured(cluster: Cluster, seconds: float) -> tuple[list[float], list[float]]:
    """Seconds of each match and of each batch of events, in turn."""
    matches, batches, end = list[float](), list[float](), time.perf_counter() + seconds
    for batch in cluster.news():
        keys = tuple(cluster.chance.choice(cluster.chains))
        begin = time.perf_counter()
        cluster.index.apply(batch)
        between = time.perf_counter()
        found = cluster.index.match(keys)
        now = time.perf_counter()
        batches.append(between - begin)
        matches.append(now - between)
        assert max(found.values()) >= 16
        if now > end:
            break
    return matches, batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--events", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    begin = time.perf_counter()
    cluster = Cluster(args)
    print(f"{cluster.held} blocks over {args.workers} workers, filled in {time.perf_counter() - begin:.1f} s")
    matches, batches = measured(cluster, args.seconds)
    cluster.index.check()
    begin = time.perf_counter()
    cluster.index.remove(cluster.names[0])
    report(matches, batches, time.perf_counter() - begin, args)


def report(matches: list[float], batches: list[float], leave_s: float, args: argparse.Namespace) -> None:
    match_s, worst_s = statistics.median(matches), percentile(matches, 0.99)
    per_s, stall_s = len(batches) / sum(batches), percentile(batches, 0.99)
    print(f"match of {args.prompt} blocks: median {match_s * 1e6:.0f} us, p99 {worst_s * 1e6:.0f} us")
    print(f"events: {per_s:.0f} batches per second, each {STEP_KEYS} keys stored and as many removed;")
    print(f"  placement waits {statistics.median(batches) * 1e6:.0f} us for one, p99 {stall_s * 1e6:.0f} us")
    print(f"a worker that is lost is forgotten in {leave_s * 1e3:.1f} ms")
    ratios = {
        "match": MATCH_LIMIT_S / match_s,
        "match_p99": MATCH_LIMIT_S / worst_s,
        "events": per_s / args.events,
        "stall": STALL_LIMIT_S / stall_s,
        "leave": LEAVE_LIMIT_S / leave_s,
    }
    print(json.dumps({"bench": "index", "ratios": {name: round(value, 3) for name, value in ratios.items()}}))


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


if __name__ == "__main__":
    main()
