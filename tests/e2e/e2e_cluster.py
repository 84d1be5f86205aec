"""A whole cluster as a user has it: `tandem serve` in a process of its own, on free ports, with the real model."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster import processes
from tandem import Client
from tandem.client import Answer, ServedBy

START_S = 120.0
KEY_VARIABLE = "TANDEM_TEST_KEY"
_LISTEN = "0A"
PROMPT = [{"role": "user", "content": "What is the capital of France?"}]


@dataclass(frozen=True)
class Cluster:
    """A running cluster and ways to look at it and to hurt it."""

    process: subprocess.Popen[str]
    grpc: str
    http: str
    run_folder: Path
    tls_ca: str | None = None
    api_key: str | None = None

    def tandem(self, *arguments: str) -> str:
        """What a command of the operator says. AssertionError when it fails."""
        command = [sys.executable, "-m", "cluster.cli", *arguments]
        environment = os.environ | {"TANDEM_RUN_DIR": str(self.run_folder), KEY_VARIABLE: self.api_key or ""}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def client(self) -> Client:
        return Client(self.grpc, api_key=self.api_key, tls_ca=self.tls_ca)

    def status(self) -> dict[str, Any]:
        asked = urllib.request.Request(f"{'https' if self.tls_ca else 'http'}://{self.http}/status")
        asked.add_header("authorization", f"Bearer {self.api_key}")
        context = ssl.create_default_context(cafile=self.tls_ca) if self.tls_ca else None
        with urllib.request.urlopen(asked, timeout=10, context=context) as answer:
            return dict(json.load(answer))

    def worker(self, name: str) -> dict[str, Any]:
        return next(worker for worker in self.status()["workers"] if worker["name"] == name)

    def control(self, name: str) -> int:
        return int(self.worker(name)["pid"])

    def rank(self, name: str) -> int:
        """The step loop's process, a child of its control."""
        children = processes.descendants(self.control(name))
        return next(child.pid for child in children if "cluster.rank" in command_line(child.pid))

    def actor(self, kind: str) -> int:
        """The process of an actor, by the title that Ray gives it."""
        family = processes.descendants(self.process.pid)
        return next(one.pid for one in family if f"ray::{kind}" in command_line(one.pid))

    def until(self, what: str, holds: Callable[[dict[str, Any]], bool], *, timeout_s: float) -> float:
        """Wait until the status says so; the seconds it took. AssertionError with the last status if it does not."""
        start_s = time.monotonic()
        status: dict[str, Any] = {}
        pause = threading.Event()
        while time.monotonic() - start_s < timeout_s:
            try:
                status = self.status()
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                status = {}
            if status and holds(status):
                return time.monotonic() - start_s
            pause.wait(0.1)
        raise AssertionError(f"not within {timeout_s} s: {what}; last status: {json.dumps(status)[:2000]}")

    def until_all_alive(self, *, timeout_s: float = 60.0) -> float:
        return self.until("every worker alive", all_alive, timeout_s=timeout_s)

    def until_idle(self, *, timeout_s: float = 15.0) -> float:
        return self.until("no live block anywhere", idle, timeout_s=timeout_s)

    def until_all_serve(self, client: Client, role: str) -> list[ServedBy]:
        """Ask until every worker of the role has served; who served what was asked. One that a busy machine kept silent
        may be passed over for a moment."""
        wanted = {worker["name"] for worker in self.status()["workers"] if worker["role"] == role}
        served: list[ServedBy] = []
        for _ in range(4 * len(wanted)):
            served.append(ask_capital(client).served_by)
            if {by.prefill_worker if role == "prefill" else by.decode_worker for by in served} == wanted:
                return served
        raise AssertionError(f"not all of {sorted(wanted)} serve: {served}")


def all_alive(status: dict[str, Any]) -> bool:
    return bool(status["workers"]) and all(worker["health"] == "alive" for worker in status["workers"])


def idle(status: dict[str, Any]) -> bool:
    loads = [worker["load"] for worker in status["workers"] if worker["load"]]
    return all(not load["live_blocks"] and not load["running"] and not load["waiting"] for load in loads)


@contextmanager
def serving(folder: Path, config: dict[str, Any]) -> Iterator[Cluster]:
    """Start, yield, stop by SIGTERM; afterwards nothing of it runs any more."""
    file = folder / "cluster.sla.yaml"
    file.write_text(yaml.safe_dump(config))
    run_folder = folder / "run"
    api_key = secrets.token_hex(8) if config["gateway"].get("api_key_env") == KEY_VARIABLE else None
    environment = {**os.environ, "TANDEM_RUN_DIR": str(run_folder), KEY_VARIABLE: api_key or ""}
    log_path = folder / "serve.log"
    with log_path.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "cluster.cli", "serve", "--config", str(file)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            text=True,
        )
    try:
        state = _state(run_folder / "cluster.json", process, log_path)
        yield Cluster(process, state["grpc"], state["http"], run_folder, state["tls_ca"], api_key)
    finally:
        family = processes.descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    left = [command_line(one.pid) for one in family if one.alive()]
    assert not left, f"these were left behind: {left}"
    assert process.returncode == 0, log_path.read_text()


def _state(path: Path, process: subprocess.Popen[str], log_path: Path) -> dict[str, Any]:
    deadline_s = time.monotonic() + START_S
    pause = threading.Event()
    while not path.exists():
        assert process.poll() is None, f"the cluster did not start: {log_path.read_text()}"
        assert time.monotonic() < deadline_s, f"the cluster is late: {log_path.read_text()}"
        pause.wait(0.1)
    return dict(json.loads(path.read_text()))


def config(prefill: int, decode: int, **sections: Any) -> dict[str, Any]:
    """An SLA file for two cores: small pools, quick restarts; who is alive is judged as ever."""
    pool = {"threads": 1, "kv_memory": "192MiB", "max_num_batched_tokens": 256}
    return {
        "version": 1,
        "model": {"name": "smollm2-135m", "dtype": "bf16"},
        "pools": {"prefill": {"count": prefill, **pool}, "decode": {"count": decode, **pool}},
        "routing": {"policy": "round_robin", "local_prefill": "never"},
        "transfer": {"transports": ["ucx", "tcp"]},
        "gateway": {"http_port": free_port(), "grpc_port": free_port()},
        "timeouts": {"restart_backoff": "200ms", "drain": "2s", "request": "60s"},
        **sections,
    }


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def listening(pids: Iterable[int]) -> set[str]:
    """Where these processes accept TCP connections, as `address:port`."""
    sockets = {target for pid in pids for target in _open_files(pid) if target.startswith("socket:")}
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for fields in (line.split() for line in Path(table).read_text().splitlines()[1:]):
            if fields[3] == _LISTEN and f"socket:[{fields[9]}]" in sockets:
                found.add(_readable(*fields[1].split(":")))
    return found


def _open_files(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return [os.readlink(descriptor) for descriptor in Path(f"/proc/{pid}/fd").iterdir()]
    return []


def _readable(address: str, port: str) -> str:
    """From the kernel's form: words of 32 bits in the machine's byte order."""
    words = [bytes.fromhex(address[start : start + 8])[::-1] for start in range(0, len(address), 8)]
    ip = ipaddress.ip_address(b"".join(words))
    return f"{getattr(ip, 'ipv4_mapped', None) or ip}:{int(port, 16)}"


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def ask_capital(client: Client) -> Answer:
    answer = client.chat(PROMPT, temperature=0.0, max_tokens=16, timeout_s=30.0)
    assert "Paris" in answer.text
    return answer


def running_processes() -> list[tuple[int, str, list[str]]]:
    """All of this machine that can be seen: id, command line, environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            environment = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if line:
            found.append((int(folder.name), line, environment))
    return found
