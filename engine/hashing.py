"""Prefix keys: what a granule of 16 tokens is called, together with everything before it.

Each key is a hash of the previous key and the next 16 token ids, so two equal keys mean two equal prefixes. The chain
starts from a root (hash name, cluster seed, checkpoint digest, KV dtype, numerics class) and the request's cache salt:
whatever would make the KV differ is in the chain, and a key means the same on every worker, in every tier and after a
restart. Engine, router and gateway call the functions below; nobody hashes in another way.

The granule is fixed, whatever the block size: a block of 32 tokens is known by the key of its last granule.

`builtin` is XXH3-128: fast, not made to withstand somebody who builds collisions on purpose, but seeded from the root,
which an outsider does not know. `sha256` is there for those who let strangers share a cache.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Callable, Sequence

import xxhash

GRANULE = 16
"""Tokens under one key."""


def hash_root(*, name: str, seed: int, model_digest: str, kv_dtype: str, numerics: str) -> bytes:
    """The 32 bytes from which every chain of a cluster starts; equal only when all five arguments are equal."""
    parts = (name, str(seed), model_digest, kv_dtype, numerics)
    return hashlib.sha256(b"tandem prefix root 1" + b"".join(_counted(part) for part in parts)).digest()


class PrefixHasher:
    """Turns token ids into prefix keys.

    `name` is "builtin" (16-byte keys) or "sha256" (32-byte keys), `root` comes from `hash_root`. Holds no state
    between calls; raises ValueError for an unknown name, OverflowError or TypeError for ids outside 0 … 2**32 - 1.
    """

    def __init__(self, name: str, root: bytes) -> None:
        if name not in _HASHES:
            raise ValueError(f"prefix hash {name!r} is unknown; it must be one of {', '.join(_HASHES)}")
        self.name = name
        self._digest = _HASHES[name](root)

    def chain(self, token_ids: Sequence[int], salt: str) -> tuple[bytes, ...]:
        """One key per full granule of `token_ids`, in order; the tail that fills no granule has none."""
        return self.extend(self.start(salt), token_ids)

    def start(self, salt: str) -> bytes:
        """The key before the first granule of every request with this cache salt."""
        return self._digest(b"salt" + salt.encode("utf-8", "surrogatepass"))

    def extend(self, parent: bytes, token_ids: Sequence[int]) -> tuple[bytes, ...]:
        """The keys of the full granules of `token_ids` that follow the prefix named `parent`."""
        raw = _as_bytes(token_ids)
        width = GRANULE * 4
        keys = []
        for begin in range(0, len(raw) - width + 1, width):
            parent = self._digest(parent + raw[begin : begin + width])
            keys.append(parent)
        return tuple(keys)


def _builtin(root: bytes) -> Callable[[bytes], bytes]:
    seed = int.from_bytes(root[:8], "little")

    def digest(data: bytes) -> bytes:
        return bytes(xxhash.xxh3_128_digest(root + data, seed=seed))

    return digest


def _sha256(root: bytes) -> Callable[[bytes], bytes]:
    def digest(data: bytes) -> bytes:
        return hashlib.sha256(root + data).digest()

    return digest


_HASHES: dict[str, Callable[[bytes], Callable[[bytes], bytes]]] = {"builtin": _builtin, "sha256": _sha256}


def _as_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian 32-bit words, on every machine."""
    words = array("I", token_ids)
    if words.itemsize != 4:  # C promises only 16 bits for this type
        return struct.pack(f"<{len(token_ids)}I", *token_ids)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def _counted(part: str) -> bytes:
    """Length before content, so that no two lists of parts read the same."""
    raw = part.encode()
    return struct.pack("<Q", len(raw)) + raw
