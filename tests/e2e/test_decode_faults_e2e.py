"""1P2D on real processes: where it listens, a decode worker drained, one killed in the middle of answers, one stopped;
and answers that all read as undisturbed."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from e2e_cluster import Cluster, all_alive, ask_capital, command_line, idle, listening
from readers import Reader, go_on_undisturbed

from cluster import processes
from tandem import Client

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

MOST_STREAMS = 8


def test_nothing_of_a_cluster_on_one_machine_listens_beyond_loopback(two_decode: Cluster) -> None:
    two_decode.until_all_alive()
    family = [two_decode.process.pid, *(one.pid for one in processes.descendants(two_decode.process.pid))]
    addresses = listening(family)
    assert {two_decode.http, two_decode.grpc} <= addresses
    assert [address for address in addresses if not address.startswith("127.")] == []


def test_no_process_of_a_cluster_is_nicer_to_others_than_whoever_started_it(two_decode: Cluster) -> None:
    two_decode.until_all_alive()
    family = {one.pid for one in processes.descendants(two_decode.process.pid)}
    assert {two_decode.rank(name) for name in ("prefill-0", "decode-0", "decode-1")} <= family
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert [command_line(pid) for pid in family if os.getpriority(os.PRIO_PROCESS, pid) > own] == []


def test_a_stream_leaves_a_drained_worker_and_reads_as_undisturbed(two_decode: Cluster) -> None:
    two_decode.until_all_alive()
    with two_decode.client() as client, ThreadPoolExecutor(1) as pool:
        stream = Reader(client, max_tokens=4000)
        stream.begin(pool)
        two_decode.until("it decodes", lambda status: sum(_running(status).values()) == 1, timeout_s=20)
        source, other = sorted(_running(two_decode.status()).items(), key=lambda each: -each[1])
        assert "is draining" in two_decode.tandem("drain", source[0])
        two_decode.until("moved", lambda status: _running(status) == {source[0]: 0, other[0]: 1}, timeout_s=20)
        two_decode.until("the source is empty", lambda status: idle(_only(status, source[0])), timeout_s=10)
        assert {ask_capital(client).served_by.decode_worker for _ in range(3)} == {other[0]}
        go_on_undisturbed(two_decode, client, [stream])
        assert "is back" in two_decode.tandem("undrain", source[0])
        two_decode.until_all_serve(client, "decode")
    two_decode.until_idle()


def test_answers_of_a_killed_decode_worker_go_on_at_the_other_and_read_as_undisturbed(two_decode: Cluster) -> None:
    two_decode.until_all_alive()
    with two_decode.client() as client, ThreadPoolExecutor(MOST_STREAMS) as pool:
        streams = _on_every_worker(two_decode, client, pool)
        os.kill(two_decode.control("decode-0"), signal.SIGKILL)
        two_decode.until("it is noticed", lambda status: _health(status, "decode-0") != "alive", timeout_s=6)
        assert ask_capital(client).served_by.decode_worker == "decode-1", "nothing goes to the dead one"
        go_on_undisturbed(two_decode, client, streams)
        two_decode.until_all_alive()
        two_decode.until_all_serve(client, "decode")
    two_decode.until_idle()


def test_answers_of_a_stopped_decode_worker_go_on_when_it_is_fenced(two_decode: Cluster) -> None:
    two_decode.until_all_alive()
    incarnation = two_decode.worker("decode-1")["incarnation"]
    with two_decode.client() as client, ThreadPoolExecutor(MOST_STREAMS) as pool:
        control, rank = two_decode.control("decode-1"), two_decode.rank("decode-1")
        streams = _on_every_worker(two_decode, client, pool)
        os.kill(control, signal.SIGSTOP)
        os.kill(rank, signal.SIGSTOP)
        go_on_undisturbed(two_decode, client, streams)
        two_decode.until("another incarnation", lambda status: _other(status, incarnation), timeout_s=60)
        two_decode.until_all_alive()
        two_decode.until_all_serve(client, "decode")
    two_decode.until_idle()


def _on_every_worker(cluster: Cluster, client: Client, pool: ThreadPoolExecutor) -> list[Reader]:
    """Answers, until every decode worker writes one; each has told its reader a token. A worker that a busy machine
    kept silent may be passed over for a moment, so that two need not be enough."""
    streams: list[Reader] = []
    running: dict[str, int] = {}

    def it_decodes(status: dict) -> bool:  # type: ignore[type-arg]
        running.update(_running(status))
        return bool(streams[-1].token_ids) and sum(running.values()) == len(streams)

    while not running or not all(running.values()):
        assert len(streams) < MOST_STREAMS, f"they are all at one worker: {running}"
        streams.append(Reader(client, max_tokens=4000))
        streams[-1].begin(pool)
        cluster.until(f"number {len(streams)} decodes", it_decodes, timeout_s=20)
    return streams


def _running(status: dict) -> dict[str, int]:  # type: ignore[type-arg]
    """Of each decode worker."""
    decode = [worker for worker in status["workers"] if worker["role"] == "decode"]
    return {worker["name"]: worker["load"]["running"] if worker["load"] else 0 for worker in decode}


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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_gateway_that_dies_or_hangs_comes_back_on_its_ports(two_decode: Cluster, number: signal.Signals) -> None:
    two_decode.until_all_alive()
    gateway = two_decode.actor("GatewayActor")
    os.kill(gateway, number)
    two_decode.until_all_alive(timeout_s=90)
    assert two_decode.actor("GatewayActor") != gateway
    with two_decode.client() as client:
        ask_capital(client)
    two_decode.until_idle()


def _same(status: dict, incarnations: dict[str, str]) -> bool:  # type: ignore[type-arg]
    return all_alive(status) and incarnations == {w["name"]: w["incarnation"] for w in status["workers"]}
