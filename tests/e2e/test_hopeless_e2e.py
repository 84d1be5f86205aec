"""A config that no worker can ever start with ends `tandem serve` at once, and by the name that the file gave it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from e2e_cluster import START_S, config

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(150)]


def test_it_is_not_tried_again_and_the_key_and_its_line_are_said(tmp_path: Path, smollm2_path: Path) -> None:
    file = tmp_path / "x.sla.yaml"
    settings = config(1, 1)
    settings["pools"]["decode"] |= {"kv_memory": "1KiB"}
    file.write_text(yaml.safe_dump(settings))
    done = subprocess.run(
        [sys.executable, "-m", "cluster.cli", "serve", "--config", str(file)],
        capture_output=True,
        text=True,
        timeout=START_S,
        env=os.environ | {"TANDEM_RUN_DIR": str(tmp_path / "run")},
        check=False,
    )
    said = done.stdout + done.stderr
    line = file.read_text().splitlines().index("    kv_memory: 1KiB") + 1
    assert done.returncode == 1, said
    assert f"{file}:{line}: pools.decode.kv_memory: is 1024; it must be at least" in said
    assert "decode-0: fenced" not in said, "it was not tried again"
