"""The file by which the commands find a running cluster, and the processes it names."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cluster import launch, processes, run_state
from cluster.run_state import NoRunFolder, NotRunning, RunState


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_RUN_DIR", str(tmp_path / "run"))


STATE = RunState(grpc="127.0.0.1:1", http="127.0.0.1:2", model="m", workers=("prefill-0", "decode-0"))


@pytest.mark.parametrize("owner", [None, processes.this_process()])
def test_what_is_saved_is_loaded_and_nobody_else_can_read_it(owner: processes.Process | None) -> None:
    state = replace(STATE, owner=owner)
    path = run_state.save(state)
    assert run_state.load() == state
    assert path.stat().st_mode & 0o777 == 0o600


def test_without_a_cluster_the_remedy_is_named() -> None:
    with pytest.raises(NotRunning, match="tandem serve"):
        run_state.load()


def test_what_a_dead_cluster_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "ray" / "session").mkdir(parents=True)
    dead = replace(processes.this_process(), started_ticks=1)
    run_state.save(replace(STATE, owner=dead, scratch=str(tmp_path / "ray")))
    with pytest.raises(NotRunning, match="is gone"):
        run_state.load()
    assert not run_state.state_file().exists()
    assert not (tmp_path / "ray").exists()


def test_a_damaged_file_is_named() -> None:
    run_state.save(STATE)
    run_state.state_file().write_text("{")
    with pytest.raises(NotRunning, match="cannot be read"):
        run_state.load()


def test_a_whole_family_of_processes_is_found_and_ended() -> None:
    child = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'input()']).wait()"
    with subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE) as parent:
        family = _family_of_two(parent.pid)
        assert len(family) == 2
        left = processes.end(family, grace_s=0.05)
        assert left == family, "neither had been told to end"
        assert not any(process.alive() for process in family)


def test_the_folder_of_an_owner_that_had_to_be_killed_goes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ray" / "session").mkdir(parents=True)
    monkeypatch.setattr(launch, "END_GRACE_S", 0.1)
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); input()"
    said: list[str] = []
    with subprocess.Popen([sys.executable, "-c", deaf], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"deaf\n"
        owner = processes.Process(child.pid, processes.start_ticks(child.pid) or 0)
        launch.stop(replace(STATE, owner=owner, drain_s=0.1, scratch=str(tmp_path / "ray")), say=said.append)
        assert not owner.alive()
    assert not (tmp_path / "ray").exists()
    assert said[1:] == ["1 of them did not end by themselves and were killed", "stopped"]


def _family_of_two(parent: int) -> tuple[processes.Process, ...]:
    """The process and its child, as soon as the child is there."""
    mine = next(one for one in processes.descendants(processes.this_process().pid) if one.pid == parent)
    while not (born := processes.descendants(parent)):
        assert mine.alive()
    return (mine, *born)


def test_a_folder_that_cannot_be_made_is_refused_with_the_variable_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TANDEM_RUN_DIR", str(tmp_path / "file" / "run"))
    with pytest.raises(NoRunFolder, match="TANDEM_RUN_DIR"):
        run_state.save(STATE)
