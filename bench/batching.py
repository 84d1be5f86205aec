"""Continuous against static batching, one scheduler in two modes, on the real model.

    python -m bench.batching [--model NAME_OR_PATH] [--requests 64] [--seats 16] [--threads 2]

All requests are there at the start; their output lengths come from the Azure conversation trace. The two modes take
turns of some steps each, so that a machine that slows down slows both. The ideal ratio is computed from the same
lengths and the step times measured in this run: a continuous batch that is never smaller than it must be, against
static batches that last as long as their longest member. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from bench.traces import output_lengths
from cluster import models
from engine.config import EngineConfig
from engine.engine import Engine
from engine.types import Request, SamplingParams, StepResult

PROMPT_TOKENS = 32
TURN_STEPS = 25
COLD_STEPS = 5
ROUNDS, PROBE_STEPS, PROBE_CONTEXT = 6, 12, 150


@dataclass
class Run:
    """One mode: its engine and what its steps took."""

    engine: Engine
    seconds: float = 0.0
    steps: int = 0
    turn_steps: int = TURN_STEPS
    decode_s: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Seconds of steps of decodes alone, by batch size."""
    prompt_s: list[float] = field(default_factory=list)
    """Seconds per token of steps of prompts alone."""
    errors: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Of the step-time model's predictions before each step, relative, by whether the step has prompt work."""

    def turn(self) -> bool:
        """Some steps; False when all requests have ended."""
        for _ in range(self.turn_steps):
            if not self.engine.has_work():
                return False
            started_s = time.perf_counter()
            result = self.engine.step(time.monotonic())
            seconds = time.perf_counter() - started_s
            self.seconds += seconds
            self.steps += 1
            self._note(result, seconds)
        return True

    def _note(self, result: StepResult | None, seconds: float) -> None:
        chunks = result.plan.chunks if result else ()
        if not chunks:
            return
        sizes = {len(chunk.token_ids) > 1 for chunk in chunks}
        assert result is not None
        kind = "prefill" if True in sizes else "decode"
        self.errors[kind].append(abs(result.plan.predicted_s / result.duration_s - 1))
        if sizes == {False}:
            self.decode_s[len(chunks)].append(seconds)
        elif sizes == {True}:
            self.prompt_s.append(seconds / sum(len(chunk.token_ids) for chunk in chunks))


def requests(lengths: tuple[int, ...], prompt_tokens: int = PROMPT_TOKENS) -> list[Request]:
    return [
        Request(
            request_id=f"r{i}",
            token_ids=tuple((37 * i + 11 * j + i * j) % 1000 + 100 for j in range(prompt_tokens)),
            sampling=SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True),
        )
        for i, length in enumerate(lengths)
    ]


def opened(batching: str, lengths: tuple[int, ...], args: argparse.Namespace) -> Run:
    longest = sorted(lengths)[-args.seats :]
    engine = Engine.open(
        EngineConfig(
            model=str(models.resolve(args.model)),
            dtype=args.dtype,
            batching=batching,
            max_num_seqs=args.seats,
            max_num_batched_tokens=512,
            num_blocks=sum(-(-(PROMPT_TOKENS + length) // 16) + 2 for length in longest) + args.seats,
            prefix_caching=False,
            threads=args.threads,
        )
    )
    warm = requests((4,))
    engine.submit(warm[0])
    while engine.has_work():
        engine.step(time.monotonic())
    for request in requests(lengths):
        engine.submit(request)
    return Run(engine)


def decode_times(run: Run, seats: int) -> dict[int, float]:
    """Seconds of a step of decodes alone by batch size: all sizes in turn, in rounds, after the run.

    The first decile, because whoever else uses the machine only ever adds time.
    """
    sizes = sorted({1, min(2, seats), seats // 4, seats // 2, 3 * seats // 4, seats} - {0})
    times: dict[int, list[float]] = defaultdict(list)
    for _ in range(ROUNDS):
        for size in sizes:
            probe = Run(run.engine)
            for request in requests((PROBE_STEPS,) * size, prompt_tokens=PROBE_CONTEXT):
                run.engine.submit(request)
            while run.engine.has_work():
                probe.turn()
            times[size] += probe.decode_s[size]
    return {size: statistics.quantiles(seconds, n=10)[0] for size, seconds in times.items()}


def interpolated(times: Mapping[int, float], size: int) -> float:
    """Between the nearest sizes measured."""
    below = max((known for known in times if known <= size), default=min(times))
    above = min((known for known in times if known >= size), default=max(times))
    if above == below:
        return times[below]
    share = (size - below) / (above - below)
    return times[below] + share * (times[above] - times[below])


def ideal_static_s(lengths: tuple[int, ...], seats: int, times: Mapping[int, float], prompt_s: float) -> float:
    """Batches in order of arrival, each as long as its longest member. The first token comes with the prompt."""
    batches = [lengths[i : i + seats] for i in range(0, len(lengths), seats)]
    decode_s = sum((max(batch) - 1) * interpolated(times, len(batch)) for batch in batches)
    return decode_s + len(lengths) * PROMPT_TOKENS * prompt_s


def ideal_continuous_s(lengths: tuple[int, ...], seats: int, times: Mapping[int, float], prompt_s: float) -> float:
    """A seat is taken again in the step after it was left; prompts cost what they cost in steps of their own."""
    queue, running, seconds = list(lengths), list[int](), len(lengths) * PROMPT_TOKENS * prompt_s
    while queue or running:
        joined = [queue.pop(0) for _ in range(min(seats - len(running), len(queue)))]
        if running:
            seconds += interpolated(times, len(running))
        running = [left - 1 for left in (*running, *joined) if left > 1]
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=models.DEFAULT)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--seats", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    lengths = output_lengths(args.requests, args.seed)
    continuous, static = (opened(batching, lengths, args) for batching in ("continuous", "static"))
    # The longer run takes longer turns, so that both last to the end.
    one = {1: 1.0}
    static.turn_steps = round(
        TURN_STEPS * ideal_static_s(lengths, args.seats, one, 0.0) / ideal_continuous_s(lengths, args.seats, one, 0.0)
    )
    while any([continuous.turn(), static.turn()]):
        pass
    report(continuous, static, lengths, args.seats)


def report(continuous: Run, static: Run, lengths: tuple[int, ...], seats: int) -> None:
    times, prompt_s = decode_times(continuous, seats), statistics.median(static.prompt_s)
    tokens = sum(lengths)
    print(f"{len(lengths)} requests, {tokens} output tokens, longest {max(lengths)}, {seats} seats")
    print("step of decodes alone, ms by batch: " + "  ".join(f"{size}: {s * 1e3:.1f}" for size, s in times.items()))
    print(f"prompts alone: {1 / prompt_s:.0f} tokens/s")
    for name, run in (("continuous", continuous), ("static", static)):
        print(f"{name:>10}: {run.seconds:7.2f} s  {run.steps:5} steps  {tokens / run.seconds:7.1f} tokens/s")
    warm = {kind: errors[COLD_STEPS:] for kind, errors in continuous.errors.items() if len(errors) > COLD_STEPS + 1}
    for kind, errors in warm.items():
        deciles = statistics.quantiles(errors, n=10)
        print(
            f"continuous step times of {kind}: predicted within {deciles[4]:.1%} (median) and {deciles[8]:.1%} (nine in"
            f" ten) of {len(errors)} steps, the first {COLD_STEPS} left out"
        )
    ideal_static, ideal_continuous = (
        ideal(lengths, seats, times, prompt_s) for ideal in (ideal_static_s, ideal_continuous_s)
    )
    ratio, ideal = static.seconds / continuous.seconds, ideal_static / ideal_continuous
    print(f"ratio {ratio:.2f}, ideal {ideal:.2f} ({ideal_static:.2f} s / {ideal_continuous:.2f} s)")
    ratios = {"continuous_vs_static": ratio, "ideal": ideal, "of_ideal": ratio / ideal}
    line = {
        "bench": "batching",
        "ratios": {name: round(value, 4) for name, value in ratios.items()},
        "tokens_per_s": round(tokens / continuous.seconds, 1),
        "step_time_error": {kind: round(statistics.median(errors), 4) for kind, errors in warm.items()},
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
