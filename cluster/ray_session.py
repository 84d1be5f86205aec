"""Ray for one cluster: a local one that lives and dies with this process, or one that is already there.

The local one has no dashboard, listens on loopback only, keeps its files in a folder of its own, takes little shared
memory, reports nothing to anybody, and wants a token from whoever talks to it. Ray reads most of this from the
environment when it is imported, so `prepare_environment` comes before the import, and this module is imported after it.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster import processes

LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 80 << 20
"""Ray's smallest: no tensor ever goes through the object store."""
STOP_GRACE_S = 8.0
INTERRUPTED_GRACE_S = 1.0


@dataclass(frozen=True, slots=True)
class RaySession:
    """`scratch` is the local Ray's folder; None when Ray is not ours to stop."""

    namespace: str
    node_id: str
    address: str
    scratch: Path | None


def prepare_environment(address: str | None) -> None:
    """Before `import ray`. For a Ray of our own, a fresh token; another one's comes from the caller's environment."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    if address is None:
        # Ray's own default is 15, and whatever else this machine does goes before the tokens: with a busy process for
        # each core, a killed router came back after 72 s instead of 4.
        os.environ.setdefault("RAY_worker_niceness", "0")
        os.environ.pop("RAY_ADDRESS", None)
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        # The name speaks of other systems, but on Linux, too, it decides whether 127.0.0.1 stays what it is. Otherwise
        # Ray puts the host's own address in its place, and each of its processes listens on every interface.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"


def open_session(address: str | None, namespace: str, resources: Mapping[str, int], num_cpus: int | None) -> RaySession:
    """Start a local Ray with these custom resources, or join the one at `address`."""
    import ray

    scratch = None
    if address is not None:
        ray.init(address=address, namespace=namespace, log_to_driver=False, configure_logging=False)
    else:
        scratch = Path(tempfile.mkdtemp(prefix="tandem-", dir="/tmp"))  # short: a socket's path has at most 107 bytes
        os.environ["TMPDIR"] = str(scratch)  # for the workers: what a killed one leaves behind goes with the rest
        try:
            ray.init(
                address="local",
                namespace=namespace,
                include_dashboard=False,
                num_cpus=num_cpus or len(os.sched_getaffinity(0)),
                resources=dict(resources),
                object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=False,
                configure_logging=False,
                _node_ip_address=LOOPBACK,
                _temp_dir=str(scratch),
            )
        except BaseException:  # an interrupt, too: Ray leaves what it has started so far to end when it notices
            processes.end(processes.descendants(os.getpid()), grace_s=INTERRUPTED_GRACE_S)
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray's ends this process on the spot, uncleaned
    context = ray.get_runtime_context()
    return RaySession(namespace, context.get_node_id(), str(context.gcs_address), scratch)


def close_session(session: RaySession, *, keep_logs: bool = False) -> None:
    """Leave Ray; a local one ends with all its processes, and its folder goes too unless its logs are wanted."""
    import ray

    ours = processes.descendants(os.getpid()) if session.scratch else ()
    ray.shutdown()
    processes.end(ours, grace_s=STOP_GRACE_S)
    if session.scratch is not None and not keep_logs:
        shutil.rmtree(session.scratch, ignore_errors=True)
