"""Hugging Face directories: config.json and safetensors, in one file or sharded with an index.

Every header is read and compared with its file's length and with the index before any weight is touched, so that a
cut-off, swapped, missing or stray file is named at start.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import ModelError
from engine.loaders.digest import content_digest
from engine.model_config import read_hf_config
from engine.quantised import Quantised

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_FLOATS = ("F64", "F32", "F16", "BF16")
_HARMLESS = ".rotary_emb.inv_freq"
"""Derived values that old checkpoints carry along; computed from config.json instead."""


class HfSource:
    """An opened directory. Raises ModelError for a bad one."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.config = read_hf_config(directory)
        self._files = _weight_files(directory)
        self._file_of: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in self._files:
            self._add(file, _read_header(directory / file))
        _compare_with_index(directory, self._file_of)
        for name in [name for name in self.shapes if name.endswith(_HARMLESS)]:
            del self.shapes[name]

    def read(self, name: str) -> torch.Tensor:
        file = self._file_of[name]
        try:
            with safe_open(self._directory / file, framework="pt") as opened:
                tensor: torch.Tensor = opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file}: tensor {name} cannot be read: {error}") from error
        return tensor

    def read_quantised(self, name: str) -> Quantised | None:
        """Nothing: safetensors of this kind hold floating tensors only."""
        return None

    def content_digest(self) -> str:
        return content_digest([self._directory / file for file in self._files])

    def _add(self, file: str, header: dict[str, Any]) -> None:
        for name, entry in header.items():
            if name in self._file_of:
                raise ModelError(f"tensor {name} is in both {self._file_of[name]} and {file}")
            if entry["dtype"] not in _FLOATS:
                raise ModelError(f"{file}: tensor {name} has dtype {entry['dtype']}; it must be a floating one")
            self._file_of[name] = file
            self.shapes[name] = tuple(entry["shape"])


def _weight_files(directory: Path) -> list[str]:
    """Names of the files to load, sorted; refuses strays, which are signs of two checkpoints in one directory."""
    present = {path.name for path in directory.glob("*.safetensors") if not path.name.startswith("consolidated")}
    if (directory / INDEX).exists():
        listed = set(_weight_map(directory).values())
    elif SINGLE in present:
        listed = {SINGLE}
    else:
        raise ModelError(_no_weights(directory, present))
    for file in sorted(listed - present):
        missing = [name for name, of in _weight_map(directory).items() if of == file]
        raise ModelError(
            f"{file} is listed in {INDEX} but missing, with tensor {missing[0]} and {len(missing) - 1} more"
        )
    for file in sorted(present - listed):
        raise ModelError(f"{file} belongs to no index; remove it from the model directory")
    return sorted(listed)


def _no_weights(directory: Path, present: set[str]) -> str:
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern))
    if present:
        return f"{INDEX} is missing; found {', '.join(sorted(present))}"
    if pickles:
        return f"only pickled weights ({pickles[0]}) found, which are not loaded; convert them to safetensors"
    return f"{SINGLE} is missing"


def _weight_map(directory: Path) -> dict[str, str]:
    try:
        weight_map = json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{INDEX} cannot be read: {error!r}") from error


def _compare_with_index(directory: Path, file_of: dict[str, str]) -> None:
    if not (directory / INDEX).exists():
        return
    listed = _weight_map(directory)
    for name, file in listed.items():
        if file_of.get(name) != file:
            raise ModelError(f"{file}: tensor {name} is listed in {INDEX} but is {_where(file_of.get(name))}")
    for name, file in file_of.items():
        if name not in listed:
            raise ModelError(f"{file}: tensor {name} is not listed in {INDEX}")


def _where(file: str | None) -> str:
    return "in no file" if file is None else f"in {file}"


def _read_header(path: Path) -> dict[str, Any]:
    """Tensor entries by name. Format: u64 length, JSON, then the data at offsets relative to the JSON's end."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size - 8:
                raise ModelError(f"{path.name} is truncated within its header")
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            if 8 + length + int(entry["data_offsets"][1]) > size:
                raise ModelError(f"{path.name} is truncated: tensor {name} ends beyond the file")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ModelError(f"{path.name} is not a safetensors file: {error!r}") from error
    return header
