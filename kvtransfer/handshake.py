"""Who may write here: a challenge that only the holder of the address can answer.

An address is a capability: it carries a random token, drawn when the transport starts, and travels over the
authenticated control plane only. The listener sends a nonce, the caller proves that it knows the token and which two
peers it means to join, and the listener proves the same back. HMAC-SHA256 (RFC 2104); neither token nor key is ever on
the wire. This keeps strangers out; it does not encrypt what follows.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass

from kvtransfer.errors import TransferError
from kvtransfer.packing import pack, unpack

NONCE_BYTES = 16
TOKEN_BYTES = 32
UNIX = "unix:"
_VERSION = 2


def socket_address(host: str, port: int) -> tuple[str, int] | bytes:
    """What the socket calls want; a `unix:` name lives in the abstract namespace and leaves no file behind."""
    return b"\0" + host.removeprefix(UNIX).encode() if host.startswith(UNIX) else (host, port)


@dataclass(frozen=True, slots=True)
class WiredAddress:
    """Where a transport listens, what it speaks, and the token that opens it."""

    scheme: str
    host: str
    """An IP address, or `unix:` and a name in this host's abstract namespace (then the port is 0)."""
    port: int
    token: bytes

    @property
    def where(self) -> tuple[str, int] | bytes:
        """For `socket.connect`."""
        return socket_address(self.host, self.port)

    def pack(self) -> bytes:
        """Opaque bytes for peers."""
        return pack(_VERSION, self.scheme, self.host, self.port, self.token)

    @staticmethod
    def unpack(raw: bytes) -> WiredAddress:
        """Raises `TransferError` if the bytes are not an address."""
        try:
            version, scheme, host, port, token = unpack(raw)
        except ValueError as error:
            raise TransferError(f"not a transfer address: {error}") from error
        sound = version == _VERSION and tuple(map(type, (scheme, host, port, token))) == (str, str, int, bytes)
        if not sound or len(token) != TOKEN_BYTES or not (0 < port < 65_536 or (host.startswith(UNIX) and port == 0)):
            raise TransferError("not a transfer address: wrong fields")
        return WiredAddress(scheme, host, port, token)


def new_nonce() -> bytes:
    """Fresh randomness for one handshake."""
    return secrets.token_bytes(NONCE_BYTES)


def new_token() -> bytes:
    """The secret of one listener."""
    return secrets.token_bytes(TOKEN_BYTES)


def proof(token: bytes, role: str, challenge: bytes, nonce: bytes, source: str, destination: str, blob: bytes) -> bytes:
    """What `role` ("hello" or "welcome") answers; every field is bound, none can be shifted into its neighbour."""
    message = pack(role, challenge, nonce, source, destination, blob)
    return hmac.new(token, message, hashlib.sha256).digest()


def proves(expected: bytes, given: bytes) -> bool:
    """Compare without telling by time."""
    return hmac.compare_digest(expected, given)
