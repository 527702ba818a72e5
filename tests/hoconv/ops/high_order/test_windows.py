"""Windows with a stride, a scale, a padding and normalised taps: what they are, written out, and in
a layer."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hoconv
from hoconv import HighOrderConv2d
from hoconv.ops.high_order.conv2d.window import Window
from hoconv.ops.high_order.layer.operator import OPERATOR
from hoconv.tools.testing.comparison import output_and_gradients, relative_error
from hoconv.tools.testing.variants import Variant, variants
from tests.hoconv.ops.high_order.support import draw, everywhere

layers = pytest.mark.parametrize("variant", variants([OPERATOR]), indirect=True)


def unfolded(x: Tensor, weight: Tensor, k: int, stride: int = 1, dilation: int = 1) -> Tensor:
    """Windows by F.unfold, times weights of one group."""
    padding = dilation * (k - 1) // 2
    columns = F.unfold(x, k, dilation, padding, stride).unflatten(1, (x.shape[1], k * k))
    out = (columns * weight[:, :, 0].flatten(2).transpose(0, 1)[:, None]).sum(2)
    return out.unflatten(2, weight.shape[3:])


@everywhere
@pytest.mark.parametrize(("stride", "dilation"), [(2, 1), (3, 2)])
def test_a_stride_takes_the_windows_of_unfold(variant: Variant, stride: int, dilation: int) -> None:
    x, weight = (
        draw(variant, 2, 3, 10, 13),
        draw(variant, 25, 2, 1, -(-10 // stride), -(-13 // stride)),
    )
    result = variant.call(x, weight, stride=stride, dilation=dilation)
    torch.testing.assert_close(result, unfolded(x, weight, 5, stride, dilation))


@everywhere
def test_a_scale_gathers_around_the_pixel_that_an_output_pixel_is_a_fraction_of(
    variant: Variant,
) -> None:
    x, weight = draw(variant, 2, 4, 5, 6), draw(variant, 9, 2, 2, 15, 12)
    result = variant.call(x, weight, scale=(3, 2))
    for a, b in itertools.product(range(3), range(2)):
        part = variant.call(x, weight[..., a::3, b::2])
        torch.testing.assert_close(result[..., a::3, b::2], part)


@everywhere
@pytest.mark.parametrize("padding", ["replicate", "reflect"])
def test_a_padding_is_that_of_pad(variant: Variant, padding: Any) -> None:
    x, weight = draw(variant, 2, 4, 7, 9), draw(variant, 5 * 4, 2, 2, 7, 9)
    padded = F.pad(x, (1, 2, 2, 2), padding)
    expected = variant.call(padded, weight, kernel_size=(5, 4), padding="valid")
    result = variant.call(x, weight, kernel_size=(5, 4), padding=padding)
    torch.testing.assert_close(result, expected)


@everywhere
def test_deterministic_algorithms_give_the_same_gradients_of_a_reflected_border(
    variant: Variant,
) -> None:
    x, weight = draw(variant, 2, 3, 7, 9).requires_grad_(), draw(variant, 49, 2, 1, 7, 9)

    def differentiate() -> Tensor:
        result = variant.call(x, weight, padding="reflect")
        return torch.autograd.grad(result.square().sum(), x)[0]

    expected = differentiate()
    torch.use_deterministic_algorithms(True)
    try:
        torch.testing.assert_close(differentiate(), expected)
    finally:
        torch.use_deterministic_algorithms(False)


@everywhere
def test_normalised_taps_are_a_softmax_or_divided_by_their_sum(variant: Variant) -> None:
    x, logits = draw(variant, 2, 4, 6, 7), draw(variant, 2, 9, 2, 6, 7)
    last = logits.permute(0, 3, 4, 1, 2).contiguous().permute(0, 3, 4, 1, 2)
    for weight in (
        logits.transpose(0, 1),
        logits.transpose(0, 1).contiguous(),
        last.transpose(0, 1),
    ):
        for normalize, taps in (
            ("softmax", weight.exp() / weight.exp().sum(0)),
            ("sum", (weight.abs() + 1) / (weight.abs() + 1).sum(0)),
        ):
            given = weight if normalize == "softmax" else weight.abs() + 1
            leaves = x.clone().requires_grad_(), given.detach().requires_grad_()
            result = variant.call(*leaves, normalize=normalize)
            torch.testing.assert_close(result, variant.call(x, taps))
            ones = torch.ones_like(x).requires_grad_()
            torch.testing.assert_close(
                variant.call(ones, given, normalize=normalize)[..., 1:-1, 1:-1],
                torch.ones_like(x)[..., 1:-1, 1:-1],
            )
            assert torch.autograd.gradgradcheck(
                lambda *t, how=normalize: variant.call(*t, normalize=how), leaves, fast_mode=True
            )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_taps_are_normalised_in_float32(dtype: torch.dtype) -> None:
    weight = torch.full((961, 1, 1, 1, 1), 0.25, dtype=dtype)
    weight[0] = 8.0
    out = hoconv.high_order_conv2d(torch.ones(1, 1, 1, 1, dtype=dtype), weight, normalize="sum")
    assert out.item() == torch.tensor(0.25 / (960 * 0.25 + 8), dtype=dtype).item()


@everywhere
@pytest.mark.parametrize("channels", [4, 32])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dilation": 2},
        {"stride": 2},
        {"scale": 2},
        {"padding": "valid"},
        {"padding": "reflect"},
    ],
)
def test_an_infinity_goes_to_what_reads_it_and_nowhere_else(
    variant: Variant, options: dict[str, Any], channels: int
) -> None:
    for k in range(1, 7):
        window = Window.of(k * k, k, **options)
        H, W = window.output_size(12, 14)
        x, weight = draw(variant, 1, channels, 12, 14), draw(variant, k * k, 1, 1, H, W)
        x[..., 5, 6] = torch.inf
        x = x.contiguous(memory_format=torch.channels_last)
        grad = draw(variant, 1, channels, H, W)
        grad[..., H // 2, W // 2] = torch.inf
        expected, results = (
            output_and_gradients(function, (x, weight), options, grad)
            for function in (partial(hoconv.high_order_conv2d, impl="reference"), variant.call)
        )
        for name, result in results.items():
            torch.testing.assert_close(result, expected[name], equal_nan=True, msg=f"{k}: {name}")


@everywhere
def test_a_stride_and_a_scale_are_exported_for_any_height(variant: Variant) -> None:
    """Also for one at which the output is as large as x, which the next one is not."""

    class Call(torch.nn.Module):
        def forward(self, x: Tensor, logits: Tensor) -> Tensor:
            return variant.call(x, logits.repeat_interleave(2, 3), stride=2, scale=(2, 1))

    half, full = torch.export.Dim("half", min=2, max=64), torch.export.Dim.DYNAMIC
    inputs = draw(variant, 2, 4, 8, 9), draw(variant, 9, 2, 1, 4, 5)
    exported = torch.export.export(Call(), inputs, dynamic_shapes=({2: full}, {3: half}))
    other = draw(variant, 2, 4, 11, 9), draw(variant, 9, 2, 1, 6, 5)
    torch.testing.assert_close(exported.module()(*other), Call()(*other))


@pytest.mark.parametrize("stride", [2**31, 2**40, 2**62])
def test_a_stride_beyond_the_image_has_one_window(stride: int) -> None:
    x, weight = torch.randn(1, 2, 5, 6).double(), torch.randn(9, 1, 1, 1, 1).double()
    for impl in ("reference", "cpp"):
        out = hoconv.high_order_conv2d(x, weight, stride=stride, padding="reflect", impl=impl)
        first = hoconv.high_order_conv2d(x, weight.expand(-1, -1, -1, 5, 6), padding="reflect")
        torch.testing.assert_close(out, first[..., :1, :1])
        splat = hoconv.splat(out, weight, size=(5, 6), stride=stride, impl=impl)
        assert splat.count_nonzero() == 2 * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 5}, "size: expected the height and width of the result, got 5"),
        ({"size": (True, 6)}, r"size: expected the height and width .* got \(True, 6\)"),
        ({"stride": 2}, "size: expected .*, which a stride leaves open, got None"),
        ({"size": (5, 7)}, r"size: expected .* compute \(5, 6\) pixels, .* compute \(5, 7\)"),
        ({"scale": 2}, r"size: expected .* multiples of the scale; got None, .* \(4, 6\)"),
        ({"dilation": 2**63}, "dilation: expected an int of at least 1, or two of them, got 92"),
    ],
)
def test_splat_refuses_a_size_that_its_windows_do_not_have(options: Any, message: str) -> None:
    x, weight = torch.zeros(1, 2, 5, 6), torch.zeros(9, 1, 1, 5, 6)
    with pytest.raises(ValueError, match=f"^{message}"):
        hoconv.splat(x, weight, **options)


LAYERS: dict[str, dict[str, Any]] = {
    "scale 2, softmax": dict(kernel_size=5, generator_kernel_size=3, scale=2, normalize="softmax"),
    "stride 2, 5 x 3": dict(kernel_size=(5, 3), generator_kernel_size=3, stride=2),
    "valid, stride, scale": dict(
        kernel_size=(3, 2), generator_kernel_size=3, padding="valid", stride=2, scale=(1, 2)
    ),
    "valid, even generator": dict(
        kernel_size=4, generator_kernel_size=2, padding="valid", normalize="softmax"
    ),
    "replicate, residual": dict(
        kernel_size=5, generator_kernel_size=1, padding="replicate", residual=True
    ),
    "reflect, k=13": dict(
        kernel_size=(13, 3), generator_kernel_size=3, padding="reflect", dilation=(1, 2)
    ),
    "divided by their sum": dict(kernel_size=3, generator_kernel_size=1, normalize="sum"),
}


@layers
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_a_layer_applies_what_its_generator_returns(variant: Variant, name: str) -> None:
    options = LAYERS[name]
    torch.manual_seed(0)
    layer = HighOrderConv2d(4, groups=2, impl=variant.impl, **options).double().to(variant.device)
    if options.get("normalize") == "sum":
        with torch.no_grad():  # no sum is near zero
            for parameter in layer.parameters():
                parameter.abs_()
    x = draw(variant, 2, 4, 14, 20).abs()
    kernel_size = options["kernel_size"]
    height, width = (kernel_size,) * 2 if isinstance(kernel_size, int) else kernel_size
    windows = {n: options[n] for n in ("dilation", "stride", "scale", "padding") if n in options}
    window = Window.of(height * width, (height, width), **windows)

    def definition(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if options.get("padding") == "valid":
            above, left = (height - 1) // 2, (width - 1) // 2
            x_centre = x[..., above : above + 14 - height + 1, left : left + 20 - width + 1]
        else:
            x_centre = x
        s = options["generator_kernel_size"]
        around = F.pad(x_centre, ((s - 1) // 2, s // 2) * 2)
        generated = F.conv2d(around, weight, bias, stride=options.get("stride", 1))
        H, W = window.output_size(14, 20)
        scales = window.down.scale, window.across.scale
        taps = torch.empty(height * width, 2, 2, H, W, dtype=x.dtype, device=x.device)
        for i, g, a, b in itertools.product(
            range(height * width), range(2), range(scales[0]), range(scales[1])
        ):
            channel = ((i * 2 + g) * scales[0] + a) * scales[1] + b
            taps[i, :, g, a :: scales[0], b :: scales[1]] = generated[:, channel]
        normalize = options.get("normalize")
        out = hoconv.high_order_conv2d(
            x, taps, kernel_size=kernel_size, normalize=normalize, impl="reference", **windows
        )
        return x + out if options.get("residual") else out

    parameters = [p.detach() for p in layer.generator.parameters()]
    expected = output_and_gradients(definition, (x, *parameters), {})
    functional = {n: v for n, v in options.items() if n != "generator_kernel_size"}
    results = output_and_gradients(
        hoconv.high_order_layer, (x, *parameters), {**functional, "impl": variant.impl}
    )
    torch.testing.assert_close(layer(x), expected["output"])
    for key, result in results.items():
        assert relative_error(result, expected[key]) < 1e-12, key
    # A generator that has hooks is called, and its output applied.
    layer.generator.register_forward_hook(lambda module, args, output: None)
    torch.testing.assert_close(layer(x), expected["output"])


def test_an_even_generator_takes_no_stride() -> None:
    with pytest.raises(ValueError, match=r"^generator_kernel_size: expected an odd .* got 2"):
        HighOrderConv2d(4, 3, generator_kernel_size=2, stride=2)


def test_a_layer_says_which_windows_are_not_fused() -> None:
    fused = HighOrderConv2d(4, 3, generator_kernel_size=3, impl="cpp", dilation=2)
    assert fused.why_unfused() is None
    for options, message in (
        (dict(stride=2), "its windows are not square, or have a stride"),
        (dict(dilation=(1, 2)), "its windows are not square"),
        (dict(padding="replicate"), "its windows are not square"),
        (dict(normalize="sum"), "its taps are divided by their sum"),
        (dict(kernel_size=13), "its kernel size is 13; 11 at most are fused"),
    ):
        options: Any = dict(kernel_size=3, generator_kernel_size=3, impl="cpp") | options
        assert str(HighOrderConv2d(4, **options).why_unfused()).startswith(message)
