"""Start a cluster and end it, with a line for each thing that takes time and a deadline for all of it.

    model on this disk ─▶ Ray ─▶ router ─▶ workers and gateway ─▶ ready          stop: drain, ranks, actors, Ray

A local cluster belongs to the process that started it (`serve` keeps that process, `demo` is it) and ends with it,
whatever happens. In a Ray of somebody else (`ray up`) the actors stay when this process goes; `stop` ends them.
Ray is imported late: it reads the environment that `prepare_environment` writes.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TextIO

from cluster import models, processes, ray_session, run_state, tls
from cluster.cluster_status import ClusterStatus
from cluster.config import ROLES, GatewaySection, TandemConfig, worker_names
from cluster.ray_session import RaySession
from cluster.run_state import RunState
from cluster.wiring import model_source
from engine.errors import TandemError

if TYPE_CHECKING:
    from cluster.gateway_host import Addresses

Say = Callable[[str], None]

POLL_S = 0.2
STATUS_WAIT_S = 5.0
STOP_GRACE_S = 5.0
END_GRACE_S = 3.0 + 10.0 + ray_session.STOP_GRACE_S + STOP_GRACE_S
"""What an owner may take beyond its drain when all that it waits for hangs: gateway, workers, Ray, and it itself."""


class StartFailed(TandemError):
    """The cluster did not become ready; what had been started is stopped again."""


@dataclass(frozen=True, slots=True)
class Running:
    """A cluster that serves. `grpc` and `http` are host:port."""

    config: TandemConfig
    session: RaySession
    grpc: str
    http: str

    @property
    def workers(self) -> tuple[str, ...]:
        return _names(self.config)


def _names(config: TandemConfig) -> tuple[str, ...]:
    return tuple(name for role in ROLES for name in worker_names(config, role))


@contextmanager
def running(config: TandemConfig, *, say: Say, allow_faults: bool = False) -> Iterator[Running]:
    """A cluster for as long as the block lasts. Raises TandemError when it does not become ready."""
    cluster = start(config, say=say, allow_faults=allow_faults)
    try:
        yield cluster
    finally:
        end(cluster, grace_s=0.5)


def start(config: TandemConfig, *, say: Say, allow_faults: bool = False) -> Running:
    """Start everything and wait until it serves. Raises TandemError; nothing is left behind then."""
    api_key = _api_key(config)
    config = _with_checked_tls(config)
    address = config.cluster.ray_address
    if address is None:
        _check_ports(config.gateway)
    models.resolve(model_source(config), say=say)
    ray_session.prepare_environment(address)
    from cluster import actors

    say("joining Ray at " + address if address else "starting Ray (local, loopback, with a token)")
    session = ray_session.open_session(address, config.cluster.namespace, actors.slots(config), config.cluster.num_cpus)
    try:
        secret = secrets.token_hex(32)
        actors.create_router(config, secret, session.node_id)
        actors.create_workers(config, secret, local=address is None, allow_faults=allow_faults)
        actors.create_gateway(config, secret, session.node_id, api_key)
        found = _until_ready(config, say)
        return Running(config, session, found.grpc, found.http)
    except BaseException as error:
        failed = isinstance(error, Exception)  # else somebody has interrupted it, and there is nothing to look up
        actors.end_all(_names(config), 0.0)
        ray_session.close_session(session, keep_logs=failed)
        if failed and session.scratch:
            say(f"the logs of what failed are in {session.scratch}/session_latest/logs")
        raise


def end(cluster: Running, *, grace_s: float) -> None:
    """Drain, stop, and leave nothing running."""
    from cluster import actors

    actors.end_all(cluster.workers, grace_s)
    ray_session.close_session(cluster.session)


def _api_key(config: TandemConfig) -> str | None:
    name = config.gateway.api_key_env
    if name is None:
        return None
    if not os.environ.get(name):
        raise StartFailed(f"the SLA file wants the API key in ${name}, which is not set")
    return os.environ[name]


def _with_checked_tls(config: TandemConfig) -> TandemConfig:
    """Before the minute that a start takes, and with paths that are good everywhere on this machine."""
    gateway = config.gateway
    return config if gateway.tls is None else replace(config, gateway=replace(gateway, tls=tls.checked(gateway.tls)))


def _check_ports(gateway: GatewaySection) -> None:
    """Look before the minute that a start takes; the gateway, which binds them at its end, cannot say it as plainly."""
    for key, port in (("http_port", gateway.http_port), ("grpc_port", gateway.grpc_port)):
        family = socket.AF_INET6 if ":" in gateway.host else socket.AF_INET
        try:
            socket.create_server((gateway.host, port), family=family).close()
        except OSError as error:
            raise StartFailed(
                f"port {port} on {gateway.host} cannot be had ({error.strerror}); end what holds it, or set "
                f"gateway.{key} in the SLA file"
            ) from error


# -- waiting -------------------------------------------------------------------------------------------------------


def _until_ready(config: TandemConfig, say: Say) -> Addresses:
    """Until every worker has registered and the gateway listens, telling each change."""
    from cluster import actors

    wanted = set(_names(config))
    deadline_s = time.monotonic() + config.timeouts.start_s
    told: Mapping[str, str] = {}
    while True:
        seen = actors.status(STATUS_WAIT_S)
        states = {worker.name: worker.health for worker in seen.workers} if seen else {}
        for name in sorted(wanted):
            if states.get(name) != told.get(name) and name in states:
                say(f"{name}: {_WORDS.get(states[name], states[name])}")
        told = states
        if seen is not None:
            _check_not_failed(seen)
        if wanted <= {name for name, state in states.items() if state == "alive"}:
            break
        if time.monotonic() > deadline_s:
            raise StartFailed(_not_ready(config, seen))
        time.sleep(POLL_S)
    return _gateway_addresses(deadline_s)


_WORDS = {"starting": "loading the model", "alive": "ready"}


def _check_not_failed(status: ClusterStatus) -> None:
    for worker in status.workers:
        if worker.health == "failed":
            raise StartFailed(f"{worker.name} does not start: {worker.why}")


def _not_ready(config: TandemConfig, status: ClusterStatus | None) -> str:
    if status is None:
        return f"the router did not answer within {config.timeouts.start_s:g} s"
    waiting = [f"{worker.name} is {worker.health}" for worker in status.workers if worker.health != "alive"]
    return (
        f"not ready after {config.timeouts.start_s:g} s: {', '.join(waiting)}. Workers need a Ray node with a free "
        "prefill_slot or decode_slot each; `ray status` shows what is there"
    )


def _gateway_addresses(deadline_s: float) -> Addresses:
    from cluster import actors

    found = actors.addresses(max(1.0, deadline_s - time.monotonic()))
    if found is None:
        raise StartFailed("the gateway did not start in time")
    return found


# -- commands ------------------------------------------------------------------------------------------------------


def serve(config: TandemConfig, *, say: Say) -> None:
    """Start and stay until SIGINT or SIGTERM; in a Ray of somebody else, start and return."""
    _refuse_second()
    run_state.make_run_folder()  # now, rather than when everything has been started
    stop_now = threading.Event()

    def told(signum: int, frame: FrameType | None) -> None:
        stop_now.set()

    cluster = start(config, say=say)
    if not cluster.session.scratch:
        run_state.save(_state(cluster, None))
        _say_ready(cluster, say)
        return
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, told)
        run_state.save(_state(cluster, processes.this_process()))
        _say_ready(cluster, say)
        stop_now.wait()
        say("stopping")
    finally:
        run_state.clear()
        end(cluster, grace_s=config.timeouts.drain_s)


def _state(cluster: Running, owner: processes.Process | None) -> RunState:
    secured = cluster.config.gateway.tls
    return RunState(
        grpc=_from_here(cluster.grpc) if secured else cluster.grpc,
        http=_from_here(cluster.http) if secured else cluster.http,
        tls_ca=(secured.ca or secured.cert) if secured else None,
        tls_cert=secured.cert if secured and secured.client_ca else None,
        tls_key=secured.key if secured and secured.client_ca else None,
        model=cluster.config.model.name,
        owner=owner,
        api_key_env=cluster.config.gateway.api_key_env,
        ray_address=cluster.config.cluster.ray_address,
        namespace=cluster.config.cluster.namespace,
        workers=cluster.workers,
        drain_s=cluster.config.timeouts.drain_s,
        scratch=str(cluster.session.scratch) if cluster.session.scratch else None,
    )


def _from_here(address: str) -> str:
    """No certificate is for the address that means all of them."""
    host, _, port = address.rpartition(":")
    return f"localhost:{port}" if host in ("0.0.0.0", "::") else address


def _say_ready(cluster: Running, say: Say) -> None:
    scheme = "https" if cluster.config.gateway.tls else "http"
    secured = " with TLS" if cluster.config.gateway.tls else ""
    say(
        f"ready: HTTP {scheme}://{cluster.http}/v1 (OpenAI style), gRPC {cluster.grpc}{secured}, "
        f"model {cluster.config.model.name}"
    )


def serve_detached(arguments: list[str], *, say: Say) -> None:
    """`tandem serve ARGUMENTS` as a process of its own: returns when it serves, with what it said told again."""
    _refuse_second()
    log_path = run_state.make_run_folder() / "serve.log"
    with log_path.open("w") as log_file:
        process = subprocess.Popen(
            [sys.executable, "-m", "cluster.cli", "serve", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _watch(process, log_path, say)
    except BaseException:
        _abandon(process)  # nobody would know of it
        raise
    if process.poll() is not None:
        raise StartFailed(f"the cluster did not start; all it said is in {log_path}")
    say("it keeps running; `tandem stop` ends it")


def _watch(process: subprocess.Popen[bytes], log_path: Path, say: Say) -> None:
    """Tell what it says until it serves or has ended."""
    with log_path.open() as lines:
        while process.poll() is None and not run_state.state_file().exists():
            _tell_again(lines, say)
            time.sleep(POLL_S)
        _tell_again(lines, say)


def _abandon(process: subprocess.Popen[bytes]) -> None:
    """End a cluster that is still starting, with everything that it has started."""
    child = processes.Process(process.pid, processes.start_ticks(process.pid) or 0)
    family = (child, *processes.descendants(child.pid))
    child.send(signal.SIGINT)  # SIGTERM is Ray's while Ray starts
    processes.end(family, grace_s=STOP_GRACE_S + ray_session.STOP_GRACE_S)


def _tell_again(lines: TextIO, say: Say) -> None:
    for line in lines:
        say(line.rstrip().removeprefix("tandem: "))


def _refuse_second() -> None:
    try:
        found = run_state.load()
    except run_state.NotRunning:
        return
    raise StartFailed(f"a cluster is running already (gRPC {found.grpc}); `tandem stop` ends it")


def stop(state: RunState, *, say: Say) -> None:
    """End the running cluster and wait until its processes are gone."""
    if state.owner is None:
        _stop_in_foreign_ray(state)
    else:
        family = (state.owner, *processes.descendants(state.owner.pid))
        say(f"stopping {len(family)} processes")
        state.owner.send(signal.SIGTERM)
        hung = processes.end(family, grace_s=END_GRACE_S + state.drain_s)
        if hung:
            say(f"{len(hung)} of them did not end by themselves and were killed")
        if state.scratch:  # of an owner that had to be killed
            shutil.rmtree(state.scratch, ignore_errors=True)
    run_state.clear()
    say("stopped")


def _stop_in_foreign_ray(state: RunState) -> None:
    ray_session.prepare_environment(state.ray_address)
    from cluster import actors

    session = ray_session.open_session(state.ray_address, state.namespace, {}, None)
    actors.end_all(state.workers, state.drain_s)
    ray_session.close_session(session)
