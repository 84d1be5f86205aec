"""Replayed decode steps equal eager ones. A graph is stood in for by the very function that it would be captured from:
what is proven is the bookkeeping around it, which is where a replay can go wrong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from model_rig import BLOCK, make_runner, random_tokens

from engine.cuda_graphs import DecodeGraphs, StaticInputs, Step, decode_graphs_for, padded_sizes
from engine.kernels.batch import batch_of
from engine.runner import ModelRunner
from engine.toy import make_toy_checkpoint
from engine.types import Chunk, StepPlan

CONTEXT = 96
CLOSE = 1e-4


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_checkpoint(tmp_path_factory.mktemp("toy"))


class Recorder:
    """Captures a step by keeping it, as a graph does: one result tensor, overwritten by each replay."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def __call__(self, step: Step) -> Step:
        self.captures += 1
        result = step()

        def replay() -> torch.Tensor:
            self.replays += 1
            return result.copy_(step())

        return replay


def graphed(toy: Path, max_batch: int = 12) -> tuple[ModelRunner, DecodeGraphs, Recorder]:
    runner, recorder = make_runner(toy), Recorder()
    graphs = DecodeGraphs(runner.model, runner.pool, max_batch=max_batch, max_context=CONTEXT, capture=recorder)
    return ModelRunner(runner.model, runner.pool, graphs), graphs, recorder


def decode(tokens: Sequence[int], tables: Sequence[tuple[int, ...]], starts: Sequence[int]) -> StepPlan:
    rows = zip(tokens, tables, starts, strict=True)
    return StepPlan(tuple(Chunk(f"r{i}", (token,), start, table) for i, (token, table, start) in enumerate(rows)))


def test_sizes_are_powers_of_two_then_multiples_of_eight() -> None:
    assert [padded_sizes(most) for most in (1, 3, 4, 5, 8, 20)] == [
        (1,),
        (1, 2, 4),
        (1, 2, 4),
        (1, 2, 4, 8),
        (1, 2, 4, 8),
        (1, 2, 4, 8, 16, 24),
    ]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 11])
def test_a_replayed_batch_equals_the_eager_one_step_after_step(toy: Path, count: int) -> None:
    runner, _, recorder = graphed(toy)
    eager = make_runner(toy)
    lengths = [(7 * i) % 37 + 2 for i in range(count)]
    tables = [tuple(range(5 * i, 5 * i + 5))[::-1] for i in range(count)]
    prompts = [random_tokens(length, seed=i) for i, length in enumerate(lengths)]
    for one in (runner, eager):
        for i, prompt in enumerate(prompts):
            one.run(StepPlan((Chunk(f"r{i}", prompt, 0, tables[i], "none"),)))
    for step in range(20):  # over the end of a block
        tokens = random_tokens(count, seed=100 + step)
        needed = [table[: (length + step) // BLOCK + 1] for table, length in zip(tables, lengths, strict=True)]
        plan = decode(tokens, needed, [length + step for length in lengths])
        replayed, expected = runner.run(plan), eager.run(plan)
        assert replayed.shape == expected.shape
        assert (replayed - expected).abs().max() < CLOSE, step
    assert recorder.replays == 20
    written = [
        block for table, length in zip(tables, lengths, strict=True) for block in table[: (length + 19) // BLOCK]
    ]
    assert (runner.pool.tensor[written] - eager.pool.tensor[written]).abs().max() < CLOSE


def test_padding_and_warm_up_write_nothing_to_the_pool(toy: Path) -> None:
    runner, graphs, recorder = graphed(toy)
    with torch.inference_mode():
        graphs.warm_up()
    assert graphs.captured == (1, 2, 4, 8, 16)
    assert runner.pool.tensor.isnan().all()
    runner.run(decode([1, 2, 3], [(9,), (4,), (30,)], [0, 0, 0]))
    assert recorder.captures == 5
    touched = (~runner.pool.tensor.isnan()).flatten(1).any(1).nonzero().view(-1).tolist()
    assert touched == [4, 9, 30]


def test_a_result_outlives_the_next_replay(toy: Path) -> None:
    runner, _, _ = graphed(toy)
    first = runner.run(decode([1], [(3,)], [0]))
    kept = first.clone()
    runner.run(decode([2], [(4,)], [0]))
    assert torch.equal(first, kept)


@pytest.mark.parametrize(
    ("chunks", "size"),
    [
        ([(1, "last", 0)], 1),
        ([(1, "all", 5)], 1),
        ([(1, "last", 0)] * 3, 4),
        ([(1, "last", 0)] * 12, 16),
        ([], None),
        ([(1, "last", 0)] * 13, None),
        ([(1, "last", 0), (2, "last", 0)], None),
        ([(1, "none", 0)], None),
        ([(1, "last", CONTEXT - 1)], 1),
        ([(1, "last", CONTEXT)], None),
    ],
)
def test_only_single_tokens_that_want_logits_are_replayed(
    toy: Path, chunks: list[tuple[int, str, int]], size: int | None
) -> None:
    _, graphs, _ = graphed(toy)
    plan = StepPlan(tuple(Chunk(str(i), (1,) * n, start, (0,) * 9, rows) for i, (n, rows, start) in enumerate(chunks)))
    assert graphs.size_of(plan) == size


def test_a_table_that_is_too_short_is_refused_before_anything_is_written(toy: Path) -> None:
    runner, _, _ = graphed(toy)
    with pytest.raises(ValueError, match="need 2 blocks"):
        runner.run(decode([1], [(3,)], [BLOCK]))
    assert runner.pool.tensor.isnan().all()


def test_inputs_follow_a_batch_that_grows_shrinks_and_changes_places() -> None:
    inputs = StaticInputs(8, 6, BLOCK, torch.device("cpu"))
    addresses = [tensor.data_ptr() for tensor in inputs.tokens(8)]
    for pieces in (
        [(20, [5, 3]), (0, [7])],
        [(32, [5, 3, 9]), (1, [7]), (90, [1, 2, 4, 6, 8, 10])],
        [(1, [7]), (32, [5, 3, 11])],
    ):
        batch = batch_of([(start, 1, table) for start, table in pieces], BLOCK)
        inputs.fill([50 + start for start, _ in pieces], batch, 4)
        decoded = inputs.batch(4)
        padding = [0] * (4 - len(pieces))
        starts = [start for start, _ in pieces]
        token_ids, positions, lengths = (tensor.tolist() for tensor in inputs.tokens(4))
        assert token_ids == [50 + start for start in starts] + padding
        assert positions == starts + padding
        assert lengths == decoded.lengths.tolist() == [start + 1 for start in starts] + padding
        assert decoded.slots.tolist() == batch.slots() + [-1] * len(padding)
        assert decoded.longest.item() == max(starts) + 1
        for row, (_, table) in enumerate(pieces):
            assert decoded.tables[row, : len(table)].tolist() == table
    assert [tensor.data_ptr() for tensor in inputs.tokens(8)] == addresses


def test_there_are_no_graphs_on_a_cpu(toy: Path) -> None:
    runner = make_runner(toy)
    assert decode_graphs_for(runner.model, runner.pool, max_batch=4, max_context=64) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_captured_graph_equals_the_eager_step_on_a_gpu(toy: Path) -> None:
    from engine.kv import KVLayout, KVPool
    from engine.loaders import load_model

    loaded = load_model(toy, dtype="bfloat16", device="cuda")
    shape = loaded.config
    layout = KVLayout(32, shape.num_layers, shape.num_kv_heads, shape.head_dim, BLOCK, "bfloat16")
    rows = []
    for with_graphs in (False, True):
        pool = KVPool(layout, "cuda")
        made = decode_graphs_for(loaded.model, pool, max_batch=4, max_context=CONTEXT) if with_graphs else None
        runner = ModelRunner(loaded.model, pool, made)
        tables = [(1, 2), (3, 4), (5, 6)]
        for i, table in enumerate(tables):
            runner.run(StepPlan((Chunk(str(i), random_tokens(20, seed=i), 0, table, "none"),)))
        rows.append([runner.run(decode([1, 2, 3], tables, [20 + step] * 3)).float() for step in range(4)])
    for eager, replayed in zip(*rows, strict=True):
        assert (eager - replayed).abs().max() < 0.05 * eager.abs().max()
