"""`tandem doctor`: is this machine fit to serve, and if not, what to do about it.

Each check looks at one thing, changes nothing, and returns a `Finding` with the remedy in it. A failed one means that
the default cluster would not start here; a warning, that something optional is absent or tight.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

OK, WARN, FAIL = "ok", "warn", "fail"
OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 6)
MEMORY_NEEDED_GB = 3.0
SHM_NEEDED_MB = 256
SHARED_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


@dataclass(frozen=True, slots=True)
class Finding:
    level: str
    what: str
    detail: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the checks look for: the ports that must be free, and where models are kept."""

    host: str = "127.0.0.1"
    ports: tuple[int, ...] = (8000, 50051)
    model_folder: Path = Path()


def examine(asked: Asked) -> Iterator[Finding]:
    """Every finding, in order, as it is made."""
    for check in CHECKS:
        yield from check(asked)


def exit_code(findings: list[Finding]) -> int:
    return int(any(finding.level == FAIL for finding in findings))


def _python(asked: Asked) -> Iterator[Finding]:
    version = sys.version.split()[0]
    if sys.version_info < OLDEST_PYTHON:
        yield Finding(FAIL, "python", version, "install Python 3.11 or newer and run `make PYTHON=python3.12 ...`")
    else:
        yield Finding(OK, "python", f"{version} at {sys.executable}")
    if _missing("venv", "ensurepip"):
        remedy = "Debian, Ubuntu: `apt-get install python3-venv`; or `make VENV=/path/to/an/environment`"
        yield Finding(WARN, "venv module", "absent: no new environment can be made", remedy)
    else:
        yield Finding(OK, "venv module", "present")
    if _missing("pip"):
        yield Finding(WARN, "pip", "absent: the default model cannot be fetched", "install pip into this environment")


def _torch(asked: Asked) -> Iterator[Finding]:
    remedy = "`pip install torch` in this environment (any build from 2.6 on)"
    version = _version("torch")
    if version is None:
        yield Finding(FAIL, "torch", "absent", remedy)
        return
    old = tuple(int(part) for part in version.split(".")[:2]) < OLDEST_TORCH
    yield Finding(FAIL if old else OK, "torch", version, remedy if old else "")
    triton = _version("triton")
    if triton is None:
        yield Finding(WARN, "triton", "absent: GPU kernels are off", "`pip install triton` (Linux)")
    else:
        yield Finding(OK, "triton", triton)


def _devices(asked: Asked) -> Iterator[Finding]:
    if _missing("torch"):
        return
    import torch

    if not torch.cuda.is_available():
        yield Finding(OK, "devices", "no GPU; workers compute on the CPU")
        return
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        yield Finding(OK, f"device cuda:{index}", f"{found.name}, {found.total_memory / 2**30:.0f} GiB")


def _ucx(asked: Asked) -> Iterator[Finding]:
    build = next((name for name in ("ucxx-cu12", "ucxx-cu13", "ucxx") if _version(name)), None)
    if build is None or _missing("ucxx"):
        remedy = "`pip install 'tandem-serve[cu13]'`, or cu12 beside a torch for CUDA 12; both work without a GPU"
        yield Finding(FAIL, "ucx", "the ucxx package is absent", remedy)
        return
    from kvtransfer.select import ucx_available

    usable, why = ucx_available()
    detail = f"{build} {_version(build)}"
    if usable:
        yield Finding(OK, "ucx", detail + (f", {why}" if why else ""))
    else:
        yield Finding(FAIL, "ucx", f"{detail} does not load: {why}", "reinstall the extra that fits this machine")
    if Path("/sys/class/infiniband").is_dir() and any(Path("/sys/class/infiniband").iterdir()):
        remedy = "the wheel's UCX has no InfiniBand module: use the system's, see deploy/README.md"
        yield Finding(WARN, "rdma", "this host has InfiniBand devices", remedy)


def _packages(asked: Asked) -> Iterator[Finding]:
    needed = ("ray", "grpcio", "pyzmq", "protobuf", "tokenizers", "gguf", "safetensors", "uvicorn")
    absent = [name for name in needed if _version(name) is None]
    if absent:
        yield Finding(FAIL, "packages", "absent: " + ", ".join(absent), "`pip install -e .` in this environment")
    else:
        yield Finding(OK, "packages", f"ray {_version('ray')}, grpcio {_version('grpcio')}, pyzmq {_version('pyzmq')}")


def _ports(asked: Asked) -> Iterator[Finding]:
    for port in asked.ports:
        try:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((asked.host, port))
            yield Finding(OK, f"port {port}", f"free on {asked.host}")
        except OSError as error:
            remedy = "`tandem stop` if it is ours; else name another port in the SLA file's gateway section"
            yield Finding(WARN, f"port {port}", f"{asked.host}: {error.strerror}", remedy)


def _room(asked: Asked) -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0))
    remedy = "two are a good least: one for each worker of the default cluster"
    yield Finding(OK if cores >= 2 else WARN, "cores", str(cores), "" if cores >= 2 else remedy)
    gb = _memory_available_gb()
    if gb is not None:
        tight = gb < MEMORY_NEEDED_GB
        remedy = f"the default cluster wants about {MEMORY_NEEDED_GB:.0f} GB; lower kv_memory in the SLA file"
        yield Finding(WARN if tight else OK, "memory", f"{gb:.1f} GB available", remedy if tight else "")
    shm = Path("/dev/shm")
    if shm.is_dir():
        mb = shutil.disk_usage(shm).free / 1e6
        tight = mb < SHM_NEEDED_MB
        remedy = "in a container: --shm-size=1g" if tight else ""
        yield Finding(WARN if tight else OK, "shared memory", f"{mb:.0f} MB free in {shm}", remedy)


def _huge_pages(asked: Asked) -> Iterator[Finding]:
    """Of shared memory, where the KV pools lie that `shm` joins: in small pages 64 KiB move a fifth slower."""
    try:
        setting = SHARED_HUGE_PAGES.read_text()
    except OSError:
        return
    chosen = setting.partition("[")[2].partition("]")[0]
    if chosen in ("never", "deny"):
        remedy = f"as root: `echo advise > {SHARED_HUGE_PAGES}`; KV moves up to a quarter faster within the host"
        yield Finding(WARN, "huge pages", f"{chosen} in shared memory", remedy)
    else:
        yield Finding(OK, "huge pages", f"{chosen} in shared memory")


def _memory_available_gb() -> float | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) / 1e6 if found else None


def _model(asked: Asked) -> Iterator[Finding]:
    from cluster import models

    known = models.KNOWN[models.DEFAULT]
    if models.is_fetched(known, asked.model_folder):
        yield Finding(OK, "model", f"{known.name} is in {asked.model_folder}")
    else:
        yield Finding(OK, "model", f"{known.name} will be fetched once into {asked.model_folder}")


def _compiler(asked: Asked) -> Iterator[Finding]:
    found = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    yield Finding(OK, "compiler", found or "none; none is needed")


CHECKS: tuple[Callable[[Asked], Iterator[Finding]], ...] = (
    _python,
    _torch,
    _devices,
    _ucx,
    _packages,
    _ports,
    _room,
    _huge_pages,
    _model,
    _compiler,
)


def _missing(*modules: str) -> bool:
    return any(importlib.util.find_spec(module) is None for module in modules)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
