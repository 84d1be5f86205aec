"""One cluster of each shape for all tests that need it: starting one takes longer than most tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_cluster import KEY_VARIABLE, Cluster, config, serving

from tests.certificates import Authority


@pytest.fixture(scope="module")
def two_prefill(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[Cluster]:
    """Behind TLS and a key, and everything that is tested with it."""
    folder = tmp_path_factory.mktemp("2p1d")
    authority = Authority(folder, "authority")
    pair = authority.signed("gateway", "127.0.0.1")
    settings = config(2, 1)
    settings["gateway"] |= {
        "api_key_env": KEY_VARIABLE,
        "tls": {"cert": pair.cert, "key": pair.key, "ca": authority.ca},
    }
    with serving(folder, settings) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def two_decode(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[Cluster]:
    with serving(tmp_path_factory.mktemp("1p2d"), config(1, 2)) as cluster:
        yield cluster
