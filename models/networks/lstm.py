"""A recurrent network that reads an image step by step.

B batch, C channels, H height, W width, T time steps, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hoconv import recurrent as rnn
from hoconv.recurrent import cells
from models.arguments import require_sizes

ORDER_SEED = 0  # not the seed of the run: every run reads the same order


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
    Rectified Linear Units, 2015), and a harder one in a random order, the same for all images.

    A cell whose state is as wide as its input reads a learned map of each step to `hidden_size`.

    Args:
        image_shape: (C, H, W) of an image.
        num_classes: K.
        cell: the name of a cell in :mod:`hoconv.recurrent.cells`.
        steps: ``"rows"``, T = H steps of C * W numbers; ``"pixels"``, T = H * W steps of C; or
            ``"permuted"``, the pixels in a random order.
        hidden_size: of the recurrent layers.
        num_layers: number of recurrent layers.
        schedule: one of :data:`hoconv.recurrent.SCHEDULES`.
        recompute: whether the gradient takes less memory, and more time.
        options: those of the cell; by default 4 heads, whose keys and values have hidden_size / 8
            and hidden_size / 4 features, 16 states, and projections to hidden_size / 2.

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
        steps: Literal["rows", "pixels", "permuted"] = "rows",
        hidden_size: int = 128,
        num_layers: int = 1,
        schedule: str = "auto",
        recompute: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        require_sizes(hidden_size=hidden_size, num_layers=num_layers)
        known = vars(cells).get(cell)
        if not isinstance(known, rnn.Cell) or known.inputs:
            names = sorted(
                n for n, v in vars(cells).items() if isinstance(v, rnn.Cell) and not v.inputs
            )
            raise ValueError(f"cell: expected one of {', '.join(names)}; got {cell!r}")
        if steps not in ("rows", "pixels", "permuted"):
            raise ValueError(f"steps: expected 'rows', 'pixels' or 'permuted', got {steps!r}")
        channels, height, width = image_shape
        self.steps = steps
        by_row = steps == "rows"
        if steps == "permuted":
            generator = torch.Generator().manual_seed(ORDER_SEED)
            self.register_buffer("order", torch.randperm(height * width, generator=generator))
        sizes = {
            "proj_size": max(1, hidden_size // 2), "heads": 4, "keys": max(1, hidden_size // 8),
            "values": max(1, hidden_size // 4), "states": 16,
        }  # fmt: skip
        chosen = {name: size for name, size in sizes.items() if name in known.options}
        read = channels * width if by_row else channels
        self.widen = None
        if any("input_size" in of for of in known.states.values()):
            self.widen = nn.Linear(read, hidden_size)
            read = hidden_size
        self.recurrent = rnn.RNN(
            known, read, hidden_size, num_layers,
            schedule=schedule, recompute=recompute, **{**chosen, **(options or {})},
        )  # fmt: skip
        for name, parameter in self.recurrent.named_parameters():
            if name.startswith("bias_f_"):
                longest = height if by_row else height * width
                nn.init.uniform_(parameter, 0.0, math.log(max(2, longest - 1)))
        self.classifier = NarrowLinear(self.recurrent.output_size, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        if self.steps == "rows":
            sequence = x.permute(2, 0, 1, 3).flatten(2)  # (T, B, C * W)
        else:
            sequence = x.permute(2, 3, 0, 1).flatten(0, 1)  # (T, B, C)
        if self.steps == "permuted":
            sequence = sequence[self.get_buffer("order")]
        if self.widen is not None:
            sequence = self.widen(sequence)
        output, _ = self.recurrent(sequence)
        return self.classifier(output[-1])
