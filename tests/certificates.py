"""Certificates made on the spot: an authority, and whom it signs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True)
class Pair:
    """PEM files."""

    cert: str
    key: str


class Authority:
    """`ca` is its PEM file; its key lies beside it."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._authority = trustme.CA(organization_name=name)
        self.ca = str(folder / f"{name}.pem")
        self._authority.cert_pem.write_to_path(self.ca)
        self._authority.private_key_pem.write_to_path(str(folder / f"{name}.key"))

    def signed(self, name: str, *alternatives: str) -> Pair:
        """A certificate for these names and IP addresses."""
        made = self._authority.issue_cert(*alternatives, common_name=name)
        pair = Pair(str(self._folder / f"{name}.pem"), str(self._folder / f"{name}.key"))
        made.cert_chain_pems[0].write_to_path(pair.cert)
        made.private_key_pem.write_to_path(pair.key)
        return pair
