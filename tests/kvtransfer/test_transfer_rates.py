"""What a pair achieved is measured on its own traffic, and told once."""

from __future__ import annotations

import logging

import pytest

from kvtransfer.layout import block_spans
from kvtransfer.rates import SAMPLE_BYTES, PeerRate, Rates
from kvtransfer.types import LeaseKey, PushDone


def joined(peer: str, scheme: str) -> Rates:
    """Past the first busy period, which is no sample."""
    rates = Rates()
    rates.offered(peer, scheme, 0.0)
    rates.ended(peer, scheme, SAMPLE_BYTES, 1.0, failed=False)
    assert not rates.all()
    return rates


def test_a_busy_period_counts_from_its_first_offer_to_its_last_end(caplog: pytest.LogCaptureFixture) -> None:
    rates = joined("d#1", "shm")
    with caplog.at_level(logging.INFO, "kvtransfer.rates"):
        rates.offered("d#1", "shm", 10.0)
        rates.offered("d#1", "shm", 10.5)
        rates.ended("d#1", "shm", SAMPLE_BYTES, 11.0, failed=False)
        assert not rates.all()
        rates.ended("d#1", "shm", SAMPLE_BYTES, 12.0, failed=False)
    assert rates.all() == (PeerRate("d#1", "shm", SAMPLE_BYTES, SAMPLE_BYTES, 1),)
    assert rates.best("shm") == SAMPLE_BYTES
    assert rates.best("tcp") == 0.0
    assert [record.message.split(":")[0] for record in caplog.records] == ["KV to d#1 over shm"]
    assert "one thread copies" in caplog.records[0].message


def test_failures_and_little_traffic_are_no_samples_and_a_slow_pair_is_told_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rates = joined("d#1", "tcp")

    def period(num_bytes: int, seconds: float, *, failed: bool = False) -> None:
        rates.offered("d#1", "tcp", 0.0)
        rates.ended("d#1", "tcp", num_bytes, seconds, failed=failed)

    with caplog.at_level(logging.INFO, "kvtransfer.rates"):
        period(SAMPLE_BYTES, 1.0, failed=True)
        period(SAMPLE_BYTES - 1, 1.0)
        assert not rates.all()
        for seconds in (1.0, 1.5, 4.0, 4.0):
            period(SAMPLE_BYTES, seconds)
    assert rates.all() == (PeerRate("d#1", "tcp", SAMPLE_BYTES / 4, SAMPLE_BYTES, 4),)
    assert len(caplog.records) == 2, "the first, and the one that fell below half"
    rates.forget("d#1")
    assert not rates.all()


def test_an_engine_tells_what_its_pairs_achieved_beside_the_limit(rig) -> None:
    source, destination = rig.pair(region_bytes=2 * SAMPLE_BYTES)
    spans = block_spans(range(2), SAMPLE_BYTES)
    for number in (1, 2):
        key = LeaseKey("request", number)
        destination.engine.open(key, source.name, spans)
        source.engine.push(key, destination.name, 0, spans)
        rig.until(lambda key=key: source.saw(PushDone, key))
    (rate,) = source.engine.rates()
    (stats,) = source.engine.stats()
    assert (rate.peer, rate.scheme, rate.samples) == (destination.name, rig.scheme, 1)
    assert rate.best == stats.best_bytes_per_s > 0
    assert stats.limit_bytes_per_s > 1e8
    assert not destination.engine.rates(), "the source measures"
