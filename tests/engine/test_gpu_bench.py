"""The GPU bench gives no numbers where there is no GPU, and what it would time is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import gpu
from engine.weights import allocate, tensors

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_cuda_it_says_so_in_one_line_and_ends_with_two(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu"])
    assert gpu.main() == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert "CUDA" in line


def test_what_it_times_equals_the_twins_on_tiny_shapes() -> None:
    """Through the same cases, in the interpreter; a graph is the function that it would be captured from."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "bench.gpu", "--check", "--batch", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told.keys() == {"bench", "check"}, "no ratio of what was not measured"
    assert told["check"].keys() == {"decode attention", "prefill attention", "decode step"}
    assert max(told["check"].values()) < 1e-5


def test_the_default_is_llama_3_8b() -> None:
    shapes = gpu.Shapes()
    assert shapes.kv_bytes(shapes.layers) == 64 * 4096 * 131072
    layout = shapes.layout(shapes.batch, shapes.context)
    assert layout.pool_bytes == shapes.kv_bytes(shapes.layers)
    weights, _ = allocate(gpu.llama_config(shapes), dtype=shapes.dtype, device=torch.device("meta"))
    assert sum(tensor.numel() for tensor in tensors(weights)) == 8_030_261_248
