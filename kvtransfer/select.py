"""Which transports exist here, and which one a pair of workers uses. Imports ucxx only when asked for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvtransfer.device import Region
from kvtransfer.errors import TransferError
from kvtransfer.inproc import InprocHub, InprocTransport
from kvtransfer.layout import check_region
from kvtransfer.shm import is_here, shm_transport
from kvtransfer.tcp import tcp_transport
from kvtransfer.transport import Transport
from kvtransfer.types import PeerId

SCHEMES = ("inproc", "shm", "ucx", "tcp")
"""All there are, the fastest first where it can be used at all."""

_UCXX_NEEDED = (
    ("UCXAddress", "tobytes"),
    ("UCXAddress", "create_from_buffer"),
    ("UCXWorker", "create_endpoint_from_worker_address"),
    ("UCXWorker", "init_blocking_progress_mode"),
    ("UCXWorker", "arm"),
)
"""Of what `kvtransfer.ucx` calls, that which not every version of ucxx has: it imports, and fails when it is used."""


def ucx_available() -> tuple[bool, str]:
    """Whether `ucx` can be used in this process, and which version or why not."""
    try:
        import kvtransfer.ucx as module
    except Exception as error:  # a broken UCX library fails in many ways, all of which mean "not here"
        return False, f"{type(error).__name__}: {error}; install ucxx-cu12 or ucxx-cu13, or use the transport tcp"
    core = vars(module)["ucx"]  # ucxx is imported there alone
    absent = [f"{name}.{part}" for name, part in _UCXX_NEEDED if not hasattr(getattr(core, name, None), part)]
    if absent:
        return False, f"this ucxx is too old, it lacks {', '.join(absent)}; upgrade it, or use the transport tcp"
    return True, f"UCX {module.version()}"


def make_transport(
    scheme: str,
    me: PeerId,
    region: Region,
    *,
    host: str = "127.0.0.1",
    advertise: str | None = None,
    hub: InprocHub | None = None,
    ucx_error_handling: bool = True,
    ucx_devices: str | None = None,
) -> Transport:
    """A transport of that scheme over a writable region. Raises `TransferError` when it cannot be had here.

    `host` (an IP address) is bound, `advertise` (default: the same) is told to peers; `hub` is needed by `inproc`.
    `shm` needs a region that can be shared, see `kvtransfer.memory`.
    `ucx_error_handling=False` lets UCX use shared memory on one host, where a peer's death may then abort this process:
    see `kvtransfer.ucx`. `ucx_devices` are its `NET_DEVICES`; None: `lo` on a loopback address, else UCX's choice.
    """
    check_region(region)
    if scheme == "ucx":
        usable, why = ucx_available()
        if not usable:
            raise TransferError(f"the transport ucx cannot be used: {why}")
        from kvtransfer.ucx import UcxOptions, ucx_transport

        options = UcxOptions(error_handling=ucx_error_handling, devices=ucx_devices)
        return ucx_transport(me, region, host=host, advertise=advertise, options=options)
    if not isinstance(region, memoryview):
        raise TransferError(f"the transport {scheme} cannot reach a device's memory: only ucx can, or stage it")
    if scheme == "inproc":
        if hub is None:
            raise TransferError("the transport inproc needs the hub of this process")
        return InprocTransport(me, region, hub)
    if scheme == "shm":
        return shm_transport(me, region)
    if scheme == "tcp":
        return tcp_transport(me, region, host=host, advertise=advertise)
    raise TransferError(f"no transport {scheme!r}; there are {', '.join(SCHEMES)}")


def choose(ours: Iterable[str], theirs: Mapping[str, bytes]) -> str:
    """The first of our schemes (ours stand best first) under which the peer has an address that can be used from here.

    Raises `TransferError` naming both sides if there is none.
    """
    mine = tuple(ours)
    for scheme in mine:
        if scheme in theirs and (scheme != "shm" or is_here(theirs[scheme])):
            return scheme
    elsewhere = " (shm on another host)" if "shm" in mine and "shm" in theirs else ""
    raise TransferError(f"no common transport: here {sorted(mine)}, there {sorted(theirs)}{elsewhere}")
