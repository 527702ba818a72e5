"""HighOrderConv2d: a generator and the operator, the same parameters for every implementation."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from hoconv import HighOrderConv2d, high_order_conv2d
from hoconv.dispatch.declaration import layers
from hoconv.ops.high_order.layer.operator import OPERATOR
from hoconv.tools.testing.variants import Variant, variants

everywhere = pytest.mark.parametrize("variant", variants([OPERATOR]), indirect=True)
# Rounding differs between the generator's convolutions of one image layout and another.
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}


def layer_at(variant: Variant, channels: int = 4, **options: Any) -> HighOrderConv2d:
    return HighOrderConv2d(channels, impl=variant.impl, **options).to(variant.device)


def image(variant: Variant, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape or (2, 4, 7, 9), dtype=dtype).to(variant.device)


def gradients(
    layer: nn.Module, x: Tensor, forward: Callable[..., Tensor] | None = None
) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()
    layer.zero_grad()
    (layer if forward is None else forward)(x).square().sum().backward()
    named = {"input": x, **dict(layer.named_parameters())}
    assert all(t.grad is not None for t in named.values())
    return {name: t.grad for name, t in named.items() if t.grad is not None}


@everywhere
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_generated_kernels_are_applied(variant: Variant, groups: int) -> None:
    layer, x = layer_at(variant, kernel_size=3, groups=groups, dilation=2), image(variant)
    generator = layer.generator
    generated = F.conv2d(x, generator.weight, generator.bias, padding="same")
    weight = generated.view(2, 9, groups, 7, 9).transpose(0, 1)
    expected = high_order_conv2d(x, weight, dilation=2, impl="reference")
    torch.testing.assert_close(layer(x), expected, **CLOSE)


@everywhere
@pytest.mark.parametrize("kernel_size", [1, 2, 5, 11])
@pytest.mark.parametrize("generator_kernel_size", [1, 2, 3, 4])
def test_any_kernel_sizes_keep_the_size_of_the_image(
    variant: Variant, kernel_size: int, generator_kernel_size: int
) -> None:
    layer = layer_at(variant, kernel_size=kernel_size, generator_kernel_size=generator_kernel_size)
    for shape in ((2, 4, 7, 9), (1, 4, 1, 1), (1, 4, 2, 13)):
        assert layer(image(variant, *shape)).shape == shape


@everywhere
def test_gradients_agree_with_the_reference(variant: Variant) -> None:
    for options in ({}, {"normalize": "softmax", "groups": 2}, {"residual": True, "bias": False}):
        layer = layer_at(variant, **options).double()
        reference = layer_at(Variant(OPERATOR, "reference", variant.device), **options).double()
        reference.load_state_dict(layer.state_dict())
        x = image(variant, dtype=torch.float64)
        expected = gradients(reference, x)
        for name, gradient in gradients(layer, x).items():
            torch.testing.assert_close(gradient, expected[name])


@pytest.mark.parametrize("impl", ["auto", *OPERATOR.implementations])
def test_state_dict_is_the_same_for_every_implementation(impl: str) -> None:
    options: dict[str, Any] = {"kernel_size": 3, "generator_kernel_size": 5, "groups": 2}
    layer = HighOrderConv2d(4, impl=impl, **options)
    shapes = {name: tuple(t.shape) for name, t in layer.state_dict().items()}
    assert shapes == {"generator.weight": (18, 4, 5, 5), "generator.bias": (18,)}
    other = HighOrderConv2d(4, impl="reference", **options)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.generator.weight, layer.generator.weight)


def test_generator_without_bias_has_none() -> None:
    assert list(HighOrderConv2d(4, bias=False).state_dict()) == ["generator.weight"]


@everywhere
def test_softmax_makes_the_weights_of_a_pixel_sum_to_one(variant: Variant) -> None:
    layer = layer_at(variant, kernel_size=3, groups=2, normalize="softmax")
    with torch.no_grad():
        layer.generator.weight.mul_(20)
    same = torch.full((2, 4, 7, 9), 5.0, device=variant.device)
    inside = layer(same)[..., 1:-1, 1:-1]
    torch.testing.assert_close(inside, torch.full_like(inside, 5))
    x = image(variant).abs()  # positive weights: between the smallest and the largest pixel
    out = layer(x)
    assert (out >= 0).all()
    assert (out <= x.amax((2, 3), keepdim=True)).all()


@everywhere
def test_without_normalisation_weights_are_as_generated(variant: Variant) -> None:
    layer = layer_at(variant, kernel_size=1)
    nn.init.zeros_(layer.generator.weight)
    assert layer.generator.bias is not None
    nn.init.constant_(layer.generator.bias, -3)
    x = image(variant)
    torch.testing.assert_close(layer(x), -3 * x)


@everywhere
def test_residual_adds_the_input(variant: Variant) -> None:
    with_residual, without = layer_at(variant, residual=True), layer_at(variant)
    without.load_state_dict(with_residual.state_dict())
    x = image(variant)
    torch.testing.assert_close(with_residual(x), x + without(x))


@everywhere
@pytest.mark.parametrize("residual", [False, True])
def test_channels_last_in_gives_channels_last_out(variant: Variant, residual: bool) -> None:
    last = torch.channels_last
    layer, x = layer_at(variant, residual=residual), image(variant)
    expected = layer(x)
    out = layer.to(memory_format=last)(x.to(memory_format=last))
    assert out.is_contiguous(memory_format=last)
    torch.testing.assert_close(out, expected, **CLOSE)


@everywhere
def test_empty_batch_gives_an_empty_batch_and_zero_gradients(variant: Variant) -> None:
    layer = layer_at(variant)
    assert layer(image(variant, 0, 4, 7, 9)).shape == (0, 4, 7, 9)
    for name, gradient in gradients(layer, image(variant, 0, 4, 7, 9)).items():
        assert not gradient.any(), name


@everywhere
@pytest.mark.parametrize("dtype", OPERATOR.tolerances)
def test_moved_to_a_dtype_computes_in_it(variant: Variant, dtype: torch.dtype) -> None:
    layer, x = layer_at(variant, normalize="softmax").double(), image(variant, dtype=torch.float64)
    expected = layer(x)
    out = layer.to(dtype)(x.to(dtype))
    assert out.dtype == dtype
    error = (out.double() - expected).norm() / expected.norm()
    assert error < 20 * torch.finfo(dtype).eps


@everywhere
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_computes_in_half_precision_and_trains_in_float32(
    variant: Variant, dtype: torch.dtype
) -> None:
    layer, x = layer_at(variant, normalize="softmax"), image(variant)
    expected = layer(x)
    with torch.autocast(variant.device, dtype=dtype):
        out = layer(x)
    assert out.dtype == dtype
    assert (out - expected).norm() / expected.norm() < 20 * torch.finfo(dtype).eps
    out.float().sum().backward()
    assert layer.generator.weight.grad is not None
    assert layer.generator.weight.grad.dtype == torch.float32


@everywhere
def test_compiled_equals_eager(variant: Variant) -> None:
    torch.compiler.reset()
    layer, x = layer_at(variant, kernel_size=3, normalize="softmax", residual=True), image(variant)
    expected = layer(x), gradients(layer, x)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    results = compiled(x), gradients(layer, x, compiled)
    torch.testing.assert_close(results[0], expected[0])
    for result, other in zip(results[1].values(), expected[1].values(), strict=True):
        torch.testing.assert_close(result, other)


@everywhere
def test_copies_compute_the_same(variant: Variant) -> None:
    layer, x = layer_at(variant, normalize="softmax", groups=2, residual=True), image(variant)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), layer(x))
        assert other.generator.weight.data_ptr() != layer.generator.weight.data_ptr()
        assert list(layers(other)) == [("", other)]
        assert other.operator is OPERATOR


def test_impl_may_be_changed_after_construction() -> None:
    layer = HighOrderConv2d(4, impl="auto")
    layer.impl = "nonsense"
    with pytest.raises(ValueError, match="impl: expected one of"):
        layer(torch.zeros(1, 4, 5, 5))


def test_shows_its_options() -> None:
    layer = HighOrderConv2d(
        6, 3, groups=2, dilation=4, normalize="softmax", residual=True, impl="reference"
    )
    shown = (
        "6, kernel_size=3, groups=2, dilation=4, stride=1, scale=1, padding='zeros', "
        "normalize='softmax', residual=True"
    )
    assert layer.extra_repr() == f"{shown}, impl='reference'"
    assert repr(layer).startswith(f"HighOrderConv2d(\n  {shown}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel_size": 0}, "kernel_size: expected an int from 1 to 31, .* got 0"),
        ({"kernel_size": 32}, "kernel_size: expected an int from 1 to 31, .* got 32"),
        ({"generator_kernel_size": 0}, "generator_kernel_size: expected at least 1, got 0"),
        ({"groups": 0}, "groups: expected a divisor of channels=4, got 0"),
        ({"groups": 3}, "groups: expected a divisor of channels=4, got 3"),
        ({"groups": 8}, "groups: expected a divisor of channels=4, got 8"),
        ({"dilation": 0}, "dilation: expected an int .* got 0"),
        ({"normalize": "max"}, "normalize: expected None, 'softmax' or 'sum', got 'max'"),
        ({"stride": 0}, "stride: expected an int .* got 0"),
        ({"scale": (1, 0)}, r"scale: expected an int .* got \(1, 0\)"),
        ({"padding": "same"}, "padding: expected one of zeros, .* got 'same'"),
        ({"stride": 2, "residual": True}, "residual: expected False where a stride, .* got True"),
        ({"impl": "fast"}, "impl: expected one of auto, .*; got 'fast' for high_order_layer"),
    ],
)
def test_wrong_option_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        HighOrderConv2d(4, **options)


class Doubled(nn.Conv2d):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Any) -> Tensor:
        return super()._conv_forward(input, 2 * weight, bias)


class Tripled(nn.Conv2d):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return 3 * super().__call__(*args, **kwargs)


@everywhere
@pytest.mark.parametrize("kind", [Doubled, Tripled])
def test_generator_of_a_derived_class_is_called(variant: Variant, kind: type[nn.Conv2d]) -> None:
    layer, x = layer_at(variant, kernel_size=3), image(variant)
    layer.generator = kind(4, 9, 5, padding="same", device=variant.device)
    taps = layer.generator(x).unflatten(1, (9, 1)).transpose(0, 1)
    expected = high_order_conv2d(x, taps, impl="reference")
    torch.testing.assert_close(layer(x), expected)
    assert layer.why_unfused() is not None


@everywhere
def test_generator_is_called_where_all_modules_are_watched(variant: Variant) -> None:
    layer, seen = layer_at(variant), []
    hook = register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        layer(image(variant))
    finally:
        hook.remove()
    assert layer.generator in seen


@pytest.mark.parametrize("channels", [0, -4])
def test_wrong_number_of_channels_is_refused_by_name(channels: int) -> None:
    with pytest.raises(ValueError, match=r"^channels: "):
        HighOrderConv2d(channels)
