"""Errors by what the caller can do about them."""

from __future__ import annotations


class TandemError(Exception):
    """Any error that Tandem raises on purpose."""


class InvalidRequest(TandemError):
    """The request is at fault; `field` names the part to change. HTTP 400, INVALID_ARGUMENT."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class ConfigError(TandemError):
    """A setting is at fault; refused before anything starts. `fault`: what it is and must be, without its name."""

    def __init__(self, field: str, value: object, remedy: str) -> None:
        self.field = field
        self.fault = f"is {value!r}; it must be {remedy}"
        super().__init__(f"{field} {self.fault}")


def too_much(field: str, value: object, error: BaseException, place: str = "this machine") -> ConfigError:
    """Memory of that size could not be had there."""
    return ConfigError(field, value, f"no more than {place} has: {str(error) or type(error).__name__}")


class ModelError(TandemError):
    """A checkpoint cannot be served: an unsupported architecture, or a missing, truncated or mismatched tensor."""
