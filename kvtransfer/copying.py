"""Copies many runs of bytes in one call without the interpreter lock: compiled C where that can be had, else numpy.

`copy_runs.c` is compiled once per machine, in well under a second, into the cache folder (`$TANDEM_CACHE/kernels`, else
`tandem/kernels` in the XDG one) under a name made of source, flags, compiler and processor. Without a compiler numpy
copies run by run: as right, and slower, most of all for small runs.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

Copy = Callable[[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.int64]], None]
"""(target, source, runs): `runs` has rows of source offset, target offset, bytes; all inside, none overlapping."""

_SOURCE = Path(__file__).with_name("copy_runs.c")
_FLAGS = ("-O3", "-march=native", "-fPIC", "-shared")
_LONGEST_S = 60.0


@functools.cache
def best_copy() -> Copy:
    """The fastest that this machine can have."""
    try:
        library = ctypes.CDLL(str(_library()))
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("blocks are copied by numpy, slower for small ones: %s", error)
        return numpy_copy
    function = library.copy_runs
    function.restype = None
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]

    def copy(target: NDArray[np.uint8], source: NDArray[np.uint8], runs: NDArray[np.int64]) -> None:
        rows = np.ascontiguousarray(runs, np.int64).tobytes()  # as an argument bytes are faster than an array
        function(target.ctypes.data, source.ctypes.data, rows, len(runs))

    return copy


def numpy_copy(target: NDArray[np.uint8], source: NDArray[np.uint8], runs: NDArray[np.int64]) -> None:
    """Run by run."""
    for start, place, length in runs.tolist():
        target[place : place + length] = source[start : start + length]


def _library() -> Path:
    """Compiled if it is not there yet. Raises OSError or SubprocessError when it cannot be."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise FileNotFoundError("no C compiler found (gcc or cc)")
    path = _folder() / f"copy-{_key(compiler)}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            made = Path(scratch) / path.name
            _run([compiler, *_FLAGS, str(_SOURCE), "-o", str(made)])
            made.replace(path)  # whole or not at all; whoever comes second replaces it by the same
    return path


def _folder() -> Path:
    ours = os.environ.get("TANDEM_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "tandem"
    folder = Path(ours).expanduser() / "kernels"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def _key(compiler: str) -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    processor = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    parts = [_SOURCE.read_text(encoding="utf-8"), *_FLAGS, _run([compiler, "--version"]), processor]
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=12).hexdigest()


def _run(command: list[str]) -> str:
    options: dict[str, Any] = {"capture_output": True, "text": True, "check": True, "timeout": _LONGEST_S}
    return str(subprocess.run(command, **options).stdout)
