"""The demo as a user runs it: one prefill and one decode worker, twelve chats, UCX, nothing left behind."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from e2e_cluster import running_processes

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(200)]

REPO = Path(__file__).parents[2]
SECOND_RUN_S = 60.0


def test_the_demo_shows_every_request_and_ends_with_zero(smollm2_path: Path) -> None:
    before = _tandem_folders()
    started_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "cluster.cli", "demo", "--config", str(REPO / "deploy" / "demo.sla.yaml")],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        cwd=REPO,
    )
    took_s = time.monotonic() - started_s
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The capital of France is Paris." in done.stdout
    rows = re.findall(r"prefill-0→decode-0 +\d+ +[\d.]+ MB +ucx", done.stdout)
    assert len(rows) == 12, done.stdout
    assert took_s < SECOND_RUN_S
    assert _tandem_folders() <= before, "its temporary folders are gone, too"


def _tandem_folders() -> set[Path]:
    """Those of other clusters that run on this machine are none of ours."""
    in_use = {entry.removeprefix("TMPDIR=") for _, _, environment in running_processes() for entry in environment}
    return {folder for folder in Path("/tmp").glob("tandem-*") if str(folder) not in in_use}
