"""Tandem's public face. `from tandem import Client` is all that a user of a running cluster needs.

`Client` and `AsyncClient` are loaded when they are first asked for: the workers import this package too, for its
messages, and need no gRPC client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tandem.client import AsyncClient, Client

__all__ = ["AsyncClient", "Client"]


def __getattr__(name: str) -> type[Client] | type[AsyncClient]:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tandem import client

    return client.Client if name == "Client" else client.AsyncClient
