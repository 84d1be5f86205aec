"""1P2D on real processes: where it listens, a decode worker drained, one killed in the middle of answers, one stopped;
and answers that all read as undisturbed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

import pytest
from e2e_cluster import PROMPT, Cluster, all_alive, ask_capital, idle, listening

from cluster import processes
from tandem import Client
from tandem.errors import RequestError

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

ENOUGH = ("told enough", "")


@dataclass(frozen=True)
class End:
    """How a request ended, on which decode worker if that is known, and when."""

    how: tuple[str, str]
    token_ids: tuple[int, ...]


class Reader:
    """Reads a stream until it ends or is told `enough`."""

    def __init__(self, client: Client, max_tokens: int) -> None:
        self._pieces = client.chat(
            PROMPT, stream=True, temperature=0.0, max_tokens=max_tokens, ignore_eos=True, timeout_s=60.0
        )
        self.token_ids: list[int] = []
        self.text = ""
        self.enough = threading.Event()

    def read(self) -> End:
        how = "", ""
        try:
            with closing(self._pieces):
                for piece in self._pieces:
                    self.token_ids += piece.token_ids
                    self.text += piece.text
                    how = str(piece.finish_reason or ""), piece.served_by.decode_worker
                    if self.enough.is_set():
                        how = ENOUGH
                        break
        except RequestError as error:
            how = type(error).__name__, ""
        return End(how, tuple(self.token_ids))


def test_nothing_of_a_cluster_on_one_machine_listens_beyond_loopback(two_decode: Cluster) -> None:
    two_decode.until_all_alive()
    family = [two_decode.process.pid, *(one.pid for one in processes.descendants(two_decode.process.pid))]
    addresses = listening(family)
    assert {two_decode.http, two_decode.grpc} <= addresses
    assert [address for address in addresses if not address.startswith("127.")] == []


def test_a_stream_leaves_a_drained_worker_and_reads_as_undisturbed(two_decode: Cluster) -> None:
    two_decode.until_all_alive()
    with two_decode.client() as client, ThreadPoolExecutor(1) as pool:
        stream = Reader(client, max_tokens=4000)
        reading = pool.submit(stream.read)
        two_decode.until("it decodes", lambda status: sum(_running(status).values()) == 1, timeout_s=20)
        source, other = sorted(_running(two_decode.status()).items(), key=lambda each: -each[1])
        assert "is draining" in two_decode.tandem("drain", source[0])
        two_decode.until("moved", lambda status: _running(status) == {source[0]: 0, other[0]: 1}, timeout_s=20)
        moved = len(stream.token_ids)
        two_decode.until("the source is empty", lambda status: idle(_only(status, source[0])), timeout_s=10)
        two_decode.until("the stream goes on", lambda status: len(stream.token_ids) > moved + 20, timeout_s=20)
        assert {ask_capital(client).served_by.decode_worker for _ in range(3)} == {other[0]}
        stream.enough.set()
        assert reading.result(20).how == ENOUGH
        assert "is back" in two_decode.tandem("undrain", source[0])
        two_decode.until_all_serve(client, "decode")
        undisturbed = client.chat(PROMPT, temperature=0.0, max_tokens=len(stream.token_ids), ignore_eos=True)
        assert list(undisturbed.token_ids) == stream.token_ids
        assert undisturbed.text.startswith(stream.text)
    two_decode.until_idle()


def test_answers_of_a_killed_decode_worker_go_on_at_the_other_and_read_as_undisturbed(two_decode: Cluster) -> None:
    two_decode.until_all_alive()
    with two_decode.client() as client, ThreadPoolExecutor(4) as pool:
        streams = [Reader(client, max_tokens=400) for _ in range(4)]
        asked = [pool.submit(stream.read) for stream in streams]
        _until_all_decode(two_decode, streams)
        os.kill(two_decode.control("decode-0"), signal.SIGKILL)
        two_decode.until("it is noticed", lambda status: _health(status, "decode-0") != "alive", timeout_s=6)
        assert ask_capital(client).served_by.decode_worker == "decode-1", "nothing goes to the dead one"
        ended = [future.result(60) for future in asked]
        assert [end.how for end in ended] == [("length", "decode-1")] * 4
        undisturbed = client.chat(PROMPT, temperature=0.0, max_tokens=400, ignore_eos=True)
        assert {end.token_ids for end in ended} == {undisturbed.token_ids}
        two_decode.until_all_alive()
        two_decode.until_all_serve(client, "decode")
    two_decode.until_idle()


def test_answers_of_a_stopped_decode_worker_go_on_when_it_is_fenced(two_decode: Cluster) -> None:
    two_decode.until_all_alive()
    incarnation = two_decode.worker("decode-1")["incarnation"]
    with two_decode.client() as client, ThreadPoolExecutor(2) as pool:
        streams = [Reader(client, max_tokens=400) for _ in range(2)]
        asked = [pool.submit(stream.read) for stream in streams]
        control, rank = two_decode.control("decode-1"), two_decode.rank("decode-1")
        assert _until_all_decode(two_decode, streams) == {"decode-0": 1, "decode-1": 1}
        os.kill(control, signal.SIGSTOP)
        os.kill(rank, signal.SIGSTOP)
        stopped_s = time.monotonic()
        assert [asked[0].result(60).how, asked[1].result(60).how] == [("length", "decode-0")] * 2
        assert time.monotonic() - stopped_s < 60
        two_decode.until("another incarnation", lambda status: _other(status, incarnation), timeout_s=60)
        two_decode.until_all_alive()
        two_decode.until_all_serve(client, "decode")
    two_decode.until_idle()


def _until_all_decode(cluster: Cluster, streams: Sequence[Reader]) -> dict[str, int]:
    """Wait until all of them decode, some on every decode worker, and each has told its reader a token. How many on
    each."""
    running: dict[str, int] = {}

    def all_decode(status: dict) -> bool:  # type: ignore[type-arg]
        running.update(_running(status))
        told = all(stream.token_ids for stream in streams)
        return told and sum(running.values()) == len(streams) and all(running.values())

    cluster.until(f"all {len(streams)} decode", all_decode, timeout_s=20)
    return running


def _running(status: dict) -> dict[str, int]:  # type: ignore[type-arg]
    """Of each decode worker."""
    return {worker["name"]: worker["load"]["running"] for worker in status["workers"] if worker["role"] == "decode"}


def _only(status: dict, name: str) -> dict:  # type: ignore[type-arg]
    return {"workers": [worker for worker in status["workers"] if worker["name"] == name]}


def _health(status: dict, name: str) -> str:  # type: ignore[type-arg]
    return str(next(worker["health"] for worker in status["workers"] if worker["name"] == name))


def _other(status: dict, incarnation: str) -> bool:  # type: ignore[type-arg]
    worker = next(worker for worker in status["workers"] if worker["name"] == "decode-1")
    return worker["incarnation"] not in ("", incarnation)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_router_that_dies_or_hangs_comes_back_and_knows_its_workers_again(
    two_decode: Cluster, number: signal.Signals
) -> None:
    two_decode.until_all_alive()
    incarnations = {worker["name"]: worker["incarnation"] for worker in two_decode.status()["workers"]}
    router = two_decode.actor("RouterActor")
    os.kill(router, number)
    two_decode.until("the same workers again", lambda status: _same(status, incarnations), timeout_s=60)
    assert two_decode.actor("RouterActor") != router
    with two_decode.client() as client:
        ask_capital(client)


def test_a_killed_gateway_comes_back_on_its_ports(two_decode: Cluster) -> None:
    two_decode.until_all_alive()
    os.kill(two_decode.actor("GatewayActor"), signal.SIGKILL)
    two_decode.until_all_alive(timeout_s=90)
    with two_decode.client() as client:
        ask_capital(client)
    two_decode.until_idle()


def _same(status: dict, incarnations: dict[str, str]) -> bool:  # type: ignore[type-arg]
    return all_alive(status) and incarnations == {w["name"]: w["incarnation"] for w in status["workers"]}
