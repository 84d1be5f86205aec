"""Ctrl-C while a cluster starts: everything that had been started is ended, also what was to be left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_cluster import free_port, running_processes

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

APPEARS_S = 60.0
ENDS_S = 40.0


@pytest.fixture(autouse=True)
def heeds_interrupts() -> Iterator[None]:
    """Whoever runs the tests in the background of a script has SIGINT ignored, and so would what they start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("awaited", ["gcs_server", "ray::WorkerActor"], ids=["in Ray's start", "in the workers' start"])
@pytest.mark.parametrize("arguments", [[], ["--detach"]], ids=["attached", "detached"])
def test_an_interrupted_start_leaves_nothing_behind(
    tmp_path: Path, smollm2_path: Path, arguments: list[str], awaited: str
) -> None:
    mark = f"TANDEM_RUN_DIR={tmp_path / 'run'}"
    file = tmp_path / "x.sla.yaml"
    file.write_text(f"version: 1\ngateway: {{http_port: {free_port()}, grpc_port: {free_port()}}}\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "cluster.cli", "serve", "--config", str(file), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "TANDEM_RUN_DIR": str(tmp_path / "run")},
        start_new_session=True,
        text=True,
    )
    _until(lambda: any(awaited in line for line in _marked(mark).values()), APPEARS_S)
    scratch = _scratch_folders(mark)
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=ENDS_S)
    assert process.returncode == 130, said
    assert "logs of what failed" not in said
    assert _marked(mark) == {}
    assert [folder for folder in scratch if folder.exists()] == []
    assert not (tmp_path / "run" / "cluster.json").exists()


def _marked(mark: str) -> dict[int, str]:
    """Command lines of the processes that have `mark` in their environment, by process id."""
    return {pid: line for pid, line, environment in running_processes() if mark in environment}


def _scratch_folders(mark: str) -> set[Path]:
    entries = {entry for _, _, environment in running_processes() if mark in environment for entry in environment}
    names = {entry.removeprefix("TMPDIR=") for entry in entries if entry.startswith("TMPDIR=/tmp/tandem-")}
    return {Path(name) for name in names}


def _until(holds, timeout_s: float) -> None:  # type: ignore[no-untyped-def]
    deadline_s, pause = time.monotonic() + timeout_s, threading.Event()
    while not holds():
        assert time.monotonic() < deadline_s
        pause.wait(0.05)
