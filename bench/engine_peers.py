"""The workload of `bench.engine`, and its peers; run by each peer's own Python, so it imports no room.

    python bench/engine_peers.py PEER MODEL_DIRECTORY THREADS ROUNDS

A rate is what a whole program gives: decode tokens/s is (tokens after the first) / (time of a long run - time of one
before it that ended with its first token), the median of the rounds; prefill is the best of them. Prompts are random
and never repeat, and prefix caches are off. The last line is JSON: {"decode": {batch: rate}, "prefill": rate}.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator

PROMPT, PREFILL = 128, 1024
NEW_TOKENS = {1: 64, 8: 96, 32: 128}
"""Of 32 prompts the first step takes so long that few tokens after it would be lost in how much it varies."""
MAX_LEN = 2048
LAST_TOKEN_ID = 40_000

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], None]
"""Generate so many tokens after each prompt, greedily, never ending early."""


def measure(generate: Generate, rounds: int) -> dict[str, object]:
    """Rates in tokens/s; see the module's head."""
    prompts = _random_prompts()
    generate(prompts(1, PROMPT), 4)
    decode = {batch: _decode_rate(generate, prompts, batch, rounds) for batch in NEW_TOKENS}
    prefill = PREFILL / min(_seconds(generate, prompts(1, PREFILL), 1) for _ in range(rounds))
    return {"decode": decode, "prefill": prefill}


def _decode_rate(generate: Generate, prompts: Callable[[int, int], Prompts], batch: int, rounds: int) -> float:
    count = NEW_TOKENS[batch]
    pairs = [[_seconds(generate, prompts(batch, PROMPT), new) for new in (1, 1 + count)] for _ in range(rounds)]
    return batch * count / statistics.median(whole - first for first, whole in pairs)


def _seconds(generate: Generate, prompts: Prompts, count: int) -> float:
    started = time.perf_counter()
    generate(prompts, count)
    return time.perf_counter() - started


def _random_prompts() -> Callable[[int, int], Prompts]:
    chance = random.Random(0)
    return lambda batch, length: [[chance.randrange(100, LAST_TOKEN_ID) for _ in range(length)] for _ in range(batch)]


def vllm(model: str, threads: int) -> Generate:
    """vLLM on the CPU, bf16."""
    os.environ.update(
        VLLM_CPU_OMP_THREADS_BIND=f"0-{threads - 1}", VLLM_CPU_KVCACHE_SPACE="2", VLLM_LOGGING_LEVEL="ERROR"
    )
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=MAX_LEN,
        max_num_batched_tokens=MAX_LEN,
        max_num_seqs=max(NEW_TOKENS),
        enable_prefix_caching=False,
    )

    def generate(prompts: Prompts, count: int) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        done = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        assert all(len(one.outputs[0].token_ids) == count for one in done)

    return generate


def transformers(model: str, threads: int) -> Generate:
    """transformers, bf16, its default attention."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()

    def generate(prompts: Prompts, count: int) -> None:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            loaded.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )

    return generate


PEERS: dict[str, Callable[[str, int], Generate]] = {"vllm": vllm, "transformers": transformers}


def _lines(argv: list[str]) -> Iterator[str]:
    peer, model, threads, rounds = argv
    yield json.dumps(measure(PEERS[peer](model, int(threads)), int(rounds)))


if __name__ == "__main__":
    for line in _lines(sys.argv[1:]):
        print(line, flush=True)
