"""Quantised weights keep the meaning that the file gave them."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from engine.quantised import from_blocks, quantise

EXACT = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
_K_BYTES = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}


def _blocks(kind: str, rows: int, inputs: int) -> np.ndarray:
    weight = np.random.default_rng(3).standard_normal((rows, inputs), dtype=np.float32)
    return gguf.quantize(weight, gguf.GGMLQuantizationType[kind])


def _k_blocks(kind: str, count: int) -> np.ndarray:
    """Random bytes with sane half-precision scales: the package cannot write these kinds, only read them."""
    blocks = np.random.default_rng(4).integers(0, 256, (count, _K_BYTES[kind]), dtype=np.uint8)
    halves = np.array([0.01, 0.003], dtype=np.float16).view(np.uint8)
    if kind == "Q6_K":
        blocks[:, -2:] = halves[:2]
    else:
        blocks[:, :4] = halves
    return blocks


@pytest.mark.parametrize("kind", EXACT)
def test_groups_of_simple_kinds_are_exactly_the_files_numbers(kind: str) -> None:
    blocks = _blocks(kind, 6, 96)
    quantised = from_blocks(kind, torch.from_numpy(blocks), 96)
    assert quantised is not None
    want = torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind]))
    torch.testing.assert_close(quantised.dequantised(), want, rtol=1e-6, atol=1e-6)
    assert int(quantised.codes.max()) < 2**quantised.bits


@pytest.mark.parametrize(("kind", "tolerance"), [("Q4_K", 1e-3), ("Q5_K", 1e-3), ("Q6_K", 5e-3)])
def test_groups_of_k_kinds_differ_by_rounding_only(kind: str, tolerance: float) -> None:
    blocks = _k_blocks(kind, 8)
    quantised = from_blocks(kind, torch.from_numpy(blocks).view(4, -1), 512)
    assert quantised is not None
    want = torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind])).view(4, 512)
    error = (quantised.dequantised() - want).norm() / want.norm()
    assert float(error) < tolerance


def test_quantising_to_8_bits_costs_less_than_half_a_percent() -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    assert float((quantise(weight).dequantised() - weight).norm() / weight.norm()) < 5e-3


def test_a_group_of_equal_weights_survives_quantising() -> None:
    weight = torch.full((1, 32), 0.75)
    assert torch.equal(quantise(weight).dequantised(), weight)


@pytest.mark.parametrize(("kind", "inputs"), [("Q2_K", 256), ("F32", 64), ("Q8_0", 48)])
def test_other_kinds_and_broken_groups_are_left_to_the_dense_road(kind: str, inputs: int) -> None:
    assert from_blocks(kind, torch.zeros(1, 64, dtype=torch.uint8), inputs) is None
