"""The toy model of the cluster's tests, and what it answers by itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.toy import make_toy_checkpoint
from engine.types import Request
from tests.cluster.local_rig import lone_engine


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_checkpoint(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="session")
def alone(toy: Path) -> Callable[[Request], list[int]]:
    return lone_engine(toy)
