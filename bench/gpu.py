"""How near a GPU's limits the kernels and the decode step come: `python -m bench.gpu [--batch 64] [--context 4096]`.

Three ratios, each to a limit measured in the same run: decode attention to the bandwidth of a device copy (1 is all of
it), prefill attention to torch's own flash SDPA (above 1 is faster), and a whole decode step of a model with
Llama-3-8B's shape and random weights, replayed as a graph, to the time that its weights and KV take at that bandwidth
(1 is the limit, larger is slower). Before anything is timed its result is compared with the plain torch twin's.
Medians count; the last line is JSON. Without CUDA there is nothing to measure, and it says so and ends with code 2.

`--check` runs the same code on tiny shapes, on a CPU in Triton's interpreter, compares, and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.nn.functional as F

from engine.cuda_graphs import Capture, CudaCapture, DecodeGraphs
from engine.kernels.batch import batch_of
from engine.kernels.torch_attention import TorchAttention
from engine.kv import KVLayout, KVPool
from engine.model_config import ModelConfig, RopeScaling
from engine.models import Decoder
from engine.runner import ModelRunner
from engine.types import Chunk, StepPlan
from engine.weights import allocate

COPY_BYTES = 2**30
ROUNDS = 20
Make = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Shapes:
    """What is run. `prompt` is the length of the prefilled sequence, `context` that of each decoded one."""

    batch: int = 64
    context: int = 4096
    prompt: int = 4096
    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    intermediate: int = 14336
    vocab: int = 128256
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def layout(self, sequences: int, length: int) -> KVLayout:
        blocks = sequences * -(-length // self.block_size)
        return KVLayout(blocks, self.layers, self.kv_heads, self.head_dim, self.block_size, self.dtype_name)

    def kv_bytes(self, layers: int) -> int:
        """KV that one decode step of the batch reads in so many layers."""
        tokens = self.batch * self.context * layers
        return tokens * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


TINY = Shapes(
    batch=3,
    context=300,
    prompt=70,
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=96,
    vocab=200,
    dtype=torch.float32,
)


@dataclass(frozen=True)
class Case:
    """Something to time, the same in plain torch, and how far apart they may be."""

    run: Make
    twin: Make
    tolerance: float

    def error(self) -> float:
        """Length of the difference from the twin over the twin's. Raises SystemExit when it is too large."""
        expected = self.twin().float()
        error = ((self.run().float() - expected).norm() / expected.norm()).item()
        if not error <= self.tolerance:
            raise SystemExit(f"the result is off its twin by {error:.2g}, allowed is {self.tolerance:.2g}")
        return error


def attention_case(shapes: Shapes, pool: KVPool, pieces: list[tuple[int, int]]) -> Case:
    """Attention of layer 0 over sequences of (start, tokens), with blocks in random order."""
    from engine.kernels.triton_attention import TritonAttention

    tables = shuffled_tables(shapes, pool, [start + tokens for start, tokens in pieces])
    batch = batch_of([(*piece, table) for piece, table in zip(pieces, tables, strict=True)], shapes.block_size)
    q, k, v = (
        torch.randn(batch.num_tokens, heads, shapes.head_dim, dtype=shapes.dtype, device=pool.device)
        for heads in (shapes.heads, shapes.kv_heads, shapes.kv_heads)
    )
    scale = shapes.head_dim**-0.5
    attention = TritonAttention(pool, batch, scale)
    return Case(
        run=lambda: attention(0, q, k, v, None),
        twin=lambda: TorchAttention(pool, batch, scale)(0, q, k, v, None),
        tolerance=_tolerance(shapes),
    )


def shuffled_tables(shapes: Shapes, pool: KVPool, lengths: list[int]) -> list[tuple[int, ...]]:
    free = iter(torch.randperm(pool.layout.num_blocks, generator=torch.Generator().manual_seed(0)).tolist())
    return [tuple(next(free) for _ in range(-(-length // shapes.block_size))) for length in lengths]


def step_case(shapes: Shapes, pool: KVPool, model: Decoder, capture: Capture) -> Case:
    """A decode step of the whole batch, each sequence at the end of its context, through a graph; and eagerly."""
    from engine.kernels.triton_attention import TritonDecode

    tables = shuffled_tables(shapes, pool, [shapes.context] * shapes.batch)
    plan = StepPlan(
        tuple(Chunk(str(row), (row % shapes.vocab,), shapes.context - 1, table) for row, table in enumerate(tables))
    )
    graphs = DecodeGraphs(
        model, pool, max_batch=shapes.batch, max_context=shapes.context, capture=capture, make_attention=TritonDecode
    )
    runner = ModelRunner(model, pool, graphs)
    # Rounding adds up over the layers.
    return Case(
        run=lambda: runner.run(plan), twin=lambda: torch_step(model, pool, plan), tolerance=3 * _tolerance(shapes)
    )


def torch_step(model: Decoder, pool: KVPool, plan: StepPlan) -> torch.Tensor:
    """Logits of single tokens, with torch's operations alone."""
    chunks, twin = plan.chunks, Decoder(model.config, model.weights)
    batch = batch_of([(chunk.start, 1, chunk.block_ids) for chunk in chunks], pool.layout.block_size)
    token_ids = torch.tensor([chunk.token_ids[0] for chunk in chunks], device=pool.device)
    positions = torch.tensor([chunk.start for chunk in chunks], device=pool.device)
    attention = TorchAttention(pool, batch, model.config.head_dim**-0.5)
    return twin.logits(twin.hidden_states(token_ids, positions, positions + 1, attention))


def llama_config(shapes: Shapes) -> ModelConfig:
    """Llama 3's architecture, without its rotary scaling."""
    return ModelConfig(
        architecture="llama",
        num_layers=shapes.layers,
        hidden_size=shapes.hidden,
        num_heads=shapes.heads,
        num_kv_heads=shapes.kv_heads,
        head_dim=shapes.head_dim,
        intermediate_size=shapes.intermediate,
        vocab_size=shapes.vocab,
        max_positions=max(8192, shapes.context),
        rope_theta=500_000.0,
        rope_scaling=RopeScaling(),
        norm_eps=1e-5,
        tied_embeddings=False,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        windows=(None,) * shapes.layers,
        eos_token_ids=(),
        bos_token_id=None,
    )


def random_model(shapes: Shapes, device: torch.device) -> Decoder:
    """A model with random weights, and Triton between its products."""
    from engine.kernels.triton_pointwise import TritonPointwise

    weights, parts = allocate(llama_config(shapes), dtype=shapes.dtype, device=device)
    for part in parts:
        if part.rows.dim() == 1:
            part.rows.fill_(1.0)
        else:
            part.rows.normal_(std=0.02)
    return Decoder(llama_config(shapes), weights, TritonPointwise())


def step_weight_bytes(model: Decoder) -> int:
    """Bytes of weights that a step reads: all but the embedding, of which it reads some rows."""
    embedding = model.weights.embedding
    return model.num_bytes - embedding.numel() * embedding.element_size()


def _tolerance(shapes: Shapes) -> float:
    return 1e-4 if shapes.dtype == torch.float32 else 3e-2


# -- timing ------------------------------------------------------------------------------------------------------------


def device_seconds(run: Callable[[], object]) -> float:
    """Median time on the device, calls one behind the other."""
    for _ in range(3):
        run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(ROUNDS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(marks)) / 1e3


def wall_seconds(run: Callable[[], object]) -> float:
    """Median time from the call until the device is done, what the host does included."""
    times = []
    for _ in range(ROUNDS + 3):
        started_s = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started_s)
    return statistics.median(times[3:])


def copy_bytes_per_s(device: torch.device) -> float:
    """Bytes read and written per second by a copy within the device's memory."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / device_seconds(lambda: target.copy_(source))


def flash_sdpa_seconds(shapes: Shapes, device: torch.device) -> float:
    """Torch's flash kernel for the same prompt, keys and values repeated for every query head beforehand."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    shape = (1, shapes.heads, shapes.prompt, shapes.head_dim)
    q, k, v = (torch.randn(shape, dtype=shapes.dtype, device=device) for _ in range(3))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return device_seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))


# -- the two ways to run -----------------------------------------------------------------------------------------------


def cases(shapes: Shapes, device: torch.device, capture: Capture) -> tuple[dict[str, Case], Decoder]:
    """What is compared and timed, over one pool, and the model of the step."""
    sequences = max(shapes.batch, -(-shapes.prompt // shapes.context))
    pool = KVPool(shapes.layout(sequences, shapes.context), device)
    pool.tensor.normal_()
    model = random_model(shapes, device)
    found = {
        "decode attention": attention_case(shapes, pool, [(shapes.context - 1, 1)] * shapes.batch),
        "prefill attention": attention_case(shapes, pool, [(0, shapes.prompt)]),
        "decode step": step_case(shapes, pool, model, capture),
    }
    return found, model


def check(shapes: Shapes) -> None:
    """Every case against its twin, on a CPU in the interpreter."""
    found, _ = cases(shapes, torch.device("cpu"), capture=lambda step: step)
    errors = {name: case.error() for name, case in found.items()}
    for name, error in errors.items():
        print(f"{name}: {error:.1e} off the torch twin")
    print(json.dumps({"bench": "gpu", "check": errors}))


def measure(shapes: Shapes) -> None:
    """Compare, time, print."""
    device = torch.device("cuda", torch.cuda.current_device())
    bandwidth = copy_bytes_per_s(device)
    print(f"{torch.cuda.get_device_name(device)}; a copy within its memory: {bandwidth / 1e9:.0f} GB/s")
    found, model = cases(shapes, device, CudaCapture(device))
    for name, case in found.items():
        print(f"{name}: {case.error():.1e} off the torch twin")
    decode_s = device_seconds(found["decode attention"].run)
    prefill_s, flash_s = device_seconds(found["prefill attention"].run), flash_sdpa_seconds(shapes, device)
    step_s = wall_seconds(found["decode step"].run)
    weight_bytes, kv_bytes = step_weight_bytes(model), shapes.kv_bytes(shapes.layers)
    limit_s = (weight_bytes + kv_bytes) / bandwidth
    ratios = {
        "decode_attention_vs_bandwidth": shapes.kv_bytes(1) / decode_s / bandwidth,
        "prefill_attention_vs_sdpa_flash": flash_s / prefill_s,
        "decode_step_vs_bytes": step_s / limit_s,
    }
    print(f"decode attention, {shapes.batch} x {shapes.context} tokens: {decode_s * 1e6:.0f} us a layer")
    print(f"prefill attention, {shapes.prompt} tokens: {prefill_s * 1e6:.0f} us a layer; SDPA {flash_s * 1e6:.0f} us")
    print(f"decode step: {step_s * 1e3:.2f} ms; its {(weight_bytes + kv_bytes) / 1e9:.1f} GB take {limit_s * 1e3:.2f}")
    print(json.dumps({"bench": "gpu", "ratios": {name: round(ratio, 3) for name, ratio in ratios.items()}}))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="compare on tiny shapes on a CPU, measure nothing")
    sizes = ("batch", "context", "prompt", "layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab")
    for name in sizes:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    arguments = parser.parse_args()
    given = {name: value for name in sizes if (value := getattr(arguments, name)) is not None}
    with torch.inference_mode():
        if arguments.check:
            os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported
            check(replace(TINY, **given))
            return 0
        if not torch.cuda.is_available():
            print("bench.gpu measures a CUDA device and there is none here; --check compares results without one")
            return 2
        measure(replace(Shapes(), **given))
    return 0


if __name__ == "__main__":
    sys.exit(main())
