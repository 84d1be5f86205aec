"""The `tandem` command. Everything it says about a fault is one clear line on stderr and an exit code other than 0.

serve, demo          start a cluster from an SLA file or from the defaults
chat, generate       talk to the running one
status, stop         look at it, end it
drain, undrain       take a worker out of use, and back; what it runs moves to other workers
doctor, models, config check      look at this machine and at files; nothing is started
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from engine.errors import TandemError

if TYPE_CHECKING:
    from cluster.config import TandemConfig
    from tandem.client import Client, Options, Piece


class _Tandem(click.Group):
    """Turns the errors that Tandem raises on purpose into one line."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except TandemError as error:
            click.echo(f"tandem: {error}", err=True)
            ctx.exit(1)
        except KeyboardInterrupt:
            ctx.exit(130)


@click.group(cls=_Tandem, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Serve a language model from two pools of workers, prefill and decode."""


def _cluster_options(command: click.decorators.FC) -> click.decorators.FC:
    for option in (
        click.option("--decode", type=click.IntRange(1), help="Number of decode workers."),
        click.option("--prefill", type=click.IntRange(1), help="Number of prefill workers."),
        click.option("--config", "config_file", type=click.Path(path_type=Path), help="SLA file (YAML)."),
    ):
        command = option(command)
    return command


def _config(config_file: Path | None, prefill: int | None, decode: int | None) -> TandemConfig:
    from cluster.config import default_config, load_config

    config = default_config() if config_file is None else load_config(config_file)
    pools = config.pools
    if prefill is not None:
        pools = replace(pools, prefill=replace(pools.prefill, count=prefill))
    if decode is not None:
        pools = replace(pools, decode=replace(pools.decode, count=decode))
    return replace(config, pools=pools)


def _warn(config: TandemConfig) -> None:
    from cluster.config_words import doubts_here

    for warning in (*config.warnings, *doubts_here(config)):
        click.echo(f"tandem: warning: {warning}", err=True)


@main.command()
@_cluster_options
@click.option("--ray", "ray_address", help="Join this Ray cluster (`auto`, or host:port) instead of starting one.")
@click.option("--detach", is_flag=True, help="Return when it is ready and leave it running.")
def serve(
    config_file: Path | None, prefill: int | None, decode: int | None, ray_address: str | None, detach: bool
) -> None:
    """Start a cluster; without --detach, until Ctrl-C."""
    from cluster import launch

    config = _config(config_file, prefill, decode)
    if ray_address is not None:
        config = replace(config, cluster=replace(config.cluster, ray_address=ray_address))
    if detach and config.cluster.ray_address is None:
        options = {"--config": config_file, "--prefill": prefill, "--decode": decode}
        launch.serve_detached([f"{name}={value}" for name, value in options.items() if value is not None], say=_say)
    else:  # the process that serves warns, once
        _warn(config)
        launch.serve(config, say=_say)


@main.command()
@_cluster_options
def demo(config_file: Path | None, prefill: int | None, decode: int | None) -> None:
    """Start a cluster, send a dozen chats through it, show what happened, stop it."""
    from cluster import demo as show

    config = _config(config_file, prefill, decode)
    _warn(config)
    sys.exit(show.run(config))


@main.command()
def stop() -> None:
    """End the running cluster and every process of it."""
    from cluster import launch, run_state

    launch.stop(run_state.load(), say=_say)


@main.command()
def status() -> None:
    """Workers, their health and load."""
    from cluster import run_state
    from cluster.show import show_status

    show_status(run_state.load())


@main.command()
@click.argument("worker")
def drain(worker: str) -> None:
    """Give WORKER nothing new, and move what it runs to other workers as far as they have room."""
    _set_draining(worker, "drain")


@main.command()
@click.argument("worker")
def undrain(worker: str) -> None:
    """Give WORKER requests again."""
    _set_draining(worker, "undrain")


def _set_draining(worker: str, what: str) -> None:
    from cluster import run_state
    from cluster.show import ask_gateway

    ask_gateway(run_state.load(), f"/{what}/{worker}", method="POST")
    _say(f"{worker} is draining; `tandem status` shows what it still runs" if what == "drain" else f"{worker} is back")


@main.command()
@click.argument("prompt")
@click.option("--max-tokens", default=128, show_default=True, type=click.IntRange(1))
@click.option("--temperature", default=0.0, show_default=True, type=click.FloatRange(0.0))
@click.option("--seed", type=int, help="The same seed gives the same answer.")
@click.option("--class", "sla_class", default="", help="SLA class.")
def generate(prompt: str, max_tokens: int, temperature: float, seed: int | None, sla_class: str) -> None:
    """Continue PROMPT as it is, without a chat template; `-` reads it from standard input."""
    text = sys.stdin.read() if prompt == "-" else prompt
    options: Options = {"max_tokens": max_tokens, "temperature": temperature, "sla_class": sla_class}
    if seed is not None:
        options["seed"] = seed
    with _client() as client:
        _stream(client.generate(text, stream=True, **options))


@main.command()
@click.option("--system", default="", help="A system prompt.")
@click.option("--max-tokens", default=256, show_default=True, type=click.IntRange(1))
@click.option("--temperature", default=0.2, show_default=True, type=click.FloatRange(0.0))
@click.option("--class", "sla_class", default="", help="SLA class.")
def chat(system: str, max_tokens: int, temperature: float, sla_class: str) -> None:
    """A conversation; an empty line or Ctrl-D ends it."""
    options: Options = {"max_tokens": max_tokens, "temperature": temperature, "sla_class": sla_class}
    said: list[Mapping[str, str]] = [{"role": "system", "content": system}] if system else []
    with _client() as client:
        while line := _next_line():
            said.append({"role": "user", "content": line})
            answer = _stream(client.chat(said, stream=True, **options))
            said.append({"role": "assistant", "content": answer})


@main.command()
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="SLA file whose ports are looked at.")
def doctor(config_file: Path | None) -> None:
    """Is this machine fit to serve? Each line names the remedy for what is not."""
    from cluster import doctor as surgery
    from cluster import models
    from cluster.show import show_finding

    gateway = _config(config_file, None, None).gateway
    asked = surgery.Asked(
        host=gateway.host, ports=(gateway.http_port, gateway.grpc_port), model_folder=models.cache_folder()
    )
    findings = []
    for finding in surgery.examine(asked):
        show_finding(finding)
        findings.append(finding)
    sys.exit(surgery.exit_code(findings))


@main.command(name="models")
def list_models() -> None:
    """The models that are known by name, and where they are."""
    from cluster import models
    from cluster.show import show_models

    show_models(models.KNOWN.values(), models.cache_folder())


@main.group(name="config")
def config_group() -> None:
    """SLA files."""


@config_group.command()
@click.argument("file", type=click.Path(path_type=Path))
def check(file: Path) -> None:
    """Say in words what FILE means, or refuse it with line, key and remedy."""
    from cluster.config import load_config
    from cluster.config_words import describe, doubts_here

    config = load_config(file)
    click.echo(describe(config))
    for doubt in doubts_here(config):
        click.echo(f"Warning: {doubt}")


# -- talking to the running cluster ------------------------------------------------------------------------------


@contextlib.contextmanager
def _client() -> Iterator[Client]:
    from cluster import run_state
    from tandem import Client

    state = run_state.load()
    key = os.environ.get(state.api_key_env) if state.api_key_env else None
    trusted = {"tls_ca": state.tls_ca, "tls_cert": state.tls_cert, "tls_key": state.tls_key}
    with Client(state.grpc, api_key=key, **trusted) as client:
        yield client


def _stream(pieces: Iterator[Piece]) -> str:
    """Write an answer as it comes, and return it whole."""
    written = ""
    for piece in pieces:
        click.echo(piece.text, nl=False)
        written += piece.text
    click.echo()
    return written


def _next_line() -> str:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""


def _say(line: str) -> None:
    click.echo(f"tandem: {line}")


if __name__ == "__main__":
    main()
