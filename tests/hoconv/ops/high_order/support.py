"""What the tests of the high-order convolution share: where it runs, and its arguments.

B batch, C channels, G groups of channels, H height, W width, k kernel size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hoconv.dispatch.declaration import Sample
from hoconv.dispatch.implementations import choose
from hoconv.ops.high_order.conv2d.operator import OPERATOR
from hoconv.ops.high_order.conv2d.window import Window, make_pair
from hoconv.tools.testing.variants import Variant, variants

HALVES = [torch.float16, torch.bfloat16]
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.mT.contiguous().mT,
    "last dimension first": lambda t: t.movedim(-1, 0).contiguous().movedim(0, -1),
    "second dimension last": lambda t: t.movedim(1, -1).contiguous().movedim(-1, 1),
    "first two swapped": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "every third, from the second": lambda t: torch.stack((t, t, t), -1).flatten(-2)[..., 1::3],
    "rows with gaps": lambda t: F.pad(t, (1, 2))[..., 1 : 1 + t.shape[-1]],
    "columns with gaps": lambda t: F.pad(t, (0, 0, 2, 1))[..., 2 : 2 + t.shape[-2], :],
}

everywhere = pytest.mark.parametrize("variant", variants([OPERATOR]), indirect=True)
with_ops = pytest.mark.parametrize(
    "variant", [p for p in variants([OPERATOR]) if "reference" not in p.id], indirect=True
)
on_cuda = pytest.mark.parametrize(
    "variant", [p for p in variants([OPERATOR]) if p.id.endswith("-cuda")], indirect=True
)
only_cuda = pytest.mark.parametrize(
    "variant", [p for p in variants([OPERATOR]) if p.id.endswith("cuda-cuda")], indirect=True
)


def draw(variant: Variant, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(variant.device, dtype)


def image_and_weight(
    variant: Variant, B=2, C=4, H=6, W=9, k=3, G=2, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    return draw(variant, B, C, H, W, dtype=dtype), draw(variant, k * k, B, G, H, W, dtype=dtype)


def window_of(sample: Sample) -> list[int]:
    """Returns the windows of a sample's call, as the ops take them."""
    options = {name: v for name, v in sample.kwargs.items() if name != "normalize"}
    return Window.of(sample.args[1].shape[0], **options).numbers()


def ops(variant: Variant, name: str = "") -> torch._ops.OpOverload:
    """An op itself, past the checks of the public function."""
    choose(OPERATOR, variant.impl, variant.device)  # loads it
    return getattr(getattr(torch.ops.hoconv, f"high_order_conv2d{name}"), variant.impl)


# B, C, G, H, W, kernel size, elements before the weights, other options.
CHANNELS_LAST: list[tuple[int, int, int, int, int, Any, int, dict[str, Any]]] = [
    (2, 3, 1, 37, 61, 3, 0, {}),
    (2, 3, 1, 33, 129, 5, 3, {}),  # misaligned
    (1, 4, 1, 40, 66, 7, 1, {}),
    (1, 1, 1, 28, 28, 5, 0, {}),
    (2, 2, 1, 35, 70, 4, 0, {}),  # an even kernel: padded in shared memory
    (2, 3, 1, 35, 71, 4, 1, {}),
    (1, 3, 1, 23, 45, (3, 8), 5, {}),
    (1, 3, 1, 60, 70, 21, 1, {}),  # threads share a row of pixels
    (1, 2, 1, 33, 40, 31, 0, {}),
    (2, 6, 2, 30, 50, 3, 2, {}),
    (1, 12, 4, 20, 33, 9, 0, {}),
    (2, 5, 1, 30, 50, 3, 0, {}),  # more channels than they take
    (2, 3, 1, 30, 50, 5, 0, {"padding": "valid"}),
    (2, 3, 1, 30, 50, 5, 0, {"padding": "replicate"}),
    (2, 3, 1, 30, 50, 5, 1, {"padding": "reflect", "stride": 2}),
    (2, 3, 1, 30, 50, 5, 0, {"dilation": (2, 3)}),
    (2, 3, 1, 30, 50, 3, 0, {"scale": 2}),
    (2, 4, 2, 30, 50, 3, 1, {"stride": (1, 3), "scale": (3, 1), "padding": "replicate"}),
]


def generated_last(
    call: tuple[Any, ...], device: torch.device | str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Makes x, weights as a channels-last generator writes them, and the options of a call."""
    B, C, G, H, W, kernel_size, before, options = call
    height, width = make_pair("kernel_size", kernel_size)
    window = Window.of(height * width, (height, width), **options)
    rows, columns = window.output_size(H, W)
    draw = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.float64, generator=draw).to(dtype)

    x = normal(B, C, H, W).contiguous(memory_format=torch.channels_last)
    pixels = normal(before + B * rows * columns * height * width * G)[before:]
    weight = pixels.view(B, rows, columns, height * width, G).permute(3, 0, 4, 1, 2)
    return x, weight, {"kernel_size": kernel_size, **options}


def is_close(result: Tensor, exact: Tensor) -> bool:
    """Returns whether a result differs from an exact one by its rounding and that of sums of up to
    961 products in float32."""
    sums = torch.float64 if result.dtype == torch.float64 else torch.float32
    bound = 4 * torch.finfo(result.dtype).eps + 16 * torch.finfo(sums).eps
    return bool((result.double() - exact).norm() <= bound * exact.norm())
