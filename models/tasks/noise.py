"""Noise that depends on seeds alone, drawn where images are. B batch, n numbers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# SplitMix64 (Steele et al., 2014, https://doi.org/10.1145/2660193.2660195), with an increment of
# its own: from the same seeds the augmentation draws other numbers.
INCREMENT = 0xD1B54A32D192ED03 - 2**64
ROUNDS = (30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64)
BITS = 24  # of a uniform number, as many as a float32 has


def draw_normal(seeds: Tensor, count: int) -> Tensor:
    """Returns normal numbers of mean 0 and deviation 1, (B, n) float32, from seeds (B,) int64.

    Those of a seed are the same in every batch and, but for rounding, on every device. A training
    step that draws them depends on its batch alone.
    """
    bits = seeds[:, None] + INCREMENT * torch.arange(1, count + 1, device=seeds.device)
    for shift, factor in ROUNDS:
        bits = (bits ^ _shift(bits, shift)) * factor
    radius, angle = (
        _shift(bits, shift).bitwise_and(2**BITS - 1).float() / 2**BITS for shift in (40, 16)
    )
    # Box and Muller's method; a radius from 1 down to above 0.
    return (-2 * (1 - radius).log()).sqrt() * (2 * math.pi * angle).cos()


def _shift(bits: Tensor, count: int) -> Tensor:
    """Returns int64 shifted to the right as if it had no sign."""
    return (bits >> count) & (2 ** (64 - count) - 1)
