"""A real prefill and a real decode worker on loopback: rank processes, control, gRPC, tcp, the toy model."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from cluster.config_text import config_from_text
from cluster.control import Control, ControlSettings, WorkerDied, WorkerUnfit
from cluster.events import Publisher, Subscriber
from cluster.ipc import RankSettings, to_json
from cluster.node_client import NodeClient
from cluster.rank import transport_hosts
from cluster.streams import FrameHub
from cluster.wiring import rank_settings
from cluster.worker import WorkerSettings
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError
from engine.toy import make_toy_checkpoint
from engine.types import FinishReason, Request, SamplingParams
from kvtransfer.select import ucx_available
from tandem.messages import (
    Abort,
    Aborted,
    Code,
    Declined,
    Delta,
    Expect,
    Expected,
    HandedOver,
    KvEvents,
    LoadReport,
    Question,
    Submit,
    WorkerRef,
)
from tandem.v1 import node_pb2, node_pb2_grpc

SECRET = secrets.token_hex(8)
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_checkpoint(tmp_path_factory.mktemp("toy"))


def engine_config(path: Path) -> EngineConfig:
    return EngineConfig(model=str(path), num_blocks=128, max_num_batched_tokens=64, max_num_seqs=8, threads=1)


def control(
    name: str,
    role: str,
    path: Path,
    scheme: str = "tcp",
    staging: str = "auto",
    staging_bytes: int = 4 << 20,
    net_device: str | None = None,
    **settings: object,
) -> Control:
    worker = WorkerSettings(name=name, incarnation="", role=role, address="", allow_faults=True)
    rank = RankSettings(
        worker=worker,
        engine=engine_config(path),
        transports=(scheme,),
        checksums=True,
        staging=staging,
        staging_bytes=staging_bytes,
        net_device=net_device,
    )
    return Control(ControlSettings(secret=SECRET, **settings), rank)  # type: ignore[arg-type]


class Gateway:
    """As much of one as a worker needs."""

    def __init__(self) -> None:
        self.hub = FrameHub()
        self.client = NodeClient(SECRET, hub=self.hub, gateway_id="g")

    async def start(self, request: Request, prefill: WorkerRef | None, decode: WorkerRef):
        """The request's stream, and the task that waits for prefill's answer."""
        await self.client.open(decode)
        stream = self.hub.expect(request.request_id, decode)
        answer = await self.client.ask(decode, Expect(request, "g", prefill), 10)
        assert isinstance(answer, Expected), answer
        submit = asyncio.create_task(self.client.ask(prefill, Submit(request, decode), 30)) if prefill else None
        return stream, submit

    async def collect(self, stream: AsyncIterator[Delta]) -> list[Delta]:
        async with asyncio.timeout(PATIENCE_S):
            return [delta async for delta in stream]


@pytest_asyncio.fixture
async def gateway() -> AsyncIterator[Gateway]:
    gateway = Gateway()
    yield gateway
    await gateway.client.close()


@pytest_asyncio.fixture
async def heard() -> AsyncIterator[Subscriber]:
    subscriber = Subscriber(SECRET)
    yield subscriber
    subscriber.close()


@pytest_asyncio.fixture
async def pair(checkpoint: Path) -> AsyncIterator[tuple[Control, Control]]:
    workers = (control("p0", "prefill", checkpoint), control("d0", "decode", checkpoint))
    await asyncio.gather(*(worker.start() for worker in workers))
    yield workers
    await asyncio.gather(*(worker.stop() for worker in workers))


def request(request_id: str, length: int = 100, **sampling: object) -> Request:
    params = SamplingParams(**({"max_tokens": 12, "temperature": 0.0} | sampling))  # type: ignore[arg-type]
    token_ids = tuple((11 * i) % 250 for i in range(length))
    now = time.monotonic()
    return Request(
        request_id=request_id, token_ids=token_ids, sampling=params, arrival_s=now, deadline_s=now + PATIENCE_S
    )


def alone(path: Path, req: Request) -> list[int]:
    engine = Engine.open(engine_config(path))
    engine.submit(replace(req, deadline_s=None))
    tokens: list[int] = []
    while engine.has_work():
        result = engine.step(0.0)
        assert result is not None
        tokens += [token.token_id for one in result.progress for token in one.tokens]
    return tokens


def refs(pair: tuple[Control, Control]) -> tuple[WorkerRef, WorkerRef]:
    assert pair[0].info is not None
    assert pair[1].info is not None
    return pair[0].info.ref, pair[1].info.ref


async def no_blocks_held(worker: Control) -> None:
    """Wait until the worker reports that nothing is live."""
    async with asyncio.timeout(12):
        while (report := await worker.next_report()).load.live_blocks or report.request_ids:
            assert not worker.died.done()


@pytest.mark.parametrize("scheme", ["shm", "ucx", "tcp"])
async def test_kv_of_a_pool_that_no_transport_reaches_goes_by_way_of_staging_memory(
    checkpoint: Path, gateway: Gateway, scheme: str
) -> None:
    """The prefill worker's pool; decode's is reached."""
    if scheme == "ucx" and not ucx_available()[0]:
        pytest.skip(ucx_available()[1])
    workers = control("p0", "prefill", checkpoint, scheme, "always"), control("d0", "decode", checkpoint, scheme)
    await asyncio.gather(*(worker.start() for worker in workers))
    try:
        req = request("r")
        stream, submit = await gateway.start(req, *refs(workers))
        deltas = await gateway.collect(stream)
        assert [token.token_id for delta in deltas for token in delta.tokens] == alone(checkpoint, req)
        assert submit is not None
        answer = await submit
        assert isinstance(answer, HandedOver)
        assert (answer.report.transport, answer.report.kv_blocks) == (scheme, 7)
        await asyncio.gather(*(no_blocks_held(worker) for worker in workers))
    finally:
        await asyncio.gather(*(worker.stop() for worker in workers))


@pytest.mark.parametrize("scheme", ["tcp", "shm", "ucx"])
async def test_tokens_travel_through_two_real_workers(
    scheme: str, gateway: Gateway, checkpoint: Path, heard: Subscriber
) -> None:
    if scheme == "ucx" and not ucx_available()[0]:
        pytest.skip(ucx_available()[1])
    pair = (control("p0", "prefill", checkpoint, scheme), control("d0", "decode", checkpoint, scheme))
    await asyncio.gather(*(worker.start() for worker in pair))
    try:
        await _tokens_travel(pair, gateway, checkpoint, heard, scheme)
    finally:
        await asyncio.gather(*(worker.stop() for worker in pair))


async def _tokens_travel(
    pair: tuple[Control, Control], gateway: Gateway, checkpoint: Path, heard: Subscriber, scheme: str
) -> None:
    prefill, decode = refs(pair)
    heard.connect(pair[1].events_address)
    assert isinstance(await asyncio.wait_for(heard.receive(), 10), LoadReport)
    req = request("r")
    stream, submit = await gateway.start(req, prefill, decode)
    deltas = await gateway.collect(stream)
    assert [token.token_id for delta in deltas for token in delta.tokens] == alone(checkpoint, req)
    assert deltas[-1].finish is FinishReason.LENGTH
    answer = await submit
    assert isinstance(answer, HandedOver)
    assert (answer.report.transport, answer.report.kv_blocks) == (scheme, 7)
    async with asyncio.timeout(10):
        while not isinstance(event := await heard.receive(), KvEvents):
            assert event.worker == "d0"
    assert event.stored
    await asyncio.gather(*(no_blocks_held(worker) for worker in pair))


async def test_a_killed_prefill_worker_is_an_answer_and_decode_forgets_it(
    pair: tuple[Control, Control], gateway: Gateway, checkpoint: Path
) -> None:
    prefill, decode = refs(pair)
    _, submit = await gateway.start(request("r", 1000, max_tokens=4), prefill, decode)
    started = time.monotonic()
    os.kill(pair[0].pid or 0, signal.SIGKILL)
    answer = await asyncio.wait_for(submit, 10)
    assert isinstance(answer, Declined | HandedOver)
    if isinstance(answer, Declined):
        assert (answer.code, answer.by) == (Code.UNAVAILABLE, "p0")
    gateway.hub.release("r")
    assert isinstance(await gateway.client.ask(decode, Abort("r"), 5), Aborted)
    assert "SIGKILL" in await asyncio.wait_for(pair[0].died, 5)
    again = await gateway.client.ask(prefill, Submit(request("q"), decode), 5)
    assert isinstance(again, Declined)
    assert time.monotonic() - started < 10
    local, _ = await gateway.start(request("local"), None, decode)
    assert len(await gateway.collect(local)) > 0
    await no_blocks_held(pair[1])


async def test_a_killed_decode_worker_ends_its_streams(pair: tuple[Control, Control], gateway: Gateway) -> None:
    prefill, decode = refs(pair)
    stream, submit = await gateway.start(request("r", 40, max_tokens=900), prefill, decode)
    assert (await asyncio.wait_for(anext(aiter(stream)), 10)).tokens
    pair[1].kill()
    deltas = await asyncio.wait_for(gateway.collect(stream), 10)
    assert deltas[-1].error is not None
    assert (deltas[-1].error.code, deltas[-1].error.by) == (Code.UNAVAILABLE, "d0")
    await submit
    await no_blocks_held(pair[0])


async def test_a_stopped_rank_is_killed_for_its_silence(checkpoint: Path, gateway: Gateway) -> None:
    worker = control("d0", "decode", checkpoint, silence_s=1.5)
    info = await worker.start()
    try:
        stream, _ = await gateway.start(request("r", 40, max_tokens=900), None, info.ref)
        await asyncio.wait_for(anext(aiter(stream)), 10)
        os.kill(worker.pid or 0, signal.SIGSTOP)
        deltas = await asyncio.wait_for(gateway.collect(stream), 8)
        assert deltas[-1].error is not None
        assert "SIGKILL" in await asyncio.wait_for(worker.died, 5)
    finally:
        await worker.stop()


async def test_a_gateway_that_leaves_takes_its_requests_with_it(checkpoint: Path) -> None:
    worker = control("d0", "decode", checkpoint, gateway_grace_s=0.2)
    info = await worker.start()
    try:
        gateway = Gateway()
        stream, _ = await gateway.start(request("r", 40, max_tokens=900), None, info.ref)
        await asyncio.wait_for(anext(aiter(stream)), 10)
        await gateway.client.close()
        await no_blocks_held(worker)
        assert worker.last_report is not None
        assert worker.last_report.load.generated_tokens < 900
    finally:
        await worker.stop()


async def test_nobody_gets_in_without_the_secret(pair: tuple[Control, Control]) -> None:
    _, decode = refs(pair)
    async with grpc.aio.insecure_channel(decode.address) as channel:
        stub = node_pb2_grpc.NodeStub(channel)
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Describe(node_pb2.DescribeRequest(), metadata=metadata, timeout=5)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await anext(aiter(stub.Frames(node_pb2.FramesRequest(gateway_id="x"), metadata=metadata, timeout=5)))
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    client = NodeClient(SECRET)
    assert (await client.describe(decode.address)).ref == decode
    await client.close()


async def test_a_call_for_another_incarnation_is_unavailable(pair: tuple[Control, Control], gateway: Gateway) -> None:
    _, decode = refs(pair)
    old = replace(decode, incarnation="gone")
    answer = await gateway.client.ask(old, Expect(request("r"), "g", None), 5)
    assert isinstance(answer, Declined)
    assert (answer.code, answer.by) == (Code.UNAVAILABLE, "d0")
    assert "gone" in answer.message


async def test_a_worker_that_cannot_start_says_why(tmp_path: Path) -> None:
    worker = control("p0", "prefill", tmp_path / "nothing")
    with pytest.raises(WorkerDied, match=r"p0 did not start: its rank process ended with code 1: .*nothing"):
        await asyncio.wait_for(worker.start(), 60)


@pytest.mark.parametrize(
    ("staging_bytes", "remedy"),
    [(1024, "larger: 0 of its bytes .* a block has"), (1 << 60, "no more than this machine has")],
)
async def test_staging_memory_that_holds_no_block_or_cannot_be_had_is_refused_for_good(
    checkpoint: Path, staging_bytes: int, remedy: str
) -> None:
    with pytest.raises(WorkerUnfit, match=f"staging_bytes: is {staging_bytes}; it must be {remedy}"):
        await control("d0", "decode", checkpoint, staging="always", staging_bytes=staging_bytes).start()


async def test_a_network_device_that_is_not_here_is_refused_for_good(checkpoint: Path) -> None:
    with pytest.raises(WorkerUnfit, match=r"net_device: is 'lo,nope0'; it must be a device .* there is no nope0 here"):
        await control("d0", "decode", checkpoint, net_device="lo,nope0").start()


@pytest.mark.parametrize(
    ("net_device", "hosts"),
    [(None, ("192.0.2.7", "198.51.100.7")), ("lo", ("127.0.0.1", None)), ("nope0", None)],
)
def test_sockets_bind_the_address_of_the_network_device_that_is_named(
    checkpoint: Path, net_device: str | None, hosts: tuple[str, str | None] | None
) -> None:
    worker = WorkerSettings(name="d0", incarnation="", role="decode", address="")
    told = {"host": "192.0.2.7", "advertise": "198.51.100.7", "net_device": net_device}
    settings = RankSettings(worker=worker, engine=engine_config(checkpoint), **told)
    if hosts is None:
        with pytest.raises(ConfigError, match="no nope0 here"):
            transport_hosts(settings)
    else:
        assert transport_hosts(settings) == hosts


UNFIT_TIERS = {
    "more than any machine has": (
        "host_memory: 1024TiB",
        "host_memory",
        r"no more than this machine has: \[Errno 12\]",
    ),
    "less than a block": ("host_memory: 1KiB", "host_memory", r"at least \d+, the bytes of one KV block"),
    "a disk for less than a block": (
        "host_memory: 1MiB, disk_path: /x, disk_space: 1KiB",
        "disk_space",
        r"at least \d+, the bytes of one KV block's file",
    ),
}


@pytest.mark.parametrize(("tiers", "key", "must_be"), UNFIT_TIERS.values(), ids=UNFIT_TIERS)
async def test_lower_tiers_that_cannot_be_are_refused_for_good_by_the_files_own_name(
    checkpoint: Path, tiers: str, key: str, must_be: str
) -> None:
    told = config_from_text(f"pools:\n  decode:\n    tiers: {{{tiers}}}\n", "sla.yaml")
    worker = Control(ControlSettings(secret=SECRET), rank_settings(told, "decode-0", checkpoint))
    with pytest.raises(WorkerUnfit, match=rf"sla\.yaml:3: pools\.decode\.tiers\.{key}: is \d+; it must be {must_be}"):
        await worker.start()


async def test_events_are_heard_only_by_who_shares_the_secret(heard: Subscriber) -> None:
    publisher = Publisher(SECRET)
    stranger, friend = Subscriber("another secret"), heard
    event = KvEvents("w", "i", 1, (b"k",), (), False)
    for subscriber in (stranger, friend):
        subscriber.connect(publisher.address)
    hears = asyncio.create_task(friend.receive())
    async with asyncio.timeout(10):
        while not hears.done():
            await publisher.publish(event)
            await asyncio.wait({hears}, timeout=0.05)
    assert hears.result() == event
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(stranger.receive(), 0.3)
    stranger.close()
    publisher.close()


async def test_a_submit_whose_caller_leaves_is_aborted(
    pair: tuple[Control, Control], gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = refs(pair)
    told: asyncio.Queue[object] = asyncio.Queue()
    for name in ("ask", "tell"):
        monkeypatch.setattr(pair[0], name, recording(getattr(pair[0], name), told))
    os.kill(pair[0].pid or 0, signal.SIGSTOP)
    _, submit = await gateway.start(request("r", 500), prefill, decode)
    assert isinstance(await asyncio.wait_for(told.get(), 5), Submit)
    submit.cancel()
    assert await asyncio.wait_for(told.get(), 5) == Abort("r")
    assert isinstance(await gateway.client.ask(decode, Abort("r"), 5), Aborted)
    os.kill(pair[0].pid or 0, signal.SIGCONT)  # both are in its socket by now
    await asyncio.gather(*(no_blocks_held(worker) for worker in pair))
    assert pair[0].last_report is not None
    assert pair[0].last_report.load.prompt_tokens == 0


def recording(method: Callable[[Question], object], told: asyncio.Queue[object]) -> Callable[[Question], object]:
    def recorded(question: Question) -> object:
        told.put_nowait(question)
        return method(question)

    return recorded


ONLY_A_CONTROL = """
import asyncio, json, sys
from cluster.config_text import config_from_text
from cluster.control import Control, ControlSettings
from cluster.ipc import from_json

async def main():
    control = Control(ControlSettings(secret="s"), from_json(sys.stdin.read()))
    await control.start()
    print(control.pid, flush=True)
    await control.died

asyncio.run(main())
"""


async def test_a_rank_dies_with_its_control(checkpoint: Path) -> None:
    worker = WorkerSettings(name="d0", incarnation="", role="decode", address="")
    settings = RankSettings(worker=worker, engine=engine_config(checkpoint), transports=("tcp",))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ONLY_A_CONTROL, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(to_json(settings).encode())
    process.stdin.close()
    rank = os.pidfd_open(int(await asyncio.wait_for(process.stdout.readline(), PATIENCE_S)))
    process.kill()
    gone = asyncio.Event()
    asyncio.get_running_loop().add_reader(rank, gone.set)
    await asyncio.wait_for(gone.wait(), 10)
    asyncio.get_running_loop().remove_reader(rank)
    os.close(rank)
    assert await process.wait() == -signal.SIGKILL
