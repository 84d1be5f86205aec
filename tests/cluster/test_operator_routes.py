"""What operators may ask of a gateway: status, and workers to be drained; and the commands that ask it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from cluster.cli import main
from cluster.cluster_status import ClusterStatus, WorkerStatus
from cluster.gateway_host import RouterAway, with_operator
from cluster.run_state import RunState, make_run_folder, save
from tandem.messages import LinkRate


class Router:
    """Knows one worker; `away` as while it is restarted."""

    def __init__(self) -> None:
        self.away = False
        self.drained: list[tuple[str, bool]] = []

    async def status(self) -> ClusterStatus:
        self._here()
        return ClusterStatus(not_ready="")

    async def drain(self, name: str, draining: bool) -> str:
        self._here()
        if name != "decode-0":
            return f"there is no worker {name}"
        self.drained.append((name, draining))
        return ""

    def _here(self) -> None:
        if self.away:
            raise RouterAway("restarting")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is no operator's question")


async def inner(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse("inner")(scope, receive, send)


def client(router: Router, key: str | None = None) -> httpx.AsyncClient:
    app = with_operator(inner, router, key)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test")


async def test_workers_are_drained_and_taken_back_by_name() -> None:
    router = Router()
    async with client(router) as asking:
        assert (await asking.post("/drain/decode-0")).json() == {"worker": "decode-0", "draining": True}
        assert (await asking.post("/undrain/decode-0")).json() == {"worker": "decode-0", "draining": False}
        unknown = await asking.post("/drain/decode-7")
        assert (unknown.status_code, unknown.json()["error"]["message"]) == (409, "there is no worker decode-7")
        assert (await asking.get("/drain/decode-0")).text == "inner"
        router.away = True
        assert (await asking.post("/drain/decode-0")).status_code == 503
        assert (await asking.get("/status")).status_code == 503
    assert router.drained == [("decode-0", True), ("decode-0", False)]


async def test_with_a_key_nobody_drains_without_it() -> None:
    router = Router()
    async with client(router, "secret") as asking:
        assert (await asking.post("/drain/decode-0")).status_code == 401
        assert (await asking.get("/status")).status_code == 401
        good = {"authorization": "Bearer secret"}
        assert (await asking.post("/drain/decode-0", headers=good)).status_code == 200
        assert (await asking.get("/status", headers=good)).json()["ready"]
    assert router.drained == [("decode-0", True)]


class Gateway(BaseHTTPRequestHandler):
    """Answers as a gateway does; knows one worker."""

    def do_POST(self) -> None:
        known = self.path.endswith("/decode-0")
        body = {"draining": True} if known else {"error": {"message": "there is no worker of that name"}}
        self.send_response(200 if known else 409)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def do_GET(self) -> None:
        links = (LinkRate("decode-0", "shm", 2e9, 5e9, 25e9),)
        worker = WorkerStatus(name="prefill-0", role="prefill", health="alive", why="", pid=123456, links=links)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(ClusterStatus(not_ready="", workers=(worker,)).to_json()).encode())

    def log_message(self, *args: object) -> None:
        """Silent."""


@pytest.fixture
def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TANDEM_RUN_DIR", str(tmp_path / "run"))
    make_run_folder()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Gateway)
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    serving.start()
    save(RunState(grpc="127.0.0.1:1", http=f"127.0.0.1:{server.server_port}", model="toy"))
    yield
    server.shutdown()
    serving.join()
    server.server_close()


@pytest.mark.usefixtures("gateway")
def test_the_commands_say_what_the_gateway_says() -> None:
    drained = CliRunner().invoke(main, ["drain", "decode-0"])
    assert (drained.exit_code, "decode-0 is draining" in drained.output) == (0, True)
    assert "decode-0 is back" in CliRunner().invoke(main, ["undrain", "decode-0"]).output
    refused = CliRunner().invoke(main, ["drain", "nobody"])
    assert (refused.exit_code, "there is no worker of that name" in refused.output) == (1, True)


@pytest.mark.usefixtures("gateway")
def test_a_narrow_terminal_shows_every_worker_by_its_whole_name_and_what_its_links_reach() -> None:
    shown = CliRunner().invoke(main, ["status"], env={"COLUMNS": "80"})
    assert shown.exit_code == 0, shown.output
    assert any(line.split()[:3] == ["prefill-0", "alive", "123456"] for line in shown.output.splitlines())
    assert "KV prefill-0 to decode-0 over shm: 5.0 GB/s at best, one thread copies 25.0" in shown.output
