"""Prefix keys mean one prefix, one salt and one cluster."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.hashing import GRANULE, PrefixHasher, hash_root

ROOT = hash_root(name="builtin", seed=0, model_digest="m", kv_dtype="float32", numerics="n")
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=100)


@pytest.fixture(params=["builtin", "sha256"])
def hasher(request: pytest.FixtureRequest) -> PrefixHasher:
    return PrefixHasher(request.param, ROOT)


def test_one_key_per_full_granule(hasher: PrefixHasher) -> None:
    width = {"builtin": 16, "sha256": 32}[hasher.name]
    for length, keys in ((0, 0), (15, 0), (16, 1), (31, 1), (32, 2), (50, 3)):
        chain = hasher.chain(range(length), "")
        assert len(chain) == keys
        assert all(len(key) == width for key in chain)


@given(tokens=TOKENS, more=TOKENS)
def test_a_longer_prompt_keeps_the_keys_of_its_prefix(tokens: list[int], more: list[int]) -> None:
    hasher = PrefixHasher("builtin", ROOT)
    short = hasher.chain(tokens, "s")
    assert hasher.chain(tokens + more, "s")[: len(short)] == short


@given(tokens=st.lists(st.integers(0, 500), min_size=64, max_size=64), where=st.integers(0, 63))
def test_one_changed_token_changes_every_key_from_there_on(tokens: list[int], where: int) -> None:
    hasher = PrefixHasher("builtin", ROOT)
    changed = list(tokens)
    changed[where] += 1
    before, after = hasher.chain(tokens, ""), hasher.chain(changed, "")
    same = where // GRANULE
    assert before[:same] == after[:same]
    assert not set(before[same:]) & set(after[same:])


@given(tokens=st.lists(st.integers(0, 500), max_size=100), cut=st.integers(0, 6))
def test_extending_step_by_step_equals_the_whole_chain(tokens: list[int], cut: int) -> None:
    hasher = PrefixHasher("sha256", ROOT)
    head = tokens[: cut * GRANULE]
    keys = hasher.chain(head, "x")
    keys += hasher.extend(keys[-1] if keys else hasher.start("x"), tokens[len(head) :])
    assert keys == hasher.chain(tokens, "x")


def test_salts_share_nothing(hasher: PrefixHasher) -> None:
    chains = [hasher.chain(range(64), salt) for salt in ("", "a", "b", "ab", "\ud83d")]
    keys = [key for chain in chains for key in chain]
    assert len(set(keys)) == len(keys)


def test_every_part_of_the_root_counts() -> None:
    base = {"name": "builtin", "seed": 1, "model_digest": "d", "kv_dtype": "float32", "numerics": "n"}
    other = {"name": "sha256", "seed": 2, "model_digest": "e", "kv_dtype": "float16", "numerics": "m"}
    roots = {hash_root(**base), *(hash_root(**{**base, part: other[part]}) for part in base)}  # type: ignore[arg-type]
    assert len(roots) == len(base) + 1
    glued = hash_root(name="builtin", seed=1, model_digest="df", kv_dtype="loat32", numerics="n")
    assert glued != hash_root(**base)  # type: ignore[arg-type]
    chains = {PrefixHasher("builtin", root).chain(range(16), "") for root in roots}
    assert len(chains) == len(roots)


def test_ids_that_are_no_token_are_refused(hasher: PrefixHasher) -> None:
    for bad in (-1, 2**32, 2**63):
        with pytest.raises(OverflowError):
            hasher.chain([bad] * 16, "")


def test_an_unknown_hash_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="md5"):
        PrefixHasher("md5", ROOT)


def test_keys_are_the_same_in_another_process() -> None:
    script = (
        "from engine.hashing import PrefixHasher, hash_root\n"
        "root = hash_root(name='builtin', seed=0, model_digest='m', kv_dtype='float32', numerics='n')\n"
        "print(PrefixHasher('builtin', root).chain(range(40), 'salt')[-1].hex())"
    )
    there = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    assert there == PrefixHasher("builtin", ROOT).chain(range(40), "salt")[-1].hex()
