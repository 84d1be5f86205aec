"""The default model on packed weights says what it says in float32: logits within noise, perplexity within 0.7 %,
the capital of France."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_rig import BLOCK, all_logits, make_runner

from cluster.text import Text
from engine.config import EngineConfig
from engine.cpu_runner import CpuRunner
from engine.engine import Engine
from engine.kernels.cpu import build
from engine.kernels.cpu.weights import Reader
from engine.kv import KVLayout, KVPool
from engine.loaders import open_checkpoint
from engine.types import Request, SamplingParams

pytestmark = pytest.mark.model
try:
    build.load()
except build.Unavailable as reason:
    pytest.skip(f"no compiled step here: {reason}", allow_module_level=True)

TEXT = """\
The water cycle describes how water moves above, on, and below the surface of the Earth. Heat from the sun
turns water from oceans, lakes and rivers into vapour, which rises, cools, and condenses into clouds. When the
drops become heavy enough they fall as rain or snow. Some of that water runs over the land into streams and
rivers and finds its way back to the sea; some soaks into the ground, feeds plants, and fills the spaces
between grains of sand and rock, where it may stay for thousands of years. People have built dams, canals and
wells to make use of it, and the growth of cities has changed how much rain can reach the soil. In a forest
most of a light rain never reaches the ground at all, because leaves hold it until it evaporates again. Snow
on mountains stores the winter's water and releases it slowly in spring, which is why a warm winter can mean a
dry summer for farmers far below."""


@pytest.fixture(scope="module")
def tokens(smollm2_path: Path) -> tuple[int, ...]:
    return Text.load(smollm2_path).encode(TEXT)


@pytest.fixture(scope="module")
def exact(smollm2_path: Path, tokens: tuple[int, ...]) -> torch.Tensor:
    """Logits of the dequantised weights in float32."""
    return all_logits(make_runner(smollm2_path), tokens)


@pytest.mark.parametrize(("weights", "noise"), [("bf16", 2e-2), ("as they come", 1e-2)])
def test_logits_and_perplexity_stay_those_of_float32(
    smollm2_path: Path, tokens: tuple[int, ...], exact: torch.Tensor, weights: str, noise: float
) -> None:
    checkpoint = open_checkpoint(smollm2_path)
    got = _logits(smollm2_path, checkpoint.read if weights == "bf16" else checkpoint.read_kept, tokens)
    assert float((got - exact).norm() / exact.norm()) < noise
    assert _perplexity(got, tokens) == pytest.approx(_perplexity(exact, tokens), rel=7e-3)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_answers_survive_packing(smollm2_path: Path, kernels: str) -> None:
    config = EngineConfig(
        model=str(smollm2_path), dtype="bfloat16", weights="packed", kernels=kernels, num_blocks=16, threads=1
    )
    engine, text = Engine.open(config), Text.load(smollm2_path)
    prompt = text.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    engine.submit(Request(request_id="a", token_ids=prompt, sampling=SamplingParams(temperature=0.0, max_tokens=20)))
    answer: list[int] = []
    while engine.has_work():
        result = engine.step(0.0)
        answer += [token.token_id for one in result.progress for token in one.tokens] if result else []
    assert text.decode(answer) == "The capital of France is Paris."


def _logits(path: Path, read: Reader, tokens: tuple[int, ...]) -> torch.Tensor:
    config = open_checkpoint(path).config
    pool = KVPool(KVLayout(32, config.num_layers, config.num_kv_heads, config.head_dim, BLOCK, "bfloat16"))
    return all_logits(CpuRunner(config, read, pool, threads=1), tokens)  # type: ignore[arg-type]


def _perplexity(logits: torch.Tensor, tokens: tuple[int, ...]) -> float:
    return float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:])).exp())
