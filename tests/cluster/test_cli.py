"""The command's manners: one line for an error, exit codes that say so, nothing started by a look."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from cluster.cli import main

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_RUN_DIR", str(tmp_path / "run"))


@pytest.mark.parametrize("command", [["chat"], ["generate", "x"], ["status"], ["stop"]])
def test_without_a_cluster_one_line_names_the_remedy(command: list[str]) -> None:
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "tandem serve" in result.stderr


@pytest.mark.parametrize("file", sorted(DEPLOY.glob("*.sla.yaml")), ids=lambda path: path.name)
def test_the_shipped_sla_files_are_said_in_words(file: Path) -> None:
    result = CliRunner().invoke(main, ["config", "check", str(file)])
    assert result.exit_code == 0, result.stderr
    assert "Prefill: " in result.output
    assert "Decode: " in result.output


@pytest.mark.parametrize("command", [["config", "check"], ["serve", "--config"], ["demo", "--config"]])
def test_a_bad_sla_file_is_refused_before_anything_starts(command: list[str], tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("version: 1\npols: {}\n")
    result = CliRunner().invoke(main, [*command, str(file)])
    assert result.exit_code == 1
    assert "pools" in result.stderr, "the nearest key is named"
    assert not (tmp_path / "run").exists()


def test_a_missing_model_is_refused_before_anything_starts(tmp_path: Path) -> None:
    file = tmp_path / "x.sla.yaml"
    file.write_text("version: 1\nmodel: {name: mine, path: /no/such/model}\n")
    result = CliRunner().invoke(main, ["serve", "--config", str(file)])
    assert result.exit_code == 1
    assert "/no/such/model" in result.stderr


def test_known_models_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_MODEL_DIR", str(tmp_path))
    result = CliRunner().invoke(main, ["models"])
    assert result.exit_code == 0
    assert "smollm2-135m" in result.output
    assert "fetched when first used" in result.output


@pytest.mark.parametrize("option", [["--prefill", "0"], ["--decode", "-1"]])
def test_a_pool_has_at_least_one_worker(option: list[str]) -> None:
    assert CliRunner().invoke(main, ["serve", *option]).exit_code == 2


@pytest.mark.parametrize("key", ["http_port", "grpc_port"])
def test_a_taken_port_is_refused_before_anything_starts(key: str, tmp_path: Path) -> None:
    file = tmp_path / "taken.sla.yaml"
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with socket.create_server(("127.0.0.1", 0)) as probe:
            free = probe.getsockname()[1]
        other = {"http_port": "grpc_port", "grpc_port": "http_port"}[key]
        file.write_text(f"version: 1\ngateway: {{{key}: {port}, {other}: {free}}}\n")
        result = CliRunner().invoke(main, ["serve", "--config", str(file)])
    assert result.exit_code == 1
    assert f"port {port} on 127.0.0.1" in result.stderr
    assert f"gateway.{key}" in result.stderr
    assert "starting Ray" not in result.output
