"""Memory that only its address tells, as a GPU's: UCX moves it straight; here the address is one of host memory."""

from __future__ import annotations

import numpy as np
import pytest
from transfer_rig import Peer, Rig

from kvtransfer.device import DeviceRegion
from kvtransfer.engine import TransferEngine
from kvtransfer.errors import TransferError
from kvtransfer.layout import block_spans
from kvtransfer.select import make_transport, ucx_available
from kvtransfer.types import LeaseKey, PushDone, Quiet, Received, ReceiveFailed

BLOCK = 1 << 16
KEY = LeaseKey("r", 1)
needs_ucx = pytest.mark.skipif(not ucx_available()[0], reason=ucx_available()[1])


def device(name: str, rig: Rig, fill: int, *, error_handling: bool = True, settled: list[str] | None = None) -> Peer:
    memory = np.full(8 * BLOCK, fill, np.uint8) + np.arange(8 * BLOCK, dtype=np.uint8) * fill
    region = DeviceRegion(memory.ctypes.data, memory.nbytes, memory)
    transport = make_transport("ucx", name, region, ucx_error_handling=error_handling)
    note = (lambda: settled.append(name)) if settled is not None else (lambda: None)
    engine = TransferEngine(name, region, [transport], wake=rig.news.set, settle=note)
    rig.peers[name] = Peer(name, memory, engine)
    return rig.peers[name]


@needs_ucx
@pytest.mark.parametrize("reads", [True, False], ids=["read by the destination", "as messages"])
def test_blocks_go_straight_from_one_address_to_another(reads: bool) -> None:
    rig, settled = Rig("ucx"), list[str]()
    source = device("p#1", rig, 3, error_handling=reads, settled=settled)
    destination = device("d#1", rig, 0, error_handling=reads)
    rig.connect(source, destination)
    rig.connect(destination, source)
    destination.engine.open(KEY, source.name, block_spans([6, 1, 2], BLOCK))
    source.engine.push(KEY, destination.name, 0, block_spans([0, 4, 5], BLOCK))
    rig.until(lambda: [event for event in source.events if isinstance(event, PushDone)])
    rig.until(lambda: [event for event in destination.events if isinstance(event, Received)])
    theirs, ours = source.memory.reshape(8, BLOCK), destination.memory.reshape(8, BLOCK)
    assert (ours[[6, 1, 2]] == theirs[[0, 4, 5]]).all()
    assert not ours[[0, 3, 4, 5, 7]].any()
    assert settled == ["p#1"], "what kernels wrote is waited for before it is offered"
    destination.engine.close(KEY)
    source.engine.withdraw(KEY)
    rig.until(lambda: Quiet(KEY) in source.events and Quiet(KEY) in destination.events)
    rig.close()


@needs_ucx
def test_what_cannot_be_verified_is_refused() -> None:
    rig = Rig("ucx")
    source, destination = rig.peer("p#1", checksums=True), device("d#1", rig, 0)
    rig.connect(source, destination)
    destination.engine.open(KEY, source.name, block_spans([0], 4096))
    source.engine.push(KEY, destination.name, 0, block_spans([0], 4096))
    rig.until(lambda: source.events)
    assert "checksums cannot be verified" in source.events[0].reason  # type: ignore[attr-defined]
    assert not [event for event in destination.events if isinstance(event, Received | ReceiveFailed)]
    assert not destination.memory.any()
    rig.close()


@pytest.mark.parametrize("scheme", ["shm", "tcp", "inproc"])
def test_only_ucx_reaches_it(scheme: str) -> None:
    with pytest.raises(TransferError, match="only ucx can, or stage it"):
        make_transport(scheme, "p#1", DeviceRegion(4096, 4096, None))


def test_checksums_need_memory_that_can_be_looked_at() -> None:
    with pytest.raises(TransferError, match="stage it, or do without"):
        TransferEngine("p#1", DeviceRegion(4096, 4096, None), [], checksums=True)
