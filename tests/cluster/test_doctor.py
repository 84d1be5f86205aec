"""The doctor changes nothing, names a remedy for whatever is not well, and its exit code follows the failures."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from cluster import doctor
from cluster.doctor import FAIL, OK, WARN, Asked, Finding


def _findings(tmp_path: Path, ports: tuple[int, ...] = ()) -> list[Finding]:
    return list(doctor.examine(Asked(ports=ports, model_folder=tmp_path)))


def test_this_machine_can_serve(tmp_path: Path) -> None:
    findings = _findings(tmp_path)
    assert doctor.exit_code(findings) == 0, findings
    assert {"python", "torch", "ucx", "packages", "cores", "model", "compiler"} <= {one.what for one in findings}


def test_whatever_is_not_well_has_a_remedy(tmp_path: Path) -> None:
    assert all(finding.remedy for finding in _findings(tmp_path) if finding.level != OK)


def test_a_taken_port_is_a_warning_with_a_remedy(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = next(one for one in _findings(tmp_path, (port,)) if one.what == f"port {port}")
    assert found.level == WARN
    assert "tandem stop" in found.remedy


@pytest.mark.parametrize(("chosen", "level"), [("never", WARN), ("deny", WARN), ("advise", OK), ("always", OK)])
def test_shared_memory_without_huge_pages_is_a_warning_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str, level: str
) -> None:
    setting = tmp_path / "shmem_enabled"
    setting.write_text("always within_size advise never deny force\n".replace(chosen, f"[{chosen}]"))
    monkeypatch.setattr(doctor, "SHARED_HUGE_PAGES", setting)
    found = next(one for one in _findings(tmp_path) if one.what == "huge pages")
    assert (found.level, found.detail) == (level, f"{chosen} in shared memory")
    assert (f"echo advise > {setting}" in found.remedy) == (level == WARN)


def test_an_absent_ucx_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda package: None if "ucxx" in package else "1")
    found = next(one for one in _findings(tmp_path) if one.what == "ucx")
    assert found.level == FAIL
    assert "tandem-serve[cu13]" in found.remedy
    assert doctor.exit_code([found]) == 1
