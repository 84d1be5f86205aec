"""One Tandem over several hosts: `python -m bench.hosts` (root, iproute2).

The hosts are network namespaces of this machine on one bridge, each with a Ray node of its own: a head, one for the
prefill worker, two for decode workers. So processes, addresses, links and their failures are those of four machines;
kernel, memory and cores are one. UCX is held to TCP, or it would read another process's memory beside the link.

Four things are seen. A long prompt's KV crosses the link (its bytes against those that left the prefill host). A decode
worker is drained while answers run: they move to the other host, and the text is that of an undisturbed run. A decode
worker is killed in the middle of an answer, and a decode host loses its link: the answer goes on at the other host; the
gap that its reader sees, whether the text is that of an undisturbed run, and how long until the lost worker serves
again. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.serving import serving
from cluster import run_state
from cluster.show import ask_gateway
from tandem import AsyncClient, errors
from tandem.client import Options, ServedBy

ROLES = {1: {}, 2: {"prefill_slot": 1}, 3: {"decode_slot": 1}, 4: {"decode_slot": 1}}
"""Ray resources by host; the first one is the head, and where the gateway runs."""
PREFIX = "tandem-host"
BRIDGE = "tandem-br"
NETWORK = "10.214.0"
RAY_PORT = 6379
GRPC = "127.0.0.1:50051"
PATIENCE_S = 90.0
STREAMS, ANSWER_TOKENS, LONG_TOKENS = 4, 300, 1200
SLA = Path(__file__).parents[1] / "deploy" / "example-1p2d.sla.yaml"


# -- hosts -------------------------------------------------------------------------------------------------------------


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=10).stdout


def host(number: int) -> str:
    return f"{PREFIX}{number}"


def port(number: int) -> str:
    """Of the bridge, where its link ends."""
    return f"tandem-v{number}"


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
        end_s = time.monotonic() + 10
        while (pids := _try("ip", "netns", "pids", host(number)).split()) and time.monotonic() < end_s:
            _try("kill", "-9", *pids)  # again, for what one of them had just begun
        _try("ip", "link", "del", port(number))  # a namespace, and its link, outlives its name while somebody is in it
        _try("ip", "netns", "del", host(number))
    _try("ip", "link", "del", BRIDGE)


def _try(*words: str) -> str:
    return subprocess.run(words, check=False, capture_output=True, text=True, timeout=10).stdout


@contextmanager
def hosts() -> Iterator[None]:
    """Joined by a bridge."""
    remove_hosts()
    try:
        ip("link", "add", BRIDGE, "type", "bridge")
        ip("link", "set", BRIDGE, "up")
        for number in ROLES:
            name = host(number)
            ip("netns", "add", name)
            ip("link", "add", port(number), "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", port(number), "master", BRIDGE, "up")
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
            "RAY_worker_niceness": "0",
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

    def serving(self) -> AbstractContextManager[int]:
        """`tandem serve` on the head."""
        words = ("tandem", "serve", "--ray", f"{address(1)}:{RAY_PORT}", "--config", str(SLA))
        return serving(self.command(1, *words), self.folder / "serve.log", self.environment())


# -- the client, on the head -------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """A stream as its reader saw it."""

    text: str = ""
    times: list[float] = field(default_factory=list)
    served_by: ServedBy = field(default_factory=ServedBy)

    @property
    def longest_gap_s(self) -> float:
        return max(later - earlier for earlier, later in pairwise(self.times))


async def ask(client: AsyncClient, prompt: str, tokens: int) -> Seen:
    """Raises `tandem.errors.RequestError`."""
    seen = Seen()
    options = Options(max_tokens=tokens, temperature=0.0, ignore_eos=True, timeout_s=PATIENCE_S)
    async for piece in client.generate(prompt, stream=True, **options):
        seen.text += piece.text
        seen.times.append(time.monotonic())
        seen.served_by = piece.served_by
    return seen


async def crossing(client: AsyncClient) -> dict[str, float]:
    """A long prompt's KV, and what left the prefill host meanwhile."""
    source = await host_of("prefill-0")
    before = sent_bytes(source)
    told = (await ask(client, " ".join(f"The number {n} follows {n - 1}." for n in range(1, 170)), 8)).served_by
    return {
        "kv_mib": told.kv_bytes / 2**20,
        "transfer_ms": told.transfer_s * 1e3,
        "exposed_ms": told.exposed_s * 1e3,
        "link_bytes_vs_kv": (sent_bytes(source) - before) / told.kv_bytes,
    }


async def drained(client: AsyncClient) -> dict[str, float]:
    """Answers run on both decode hosts; one is drained. Share of texts that are as undisturbed ones."""
    prompts = [f"Story {number}: Once upon a time" for number in range(STREAMS)]
    alone = await asyncio.gather(*(ask(client, prompt, ANSWER_TOKENS) for prompt in prompts))
    tasks = [asyncio.create_task(ask(client, prompt, ANSWER_TOKENS)) for prompt in prompts]
    await asyncio.sleep(1.0)
    await order("drain", "decode-0")
    moved = await asyncio.gather(*tasks)
    await order("undrain", "decode-0")
    return {
        "moved": float((await status("decode-0"))["migrations"]["moved"]),
        "same_text": sum(one.text == other.text for one, other in zip(alone, moved, strict=True)) / STREAMS,
        "longest_gap_ms": max(one.longest_gap_s for one in moved) * 1e3,
    }


async def lost(client: AsyncClient, lose: Callable[[], object]) -> tuple[Seen, bool]:
    """An answer whose decode worker, `decode-0`, is lost in the middle; and whether it reads as an undisturbed one."""
    await order("drain", "decode-1")
    running = asyncio.create_task(ask(client, "Once upon a time", LONG_TOKENS))
    await asyncio.sleep(2.0)
    await order("undrain", "decode-1")
    if running.done():
        raise RuntimeError("the answer has ended before its worker is lost")
    lose()
    seen = await asyncio.wait_for(running, PATIENCE_S)
    if seen.served_by.decode_worker != "decode-1":
        raise RuntimeError(f"{seen.served_by.decode_worker} has ended it, which was lost")
    return seen, seen.text == (await ask(client, "Once upon a time", LONG_TOKENS)).text


async def killed(client: AsyncClient) -> dict[str, float]:
    """SIGKILL of a decode worker: the gap that its reader sees, and until it serves again."""
    worker = await status("decode-0")
    seen, same = await lost(client, lambda: os.kill(worker["pid"], signal.SIGKILL))
    again_s = await until_it_serves(client)
    return {"killed_gap_s": seen.longest_gap_s, "killed_same_text": float(same), "killed_serves_again_s": again_s}


async def cut_off(client: AsyncClient) -> dict[str, float]:
    """A decode host without a link: the same, and from the link's return until it serves."""
    number = await host_of("decode-0")
    seen, same = await lost(client, lambda: set_link(number, "down"))
    set_link(number, "up")
    again_s = await until_it_serves(client)
    return {"cut_gap_s": seen.longest_gap_s, "cut_same_text": float(same), "cut_serves_again_s": again_s}


async def until_it_serves(client: AsyncClient) -> float:
    """Seconds until `decode-0` serves again."""
    began = time.monotonic()
    await order("drain", "decode-1")
    while not await serves(client):
        if time.monotonic() - began > PATIENCE_S:
            raise RuntimeError("decode-0 does not serve again")
        await asyncio.sleep(0.5)
    await order("undrain", "decode-1")
    return time.monotonic() - began


async def serves(client: AsyncClient) -> bool:
    try:
        return bool((await ask(client, "Once upon a time", 8)).text)
    except errors.UnavailableError:
        return False


async def order(word: str, worker: str) -> None:
    """What `tandem drain` and `tandem undrain` do."""
    await asyncio.to_thread(ask_gateway, run_state.load(), f"/{word}/{worker}", method="POST")


async def status(worker: str) -> dict[str, Any]:
    """See `cluster.cluster_status.WorkerStatus`."""
    told = await asyncio.to_thread(ask_gateway, run_state.load(), "/status")
    return next(one for one in told["workers"] if one["name"] == worker)


async def host_of(worker: str) -> int:
    """Ray chooses among the hosts of a role."""
    where, _, _ = (await status(worker))["address"].rpartition(":")
    return next(number for number in ROLES if address(number) == where)


async def visit() -> dict[str, float]:
    async with AsyncClient(GRPC) as client:
        return await crossing(client) | await drained(client) | await killed(client) | await cut_off(client)


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
    ratios = {name: round(row[name], 3) for name in row if name == "link_bytes_vs_kv" or name.endswith("same_text")}
    print(json.dumps({"bench": "hosts", "ratios": ratios} | {name: round(value, 3) for name, value in row.items()}))


if __name__ == "__main__":
    main()
