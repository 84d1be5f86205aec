"""Make the virtual environment ready; quick when it already is.

Standard library only, and readable by old interpreters, because it runs before anything is installed. A stamp in the
environment holds what was installed for which `pyproject.toml`; while it matches, nothing is done. A torch that is
already there (in the environment, or in the interpreter it is made from) is kept, whatever its build, and the UCX build
follows it: both pin the same CUDA packages, and with another build pip goes back to a UCX from long ago.
"""

import argparse
import fcntl
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

OLDEST = (3, 11)
ROOT = Path(__file__).resolve().parent.parent
PROBE_TORCH = (
    "import importlib.util as u, importlib.metadata as m, sys\n"
    "sys.exit(not (u.find_spec('torch') and "
    "tuple(int(p) for p in m.version('torch').split('.')[:2]) >= (2, 6)))"
)
# The CUDA that torch is built for, without the seconds that importing torch takes.
PROBE_CUDA = (
    "import importlib.util as u, os, runpy\n"
    "where = u.find_spec('torch').submodule_search_locations[0]\n"
    "print(runpy.run_path(os.path.join(where, 'version.py')).get('cuda') or '')"
)
TORCH_REMEDY = (
    "is the package index in reach? Else choose another build with `make TORCH=...` or install torch yourself"
)
UCX_BUILDS = ("cu12", "cu13")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", required=True, type=Path)
    parser.add_argument("--torch", required=True, help="requirement used when no torch is there yet")
    parser.add_argument(
        "--ucx", choices=["", *UCX_BUILDS], default="", help="UCX build; default: the one that fits torch"
    )
    parser.add_argument("--extra", action="append", default=[])
    args = parser.parse_args()
    if sys.version_info < OLDEST and not (args.venv / "bin" / "python").exists():
        fail(
            f"Python {sys.version.split()[0]} is too old; Tandem needs 3.11 or newer.",
            "install one and run `make PYTHON=python3.12 ...`",
        )
    (ROOT / ".cache").mkdir(exist_ok=True)
    with open(ROOT / ".cache" / "environment.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        prepare(args.venv.absolute(), args.torch, args.ucx, args.extra)


def prepare(venv: Path, torch: str, ucx: str, extras: "list[str]") -> None:
    python = venv / "bin" / "python"
    stamp = venv / ".tandem-installed"
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    installed = read_stamp(stamp)
    have = set(installed.get("extras", [])) if installed.get("pyproject") == wanted else set()
    ucx = ucx or next((build for build in UCX_BUILDS if build in have), "")
    if python.exists() and ucx and have >= {ucx, *extras}:
        return
    if not python.exists():
        create(venv)
    check_pip(python)
    if not succeeds([python, "-c", PROBE_TORCH]):
        pip(python, "torch", [torch], remedy=TORCH_REMEDY)
    names = sorted(have | {ucx or ucx_build(python), *extras})
    pip(python, "Tandem and what it needs", ["--editable", f"{ROOT}[{','.join(names)}]"])
    stamp.write_text(json.dumps({"pyproject": wanted, "extras": names}))


def ucx_build(python: Path) -> str:
    """The UCX build that can be installed beside the torch of this environment; without CUDA, either can."""
    cuda = subprocess.run([str(python), "-c", PROBE_CUDA], stdout=subprocess.PIPE, text=True).stdout.strip()
    return "cu13" if cuda and int(cuda.split(".")[0]) >= 13 else "cu12"


def read_stamp(stamp: Path) -> "dict[str, object]":
    try:
        return dict(json.loads(stamp.read_text()))
    except (OSError, ValueError):
        return {}


def create(venv: Path) -> None:
    say(f"making the virtual environment {venv}")
    if not succeeds([sys.executable, "-c", "import venv, ensurepip"]):
        fail(
            f"this Python ({sys.executable}) comes without its venv module, so no virtual environment can be made.",
            "install it (Debian, Ubuntu: `apt-get install python3-venv`), or name an environment that has pip: "
            "`make VENV=/path/to/env ...`",
        )
    command = [sys.executable, "-m", "venv", str(venv)]
    if succeeds([sys.executable, "-c", PROBE_TORCH]):
        command.insert(3, "--system-site-packages")  # so that the torch that is there already is the one in use
    if subprocess.call(command) != 0:
        fail(f"the virtual environment {venv} could not be made.", "see the lines above; is there room on the disk?")


def check_pip(python: Path) -> None:
    if not succeeds([python, "-m", "pip", "--version"]) and not succeeds([python, "-m", "ensurepip"]):
        fail(f"{python} has no pip.", "install pip into that environment, or let `make` create its own")


def pip(python: Path, what: str, arguments: "list[str]", remedy: str = "") -> None:
    say(f"installing {what} (the first time this takes a minute or so)")
    command = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", *arguments]
    if subprocess.call(command) != 0:
        fail(f"{what} could not be installed.", remedy or "see pip's message above; is the package index in reach?")


def succeeds(command: "list[object]") -> bool:
    silent = subprocess.DEVNULL
    return subprocess.call([os.fspath(str(part)) for part in command], stdout=silent, stderr=silent) == 0


def say(line: str) -> None:
    print("tandem: " + line, file=sys.stderr, flush=True)


def fail(problem: str, remedy: str) -> None:
    say("error: " + problem)
    say("remedy: " + remedy)
    sys.exit(1)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
