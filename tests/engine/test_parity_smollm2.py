"""The default model answers as transformers does on the same dequantised weights, token by token, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from model_rig import greedy, make_runner

from engine.runner import ModelRunner

pytestmark = pytest.mark.model
PROMPTS = {
    "one token": [1],
    "a block": list(range(100, 116)),
    "a chat": [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198],
    "a long one": [(7 * i * i + 13 * i) % 40_000 + 20 for i in range(300)],
}
COUNT = 12


@pytest.fixture(scope="module")
def runner(smollm2_path: Path) -> ModelRunner:
    return make_runner(smollm2_path)


@pytest.mark.parametrize("name", PROMPTS)
def test_greedy_output_equals_transformers(
    runner: ModelRunner, transformers_twin: transformers.LlamaForCausalLM, name: str
) -> None:
    prompt = PROMPTS[name]
    expected = transformers_twin.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=COUNT,
        min_new_tokens=COUNT,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0, len(prompt) :].tolist()
    assert greedy(runner, prompt, COUNT) == expected
