"""`deploy/ray-cluster.yaml` is what Ray's launcher accepts, and its start command gives each host its role."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.fixture
def cluster() -> dict[str, Any]:
    return dict(yaml.safe_load((DEPLOY / "ray-cluster.yaml").read_text()))


def test_the_launcher_accepts_it(cluster: dict[str, Any]) -> None:
    util = pytest.importorskip("ray.autoscaler._private.util")
    prepared = util.prepare_config(cluster)
    util.validate_config(prepared)
    assert prepared["max_workers"] == len(cluster["provider"]["worker_ips"])


def test_ray_is_started_with_a_token_and_without_a_dashboard(cluster: dict[str, Any]) -> None:
    starts = [
        line
        for key in ("head_start_ray_commands", "worker_start_ray_commands")
        for line in cluster[key]
        if "ray start" in line
    ]
    assert len(starts) == 2
    assert all("RAY_AUTH_MODE=token" in line and "RAY_AUTH_TOKEN_PATH=" in line for line in starts)
    assert "--include-dashboard=false" in starts[0]


def test_every_worker_host_gets_exactly_one_role(cluster: dict[str, Any], tmp_path: Path) -> None:
    start = next(line for line in cluster["worker_start_ray_commands"] if "ray start" in line)
    roles = {ip: _start_on(ip, start, tmp_path) for ip in cluster["provider"]["worker_ips"]}
    assert all(role in ('{"prefill_slot": 1}', '{"decode_slot": 1}') for role in roles.values()), roles
    assert len(set(roles.values())) == 2, "both roles are there"


def test_a_host_without_a_role_is_refused(cluster: dict[str, Any], tmp_path: Path) -> None:
    start = next(line for line in cluster["worker_start_ray_commands"] if "ray start" in line)
    with pytest.raises(subprocess.CalledProcessError) as refusal:
        _start_on("192.0.2.9", start, tmp_path)
    assert "no role" in refusal.value.stderr


def _start_on(ip: str, command: str, home: Path) -> str:
    """Runs the start command in a shell where `hostname` says `ip` and `ray` prints its --resources."""
    tools = home / "tandem" / "bin"
    tools.mkdir(parents=True, exist_ok=True)
    _script(tools / "hostname", f"echo {ip} ")
    _script(tools / "ray", 'for a in "$@"; do case "$a" in --resources=*) echo "${a#--resources=}";; esac; done')
    environment = {"HOME": str(home), "PATH": f"{tools}:{os.environ['PATH']}", "RAY_HEAD_IP": "10.0.0.10"}
    done = subprocess.run(
        ["bash", "-c", command], env=environment, capture_output=True, text=True, check=True, timeout=20
    )
    return done.stdout.strip()


def _script(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
