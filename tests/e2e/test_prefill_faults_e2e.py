"""2P1D on real processes: what a client sees while prefill workers are killed, stopped and come back."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from e2e_cluster import PROMPT, Cluster, all_alive, ask_capital, command_line

from cluster import processes
from tandem import Client
from tandem.errors import RequestError

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

ENDS_WITHIN_S = 10.0


def _long(number: int) -> list[dict[str, str]]:
    text = " ".join(f"{number * 1000 + i} is a number." for i in range(50))
    return [{"role": "user", "content": text + " Which one is the last?"}]


def _ask_long(client: Client, number: int) -> tuple[str, float]:
    """How it ended ("" for an answer), and after how long."""
    started_s = time.monotonic()
    try:
        answer = client.chat(_long(number), temperature=0.0, max_tokens=4, timeout_s=30.0)
        how = "" if answer.finish_reason in ("stop", "length") else f"finish {answer.finish_reason}"
    except RequestError as error:
        how = str(error)
    return how, time.monotonic() - started_s


def test_both_prefill_workers_serve_over_ucx(two_prefill: Cluster) -> None:
    two_prefill.until_all_alive()
    with two_prefill.client() as client:
        answers = [ask_capital(client) for _ in range(4)]
    assert {answer.served_by.prefill_worker for answer in answers} == {"prefill-0", "prefill-1"}
    assert {answer.served_by.transport for answer in answers} <= {"ucx", ""}
    assert any(answer.served_by.kv_bytes for answer in answers)
    two_prefill.until_idle()


def test_everything_of_ours_listens_on_loopback_only(two_prefill: Cluster) -> None:
    """Ray's own listeners are the exception that the deployment guide names; here they are told apart."""
    family = (two_prefill.process.pid, *(one.pid for one in processes.descendants(two_prefill.process.pid)))
    wide = {pid: _wide_listeners(pid) for pid in family}
    ours = {pid: ports for pid, ports in wide.items() if ports and "cluster.rank" in command_line(pid)}
    assert not ours, f"rank processes listen beyond loopback: {ours}"
    allowed = len(family)  # Ray opens one port for each of its worker processes, and some for its daemons
    assert sum(map(len, wide.values())) <= 3 * allowed, wide
    for port in (two_prefill.grpc, two_prefill.http, *_worker_addresses(two_prefill)):
        number = int(port.rpartition(":")[2])
        assert not any(number in ports for ports in wide.values()), f"{port} is open to other machines"


def test_requests_on_a_killed_prefill_worker_end_in_time_and_it_comes_back(two_prefill: Cluster) -> None:
    two_prefill.until_all_alive()
    with two_prefill.client() as client, ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(_ask_long, client, number) for number in range(4)]
        two_prefill.until("requests in the queues", lambda status: not _idle_prefill(status), timeout_s=10)
        killed_s = time.monotonic()
        victim = two_prefill.control("prefill-0")
        os.kill(two_prefill.rank("prefill-0"), signal.SIGKILL)
        two_prefill.until("it is noticed", lambda status: not all_alive(status), timeout_s=5)
        next_answer = ask_capital(client)
        assert next_answer.served_by.prefill_worker == "prefill-1", "nothing goes to the dead one"
        ended = [future.result(30) for future in asked]
        assert time.monotonic() - killed_s < ENDS_WITHIN_S
        assert [how for how, _ in ended] == [""] * 4, "a prompt that no token has left yet is tried elsewhere"
        assert two_prefill.until_all_alive() < 60
        assert two_prefill.control("prefill-0") != victim, "a new process, a new incarnation"
        served = {ask_capital(client).served_by.prefill_worker for _ in range(4)}
    assert served == {"prefill-0", "prefill-1"}, "traffic returns"
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
        assert {ask_capital(client).served_by.prefill_worker for _ in range(4)} == {"prefill-0", "prefill-1"}


def test_a_request_whose_client_leaves_holds_nothing(two_prefill: Cluster) -> None:
    two_prefill.until_all_alive()
    with two_prefill.client() as client:
        pieces = client.chat(PROMPT, stream=True, temperature=0.0, max_tokens=512, ignore_eos=True)
        next(pieces)
        pieces.close()
    two_prefill.until_idle()


def _idle_prefill(status: dict) -> bool:  # type: ignore[type-arg]
    loads = [worker["load"] for worker in status["workers"] if worker["role"] == "prefill" and worker["load"]]
    return not any(load["running"] or load["waiting"] for load in loads)


def _incarnation(status: dict, name: str) -> str:  # type: ignore[type-arg]
    return next(str(worker["incarnation"]) for worker in status["workers"] if worker["name"] == name)


def _worker_addresses(cluster: Cluster) -> list[str]:
    return [worker["address"] for worker in cluster.status()["workers"]]


def _wide_listeners(pid: int) -> set[int]:
    """Ports on which this process listens on every interface, from /proc."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            address, _, port = fields[1].rpartition(":")
            if fields[3] == "0A" and fields[9] in inodes and set(address) == {"0"}:
                ports.add(int(port, 16))
    return ports
