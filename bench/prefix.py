"""Time to first token with and without the prefix cache: many chats of several turns behind one long system prompt.

    python -m bench.prefix [--model NAME_OR_PATH] [--system 2000] [--chats 4] [--turns 3] [--threads 2]

One request at a time, so that the time is the prompt's alone. The two engines answer each turn one after the other,
which a machine that slows down slows alike. `ttft_fall` is of the mean over all turns, the first and cold one included;
the published figure for such traffic is 0.62. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

from cluster import models
from engine.config import EngineConfig
from engine.engine import Engine
from engine.types import Request, SamplingParams

QUESTION_TOKENS, ANSWER_TOKENS = 60, 24


def opened(args: argparse.Namespace, caching: bool) -> Engine:
    longest = args.system + args.turns * (QUESTION_TOKENS + ANSWER_TOKENS)
    own = args.chats * args.turns * (QUESTION_TOKENS + ANSWER_TOKENS)
    return Engine.open(
        EngineConfig(
            model=str(models.resolve(args.model)),
            dtype=args.dtype,
            num_blocks=(2 * longest + own) // 16 + 16,
            max_num_batched_tokens=512,
            prefix_caching=caching,
            threads=args.threads,
        )
    )


def answered(engine: Engine, prompt: tuple[int, ...], name: str) -> tuple[float, tuple[int, ...]]:
    """Seconds to the first token, and the answer."""
    sampling = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
    started_s, ttft_s, answer = time.perf_counter(), 0.0, list[int]()
    engine.submit(Request(request_id=name, token_ids=prompt, sampling=sampling))
    while engine.has_work():
        result = engine.step(time.monotonic())
        tokens = [token.token_id for one in (result.progress if result else ()) for token in one.tokens]
        if tokens and not answer:
            ttft_s = time.perf_counter() - started_s
        answer += tokens
    return ttft_s, tuple(answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=models.DEFAULT)
    parser.add_argument("--system", type=int, default=2000)
    parser.add_argument("--chats", type=int, default=4)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    chance = random.Random(0)
    system = tuple(chance.randrange(100, 40_000) for _ in range(args.system))
    cached, plain = opened(args, True), opened(args, False)
    for engine in (cached, plain):
        answered(engine, system[:64], "warm-up")
    cached.reset_prefix_cache()
    times: dict[str, list[float]] = {"cached": [], "plain": []}
    for chat in range(args.chats):
        prompt = system
        for turn in range(args.turns):
            prompt = (*prompt, *(chance.randrange(100, 40_000) for _ in range(QUESTION_TOKENS)))
            slow, answer = answered(plain, prompt, f"{chat}.{turn}")
            quick, _ = answered(cached, prompt, f"{chat}.{turn}")
            times["plain"].append(slow)
            times["cached"].append(quick)
            print(f"chat {chat} turn {turn}: {len(prompt)} tokens, {slow * 1e3:7.0f} ms, cached {quick * 1e3:7.0f} ms")
            prompt = (*prompt, *answer)
    report(times, cached)


def report(times: dict[str, list[float]], cached: Engine) -> None:
    load = cached.load(0.0)
    means = {name: statistics.mean(seconds) for name, seconds in times.items()}
    print(f"step-time model of prefill errs by {load.step_times.prefill_error:.1%}, of decode by", end=" ")
    print(f"{load.step_times.decode_error:.1%}")
    ratios = {
        "ttft_fall": 1 - means["cached"] / means["plain"],
        "ttft_fall_warm": 1 - statistics.mean(times["cached"][1:]) / statistics.mean(times["plain"][1:]),
        "hit_share": load.prefix_hits / load.prefix_queries,
    }
    line = {
        "bench": "prefix",
        "ratios": {name: round(value, 4) for name, value in ratios.items()},
        "ttft_s": {name: round(seconds, 4) for name, seconds in means.items()},
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
