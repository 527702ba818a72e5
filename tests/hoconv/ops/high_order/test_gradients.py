"""The strides of what the high-order convolution returns, and its gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hoconv.ops.high_order.conv2d.operator import OPERATOR
from hoconv.tools.testing.comparison import differentiable, output_and_gradients
from hoconv.tools.testing.variants import Variant
from tests.hoconv.ops.high_order.support import (
    LAYOUTS,
    draw,
    everywhere,
    image_and_weight,
    with_ops,
)

# Strides


@everywhere
def test_output_has_the_memory_format_of_x(variant: Variant) -> None:
    x, weight = image_and_weight(variant)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        out = variant.call(x.to(memory_format=memory_format), weight)
        assert out.is_contiguous(memory_format=memory_format)


@everywhere
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_output_gradient_may_have_any_strides(variant: Variant, dtype: torch.dtype) -> None:
    x, weight = image_and_weight(variant, W=33, dtype=dtype)
    dense = draw(variant, *x.shape, dtype=dtype)
    strided = {name: layout(dense) for name, layout in LAYOUTS.items()}
    strided["channels-last"] = dense.to(memory_format=torch.channels_last)
    expected = output_and_gradients(variant.call, (x, weight), {}, dense)
    for layout, grad in strided.items():
        results = output_and_gradients(variant.call, (x, weight), {}, grad)
        assert all(torch.equal(results[name], expected[name]) for name in results), layout
    one = torch.ones((), dtype=dtype, device=variant.device)
    expected = output_and_gradients(variant.call, (x, weight), {}, one.expand_as(x).contiguous())
    results = output_and_gradients(variant.call, (x, weight), {}, one.expand_as(x))  # as of a sum
    assert all(torch.equal(results[name], expected[name]) for name in results)


@everywhere
def test_sizes_of_one_may_have_any_stride(variant: Variant) -> None:
    for shape in ((1, 1, 5, 9), (2, 1, 1, 9), (2, 3, 5, 1), (1, 1, 1, 1)):
        x, weight = image_and_weight(variant, *shape, G=1)
        strides = [7 if size == 1 else x.stride(i) for i, size in enumerate(shape)]
        odd = x.as_strided(shape, strides)
        assert torch.equal(variant.call(odd, weight), variant.call(x, weight))


@everywhere
def test_negative_view_is_read_with_its_sign(variant: Variant) -> None:
    x, weight = image_and_weight(variant)
    negative = torch.complex(x, x).conj().imag
    assert negative.is_neg()
    assert torch.equal(variant.call(negative, weight), variant.call(-x, weight))


def generated(variant: Variant, channels_last: bool) -> tuple[Tensor, Tensor]:
    """Returns what a generator gives, and the weight that is a view of it."""
    output = draw(variant, 2, 25 * 2, 6, 9)
    if channels_last:
        output = output.to(memory_format=torch.channels_last)
    output.requires_grad_()
    return output, output.unflatten(1, (25, 2)).transpose(0, 1)


@with_ops
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("x_needs_gradient", [False, True])
def test_gradient_of_a_generators_output_comes_in_its_layout(
    variant: Variant, channels_last: bool, x_needs_gradient: bool
) -> None:
    output, weight = generated(variant, channels_last)
    seen = []
    weight.register_hook(seen.append)
    x = draw(variant, 2, 4, 6, 9).requires_grad_(x_needs_gradient)
    variant.call(x, weight).sum().backward()
    assert seen[0].stride() == weight.stride()
    assert output.grad is not None
    assert output.grad.stride() == output.stride()
    # The gradient that arrives is the kernel's own: the views on the way copied nothing.
    assert output.grad.data_ptr() == seen[0].data_ptr()


@with_ops
def test_gradient_of_an_expanded_weight_is_dense(variant: Variant) -> None:
    x, weight = draw(variant, 2, 4, 6, 9), draw(variant, 9, 1, 1, 1, 1).expand(9, 2, 2, 6, 9)
    for x_needs_gradient in (False, True):
        leaf = weight.detach().requires_grad_()
        out = variant.call(x.detach().requires_grad_(x_needs_gradient), leaf)
        (gradient,) = torch.autograd.grad(out.sum(), leaf)
        assert gradient.is_contiguous()


# Autograd


@with_ops
@pytest.mark.parametrize(
    ("wanted", "saved"), [("x", {"weight"}), ("weight", {"x"}), ("both", {"x", "weight"})]
)
def test_only_what_the_backward_needs_is_saved_and_not_copied(
    variant: Variant, wanted: str, saved: set[str]
) -> None:
    x, weight = image_and_weight(variant)
    x.requires_grad_(wanted != "weight")
    weight.requires_grad_(wanted != "x")
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        variant.call(x, weight)
    names = {x.data_ptr(): "x", weight.data_ptr(): "weight"}
    assert {names[t.data_ptr()] for t in packed} == saved
    assert len(packed) == len(saved)


@everywhere
def test_nothing_is_saved_without_gradients(variant: Variant) -> None:
    x, weight = image_and_weight(variant)
    weight.requires_grad_()
    packed: list[Tensor] = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t),
        torch.no_grad(),
    ):
        assert not variant.call(x, weight).requires_grad
    assert not packed


@everywhere
def test_inference_mode_gives_the_same_bits(variant: Variant) -> None:
    x, weight = image_and_weight(variant)
    expected = variant.call(x, weight)
    with torch.inference_mode():
        assert torch.equal(variant.call(x, weight), expected)


@everywhere
@pytest.mark.parametrize("wanted", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize(("k", "dilation"), [(2, 1), (3, 2)])
def test_gradients_of_either_argument_alone_can_be_differentiated(
    variant: Variant, wanted: tuple[bool, bool], k: int, dilation: int
) -> None:
    x, weight = image_and_weight(variant, B=1, C=2, H=2, W=3, k=k)
    inputs = [t.requires_grad_(want) for t, want in zip((x, weight), wanted, strict=True)]

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return variant.call(x, weight, dilation=dilation)

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@everywhere
@pytest.mark.parametrize("of", ["x", "weight", "both"])
def test_gradient_penalty_agrees_with_the_reference(variant: Variant, of: str) -> None:
    x, weight = image_and_weight(variant)

    def penalty_gradients(impl: str) -> list[Tensor]:
        inputs = differentiable((x, weight))
        out = OPERATOR.function(*inputs, impl=impl)
        gradients = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        chosen = {"x": gradients[:1], "weight": gradients[1:], "both": gradients}[of]
        penalty = torch.stack([g.square().sum() for g in chosen]).sum()
        return list(torch.autograd.grad(penalty, inputs))

    for result, expected in zip(
        penalty_gradients(variant.impl), penalty_gradients("reference"), strict=True
    ):
        torch.testing.assert_close(result, expected)
