"""The torch kernels equal a naive reading of attention, the Triton ones equal the torch ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from engine.kernels import attention_for
from engine.kernels.batch import AttentionBatch, batch_of
from engine.kernels.decode_batch import DecodeBatch, decode_batch_of
from engine.kernels.tiling import split_count
from engine.kernels.torch_attention import TorchAttention
from engine.kernels.torch_decode import TorchDecode
from engine.kv import KVLayout, KVPool

ROOT = Path(__file__).parents[2]
SCALE = 0.3


def naive(pool: torch.Tensor, layer: int, q: torch.Tensor, batch: AttentionBatch, window: int | None) -> torch.Tensor:
    """One query head and token at a time, straight from the definition."""
    group, mixed = q.shape[1] // pool.shape[1], torch.empty_like(q)
    for span in batch.spans:
        stored = pool[list(span.blocks), :, layer].float()  # (blocks, kv_heads, 2, block_size, head_dim)
        keys, values = stored.permute(2, 1, 0, 3, 4).flatten(2, 3)
        for token in range(span.query):
            position = span.start + token
            seen = slice(0 if window is None else max(0, position - window + 1), position + 1)
            for head in range(q.shape[1]):
                k, v = keys[head // group, seen], values[head // group, seen]
                weights = (k @ q[span.first + token, head] * SCALE).softmax(0)
                mixed[span.first + token, head] = weights @ v
    return mixed


@pytest.mark.parametrize("window", [None, 1, 9, 1000])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (9, 3), (4, 1)])
@pytest.mark.parametrize(
    "pieces",
    [
        [(0, 1)],
        [(31, 1), (0, 1), (16, 1)],
        [(0, 33)],
        [(20, 5), (7, 1), (0, 16), (150, 1), (32, 2)],
        [(10, 140)],
    ],
    ids=["first token", "decodes", "prompt", "mixed", "several tiles"],
)
def test_the_twin_equals_the_definition(
    pieces: list[tuple[int, int]], heads: int, kv_heads: int, window: int | None
) -> None:
    torch.manual_seed(0)
    layout = KVLayout(64, 2, kv_heads, 8, 16, "float32")
    pool = KVPool(layout)
    pool.tensor.normal_()
    free = iter(torch.randperm(64).tolist())
    batch = batch_of([(start, n, [next(free) for _ in range(-(-(start + n) // 16))]) for start, n in pieces], 16)
    q, k, v = (torch.randn(batch.num_tokens, count, 8) for count in (heads, kv_heads, kv_heads))
    mixed = TorchAttention(pool, batch, SCALE)(1, q, k, v, window)
    slots = torch.tensor(batch.slots())
    assert torch.equal(pool.tensor[slots // 16, :, 1, 0, slots % 16], k)
    assert torch.equal(pool.tensor[slots // 16, :, 1, 1, slots % 16], v)
    assert (mixed - naive(pool.tensor, 1, q, batch, window)).abs().max() < 1e-5


def test_only_the_slots_of_the_step_and_the_tail_of_a_begun_block_are_touched() -> None:
    pool = KVPool(KVLayout(8, 2, 1, 4, 16, "float32"))
    pool.tensor.fill_(7.0)
    batch = batch_of([(14, 4, [2, 5])], 16)
    attend = TorchAttention(pool, batch, SCALE)
    attend(0, torch.ones(4, 1, 4), torch.ones(4, 1, 4), torch.ones(4, 1, 4), None)
    assert torch.all(pool.tensor[[0, 1, 3, 4, 6, 7]] == 7)
    assert torch.all(pool.tensor[2, :, :, :, :14] == 7)
    assert torch.all(pool.tensor[2, :, 0, :, 14:] == 1)
    assert torch.all(pool.tensor[5, :, 0, :, :2] == 1)
    assert torch.all(pool.tensor[5, :, :, :, 2:] == 0), "the former owner's slots are gone"


def test_a_pool_narrower_than_the_products_gives_a_prompt_what_a_cached_one_gets() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(40, 4, 8), torch.randn(40, 2, 8), torch.randn(40, 2, 8)
    mixed = []
    for cuts in ([(0, 40)], [(0, 32), (32, 8)]):
        pool = KVPool(KVLayout(8, 1, 2, 8, 16, "bfloat16"))
        parts = []
        for start, n in cuts:
            part = slice(start, start + n)
            attend = TorchAttention(pool, batch_of([(start, n, [4, 1, 3])], 16), SCALE)
            parts.append(attend(0, q[part], k[part], v[part], None))
        mixed.append(torch.cat(parts))
    assert (mixed[0] - mixed[1]).abs().max() < 1e-6


def test_a_block_table_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="need 2 blocks"):
        batch_of([(10, 7, [1])], 16)
    with pytest.raises(ValueError, match="0 tokens"):
        batch_of([(0, 0, [1])], 16)


def test_the_device_chooses_the_kernel() -> None:
    assert attention_for(torch.device("cpu")) is TorchAttention


@pytest.fixture(scope="module")
def triton_errors() -> dict[str, dict[str, float]]:
    """Largest differences from the twin, by case, measured in a process of its own."""
    return run_script("triton_interpreter.py", TRITON_INTERPRET="1")


def run_script(name: str, **environment: str) -> dict[str, dict[str, Any]]:
    pytest.importorskip("triton")
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    script = ROOT / "tests" / "engine" / name
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_triton_equals_its_twin_for_decodes_prompts_windows_odd_shapes_and_pointwise_operations(
    triton_errors: dict[str, dict[str, float]],
) -> None:
    exact = {name: errors for name, errors in triton_errors.items() if "bfloat16" not in name}
    assert len(exact) >= 20
    assert {name: errors for name, errors in exact.items() if errors["attention"] > 1e-5 or errors["written"]} == {}


def test_triton_writes_bfloat16_to_the_last_place(triton_errors: dict[str, dict[str, float]]) -> None:
    """The interpreter cuts off where a GPU rounds: values below 4 may differ by their last bit, 2**-6."""
    errors = triton_errors["mixed bfloat16 pool"]
    assert errors["written"] <= 2**-6
    assert errors["attention"] < 0.03


def test_every_triton_kernel_compiles_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    """The interpreter takes what the compiler refuses. Keys and values must be on their way 16 bytes at a time while
    others are multiplied, and the shared memory must be what even the smaller GPUs of a generation have."""
    found = run_script("triton_for_gpus.py", TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    for kernels in found.values():
        assert {name: taken for name, taken in kernels.items() if taken["shared"] > 99 * 1024} == {}
        assert all(kernels[name]["copies"] >= 16 for name in ("decode", "decode in one part, window", "prefill"))
        assert kernels["decode"]["mma"]
    assert found["90"]["prefill"]["wgmma"]


def test_a_context_is_split_until_every_processor_has_work_and_no_further() -> None:
    splits = {
        (batch, context): split_count(batch, 8, context, 132)
        for batch in (1, 8, 64, 512)
        for context in (1, 200, 4096, 131072)
    }
    for (batch, context), count in splits.items():
        assert 1 <= count <= max(1, -(-context // 256)), "a split has keys enough to be worth its start"
        assert count == 1 or batch * 8 * count <= 2 * 3 * 132 * 4 + batch * 8, (batch, context)
    assert splits[1, 4096] == 16
    assert splits[64, 4096] * 64 * 8 >= 3 * 132 * 4
    assert all(splits[512, context] == 1 for context in (1, 200, 4096))
    assert splits[1, 200] == 1


def test_tiles_cover_every_token_once_and_begin_with_those_that_see_most() -> None:
    tiles_of = pytest.importorskip("engine.kernels.triton_prefill").tiles_of
    batch = batch_of([(0, 35, range(3)), (100, 20, range(8)), (7, 16, range(2))], 16)
    tiles = tiles_of(batch.spans, 16)
    covered = [token for _, first, count, _ in tiles for token in range(first, first + count)]
    assert sorted(covered) == list(range(batch.num_tokens))
    assert max(count for _, _, count, _ in tiles) == 16
    starts = [start for *_, start in tiles]
    assert starts == sorted(starts, reverse=True)


@pytest.mark.parametrize("window", [None, 9])
def test_a_batch_of_single_tokens_equals_its_general_form_and_leaves_padding_alone(window: int | None) -> None:
    torch.manual_seed(0)
    layout = KVLayout(16, 2, 2, 8, 16, "float32")
    batch = batch_of([(20, 1, [9, 2]), (0, 1, [4]), (15, 1, [5]), (33, 1, [1, 3, 7])], 16)
    q, k, v = torch.randn(4, 6, 8), torch.randn(4, 2, 8), torch.randn(4, 2, 8)
    history = torch.randn(layout.shape)
    pools = [KVPool(layout), KVPool(layout)]
    for pool in pools:
        pool.tensor.copy_(history)
    general = TorchAttention(pools[0], batch, SCALE)(1, q, k, v, window)
    decodes = decode_batch_of(batch, batch.spans, torch.device("cpu"))
    padded = DecodeBatch(
        rows=torch.arange(6),
        lengths=F.pad(decodes.lengths, (0, 2)),
        slots=F.pad(decodes.slots, (0, 2), value=-1),
        tables=F.pad(decodes.tables, (0, 3, 0, 2)),
        longest=decodes.longest,
    )
    q, k, v = (F.pad(x, (0, 0, 0, 0, 0, 2), value=torch.nan) for x in (q, k, v))
    single = TorchDecode(pools[1], padded, SCALE, 96)(1, q.nan_to_num(3.0), k, v, window)
    assert (single[:4] - general).abs().max() < 1e-6
    assert not single[4:].any()
    slots = batch.slots()
    begun = {slot // 16 for slot in slots}
    kept = [block for block in range(16) if block not in begun]
    assert torch.equal(pools[1].tensor[kept], history[kept])
    assert not pools[1].tensor.isnan().any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_triton_equals_its_twin_on_a_gpu() -> None:
    torch.manual_seed(0)
    layout = KVLayout(32, 2, 2, 64, 16, "bfloat16")
    batch = batch_of([(0, 35, [9, 2, 30]), (20, 1, [4, 5]), (17, 20, [11, 7, 8])], 16)
    q, k, v = (torch.randn(batch.num_tokens, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (6, 2, 2))
    history = torch.randn(layout.shape, device="cuda").to(torch.bfloat16)
    results = []
    for kind in (TorchAttention, attention_for(torch.device("cuda"))):
        pool = KVPool(layout, "cuda")
        pool.tensor.copy_(history)
        results.append(kind(pool, batch, 0.125)(1, q, k, v, None).float())
    assert (results[0] - results[1]).abs().max() < 0.03
