"""Compiles every Triton kernel for GPUs that are not here and prints what each takes: shared memory, matrix
instructions, asynchronous copies. The shapes are Llama-3-8B's in bfloat16.

A process of its own: nothing here may be in interpreter mode.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.kernels import triton_attention, triton_decode, triton_pointwise, triton_prefill
from engine.kernels.tiling import keys_together, rows_together

BF16 = dict.fromkeys(("q", "k", "v", "pages", "mixed", "delta", "normed", "qk", "gate_up", "out"), "*bf16")
FP32 = dict.fromkeys(("sums_out", "logs_out", "sums_in", "logs_in", "x", "weight", "cos", "sin"), "*fp32")
WHOLE = dict.fromkeys(("rows", "lengths", "longest", "slots"), "*i64") | {"tables": "*i32", "tiles": "*i32"}
TYPES = BF16 | FP32 | WHOLE | {"scale": "fp32", "eps": "fp32"}

SHAPE = {"BLOCK": 16, "DIM": 128, "DIM_PADDED": 128}
KEYS = keys_together(128, 2)
ROWS = rows_together(512, 4, 128, 2)
# name: (kernel, compile-time arguments, warps, stages)
KERNELS: dict[str, tuple[Any, dict[str, Any], int, int]] = {
    "decode": (
        triton_decode._partial,
        SHAPE | {"GROUP": 4, "ROWS": 16, "SPLITS": 4, "KEYS": KEYS, "WINDOW": 0},
        4,
        triton_decode.STAGES,
    ),
    "decode in one part, window": (
        triton_decode._partial,
        SHAPE | {"GROUP": 4, "ROWS": 16, "SPLITS": 1, "KEYS": KEYS, "WINDOW": 4096},
        4,
        triton_decode.STAGES,
    ),
    "reduce": (
        triton_decode._reduce,
        {"SPLITS": 4, "KEYS": KEYS, "PARTS": 16, "DIM": 128, "DIM_PADDED": 128, "WINDOW": 0},
        4,
        1,
    ),
    "prefill": (
        triton_prefill._chunk,
        SHAPE | {"GROUP": 4, "ROWS": ROWS, "KEYS": KEYS, "WINDOW": 0},
        8,
        triton_prefill.STAGES,
    ),
    "prefill of wide heads": (
        triton_prefill._chunk,
        {"BLOCK": 16, "DIM": 256, "DIM_PADDED": 256, "GROUP": 8, "KEYS": keys_together(256, 2), "WINDOW": 512}
        | {"ROWS": rows_together(512, 8, 256, 2)},
        4,
        triton_prefill.STAGES,
    ),
    "write": (triton_attention._write, SHAPE | {"HEADS": 8, "HEADS_PADDED": 8}, 4, 1),
    "add_norm": (triton_pointwise._add_norm, {"ADD": True, "SIZE": 4096, "PADDED": 4096}, 8, 1),
    "rotate": (
        triton_pointwise._rotate,
        {"HEADS": 40, "HEADS_PADDED": 64, "HALF": 64, "HALF_PADDED": 64},
        4,
        1,
    ),
    "gated": (triton_pointwise._gated, {"SIZE": 14336, "COLUMNS": 1024}, 4, 1),
}


def compiled(capability: int) -> Iterator[tuple[str, dict[str, int]]]:
    for name, (kernel, constants, warps, stages) in KERNELS.items():
        names = kernel.arg_names
        types = {arg: "constexpr" if arg in constants else TYPES.get(arg, "i32") for arg in names}
        aligned = {
            (place,): [["tt.divisibility", 16]]
            for place, arg in enumerate(names)
            if types[arg] not in ("constexpr", "fp32")
        }
        source = ASTSource(kernel, types, constants, aligned)
        options = {"num_warps": warps, "num_stages": stages}
        result = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        code = result.asm["ptx"]
        yield (
            name,
            {
                "shared": result.metadata.shared,
                "copies": code.count("cp.async.cg.shared.global"),
                "mma": code.count("mma.sync"),
                "wgmma": code.count("wgmma.mma_async"),
            },
        )


if __name__ == "__main__":
    print(json.dumps({capability: dict(compiled(capability)) for capability in (80, 90)}))
