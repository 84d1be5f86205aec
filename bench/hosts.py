"""One Tandem over several hosts: `python -m bench.hosts` (root, iproute2).

The hosts are network namespaces of this machine on one bridge, each with a Ray node of its own: a head, one for the
prefill worker, two for decode workers. So processes, addresses, links and their failures are those of four machines;
kernel, memory and cores are one. UCX is held to TCP, or it would read another process's memory beside the link.

Three things are seen. A long prompt's KV crosses the link (its bytes against those that left the prefill host). A
decode worker is drained while answers run: they move to the other host, and the text is that of an undisturbed run. A
decode host loses its link in the middle of an answer: how long until the reader is told, and, once the link is back,
until that host serves again. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

ROLES = {1: {}, 2: {"prefill_slot": 1}, 3: {"decode_slot": 1}, 4: {"decode_slot": 1}}
"""Ray resources by host; the first one is the head, and where the gateway runs."""
PREFIX = "tandem-host"
BRIDGE = "tandem-br"
NETWORK = "10.214.0"
RAY_PORT = 6379
URL = "http://127.0.0.1:8000"
START_S, PATIENCE_S = 240.0, 90.0
STREAMS, ANSWER_TOKENS = 4, 300
SLA = """
version: 1
model: smollm2-135m
pools:
  prefill: {count: 1, threads: 1, kv_memory: 512MiB}
  decode: {count: 2, threads: 1, kv_memory: 512MiB}
routing: {policy: sla, local_prefill: never}
classes:
  default: {ttft: 10s, itl: 1s}
"""


# -- hosts -------------------------------------------------------------------------------------------------------------


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=10).stdout


def host(number: int) -> str:
    return f"{PREFIX}{number}"


def address(number: int) -> str:
    return f"{NETWORK}.{number}"


def sent_bytes(number: int) -> int:
    """What a host has sent over its link."""
    (link,) = json.loads(ip("-n", host(number), "-s", "-j", "link", "show", "eth0"))
    return int(link["stats64"]["tx"]["bytes"])


def set_link(number: int, state: str) -> None:
    ip("-n", host(number), "link", "set", "eth0", state)


def remove_hosts() -> None:
    """What runs in them too; nothing where there are none."""
    for number in ROLES:
        pids = subprocess.run(["ip", "netns", "pids", host(number)], check=False, capture_output=True, text=True).stdout
        subprocess.run(["kill", "-9", *pids.split()], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", host(number)], check=False, capture_output=True)
    subprocess.run(["ip", "link", "del", BRIDGE], check=False, capture_output=True)


@contextmanager
def hosts() -> Iterator[None]:
    """Joined by a bridge."""
    remove_hosts()
    try:
        ip("link", "add", BRIDGE, "type", "bridge")
        ip("link", "set", BRIDGE, "up")
        for number in ROLES:
            name, port = host(number), f"tandem-v{number}"
            ip("netns", "add", name)
            ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", port, "master", BRIDGE, "up")
            ip("-n", name, "addr", "add", f"{address(number)}/24", "dev", "eth0")
            set_link(number, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield
    finally:
        remove_hosts()


@dataclass(frozen=True)
class Cluster:
    """Ray over the hosts, and commands on them."""

    folder: Path

    def environment(self) -> dict[str, str]:
        return os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.folder / "token"),
            "TANDEM_RUN_DIR": str(self.folder / "run"),
            "UCX_TLS": "tcp,self",
        }

    def command(self, number: int, *words: str) -> list[str]:
        return ["ip", "netns", "exec", host(number), *words]

    def run(self, number: int, *words: str, timeout_s: float = 60.0) -> str:
        done = subprocess.run(
            self.command(number, *words),
            env=self.environment(),
            check=False,
            text=True,
            timeout=timeout_s,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)} on {host(number)}: {done.stdout[-2000:]}")
        return done.stdout

    def start_ray(self) -> None:
        token = self.folder / "token"
        token.write_text(secrets.token_hex(32), encoding="ascii")
        token.chmod(0o600)
        head = ("--head", f"--port={RAY_PORT}", f"--temp-dir={self.folder}", "--include-dashboard=false")
        for number, resources in ROLES.items():
            joining = (f"--address={address(1)}:{RAY_PORT}", f"--resources={json.dumps(resources)}")
            own = (f"--node-ip-address={address(number)}", "--num-cpus=4", "--disable-usage-stats")
            self.run(number, "ray", "start", *(head if number == 1 else joining), *own)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """`tandem serve` on the head."""
        sla, log = self.folder / "hosts.sla.yaml", self.folder / "serve.log"
        sla.write_text(SLA, encoding="utf-8")
        words = ("tandem", "serve", "--ray", f"{address(1)}:{RAY_PORT}", "--config", str(sla))
        with log.open("w") as out:
            serve = subprocess.Popen(self.command(1, *words), env=self.environment(), stdout=out, stderr=out)
        try:
            end_s = time.monotonic() + START_S
            while "ready: HTTP" not in log.read_text():
                if serve.poll() is not None or time.monotonic() > end_s:
                    raise RuntimeError(f"tandem serve did not start: {log.read_text()[-2000:]}")
                time.sleep(0.2)
            yield
        finally:
            serve.terminate()
            serve.wait(60)


# -- the client, on the head -------------------------------------------------------------------------------------------


@dataclass
class Answer:
    """A stream as its reader saw it."""

    text: str = ""
    times: list[float] = field(default_factory=list)
    error: str = ""
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def longest_gap_s(self) -> float:
        return max(later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False))


async def ask(client: httpx.AsyncClient, prompt: str, tokens: int) -> Answer:
    answer = Answer()
    wanted = {"model": "smollm2-135m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    async with client.stream("POST", f"{URL}/v1/completions", json=wanted | {"stream": True}) as response:
        async for line in response.aiter_lines():
            told = json.loads(line[6:]) if line.startswith("data: {") else {}
            answer.error = told.get("error", {}).get("message", answer.error)
            answer.report = told.get("tandem", answer.report)
            for choice in told.get("choices", ()):
                answer.text += choice["text"]
                answer.times.append(time.monotonic())
    return answer


async def crossing(client: httpx.AsyncClient) -> dict[str, float]:
    """A long prompt's KV, and what left the prefill host meanwhile."""
    before = sent_bytes(2)
    answer = await ask(client, " ".join(f"The number {n} follows {n - 1}." for n in range(1, 170)), 8)
    return {
        "kv_mib": answer.report["kv_bytes"] / 2**20,
        "transfer_ms": answer.report["transfer_s"] * 1e3,
        "exposed_ms": answer.report["exposed_s"] * 1e3,
        "link_bytes_vs_kv": (sent_bytes(2) - before) / answer.report["kv_bytes"],
    }


async def drained(client: httpx.AsyncClient) -> dict[str, float]:
    """Answers run on both decode hosts; one is drained. Share of texts that are as undisturbed ones."""
    prompts = [f"Story {number}: Once upon a time" for number in range(STREAMS)]
    alone = await asyncio.gather(*(ask(client, prompt, ANSWER_TOKENS) for prompt in prompts))
    tasks = [asyncio.create_task(ask(client, prompt, ANSWER_TOKENS)) for prompt in prompts]
    await asyncio.sleep(1.0)
    await told("drain", "decode-0")
    moved = await asyncio.gather(*tasks)
    await told("undrain", "decode-0")
    return {
        "moved": float(await counted('tandem_worker_migrations_total{result="moved",worker="decode-0"}')),
        "same_text": sum(one.text == other.text for one, other in zip(alone, moved, strict=True)) / STREAMS,
        "longest_gap_ms": max(one.longest_gap_s for one in moved) * 1e3,
    }


async def cut_off(client: httpx.AsyncClient) -> dict[str, float]:
    """A decode host without a link: seconds until its readers know, and from the link's return until it serves."""
    await told("drain", "decode-1")  # the answer runs on the host that is cut off
    running = asyncio.create_task(ask(client, "Once upon a time", 4000))
    await asyncio.sleep(2.0)
    set_link(3, "down")
    began = time.monotonic()
    answer = await asyncio.wait_for(running, PATIENCE_S)
    noticed = time.monotonic() - began
    if not answer.error:
        raise RuntimeError("an answer ended well on a host without a link")
    await told("undrain", "decode-1")
    other = await ask(client, "Once upon a time", 8)
    if other.error or other.report["decode"] != "decode-1":
        raise RuntimeError(f"the other host does not serve: {other.error or other.report}")
    set_link(3, "up")
    began = time.monotonic()
    await told("drain", "decode-1")
    while (again := await ask(client, "Once upon a time", 8)).error or not again.times:
        if time.monotonic() - began > PATIENCE_S:
            raise RuntimeError(f"the host does not serve again: {again.error}")
        await asyncio.sleep(0.5)
    return {"noticed_s": noticed, "serves_again_s": time.monotonic() - began}


async def told(*words: str) -> None:
    """A command of ours, on this host."""
    process = await asyncio.create_subprocess_exec("tandem", *words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said, _ = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    if process.returncode:
        raise RuntimeError(f"tandem {' '.join(words)}: {said.decode()}")


async def counted(metric: str) -> float:
    async with httpx.AsyncClient() as client:
        lines = (await client.get(f"{URL}/metrics")).text.splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(metric))


async def visit() -> dict[str, float]:
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        return await crossing(client) | await drained(client) | await cut_off(client)


# -- the run -----------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.hosts", description=__doc__)
    parser.add_argument("--visit", action="store_true", help=argparse.SUPPRESS)
    if parser.parse_args(arguments).visit:
        print(json.dumps(asyncio.run(visit())))
        return
    if os.geteuid():
        sys.exit("bench.hosts makes network namespaces, which takes root")
    with tempfile.TemporaryDirectory(prefix="tandem-hosts-") as folder, hosts():
        cluster = Cluster(Path(folder))
        cluster.start_ray()
        with cluster.serving():
            told = cluster.run(1, sys.executable, "-m", "bench.hosts", "--visit", timeout_s=600)
    row = json.loads(told.splitlines()[-1])
    for name, value in row.items():
        print(f"{name:20}{value:10.2f}")
    ratios = {name: round(row[name], 3) for name in ("link_bytes_vs_kv", "same_text")}
    print(json.dumps({"bench": "hosts", "ratios": ratios} | {name: round(value, 3) for name, value in row.items()}))


if __name__ == "__main__":
    main()
