"""Ends with unlike numbers of ranks and blocks of two sizes: each pair of ranks that share heads has a lease."""

from __future__ import annotations

import pytest
from test_transfer_plan import ROW_VALUES, expected, pools
from transfer_rig import Rig

from kvtransfer.plan import Cut, KvShape, Side
from kvtransfer.types import LeaseKey, PushDone, Quiet

SHAPE = KvShape(kv_heads=4, layers=2, row_bytes=ROW_VALUES * 4)
TOKENS = 40
BLOCKS = {16: [5, 0, 9], 32: [7, 2]}


@pytest.mark.parametrize(
    ("source", "destination"),
    [(Cut(16, 2), Cut(16, 1)), (Cut(16, 1), Cut(16, 4)), (Cut(16, 4), Cut(32, 2)), (Cut(32, 2), Cut(16, 4))],
    ids=str,
)
def test_every_rank_gets_its_heads_from_those_that_hold_them(rig: Rig, source: Cut, destination: Cut) -> None:
    read, written = BLOCKS[source.block_size], BLOCKS[destination.block_size]
    ends = {}
    for name, contents in (
        ("p", expected(SHAPE, source, read, 16, range(len(read) * source.block_size))),
        ("d", pools(SHAPE, destination, 16)),
    ):
        for rank, content in enumerate(contents):
            ends[name, rank] = rig.peer(f"{name}{rank}#1", region_bytes=content.nbytes)
            ends[name, rank].memory[:] = content.reshape(-1).view("u1")
    leases = []
    for one in range(source.ranks):
        for other in range(destination.ranks):
            here, there = Side(SHAPE, source, destination, one, other), Side(SHAPE, destination, source, other, one)
            if not here.heads:
                continue
            key, pieces, (giver, taker) = (
                LeaseKey(f"{one}>{other}", 1),
                here.pieces(TOKENS),
                (ends["p", one], ends["d", other]),
            )
            taker.engine.open(key, giver.name, there.spans(written, 0, pieces))
            rig.connect(giver, taker)
            giver.engine.push(key, taker.name, 0, here.spans(read, 0, pieces))
            leases.append((key, giver, taker))
    assert len(leases) == max(source.ranks, destination.ranks)
    rig.until(lambda: sum(isinstance(event, PushDone) for end in ends.values() for event in end.events) == len(leases))
    piece = min(source.block_size, destination.block_size)
    wanted = expected(SHAPE, destination, written, 16, range(-(-TOKENS // piece) * piece))
    for rank, content in enumerate(wanted):
        assert ends["d", rank].memory.tobytes() == content.tobytes()
    for key, giver, taker in leases:
        taker.engine.close(key)
        giver.engine.withdraw(key)
    rig.until(lambda: all(Quiet(key) in end.events for key, giver, taker in leases for end in (giver, taker)))
