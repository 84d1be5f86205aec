"""One rig per test, over every transport or over one of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transfer_rig import Rig, transports


@pytest.fixture(params=transports())
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(request.param)
    yield rig
    rig.close()


@pytest.fixture
def inproc() -> Iterator[Rig]:
    rig = Rig("inproc")
    yield rig
    rig.close()


@pytest.fixture
def tcp() -> Iterator[Rig]:
    rig = Rig("tcp")
    yield rig
    rig.close()
