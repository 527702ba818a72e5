"""The high-order layer of images, 1 or 3 channels and a generator as large as the kernel, for which
Hopper has kernels of its own; in every precision, TF32 among them.

B batch, C channels, H height, W width, k kernel size, K = k * k taps.
"""

from __future__ import annotations

import functools

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from hoconv.ops.high_order.layer.operator import OPERATOR
from hoconv.tools.testing.comparison import output_and_gradients
from hoconv.tools.testing.variants import Variant, variants

everywhere = pytest.mark.parametrize("variant", variants([OPERATOR]), indirect=True)
# Largest relative error, and the dtype with PyTorch's flag.
PRECISIONS = {
    "float32": (2e-5, torch.float32, False),
    "tf32": (4e-3, torch.float32, True),
    "float16": (4e-3, torch.float16, False),
    "bfloat16": (3e-2, torch.bfloat16, False),
}
precisions = pytest.mark.parametrize("precision", PRECISIONS)


def inputs(
    variant: Variant, B: int, C: int, H: int, W: int, k: int, dtype: torch.dtype
) -> list[Tensor]:
    """x, the generator's weight and bias, and the output's gradient."""
    weight = torch.randn(k * k, C, k, k) * (C * k * k) ** -0.5
    values = torch.randn(B, C, H, W), weight, torch.randn(k * k), torch.randn(B, C, H, W)
    return [value.to(variant.device, dtype) for value in values]


def compare(variant: Variant, precision: str, args: list[Tensor], options: dict) -> None:
    tolerance, _, tf32 = PRECISIONS[precision]
    *args, grad = args
    with torch.backends.cudnn.flags(allow_tf32=tf32):
        results = output_and_gradients(variant.call, args, options, grad)
    exact = [t.cpu().double() for t in args]
    reference = functools.partial(OPERATOR.function, impl="reference")
    expected = output_and_gradients(reference, exact, options, grad.cpu().double())
    assert results.keys() == expected.keys()
    for name, result in results.items():
        result, wanted = result.cpu().double(), expected[name]
        assert torch.equal(result.isnan(), wanted.isnan()), name
        error = (result - wanted).nan_to_num().norm()
        assert error <= tolerance * wanted.nan_to_num().norm() + 1e-6, (name, precision)


@everywhere
@precisions
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=15)
def test_images_of_any_size(variant: Variant, precision: str, data: st.DataObject) -> None:
    B, C = data.draw(st.integers(1, 3), "B"), data.draw(st.sampled_from((1, 3)), "C")
    H, W = data.draw(st.integers(1, 40), "H"), data.draw(st.integers(1, 140), "W")
    k = data.draw(st.sampled_from((3, 5, 7)), "k")
    args = inputs(variant, B, C, H, W, k, PRECISIONS[precision][1])
    if data.draw(st.booleans(), "channels-last"):
        args[0] = args[0].to(memory_format=torch.channels_last)
    if data.draw(st.booleans(), "columns with gaps"):
        args[0], args[3] = torch.cat([args[0]] * 2, -1)[..., :W], args[3].mT.contiguous().mT
    options = {
        "kernel_size": k,
        "normalize": data.draw(st.sampled_from((None, "softmax")), "normalize"),
        "residual": data.draw(st.booleans(), "residual"),
    }
    compare(variant, precision, args, options)


@everywhere
@precisions
@pytest.mark.parametrize("where", ["x", "grad"])
@pytest.mark.parametrize("normalize", [None, "softmax"])
def test_nan_goes_where_the_definition_puts_it(
    variant: Variant,
    precision: str,
    where: str,
    normalize: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # oneDNN's bfloat16 convolution of odd channels, F.conv2d alone, puts NaN into more pixels than
    # the kernel reaches: of three channels with AMX, of one without it, too.
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    # Not at the border, where implementations differ in whether they multiply zeros by it.
    for k, h, w in ((3, 5, 30), (5, 7, 63), (5, 9, 8)):
        args = inputs(variant, 1, 3, 16, 70, k, PRECISIONS[precision][1])
        # As a GPU computes it: all bits but the sign are ones.
        nan = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
        args[0 if where == "x" else 3][0, 1, h, w] = nan.to(variant.device)
        compare(variant, precision, args, {"kernel_size": k, "normalize": normalize})
