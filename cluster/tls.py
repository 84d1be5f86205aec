"""The gateway's TLS files: whether they can be used, and how commands on this machine know the gateway by them."""

from __future__ import annotations

import ssl
from dataclasses import replace
from pathlib import Path

from cluster.config import TlsSection
from engine.errors import TandemError

REMEDY = "gateway.tls.ca must name the authority that signed gateway.tls.cert, for the name in the address"


class TlsProblem(TandemError):
    """A file of `gateway.tls` cannot be used; the message names key, path and remedy."""


def checked(tls: TlsSection) -> TlsSection:
    """The section with absolute paths: commands are given elsewhere. Raises TlsProblem."""
    paths = {key: getattr(tls, key) for key in ("cert", "key", "client_ca", "ca")}
    found = {key: str(_readable(key, path)) for key, path in paths.items() if path is not None}
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(found["cert"], found["key"], password=lambda: "")  # never ask for one
    except (ssl.SSLError, ValueError) as error:
        raise TlsProblem(
            f"gateway.tls: {tls.cert} and {tls.key} are no certificate and its private key ({_reason(error)}); "
            "give both as PEM, the key without a password"
        ) from error
    for key in found.keys() & {"client_ca", "ca"}:
        try:
            context.load_verify_locations(found[key])
        except ssl.SSLError as error:
            raise TlsProblem(
                f"gateway.tls.{key}: {paths[key]} holds no certificate ({_reason(error)}); give it as PEM"
            ) from error
    return replace(tls, **found)


def client_context(ca: str, cert: str | None, key: str | None) -> ssl.SSLContext:
    """For HTTPS to a server that `ca` vouches for, showing `cert` if there is one."""
    context = ssl.create_default_context(cafile=ca)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as gRPC does: the server's own certificate may be the `ca`
    if cert is not None:
        context.load_cert_chain(cert, key)
    return context


def _readable(key: str, path: str) -> Path:
    absolute = Path(path).expanduser().absolute()
    try:
        absolute.read_bytes()
    except OSError as error:
        raise TlsProblem(
            f"gateway.tls.{key}: {path} cannot be read ({error.strerror}); it must be a PEM file here"
        ) from error
    return absolute


def _reason(error: Exception) -> str:
    return (getattr(error, "reason", None) or str(error)).lower().replace("_", " ")
