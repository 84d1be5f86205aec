"""What a pair achieved is measured on its own traffic, and told once."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
from transfer_rig import Peer, Rig

from kvtransfer.layout import block_spans
from kvtransfer.rates import SAMPLE_BYTES, PeerRate, Rates
from kvtransfer.types import LeaseKey, PeerLost, PushDone


def joined(peer: str, scheme: str) -> Rates:
    """Past the first busy period, which is no sample."""
    rates = Rates()
    period(rates, peer, scheme, SAMPLE_BYTES, 1.0)
    assert not rates.all()
    return rates


def period(rates: Rates, peer: str, scheme: str, num_bytes: int, seconds: float, *, failed: bool = False) -> None:
    """A busy period of one push."""
    rates.offered(peer, scheme)
    rates.ended(peer, scheme, num_bytes, 0.0, seconds, failed=failed)


@pytest.mark.parametrize(
    ("pushes", "seconds"),
    [
        (((10.0, 11.0), (10.5, 12.0)), 2.0),
        (((10.0, 11.0), (13.0, 14.0)), 2.0),
        (((10.0, 13.0), (11.0, 12.0)), 3.0),
    ],
    ids=["side by side", "with a pause", "one within the other"],
)
def test_a_busy_period_takes_the_time_in_which_a_push_was_under_way(
    pushes: Sequence[tuple[float, float]], seconds: float
) -> None:
    rates = joined("d#1", "shm")
    for _ in pushes:
        rates.offered("d#1", "shm")
    for offered_s, ended_s in pushes:
        assert not rates.all(), "one is still under way"
        rates.ended("d#1", "shm", SAMPLE_BYTES, offered_s, ended_s, failed=False)
    rate = 2 * SAMPLE_BYTES / seconds
    assert rates.all() == (PeerRate("d#1", "shm", rate, rate, 1),)
    assert rates.best("shm") == rate
    assert rates.best("tcp") == 0.0


def test_failures_and_little_traffic_are_no_samples() -> None:
    rates = joined("d#1", "tcp")
    period(rates, "d#1", "tcp", SAMPLE_BYTES, 1.0, failed=True)
    period(rates, "d#1", "tcp", SAMPLE_BYTES - 1, 1.0)
    assert not rates.all()


def test_a_pair_is_told_once_by_the_best_of_its_first_three_samples(caplog: pytest.LogCaptureFixture) -> None:
    rates = joined("d#1", "tcp")
    told = []
    with caplog.at_level(logging.INFO, "kvtransfer.rates"):
        for seconds in (2e-3, 1e-3, 4e-3, 2e-3, 20e-3):
            period(rates, "d#1", "tcp", SAMPLE_BYTES, seconds)
            told.append([record.getMessage().split(";")[0] for record in caplog.records])
            caplog.clear()
    assert told == [[], [], ["KV to d#1 over tcp: 2.10 GB/s"], [], []]


def test_a_pair_that_was_lost_begins_anew(rig) -> None:
    source, destination = rig.pair(region_bytes=2 * SAMPLE_BYTES)
    for number in (1, 2):
        sent(rig, source, destination, number)
    assert len(source.engine.rates()) == 1
    destination.engine.shutdown()
    rig.until(lambda: source.saw(PeerLost))
    assert source.engine.rates() == ()


def sent(rig: Rig, source: Peer, destination: Peer, number: int) -> None:
    key, spans = LeaseKey("request", number), block_spans(range(2), SAMPLE_BYTES)
    destination.engine.open(key, source.name, spans)
    source.engine.push(key, destination.name, 0, spans)
    rig.until(lambda: source.saw(PushDone, key))


def test_an_engine_tells_what_its_pairs_achieved_beside_the_limit(rig) -> None:
    source, destination = rig.pair(region_bytes=2 * SAMPLE_BYTES)
    for number in (1, 2):
        sent(rig, source, destination, number)
    (rate,) = source.engine.rates()
    (stats,) = source.engine.stats()
    assert (rate.peer, rate.scheme, rate.samples) == (destination.name, rig.scheme, 1)
    assert rate.best == stats.best_bytes_per_s > 0
    assert stats.limit_bytes_per_s > 1e8
    assert not destination.engine.rates(), "the source measures"
