"""Compiles the C++ of this folder once per machine, and loads it.

It lies in the cache folder (`$TANDEM_CACHE/kernels`, else `tandem/kernels` in the XDG one) under a name made of
everything that it depends on: sources, flags, compiler and processor. So it is compiled at the first start only (some
ten seconds), never stale, and a folder shared between unlike machines is harmless. `load` raises Unavailable, saying
why, wherever this cannot be done.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

_log = logging.getLogger(__name__)
_HERE = Path(__file__).parent
_FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
          "-fPIC", "-shared", "-pthread", "-w")  # fmt: skip
_LONGEST_S = 300.0
_NEEDED = ("avx2", "fma", "f16c")


class Unavailable(Exception):
    """The library cannot be had here; the message says why."""


@functools.cache
def load() -> ctypes.CDLL:
    """The library, compiled when it is not in the cache folder yet. Raises Unavailable."""
    processor = _processor()
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise Unavailable("no C++ compiler found (g++ or c++)")
    path = _folder() / f"step-{_key(compiler, processor)}.so"
    with _turn(path.parent):
        if not path.exists():
            _compile(compiler, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise Unavailable(f"{path} cannot be loaded: {error}") from error


def _processor() -> str:
    if platform.machine() not in ("x86_64", "AMD64"):
        raise Unavailable(f"the processor is {platform.machine()}; the kernels are for x86-64")
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise Unavailable(f"the processor cannot be told: {error}") from error
    flags = next((line for line in lines if line.startswith("flags")), "")
    missing = [flag for flag in _NEEDED if flag not in flags.split()]
    if missing:
        raise Unavailable(f"the processor lacks {', '.join(missing)}")
    return next((line for line in lines if line.startswith("model name")), "") + flags


def _folder() -> Path:
    ours = os.environ.get("TANDEM_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "tandem"
    folder = Path(ours).expanduser() / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise Unavailable(f"{folder} cannot be made: {error}") from error
    return folder


def _key(compiler: str, processor: str) -> str:
    version = _output([compiler, "--version"])
    parts = [processor, version, *_FLAGS]
    parts += [path.read_text(encoding="utf-8") for path in sorted(_HERE.glob("*.[ch]*"))]
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=12).hexdigest()


@contextlib.contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """One process compiles, those that start with it wait."""
    try:
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise Unavailable(f"{folder} cannot be locked: {error}") from error


def _compile(compiler: str, path: Path) -> None:
    """Into a name of its own, then renamed: a library is there whole or not at all."""
    try:
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            made = Path(scratch) / path.name
            _log.info("compiling the CPU kernels into %s", path)
            _output([compiler, *_FLAGS, str(_HERE / "step.cpp"), "-o", str(made)])
            made.replace(path)
    except OSError as error:
        raise Unavailable(f"{path} cannot be written: {error}") from error


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        raise Unavailable(f"{command[0]} failed: {done.stderr.strip()[-400:]}")
    return done.stdout
