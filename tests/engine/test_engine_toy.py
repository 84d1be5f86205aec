"""The whole engine on a tiny random Llama: loader, pool, runner, scheduler and sampler together."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from fakes import Story, make_request, run_all

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError
from engine.toy import make_toy_checkpoint
from engine.types import Request


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(make_toy_checkpoint(tmp_path_factory.mktemp("toy")))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def opened(checkpoint: Path, **settings: object) -> Engine:
    return Engine.open(EngineConfig(model=str(checkpoint), **{"num_blocks": 64, **settings}))  # type: ignore[arg-type]


def prompts() -> list[Request]:
    """Lengths around a block's edge, two with a common start."""
    shared = tuple(range(40, 100))
    made = [tuple((i * i + length) % 256 for i in range(length)) for length in (1, 15, 16, 17, 130)]
    made += [(*shared, 7, 8), (*shared, 9)]
    return [make_request(prompt, f"p{i}", max_tokens=12, logprobs=2) for i, prompt in enumerate(made)]


def outputs(story: Story) -> list[list[int]]:
    return [story.tokens(request.request_id) for request in prompts()]


def test_chunk_budgets_neighbours_prefix_hits_and_preemption_change_no_token(checkpoint: Path) -> None:
    alone = opened(checkpoint, prefix_caching=False, max_num_batched_tokens=4096)
    want = []
    for request in prompts():
        story = run_all(alone, request)
        want.append(story.tokens(request.request_id))
        for token in story.full(request.request_id):
            assert token.top[0][1] - token.top[1][1] > 1e-3, "near ties make no fair comparison"
    for budget in (16, 64, 4096):
        engine = opened(checkpoint, max_num_batched_tokens=budget)
        assert outputs(run_all(engine, *prompts())) == want
        assert outputs(run_all(engine, *prompts())) == want
        assert engine.load(0.0).prefix_hits > 0
    tight = opened(checkpoint, num_blocks=10, max_num_batched_tokens=64)
    long = [make_request(tuple(range(i, i + 50)), f"l{i}", max_tokens=90) for i in range(3)]
    roomy = run_all(opened(checkpoint), *long)
    squeezed = run_all(tight, *long)
    assert tight.load(0.0).preemptions > 0
    assert [squeezed.tokens(f"l{i}") for i in range(3)] == [roomy.tokens(f"l{i}") for i in range(3)]


def test_blocks_copied_between_two_pools_go_on_with_the_same_tokens(checkpoint: Path) -> None:
    request = make_request(tuple(range(3, 80)), "x", max_tokens=16)
    want = run_all(opened(checkpoint), request).tokens("x")
    prefill, decode = opened(checkpoint, max_num_batched_tokens=32), opened(checkpoint, num_blocks=20)
    assert prefill.info.hash_root == decode.info.hash_root
    assert prefill.info.layout == decode.info.layout
    prefill.submit(request, hold=True)
    first = tuple(Story(prefill).run().full("x"))
    lease = decode.lease(request)
    assert lease is not None
    size = prefill.info.block_bytes
    source, target = prefill.pool_bytes(), decode.pool_bytes()
    assert len(source) == 64 * size
    for here, there in zip(prefill.block_table("x"), lease.block_ids, strict=True):
        target[there * size : (there + 1) * size] = source[here * size : (here + 1) * size]
    decode.adopt(request, first)
    story = Story(decode).run()
    assert [first[0].token_id, *story.tokens("x")] == want


def test_memory_too_small_for_one_block_is_refused_by_name(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="kv_memory_bytes"):
        opened(checkpoint, num_blocks=None, kv_memory_bytes=100)


def test_the_pool_is_sized_from_memory_and_the_context_from_the_model(checkpoint: Path) -> None:
    engine = opened(checkpoint, num_blocks=None, kv_memory_bytes=1 << 20, max_model_len=1 << 20)
    info = engine.info
    assert info.total_blocks == (1 << 20) // info.block_bytes
    assert info.max_model_len < 1 << 20
    assert len(engine.pool_bytes()) == info.total_blocks * info.block_bytes


def test_a_pool_is_a_file_only_where_peers_read_it_and_is_used_alike(checkpoint: Path) -> None:
    engines = [opened(checkpoint, kv_shared=shared) for shared in (True, False)]
    assert [hasattr(engine.pool_bytes().obj, "fileno") for engine in engines] == [hasattr(os, "memfd_create"), False]
    first, second = (outputs(run_all(engine, *prompts())) for engine in engines)
    assert first == second


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_real_model_says_the_same_after_either_way_of_preemption(checkpoint: Path, preemption: str) -> None:
    requests = [make_request(tuple(range(i, i + 50)), f"l{i}", max_tokens=90) for i in range(3)]
    roomy = run_all(opened(checkpoint, prefix_caching=False), *requests)
    tight = opened(checkpoint, num_blocks=10, prefix_caching=False, preemption=preemption)
    squeezed = run_all(tight, *requests)
    load = tight.load(0.0)
    assert load.preemptions > 0
    assert load.swap_preemptions == (load.preemptions if preemption == "swap" else 0)
    assert [squeezed.tokens(f"l{i}") for i in range(3)] == [roomy.tokens(f"l{i}") for i in range(3)]


def test_swap_space_is_bounded_by_its_bytes(checkpoint: Path) -> None:
    engine = opened(checkpoint, swap_bytes=1 << 20)
    assert engine.load(0.0).swap_total_blocks == (1 << 20) // engine.info.block_bytes
    assert opened(checkpoint, swap_bytes=0).load(0.0).swap_total_blocks == 0


def test_a_swap_space_that_holds_no_block_is_refused_where_it_must_be_used_and_told_where_it_may(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    least = opened(checkpoint).info.block_bytes
    with pytest.raises(ConfigError, match=f"swap_bytes is {least - 1}; it must be at least {least}, the bytes of one"):
        opened(checkpoint, preemption="swap", swap_bytes=least - 1)
    assert opened(checkpoint, preemption="swap", swap_bytes=least).load(0.0).swap_total_blocks == 1
    assert not caplog.records
    opened(checkpoint, swap_bytes=1)
    assert f"holds no KV block of {least}" in caplog.text
