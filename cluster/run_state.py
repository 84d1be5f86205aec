"""How `tandem chat`, `status` and `stop` find the cluster that `tandem serve` left running.

One small file for each user, readable by nobody else, because it says where the token of the cluster's Ray lies and
which variable holds the API key. A process is recognised by its id together with its start time, so that a number
which the system has given to somebody else is never signalled.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from cluster.processes import Process
from engine.errors import TandemError


class NotRunning(TandemError):
    """No cluster of ours is running here."""


class NoRunFolder(TandemError):
    """The folder for run-time files cannot be made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """A running cluster. `owner` is the process that ends it when told to; None: it runs in a Ray of somebody else."""

    grpc: str
    http: str
    model: str
    owner: Process | None = None
    api_key_env: str | None = None
    ray_address: str | None = None
    namespace: str = "tandem"
    workers: tuple[str, ...] = ()
    drain_s: float = 30.0
    scratch: str | None = None
    """Folder of the Ray that the owner has started."""
    tls_ca: str | None = None
    """PEM file by which clients here know the gateway; None: no TLS."""
    tls_cert: str | None = None
    tls_key: str | None = None
    """What they show it, if it wants to see a certificate."""

    def alive(self) -> bool:
        return self.owner is None or self.owner.alive()


def run_folder() -> Path:
    """`$TANDEM_RUN_DIR`, else a folder of the user's own for run-time files."""
    if chosen := os.environ.get("TANDEM_RUN_DIR"):
        return Path(chosen).expanduser()
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "tandem"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tandem" / "run"


def make_run_folder() -> Path:
    """The folder, readable by its owner alone when it is new. Raises NoRunFolder."""
    folder = run_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise NoRunFolder(
            f"{folder} cannot be made ({error.strerror}); set TANDEM_RUN_DIR to another folder"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise NoRunFolder(f"{folder} cannot be written; set TANDEM_RUN_DIR to another folder")
    return folder


def state_file() -> Path:
    return run_folder() / "cluster.json"


def save(state: RunState) -> Path:
    """Written whole or not at all, mode 0600."""
    path = make_run_folder() / state_file().name
    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(asdict(state), file, indent=1)
    os.replace(part, path)
    return path


def load() -> RunState:
    """The running cluster. NotRunning when there is none; what a dead one left is removed."""
    path = state_file()
    try:
        read = json.loads(path.read_text())
        owner = read.pop("owner")
        state = RunState(**{**read, "workers": tuple(read["workers"])}, owner=Process(**owner) if owner else None)
    except FileNotFoundError:
        raise NotRunning("no cluster is running here; start one with `tandem serve` (or `make serve`)") from None
    except (ValueError, TypeError, KeyError) as error:
        raise NotRunning(f"{path} cannot be read ({error}); remove it and start the cluster again") from error
    if not state.alive():
        clear()
        if state.scratch:  # it was killed, and could not
            shutil.rmtree(state.scratch, ignore_errors=True)
        raise NotRunning(f"the cluster of {path} is gone: its process ended; start it again")
    return state


def clear() -> None:
    state_file().unlink(missing_ok=True)
