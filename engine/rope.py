"""Rotary position embeddings, with the scalings of the Llama family.

Sources: RoPE (arXiv 2104.09864), linear interpolation (2306.15595), dynamic NTK and YaRN (2309.00071), llama3 (the
wavelength rule of the Llama 3.1 release). Cosines and sines are computed once a step, in float32, for exactly the
step's positions, so there is no table that ends.
"""

from __future__ import annotations

import math

import torch

from engine.model_config import ModelConfig, RopeScaling


class Rotary:
    """Angles of one model. Half-split convention: element i turns with element i + head_dim / 2."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self._config = config
        self._frequencies = frequencies(config).to(device)
        self._magnitude = _magnitude(config.rope_scaling)

    def angles(self, positions: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and signed sine for `rotate`, each float32 (tokens, 1, head_dim).

        `positions` (tokens,) int64. `lengths` (tokens,) int64: length of the sequence as far as it is known when the
        token is computed; only dynamic scaling looks at it.
        """
        turns = self._frequencies
        if self._config.rope_scaling.kind == "dynamic":
            turns = _dynamic_frequencies(self._config, lengths)
        angles = positions.to(torch.float32).unsqueeze(1) * turns
        cos, sin = angles.cos() * self._magnitude, angles.sin() * self._magnitude
        return torch.cat((cos, cos), dim=1).unsqueeze(1), torch.cat((-sin, sin), dim=1).unsqueeze(1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn `x` (tokens, heads, head_dim) by `Rotary.angles`, computed in float32; x's dtype is kept."""
    wide = x.to(torch.float32)
    return torch.addcmul(wide * cos, wide.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


def frequencies(config: ModelConfig) -> torch.Tensor:
    """Radians per position, float32 (head_dim / 2,), before dynamic scaling."""
    plain = _plain(config.rope_theta, config.head_dim)
    scaling = config.rope_scaling
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "divisors":
        return plain / torch.tensor(scaling.divisors, dtype=torch.float32)
    if scaling.kind == "yarn":
        return _yarn(plain, config)
    if scaling.kind == "llama3":
        return _llama3(plain, scaling)
    return plain


def _plain(theta: float, head_dim: int) -> torch.Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / theta**exponents


def _dynamic_frequencies(config: ModelConfig, lengths: torch.Tensor) -> torch.Tensor:
    """One row of frequencies per token: the base grows once a sequence outgrows the trained length."""
    factor, head_dim = config.rope_scaling.factor, config.head_dim
    stretch = lengths.clamp(min=config.max_positions).to(torch.float32) / config.max_positions
    theta = config.rope_theta * (factor * stretch - (factor - 1)) ** (head_dim / (head_dim - 2))
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=lengths.device) / head_dim
    return 1.0 / theta.unsqueeze(1) ** exponents


def _llama3(plain: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Long wavelengths are slowed by the factor, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / plain
    turns = scaling.original_max_positions / wavelengths
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return (1 - keep) * plain / scaling.factor + keep * plain


def _yarn(plain: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Dimensions that turn often are kept, those that hardly turn are interpolated, with a ramp between."""
    scaling, head_dim = config.rope_scaling, config.head_dim

    def dimension(rotations: float) -> float:
        span = scaling.original_max_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(span) / (2 * math.log(config.rope_theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return plain / scaling.factor * ramp + plain * (1 - ramp)


def _magnitude(scaling: RopeScaling) -> float:
    """YaRN's correction of the attention temperature, applied to queries and keys through the angles."""
    if scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _temperature(scaling.factor, scaling.mscale) / _temperature(scaling.factor, scaling.mscale_all_dim)
    return _temperature(scaling.factor, 1.0)


def _temperature(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
