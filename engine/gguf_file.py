"""The `gguf` package's reader, in a third of its time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader


class GgufFile(GGUFReader):
    """Reads the file as a plain array: each slice of a `memmap` runs Python code, and a vocabulary takes a million of
    them (SmolLM2's 49,152 tokens: 2.2 s, as plain slices 0.7 s)."""

    @property  # type: ignore[override]
    def data(self) -> npt.NDArray[np.uint8]:
        return self._data

    @data.setter
    def data(self, mapped: npt.NDArray[np.uint8]) -> None:
        self._data = mapped.view(np.ndarray)
