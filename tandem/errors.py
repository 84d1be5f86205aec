"""What a client can meet, by what its caller can do about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from engine.errors import TandemError


class RequestError(TandemError):
    """A request ended without its answer. `request_id` is the one in the servers' logs, where known."""

    retryable: ClassVar[bool] = False
    """Whether the same request, sent again a little later, may succeed."""

    def __init__(self, message: str, *, request_id: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.request_id = request_id


class InvalidRequestError(RequestError):
    """Change the request: the message names the field."""


class UnauthenticatedError(RequestError):
    """Send the right key."""


class NotFoundError(RequestError):
    """Ask for a model or a request that exists."""


class OverloadedError(RequestError):
    """Wait, then ask again, or ask for less."""

    retryable = True


class UnavailableError(RequestError):
    """Ask again: a worker was lost, or the server is draining or out of reach."""

    retryable = True


class TlsError(RequestError):
    """Mend the client's TLS settings: the message says which."""


class DeadlineError(RequestError):
    """Allow more time."""


class CancelledError(RequestError):
    """Nothing to do: the request was cancelled."""


class ServerError(RequestError):
    """Report it: the fault is on the server's side."""


_BY_GRPC_CODE: Mapping[str, type[RequestError]] = {
    "INVALID_ARGUMENT": InvalidRequestError,
    "OUT_OF_RANGE": InvalidRequestError,
    "UNAUTHENTICATED": UnauthenticatedError,
    "PERMISSION_DENIED": UnauthenticatedError,
    "NOT_FOUND": NotFoundError,
    "RESOURCE_EXHAUSTED": OverloadedError,
    "UNAVAILABLE": UnavailableError,
    "DEADLINE_EXCEEDED": DeadlineError,
    "CANCELLED": CancelledError,
}


def error_for(grpc_code: str, message: str, *, request_id: str = "") -> RequestError:
    """The error for the name of a gRPC code; a name that says nothing to a caller is a `ServerError`."""
    return _BY_GRPC_CODE.get(grpc_code, ServerError)(message, request_id=request_id)
