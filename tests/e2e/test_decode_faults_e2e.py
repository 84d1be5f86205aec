"""1P2D on real processes: where it listens, a decode worker killed in the middle of an answer, and one stopped."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from e2e_cluster import PROMPT, Cluster, all_alive, ask_capital, listening

from cluster import processes
from tandem import Client
from tandem.errors import RequestError, UnavailableError

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

ENDS_WITHIN_S = 10.0


def _ask_many_tokens(client: Client) -> tuple[str, str]:
    """(how it ended, on which decode worker if it is known)."""
    try:
        answer = client.chat(PROMPT, temperature=0.0, max_tokens=400, ignore_eos=True, timeout_s=60.0)
        return str(answer.finish_reason), answer.served_by.decode_worker
    except RequestError as error:
        return type(error).__name__, ""


def test_nothing_of_a_cluster_on_one_machine_listens_beyond_loopback(two_decode: Cluster) -> None:
    two_decode.until_all_alive()
    family = [two_decode.process.pid, *(one.pid for one in processes.descendants(two_decode.process.pid))]
    addresses = listening(family)
    assert {two_decode.http, two_decode.grpc} <= addresses
    assert [address for address in addresses if not address.startswith("127.")] == []


def test_requests_on_a_killed_decode_worker_fail_in_time_and_the_others_do_not(two_decode: Cluster) -> None:
    two_decode.until_all_alive()
    with two_decode.client() as client, ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(_ask_many_tokens, client) for _ in range(4)]
        two_decode.until("both decode", _both_decode, timeout_s=20)
        killed_s = time.monotonic()
        os.kill(two_decode.control("decode-0"), signal.SIGKILL)
        two_decode.until("it is noticed", lambda status: not all_alive(status), timeout_s=6)
        assert ask_capital(client).served_by.decode_worker == "decode-1", "nothing goes to the dead one"
        failed = [future for future in asked if _done_within(future, killed_s + ENDS_WITHIN_S)]
        ended = [future.result(60) for future in asked]
        assert sorted(ended) == [(UnavailableError.__name__, "")] * 2 + [("length", "decode-1")] * 2
        assert len(failed) >= 2
        two_decode.until_all_alive()
        assert {ask_capital(client).served_by.decode_worker for _ in range(4)} == {"decode-0", "decode-1"}
    two_decode.until_idle()


def test_streams_of_a_stopped_decode_worker_end_when_it_is_fenced(two_decode: Cluster) -> None:
    two_decode.until_all_alive()
    incarnation = two_decode.worker("decode-1")["incarnation"]
    with two_decode.client() as client, ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(_ask_many_tokens, client) for _ in range(2)]
        two_decode.until("both decode", _both_decode, timeout_s=20)
        os.kill(two_decode.control("decode-1"), signal.SIGSTOP)
        os.kill(two_decode.rank("decode-1"), signal.SIGSTOP)
        stopped_s = time.monotonic()
        ended = {asked[0].result(60), asked[1].result(60)}
        assert ended == {(UnavailableError.__name__, ""), ("length", "decode-0")}
        assert time.monotonic() - stopped_s < 60
        two_decode.until("another incarnation", lambda status: _other(status, incarnation), timeout_s=60)
        two_decode.until_all_alive()
        assert {ask_capital(client).served_by.decode_worker for _ in range(4)} == {"decode-0", "decode-1"}
    two_decode.until_idle()


def _both_decode(status: dict) -> bool:  # type: ignore[type-arg]
    return all(worker["load"]["running"] for worker in status["workers"] if worker["role"] == "decode")


def _other(status: dict, incarnation: str) -> bool:  # type: ignore[type-arg]
    worker = next(worker for worker in status["workers"] if worker["name"] == "decode-1")
    return worker["incarnation"] not in ("", incarnation)


def _done_within(future, deadline_s: float) -> bool:
    try:
        future.result(max(0.0, deadline_s - time.monotonic()))
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_router_that_dies_or_hangs_comes_back_and_knows_its_workers_again(
    two_decode: Cluster, number: signal.Signals
) -> None:
    two_decode.until_all_alive()
    incarnations = {worker["name"]: worker["incarnation"] for worker in two_decode.status()["workers"]}
    router = two_decode.actor("RouterActor")
    os.kill(router, number)
    two_decode.until("the same workers again", lambda status: _same(status, incarnations), timeout_s=30)
    assert two_decode.actor("RouterActor") != router
    with two_decode.client() as client:
        ask_capital(client)


def test_a_killed_gateway_comes_back_on_its_ports(two_decode: Cluster) -> None:
    two_decode.until_all_alive()
    os.kill(two_decode.actor("GatewayActor"), signal.SIGKILL)
    two_decode.until_all_alive(timeout_s=30)
    with two_decode.client() as client:
        ask_capital(client)
    two_decode.until_idle()


def _same(status: dict, incarnations: dict[str, str]) -> bool:  # type: ignore[type-arg]
    return all_alive(status) and incarnations == {w["name"]: w["incarnation"] for w in status["workers"]}
