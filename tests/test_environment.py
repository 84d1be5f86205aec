"""Claims for `scripts/environment.py`: what it installs fits together, and it does nothing when nothing is to do."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(name="environment")
def environment_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("environment", ROOT / "scripts" / "environment.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("cuda", "build"), [("'13.0'", "cu13"), ("'12.8'", "cu12"), ("None", "cu12")])
def test_the_ucx_build_follows_the_cuda_of_torch_without_importing_torch(
    environment: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: str, build: str
) -> None:
    torch = tmp_path / "torch"
    torch.mkdir()
    (torch / "__init__.py").write_text("raise RuntimeError('imported')")
    (torch / "version.py").write_text(f"__version__ = '2.13.0'\ncuda = {cuda}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert environment.ucx_build(Path(sys.executable)) == build


def make_environment(venv: Path, extras: list[str]) -> None:
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").touch()
    digest = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    (venv / ".tandem-installed").write_text(json.dumps({"pyproject": digest, "extras": extras}))


@pytest.mark.parametrize(
    ("ucx", "extras", "complete"),
    [("", [], True), ("cu13", [], True), ("cu12", [], False), ("", ["test"], True), ("", ["dev"], False)],
)
def test_an_environment_that_has_what_is_asked_for_is_left_alone(
    environment: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ucx: str,
    extras: list[str],
    complete: bool,
) -> None:
    make_environment(tmp_path, ["cu13", "test"])
    installed: list[str] = []
    monkeypatch.setattr(environment, "pip", lambda python, what, arguments, remedy="": installed.extend(arguments))
    monkeypatch.setattr(environment, "succeeds", lambda command: True)
    environment.prepare(tmp_path, "torch", ucx, extras)
    assert (installed == []) is complete
