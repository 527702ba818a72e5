"""Draws random masks from a counter: every implementation draws the same, in any order.

Philox4x32-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011) of the key
`seed` and the counter (feature, row, step, site); `site` numbers the draws of one step. A mask need
not be saved for the gradient: it is drawn again.

B batch, n features.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW = 0xFFFFFFFF


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: Tensor) -> Tensor:
    """The first of the four 32-bit words, as int64. Counters broadcast; the seed is a scalar."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(_ROUNDS):
        # The product of two 32-bit words has 64 bits; int64 takes the highest as its sign.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _LOW) ^ c1 ^ k0,
            p1 & _LOW,
            ((p0 >> 32) & _LOW) ^ c3 ^ k1,
            p0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0


def threshold(probability: float) -> int:
    """The bound below which a random 32-bit word is with this probability."""
    return round(probability * 2**32)


def keep(probability: float, site: int, size: int, batch: int, step: int, seed: Tensor) -> Tensor:
    """Draws a mask (batch, size), bool, whose elements are true with this probability.

    Args:
        site: the number of the draw within the step.
        step: the time step.
        seed: int64 scalar, on the device of the result.
    """
    rows = torch.arange(batch, device=seed.device)[:, None]
    features = torch.arange(size, device=seed.device)
    at = (features, rows, torch.full_like(seed, step), torch.full_like(seed, site))
    return philox(at, seed) < threshold(probability)
