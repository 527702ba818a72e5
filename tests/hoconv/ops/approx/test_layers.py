"""The layers: PyTorch's own in everything but the products."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hoconv import ApproxConv2d, ApproxLinear, approx
from hoconv.dispatch.declaration import layers
from hoconv.dispatch.implementations import choose
from hoconv.ops.approx.gradients import KINDS
from hoconv.ops.approx.operator import CONV2D, MATMUL
from hoconv.tools.testing.variants import Variant, variants
from tests.hoconv.ops.approx.test_multipliers import bits

conv2d_everywhere = pytest.mark.parametrize("variant", variants([CONV2D]), indirect=True)
matmul_everywhere = pytest.mark.parametrize("variant", variants([MATMUL]), indirect=True)
CONVOLUTIONS: list[dict[str, Any]] = [
    {},
    {"kernel_size": 1},
    {"kernel_size": (2, 3), "stride": (2, 1), "padding": (1, 2), "dilation": (1, 2)},
    {"groups": 2, "bias": False},
    {"groups": 4, "out_channels": 8, "padding": 1},
    {"padding": "same"},
    {"padding": "same", "kernel_size": (4, 2), "dilation": (1, 3)},
    {"padding": "valid"},
    {"padding": 1, "padding_mode": "reflect"},
    {"padding": (2, 1), "padding_mode": "circular", "stride": 2},
    {"padding": "same", "kernel_size": 4, "padding_mode": "replicate"},
]


def pair(variant: Variant, **options: Any) -> tuple[ApproxConv2d, nn.Conv2d]:
    """The layer with exact products, and PyTorch's with the same parameters."""
    arguments: dict[str, Any] = {"in_channels": 4, "out_channels": 6, "kernel_size": 3, **options}
    theirs = nn.Conv2d(**arguments)
    ours = ApproxConv2d(**arguments, multiplier="exact", impl=variant.impl)
    ours.load_state_dict(theirs.state_dict())
    return ours.to(variant.device), theirs.to(variant.device)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@conv2d_everywhere
@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
def test_convolution_with_exact_products_is_pytorchs(variant: Variant, options: Any) -> None:
    ours, theirs = pair(variant, **options)
    x = torch.randn(2, 4, 9, 8, device=variant.device)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outs = [layer(t) for layer, t in zip((ours, theirs), inputs, strict=True)]
    torch.testing.assert_close(*outs)
    for out in outs:
        out.square().sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-5, atol=1e-4)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(ours(x[0]), theirs(x[0]))


@matmul_everywhere
@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5), (0, 5)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_with_exact_products_is_pytorchs(
    variant: Variant, shape: tuple[int, ...], bias: bool
) -> None:
    theirs = nn.Linear(5, 4, bias).to(variant.device)
    ours = ApproxLinear(5, 4, bias, multiplier="exact", impl=variant.impl).to(variant.device)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(shape, device=variant.device)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outs = [layer(t) for layer, t in zip((ours, theirs), inputs, strict=True)]
    torch.testing.assert_close(*outs)
    for out in outs:
        out.square().sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@conv2d_everywhere
def test_products_are_the_multipliers_and_the_bias_is_added_last(variant: Variant) -> None:
    layer = ApproxConv2d(3, 5, 3, padding=1, multiplier="mbm14", impl=variant.impl).to(
        variant.device
    )
    x = torch.randn(2, 3, 6, 6, device=variant.device)
    assert layer.bias is not None
    out = approx.conv2d(x, layer.weight, "mbm14", padding=1, impl=variant.impl)
    assert torch.equal(bits(layer(x)), bits(out + layer.bias[:, None, None]))
    linear = ApproxLinear(6, 4, multiplier="mbm14", impl=variant.impl).to(variant.device)
    out = approx.matmul(x, linear.weight.mT, "mbm14", impl=variant.impl)
    assert torch.equal(bits(linear(x)), bits(out + linear.bias))


@pytest.mark.parametrize("gradient", ["ste", "approx", "analytic", ("approx", "ste")])
def test_gradient_is_what_was_asked_for(gradient: Any) -> None:
    x = torch.randn(2, 3, 6, 6)
    layer = ApproxConv2d(3, 5, 3, gradient=gradient, impl="reference")
    layer(x).sum().backward()
    weight = layer.weight.detach().clone().requires_grad_()
    out = approx.conv2d(x, weight, "mbm16", gradient=gradient, impl="reference")
    out.sum().backward()
    torch.testing.assert_close(layer.weight.grad, weight.grad)


@pytest.mark.parametrize("padding", [1, (2, 1), "same", "valid"])
@pytest.mark.parametrize("padding_mode", ["zeros", "reflect", "circular"])
def test_a_padding_set_later_is_that_of_a_new_layer(padding: Any, padding_mode: Any) -> None:
    x = torch.randn(2, 3, 6, 7)
    new = ApproxConv2d(3, 4, (3, 4), padding=padding, padding_mode=padding_mode)
    changed = ApproxConv2d(3, 4, (3, 4))
    changed.load_state_dict(new.state_dict())
    changed.padding, changed.padding_mode = padding, padding_mode
    assert torch.equal(changed(x), new(x))


@pytest.mark.parametrize("gradient", KINDS)
@pytest.mark.parametrize("padding_mode", ["zeros", "circular"])
def test_many_cotangents_give_the_gradients_of_each(gradient: str, padding_mode: Any) -> None:
    layer = approx.ApproxConv2d(
        2, 4, 3, padding=1, padding_mode=padding_mode, gradient=gradient, impl="reference"
    )
    leaves = [torch.randn(1, 2, 5, 4, requires_grad=True), *layer.parameters()]
    out = layer(leaves[0])
    cotangents = torch.randn(3, *out.shape)
    at_once = torch.autograd.grad(out, leaves, cotangents, True, is_grads_batched=True)
    one_by_one = [torch.autograd.grad(out, leaves, each, True) for each in cotangents]
    for found, expected in zip(at_once, map(torch.stack, zip(*one_by_one)), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [ApproxConv2d, ApproxLinear])
def test_state_dict_and_initialisation_are_pytorchs(kind: Any) -> None:
    torch.manual_seed(3)
    ours = kind(4, 6, 3) if kind is ApproxConv2d else kind(4, 6)
    torch.manual_seed(3)
    theirs = nn.Conv2d(4, 6, 3) if kind is ApproxConv2d else nn.Linear(4, 6)
    mine, other = ours.state_dict(), theirs.state_dict()
    assert list(mine) == list(other)
    assert all(torch.equal(mine[name], other[name]) for name in other)


@conv2d_everywhere
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_computes_in_float32_and_says_so_by_its_dtype(
    variant: Variant, dtype: torch.dtype
) -> None:
    layer = ApproxConv2d(3, 5, 3, impl=variant.impl).to(variant.device)
    linear = ApproxLinear(4, 2, impl=variant.impl).to(variant.device)
    x = torch.randn(2, 3, 6, 6, device=variant.device).to(dtype).requires_grad_()
    with torch.autocast(variant.device, dtype=dtype):
        out = layer(x)
        last = linear(out)
    assert out.dtype == last.dtype == torch.float32
    assert torch.equal(out, layer(x.float()))
    last.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_are_refused_without_autocast(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"^x: expected float32, .*got {dtype}; convert it with"):
        ApproxConv2d(3, 5, 3).to(dtype)(torch.randn(2, 3, 6, 6).to(dtype))


@conv2d_everywhere
def test_empty_batch_has_an_empty_output_and_zero_gradients(variant: Variant) -> None:
    layer = ApproxConv2d(3, 5, 3, impl=variant.impl).to(variant.device)
    out = layer(torch.zeros(0, 3, 6, 6, device=variant.device))
    assert out.shape == (0, 5, 4, 4)
    out.sum().backward()
    assert layer.weight.grad is not None
    assert not layer.weight.grad.any()


def test_learns_with_approximate_gradients() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 1, 6, 6)
    labels = (x[:, 0, :3].sum((1, 2)) > x[:, 0, 3:].sum((1, 2))).long()
    for gradient in ("approx", "ste", "analytic"):
        options: dict[str, Any] = {"multiplier": "mbm16", "gradient": gradient}
        network = nn.Sequential(
            ApproxConv2d(1, 4, 3, **options),
            nn.ReLU(),
            nn.Flatten(),
            ApproxLinear(64, 2, **options),
        )
        optimizer = torch.optim.Adam(network.parameters(), 0.01)
        losses = []
        for _ in range(60):
            loss = F.cross_entropy(network(x), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.3 * losses[0]


def test_copies_compute_the_same_and_are_found() -> None:
    network = nn.Sequential(ApproxConv2d(3, 5, 3), nn.Flatten(), ApproxLinear(80, 2))
    x = torch.randn(2, 3, 6, 6)
    for other in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        assert torch.equal(other(x), network(x))
        found = dict(layers(other))
        assert [layer.operator.name for layer in found.values()] == [
            "approx_conv2d", "approx_matmul",
        ]  # fmt: skip
        assert all(choose(layer.operator, layer.impl, "cpu").name for layer in found.values())


@conv2d_everywhere
def test_compiled_equals_eager(variant: Variant) -> None:
    torch.compiler.reset()
    layer = nn.Sequential(
        ApproxConv2d(3, 5, 3, impl=variant.impl),
        nn.Flatten(),
        ApproxLinear(80, 2, impl=variant.impl),
    ).to(variant.device)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 3, 6, 6, device=variant.device)
    assert torch.equal(compiled(x), layer(x))

    def gradients(network: Any) -> list[Tensor]:
        layer.zero_grad()
        network(x).square().sum().backward()
        return [p.grad for p in layer.parameters() if p.grad is not None]

    for a, b in zip(gradients(compiled), gradients(layer), strict=True):
        assert torch.equal(a, b)


def test_shows_its_options() -> None:
    layer = ApproxConv2d(3, 5, 3, padding=1, gradient="ste", impl="reference")
    assert layer.extra_repr() == (
        "3, 5, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), multiplier='mbm16', "
        "gradient='ste', impl='reference'"
    )
    assert ApproxLinear(3, 5).extra_repr() == (
        "in_features=3, out_features=5, bias=True, multiplier='mbm16', gradient='approx', "
        "impl='auto'"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"multiplier": "mbm8"}, "multiplier: expected one of exact, .*; got 'mbm8'"),
        ({"gradient": "exact"}, "gradient: expected one of approx, ste, analytic, or a pair.*"),
        ({"impl": "fast"}, "impl: expected one of auto, .*; got 'fast' for approx_.*"),
    ],
)
def test_wrong_option_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        ApproxConv2d(3, 5, 3, **options)
    with pytest.raises(ValueError, match=f"^{message}$"):
        ApproxLinear(3, 5, **options)


def test_wrong_input_is_refused_by_name() -> None:
    for shape in ((2, 4, 6, 6), (6, 6), (1, 2, 3, 6, 6)):
        with pytest.raises(ValueError, match=r"^input: expected \(B, 3, H, W\) or \(3, H, W\)"):
            ApproxConv2d(3, 5, 3)(torch.zeros(shape))
    with pytest.raises(ValueError, match=r"^input: expected \(\.\.\., 3\), got shape \(2, 4\)"):
        ApproxLinear(3, 5)(torch.zeros(2, 4))
