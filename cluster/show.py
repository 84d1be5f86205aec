"""What the commands show on the terminal: tables of findings, models and workers."""

from __future__ import annotations

import json
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from cluster import models, tls
from cluster.doctor import FAIL, OK, WARN, Finding
from cluster.run_state import NotRunning, RunState
from engine.errors import TandemError

STATUS_TIMEOUT_S = 10.0
_COLOURS = {OK: "green", WARN: "yellow", FAIL: "red"}
_HEALTH_COLOURS = {"alive": "green", "starting": "yellow", "suspect": "yellow", "fenced": "red", "failed": "red"}


class Refused(TandemError):
    """The running cluster says no; the message says why."""


def show_finding(finding: Finding) -> None:
    console = Console(highlight=False, soft_wrap=True)
    colour = _COLOURS[finding.level]
    console.print(f"[{colour}]{finding.level:>4}[/{colour}]  {finding.what}: {finding.detail}")
    if finding.remedy:
        console.print(f"      remedy: {finding.remedy}", markup=False)


def show_models(known: Iterable[models.KnownModel], folder: Path) -> None:
    table = Table("name", "what it is", "here")
    for model in known:
        table.add_row(model.name, model.about, "yes" if models.is_fetched(model, folder) else "fetched when first used")
    console = Console()
    console.print(table)
    console.print(
        f"Cache folder: {folder}. A Hugging Face directory or a .gguf file is named by its path.", soft_wrap=True
    )


def show_status(state: RunState) -> None:
    """Workers, their health and load, and the router's last decisions."""
    status = ask_gateway(state, "/status")
    console = Console(highlight=False)
    ready = "[green]ready[/green]" if status["ready"] else f"[red]not ready[/red]: {status['not_ready']}"
    console.print(f"{state.model}: {ready}   HTTP {state.http}   gRPC {state.grpc}")
    console.print(_workers(status["workers"]))
    for worker in status["workers"]:
        for rate in worker["links"]:
            console.print(_link(worker["name"], rate), markup=False, soft_wrap=True)
    for worker in status["workers"]:
        if worker["health"] != "alive":
            console.print(f"{worker['name']} is {worker['health']}: {worker['why']}", markup=False, soft_wrap=True)
    for reason, count in sorted(status["placements"].items()):
        console.print(f"{count:>6}  {reason}", markup=False)


def _workers(workers: Iterable[Mapping[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("worker", "health", "pid"):
        table.add_column(name)
    for name in ("running", "waiting", "KV live", "cached", "of"):
        table.add_column(name, justify="right")
    for worker in workers:
        load = worker["load"] or {}
        colour = _HEALTH_COLOURS.get(worker["health"], "white")
        numbers = ("running", "waiting", "live_blocks", "cached_blocks", "total_blocks")
        drains = worker["draining"] and worker["health"] == "alive"
        health = "[yellow]draining[/yellow]" if drains else f"[{colour}]{worker['health']}[/{colour}]"
        table.add_row(
            worker["name"],
            health,
            str(worker["pid"] or "-"),
            *(str(load.get(name, "-")) for name in numbers),
        )
    return table


def _link(source: str, rate: Mapping[str, Any]) -> str:
    best, limit = rate["best_bytes_per_s"] / 1e9, rate["limit_bytes_per_s"] / 1e9
    return (
        f"KV {source} to {rate['peer']} over {rate['scheme']}: {best:.1f} GB/s at best, one thread copies {limit:.1f}"
    )


def ask_gateway(state: RunState, path: str, *, method: str = "GET") -> dict[str, Any]:
    """One of the gateway's routes for operators. Refused when it says no, NotRunning when it does not answer."""
    scheme, context = "http", None
    if state.tls_ca is not None:
        scheme, context = "https", tls.client_context(state.tls_ca, state.tls_cert, state.tls_key)
    request = urllib.request.Request(f"{scheme}://{state.http}{path}", method=method)
    if state.api_key_env:
        request.add_header("authorization", f"Bearer {os.environ.get(state.api_key_env, '')}")
    try:
        with urllib.request.urlopen(request, timeout=STATUS_TIMEOUT_S, context=context) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except urllib.error.HTTPError as error:
        raise Refused(_reason(error)) from error
    except (urllib.error.URLError, OSError, ValueError) as error:
        if isinstance(getattr(error, "reason", None), ssl.SSLError):
            raise Refused(f"the gateway at {state.http} is not trusted ({error}); {tls.REMEDY}") from error
        raise NotRunning(f"the gateway at {state.http} does not say how it is: {error}") from error


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the gateway answers {error.code}"
