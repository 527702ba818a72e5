"""A linear layer of few outputs.

B batch, C input features, K outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class NarrowLinear(nn.Linear):
    """:class:`torch.nn.Linear`, as a product of one batch.

    For some sizes, 10 outputs of 128 features for 128 rows among them, cuBLAS 13.0 computes the
    gradient of a Linear's weight many times more slowly than as a batched product.

    Shape: (B, C) to (B, K).
    """

    def forward(self, x: Tensor) -> Tensor:
        out = torch.einsum("bc,kc->bk", x, self.weight)
        return out if self.bias is None else out + self.bias
