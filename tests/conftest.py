"""What every test may ask for: one quiet, offline, single-threaded process and the default model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import transformers

os.environ.update(
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    RAY_USAGE_STATS_ENABLED="0",
    CUDA_VISIBLE_DEVICES=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
    OMP_NUM_THREADS="1",  # two cores are shared with whatever else runs; torch follows this too
)


_GUARDED = ("TANDEM_", "HF_", "XDG_", "CUDA_", "OMP_")
"""Ours, and the ones that change what other tests measure; libraries may set their own."""


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """A test that changes the environment puts it back."""
    before = _guarded()
    yield
    changed = {name for name, _ in before.items() ^ _guarded().items()}
    assert not changed, f"this test left the environment changed: {sorted(changed)}"


def _guarded() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_GUARDED)}


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's GGUF, fetched once into the cache folder."""
    from cluster import models

    return models.resolve(models.DEFAULT)


@pytest.fixture(scope="session")
def transformers_twin(smollm2_path: Path) -> transformers.LlamaForCausalLM:
    """What the default model is compared with."""
    from tests.twin import twin_of

    return twin_of(smollm2_path)
