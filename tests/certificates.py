"""Certificates made on the spot by the `openssl` command: an authority, and whom it signs."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


@dataclass(frozen=True)
class Pair:
    """PEM files."""

    cert: str
    key: str


class Authority:
    """`ca` is its PEM file."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._pair = Pair(str(folder / f"{name}.pem"), str(folder / f"{name}.key"))
        self.ca = self._pair.cert
        _openssl("req", "-x509", *_KEY, *self._files(self._pair), "-days", "2", "-subj", f"/CN={name}")

    def signed(self, name: str, *alternatives: str) -> Pair:
        """A certificate for these names, written as `DNS:localhost` or `IP:127.0.0.1`."""
        pair = Pair(str(self._folder / f"{name}.pem"), str(self._folder / f"{name}.key"))
        names = ["-addext", f"subjectAltName={','.join(alternatives)}"] if alternatives else []
        by = ["-CA", self._pair.cert, "-CAkey", self._pair.key]
        own = ["-addext", "basicConstraints=critical,CA:FALSE", *names]
        _openssl("req", "-x509", *_KEY, *self._files(pair), *by, *own, "-days", "2", "-subj", f"/CN={name}")
        return pair

    def _files(self, pair: Pair) -> tuple[str, ...]:
        return "-keyout", pair.key, "-out", pair.cert


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=30)
