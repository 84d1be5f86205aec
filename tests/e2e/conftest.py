"""One cluster of each shape for all tests that need it: starting one takes longer than most tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_cluster import Cluster, config, serving


@pytest.fixture(scope="module")
def two_prefill(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[Cluster]:
    with serving(tmp_path_factory.mktemp("2p1d"), config(2, 1)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def two_decode(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[Cluster]:
    with serving(tmp_path_factory.mktemp("1p2d"), config(1, 2)) as cluster:
        yield cluster
