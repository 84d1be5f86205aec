"""The compiled copy and numpy's agree byte for byte, and a machine without a compiler still copies."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from kvtransfer import copying

POOL_BYTES = 1 << 18


def random_runs(seed: int) -> np.ndarray:
    """Runs of all kinds of lengths that do not overlap where they are written."""
    chance = random.Random(seed)
    rows, place = [], chance.randrange(100)
    while place < POOL_BYTES - 20_000:
        length = chance.choice([1, 3, 63, 64, 65, 2_047, 2_048, 2_049, 4_096, 16_384, 19_999])
        rows.append((chance.randrange(POOL_BYTES - length), place, length))
        place += length + chance.choice([0, 0, 1, 77])
    chance.shuffle(rows)
    return np.array(rows, np.int64)


@pytest.mark.parametrize("seed", range(5))
def test_both_copies_move_the_same_bytes_and_no_others(seed: int) -> None:
    source = np.random.default_rng(seed).integers(0, 256, POOL_BYTES, np.uint8)
    runs = random_runs(seed)
    expected, got = np.zeros(POOL_BYTES, np.uint8), np.zeros(POOL_BYTES, np.uint8)
    copying.numpy_copy(expected, source, runs)
    copying.best_copy()(got, source, runs)
    assert (got == expected).all()


def test_without_a_compiler_numpy_copies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    monkeypatch.setattr(copying.shutil, "which", lambda name: None)
    assert copying.best_copy.__wrapped__() is copying.numpy_copy


def test_it_is_compiled_once_and_found_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if copying.shutil.which("gcc") is None and copying.shutil.which("cc") is None:
        pytest.skip("no C compiler here")
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    first = copying._library()
    made = first.stat().st_mtime_ns
    assert copying._library() == first
    assert first.stat().st_mtime_ns == made
    assert [path.name for path in first.parent.iterdir()] == [first.name]
