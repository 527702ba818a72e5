"""What the tests of the high-order convolution share: where it runs, and its arguments.

B batch, C channels, G groups of channels, H height, W width, k kernel size.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hoconv.dispatch.declaration import Sample
from hoconv.dispatch.implementations import choose
from hoconv.ops.high_order.conv2d.operator import OPERATOR
from hoconv.ops.high_order.conv2d.window import Window
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
