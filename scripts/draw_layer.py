"""Draws the picture of README: a pixel, the kernel of its own, and what applying it gives.

The kernels are those of a fixed rule, which blurs along the edges of an image: they show that each
pixel has another one. Nothing here is trained.

    python scripts/draw_layer.py
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from matplotlib.patches import ConnectionPatch, Rectangle
from sklearn.datasets import load_digits
from torch import Tensor

from hoconv import high_order_conv2d

OUT = Path(__file__).resolve().parents[1] / "docs" / "high_order_convolution.png"
SIZE = 5  # pixels of a kernel, along each side
PIXELS = ((2, 3), (5, 5))  # whose kernels are shown: row, column
COLORS = ("tab:orange", "tab:blue")
DIGIT = 8  # of scikit-learn's handwritten digits


def make_kernels(image: Tensor) -> Tensor:
    """Returns a kernel for every pixel of an image (H, W), (SIZE^2, H, W): the more a neighbour
    looks like the pixel, the more it counts."""
    windows = F.unfold(image[None, None], SIZE, padding=SIZE // 2).view(SIZE**2, *image.shape)
    return (-8 * (windows - image).square()).softmax(0)


def draw(image: Tensor, kernels: Tensor, result: Tensor) -> Figure:
    figure = Figure(figsize=(10, 4), layout="constrained")
    grid = figure.add_gridspec(2, 3, width_ratios=(2, 1, 2))
    left, right = figure.add_subplot(grid[:, 0]), figure.add_subplot(grid[:, 2])
    left.set_title(f"the {SIZE} by {SIZE} pixels around each pixel")
    right.set_title("the sum of the products")
    for axes, picture in ((left, image), (right, result)):
        axes.imshow(picture, cmap="gray_r")
    for i, ((row, column), color) in enumerate(zip(PIXELS, COLORS, strict=True)):
        middle = figure.add_subplot(grid[i, 1])
        middle.imshow(kernels[:, row, column].view(SIZE, SIZE), cmap="gray_r")
        middle.spines[:].set(color=color, linewidth=2)
        if i == 0:
            middle.set_title("its own kernel")
        corner = column - SIZE / 2, row - SIZE / 2
        frame = {"fill": False, "edgecolor": color, "linewidth": 2}
        left.add_patch(Rectangle(corner, SIZE, SIZE, **frame))
        right.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, **frame))
        for axes, start, end in (
            (left, (column + SIZE / 2, row), (0, 0.5)),
            (right, (column - 0.5, row), (1, 0.5)),
        ):
            arrow = ConnectionPatch(
                start, end, "data", "axes fraction", axesA=axes, axesB=middle, color=color
            )
            figure.add_artist(arrow)
    for axes in figure.axes:
        axes.set(xticks=[], yticks=[])
    return figure


def main() -> None:
    pixels, _ = load_digits(return_X_y=True)
    image = torch.tensor(pixels[DIGIT] / 16, dtype=torch.float32).view(8, 8)
    kernels = make_kernels(image)
    result = high_order_conv2d(image[None, None], kernels[:, None, None], impl="reference")[0, 0]
    draw(image, kernels, result).savefig(OUT, dpi=120)


if __name__ == "__main__":
    main()
