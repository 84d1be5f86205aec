"""A product on 4-bit codes is the product on the dense weights, and is taken for few rows only."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from engine.linear import FEW_COLUMNS, FEW_ROWS, FourBit, Linear, dense, four_bit, product
from engine.loaders import decoder_of, open_checkpoint
from engine.quantised import Quantised, from_blocks, quantise


def _four_bit(rows: int, seed: int) -> Quantised:
    weight = np.random.default_rng(seed).standard_normal((rows, 64), dtype=np.float32)
    blocks = torch.from_numpy(gguf.quantize(weight, gguf.GGMLQuantizationType.Q4_1))
    made = from_blocks("Q4_1", blocks, 64)
    assert made is not None
    return made


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("bias", [False, True])
def test_products_of_both_forms_agree(dtype: torch.dtype, tolerance: float, bias: bool) -> None:
    parts = [_four_bit(64, 1), _four_bit(32, 2)]
    weight = torch.cat([part.dequantised() for part in parts])
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(3))
    added = torch.randn(96) if bias else None
    want = torch.nn.functional.linear(x, weight, added)
    few = four_bit(parts, dtype)
    assert few is not None
    nothing = torch.full((96, 64), torch.nan, dtype=dtype)
    got = product(x.to(dtype), Linear(nothing, None if added is None else added.to(dtype), few))
    assert float((got.float() - want).norm() / want.norm()) < tolerance


@pytest.mark.parametrize("rows", [0, 1, 2, FEW_COLUMNS, FEW_COLUMNS + 1])
@pytest.mark.parametrize("bias", [False, True])
def test_few_rows_as_columns_are_the_product_of_torch(rows: int, bias: bool) -> None:
    chance = torch.Generator().manual_seed(3)
    x, weight = torch.randn(rows, 64, generator=chance), torch.randn(96, 64, generator=chance)
    added = torch.randn(96, generator=chance) if bias else None
    got = dense(x, weight, added)
    assert got.is_contiguous()
    torch.testing.assert_close(got, torch.nn.functional.linear(x, weight, added), rtol=1e-5, atol=1e-5)


def test_many_rows_go_the_dense_way() -> None:
    few = four_bit([_four_bit(32, 1)], torch.float32)
    assert few is not None
    broken = FourBit(few.codes, few.scales_and_middles * torch.nan)
    linear = Linear(torch.ones(32, 64), None, broken)
    assert product(torch.ones(FEW_ROWS, 64), linear).isnan().all()
    assert product(torch.ones(FEW_ROWS + 1, 64), linear).isfinite().all()


def test_other_forms_stay_dense() -> None:
    four, dense = _four_bit(32, 1), torch.ones(32, 64)
    assert four_bit([four, dense], torch.float32) is None
    assert four_bit([quantise(dense)], torch.float32) is None
    assert four_bit([replace(four, codes=four.codes[:24], scales=four.scales[:24])], torch.float32) is None


@pytest.mark.model
def test_the_torch_model_takes_the_files_codes(smollm2_path: Path) -> None:
    decoder = decoder_of(open_checkpoint(smollm2_path), dtype="bfloat16", packed=True)
    assert all(getattr(decoder.weights.layers[7], name).four_bit for name in ("qkv", "output", "gate_up", "down"))
