"""A recurrent network that reads an image step by step.

B batch, C channels, H height, W width, T time steps, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hoconv import recurrent as rnn
from models.arguments import require_sizes


class NarrowLinear(nn.Linear):
    """:class:`torch.nn.Linear`, as a product of one batch.

    For some sizes, 10 outputs of 128 features for 128 rows among them, cuBLAS 13.0 computes the
    gradient of a Linear's weight many times more slowly than as a batched product.

    Shape: (B, C) to (B, K).
    """

    def forward(self, x: Tensor) -> Tensor:
        out = torch.einsum("bc,kc->bk", x, self.weight)
        return out if self.bias is None else out + self.bias


class ImageReader(nn.Module):
    """Recurrent layers over the rows or the pixels of an image; a classifier of the last output.

    The rows of an MNIST image are 28 steps of 28 numbers. Its pixels are 784 steps of one number, a
    test of memory (Le, Jaitly and Hinton, A Simple Way to Initialize Recurrent Networks of
    Rectified Linear Units, 2015).

    Args:
        image_shape: (C, H, W) of an image.
        num_classes: K.
        cell: the name of a cell in :mod:`hoconv.recurrent`.
        steps: ``"rows"``, T = H steps of C * W numbers, or ``"pixels"``, T = H * W steps of C.
        hidden_size: of the recurrent layers.
        num_layers: number of recurrent layers.
        schedule: one of :data:`hoconv.recurrent.SCHEDULES`.
        recompute: whether the gradient takes less memory, and more time.

    The forget gate of a cell, the linear map "f", starts open enough to remember for about T steps:
    its biases are drawn as in Tallec and Ollivier, Can Recurrent Neural Networks Warp Time?, 2018.

    Shape: (B, C, H, W) to logits (B, K), floating point.

    Raises:
        ValueError: `cell` or `steps` is not one of those.
    """

    def __init__(
        self,
        image_shape: Sequence[int],
        num_classes: int,
        cell: str = "lstm",
        steps: Literal["rows", "pixels"] = "rows",
        hidden_size: int = 128,
        num_layers: int = 1,
        schedule: str = "auto",
        recompute: bool = False,
    ) -> None:
        super().__init__()
        require_sizes(hidden_size=hidden_size, num_layers=num_layers)
        known = getattr(rnn, cell, None)
        if not isinstance(known, rnn.Cell):
            names = sorted(n for n, v in vars(rnn).items() if isinstance(v, rnn.Cell))
            raise ValueError(f"cell: expected one of {', '.join(names)}; got {cell!r}")
        if steps not in ("rows", "pixels"):
            raise ValueError(f"steps: expected 'rows' or 'pixels', got {steps!r}")
        channels, height, width = image_shape
        self.steps = steps
        by_row = steps == "rows"
        options: dict[str, Any] = (
            {"proj_size": hidden_size // 2} if "proj_size" in known.options else {}
        )
        self.recurrent = rnn.RNN(
            known,
            channels * width if by_row else channels,
            hidden_size,
            num_layers,
            schedule=schedule,
            recompute=recompute,
            **options,
        )
        for name, parameter in self.recurrent.named_parameters():
            if name.startswith("bias_f_"):
                longest = height if by_row else height * width
                nn.init.uniform_(parameter, 0.0, math.log(max(2, longest - 1)))
        self.classifier = NarrowLinear(options.get("proj_size", hidden_size), num_classes)

    def forward(self, x: Tensor) -> Tensor:
        if self.steps == "rows":
            sequence = x.permute(2, 0, 1, 3).flatten(2)  # (T, B, C * W)
        else:
            sequence = x.permute(2, 3, 0, 1).flatten(0, 1)  # (T, B, C)
        output, _ = self.recurrent(sequence)
        return self.classifier(output[-1])
