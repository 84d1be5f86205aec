"""Lengths of real requests, see `bench/data/README.md`."""

from __future__ import annotations

import csv
import random
from pathlib import Path

CONVERSATION = Path(__file__).parent / "data" / "azure_conversation_2023.csv"


def output_lengths(count: int, seed: int = 0) -> tuple[int, ...]:
    """Output tokens of `count` requests of the Azure conversation trace, drawn without putting back."""
    with CONVERSATION.open(newline="") as file:
        lengths = [int(row["GeneratedTokens"]) for row in csv.DictReader(file)]
    return tuple(random.Random(seed).sample(lengths, count))
