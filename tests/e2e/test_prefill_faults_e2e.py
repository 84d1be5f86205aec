"""2P1D on real processes: what a client sees while prefill workers are killed, stopped and come back."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from e2e_cluster import PROMPT, Cluster, ask_capital, idle
from readers import Reader, go_on_undisturbed

from cluster import processes
from tandem import Client
from tandem.errors import RequestError, UnauthenticatedError, UnavailableError

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

ENDS_WITHIN_S = 10.0


def _long(number: int) -> list[dict[str, str]]:
    text = " ".join(f"{number * 1000 + i} is a number." for i in range(50))
    return [{"role": "user", "content": text + " Which one is the last?"}]


def _ask_long(client: Client, number: int) -> tuple[str, float]:
    """How it ended ("" for an answer), and when."""
    try:
        answer = client.chat(_long(number), temperature=0.0, max_tokens=4, timeout_s=30.0)
        how = "" if answer.finish_reason in ("stop", "length") else f"finish {answer.finish_reason}"
    except RequestError as error:
        how = str(error)
    return how, time.monotonic()


def test_both_prefill_workers_serve_over_ucx(two_prefill: Cluster) -> None:
    two_prefill.until_all_alive()
    with two_prefill.client() as client:
        served = two_prefill.until_all_serve(client, "prefill")
    assert {by.transport for by in served} <= {"ucx", ""}
    assert any(by.kv_bytes for by in served)
    two_prefill.until_idle()


def test_neither_the_commands_nor_the_client_get_in_without_the_key_or_another_way_than_by_tls(
    two_prefill: Cluster,
) -> None:
    two_prefill.until_all_alive()
    assert "ready" in two_prefill.tandem("status")
    with pytest.raises(AssertionError, match="a valid API key is needed"):
        replace(two_prefill, api_key="wrong").tandem("status")
    with Client(two_prefill.grpc, tls_ca=two_prefill.tls_ca) as client, pytest.raises(UnauthenticatedError):
        ask_capital(client)
    with Client(two_prefill.grpc, api_key=two_prefill.api_key) as client, pytest.raises(UnavailableError, match="TLS"):
        ask_capital(client)


def test_requests_on_a_killed_prefill_worker_end_in_time_and_it_comes_back(two_prefill: Cluster) -> None:
    two_prefill.until_all_alive()
    with two_prefill.client() as client, ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(_ask_long, client, number) for number in range(4)]
        victim, rank = two_prefill.control("prefill-0"), two_prefill.rank("prefill-0")
        two_prefill.until("it has work", lambda status: _has_work(status, "prefill-0"), timeout_s=10)
        killed_s = time.monotonic()
        os.kill(rank, signal.SIGKILL)
        two_prefill.until("it is noticed", lambda status: _state(status, "prefill-0")["health"] != "alive", timeout_s=5)
        next_answer = ask_capital(client)
        assert next_answer.served_by.prefill_worker == "prefill-1", "nothing goes to the dead one"
        ended = [future.result(30) for future in asked]
        assert max(at_s for _, at_s in ended) < killed_s + ENDS_WITHIN_S
        assert [how for how, _ in ended] == [""] * 4, "a prompt that no token has left yet is tried elsewhere"
        two_prefill.until_all_alive()
        assert two_prefill.control("prefill-0") != victim, "a new process, a new incarnation"
        two_prefill.until_all_serve(client, "prefill")
    two_prefill.until_idle()


def test_a_stopped_prefill_rank_is_fenced_and_restarted(two_prefill: Cluster) -> None:
    two_prefill.until_all_alive()
    rank, incarnation = two_prefill.rank("prefill-1"), two_prefill.worker("prefill-1")["incarnation"]
    os.kill(rank, signal.SIGSTOP)
    with two_prefill.client() as client:
        started_s = time.monotonic()
        for _ in range(2):
            ask_capital(client)
        assert time.monotonic() - started_s < ENDS_WITHIN_S + 5
    two_prefill.until(
        "another incarnation", lambda status: _incarnation(status, "prefill-1") not in ("", incarnation), timeout_s=60
    )
    two_prefill.until_all_alive()
    assert processes.start_ticks(rank) is None, "the stopped process is gone for good"
    two_prefill.until_idle()


def test_a_stopped_control_is_killed_too(two_prefill: Cluster) -> None:
    two_prefill.until_all_alive()
    control, incarnation = two_prefill.control("prefill-0"), two_prefill.worker("prefill-0")["incarnation"]
    os.kill(control, signal.SIGSTOP)
    two_prefill.until(
        "another incarnation", lambda status: _incarnation(status, "prefill-0") not in ("", incarnation), timeout_s=60
    )
    two_prefill.until_all_alive()
    with two_prefill.client() as client:
        two_prefill.until_all_serve(client, "prefill")


def test_an_answer_whose_only_decode_worker_is_killed_goes_on_when_that_is_back(two_prefill: Cluster) -> None:
    two_prefill.until_all_alive()
    with two_prefill.client() as client, ThreadPoolExecutor(1) as pool:
        stream = Reader(client, max_tokens=4000)
        stream.begin(pool)
        two_prefill.until("it decodes", lambda status: bool(stream.token_ids), timeout_s=10)
        os.kill(two_prefill.control("decode-0"), signal.SIGKILL)
        two_prefill.until("it is noticed", lambda status: _state(status, "decode-0")["health"] != "alive", timeout_s=6)
        go_on_undisturbed(two_prefill, client, [stream])
    two_prefill.until_idle()


def test_a_request_whose_client_leaves_holds_nothing(two_prefill: Cluster) -> None:
    two_prefill.until_all_alive()
    with two_prefill.client() as client:
        pieces = client.chat(PROMPT, stream=True, temperature=0.0, max_tokens=512, ignore_eos=True)
        next(pieces)
        two_prefill.until("it runs", lambda status: not idle(status), timeout_s=5)
        pieces.close()
    two_prefill.until_idle()


def _state(status: dict, name: str) -> dict:  # type: ignore[type-arg]
    return next(worker for worker in status["workers"] if worker["name"] == name)


def _has_work(status: dict, name: str) -> bool:  # type: ignore[type-arg]
    load = _state(status, name)["load"]
    return bool(load["running"] or load["waiting"])


def _incarnation(status: dict, name: str) -> str:  # type: ignore[type-arg]
    return str(_state(status, name)["incarnation"])
