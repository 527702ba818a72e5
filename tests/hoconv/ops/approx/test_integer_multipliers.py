"""Functions and layers with multipliers of integers, given as tables or by their files."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hoconv import ApproxConv2d, ApproxLinear, approx
from hoconv.ops.approx.operator import CONV2D, MATMUL
from hoconv.tools.testing.variants import Variant, variants

everywhere = pytest.mark.parametrize("variant", variants([MATMUL]), indirect=True)
conv2d_everywhere = pytest.mark.parametrize("variant", variants([CONV2D]), indirect=True)
kinds = pytest.mark.parametrize(
    ("bits", "signed"), [((8, 8), True), ((8, 8), False), ((4, 4), True), ((8, 3), False)]
)


def coarse(a: Tensor, b: Tensor) -> Tensor:
    """A product that is not symmetric."""
    return (a >> 1 << 1) * b + (a & 1)


def table(bits: tuple[int, int], signed: bool) -> approx.LookupTable:
    found = approx.multiplier(coarse, bits=bits, signed=signed)
    assert isinstance(found, approx.LookupTable)
    return found


def operand(bits: int, signed: bool, *shape: int) -> Tensor:
    low = -(1 << bits >> 1) if signed else 0
    return torch.randint(low, low + (1 << bits), shape).to(torch.int8 if signed else torch.uint8)


@everywhere
@kinds
def test_products_of_integers_are_the_functions(
    variant: Variant, bits: tuple[int, int], signed: bool
) -> None:
    multiplier = table(bits, signed)
    shapes = [((3, 1, 5), (4, 5)), ((), (2,)), ((0, 3), (3,))]
    for left, right in shapes:
        a, b = operand(bits[0], signed, *left), operand(bits[1], signed, *right)
        out = approx.multiply(a.to(variant.device), b.to(variant.device), multiplier)
        assert out.dtype == torch.int32
        assert torch.equal(out.cpu().long(), coarse(a.long(), b.long()))
    for left, right in (((5, 7), (7, 3)), ((2, 3, 5, 7), (7, 3)), ((2, 1, 5, 7), (3, 7, 4)),
                        ((2, 5, 0), (0, 4))):  # fmt: skip
        a, b = operand(bits[0], signed, *left), operand(bits[1], signed, *right)
        out = approx.matmul(
            a.to(variant.device), b.to(variant.device), multiplier, impl=variant.impl
        )
        expected = coarse(a.long()[..., None], b.long()[..., None, :, :]).sum(-2)
        assert out.dtype == torch.int32
        assert torch.equal(out.cpu().long(), expected)


@conv2d_everywhere
@kinds
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": 2, "padding": (1, 2), "dilation": (2, 1)},
        {"groups": 2, "padding": "same"},
        {"groups": 4, "stride": (1, 2), "padding": 2, "dilation": (2, 1)},
    ],
)
def test_convolutions_of_integers_sum_the_functions_products(
    variant: Variant, bits: tuple[int, int], signed: bool, options: Any
) -> None:
    x = operand(bits[0], signed, 2, 4, 7, 6)
    weight = operand(bits[1], signed, 8, 4 // options.get("groups", 1), 3, 2)
    multiplier = table(bits, signed)
    out = approx.conv2d(
        x.to(variant.device), weight.to(variant.device), multiplier, **options, impl=variant.impl
    )
    exact = F.conv2d(x.double(), weight.double(), **options)
    # coarse(a, b) = a * b - (a & 1) * (b - 1), and the padding's zeros are even.
    odd, less = (x.long() & 1).double(), weight.double() - 1
    assert torch.equal(out.cpu().double(), exact - F.conv2d(odd, less, **options))


def files(folder: Path) -> list[Path]:
    """A multiplier of integers in each kind of file."""
    paths = [folder / f"mul4s.{suffix}" for suffix in ("c", "txt", "npy")]
    paths[0].write_text("int mul4s_T(int a, int b) { return (a >> 1 << 1) * b + (a & 1); }")
    values = np.arange(-8, 8)
    products = (values[:, None] >> 1 << 1) * values + (values[:, None] & 1)
    np.savetxt(paths[1], products, "%d")
    np.save(paths[2], products)
    return paths


def test_a_file_is_a_multiplier_wherever_a_name_is(tmp_path: Path) -> None:
    expected = table((4, 4), True)
    a, b, x = (operand(4, True, *shape) for shape in ((6, 5), (5, 3), (2, 3, 4, 4)))
    weight, real, image = operand(4, True, 2, 3, 3, 3), torch.randn(6, 5), torch.randn(2, 3, 4, 4)
    for path in files(tmp_path):
        for given in (path, str(path)):
            assert torch.equal(approx.multiply(a[:, 0], a[:, 1], given),
                               approx.multiply(a[:, 0], a[:, 1], expected))  # fmt: skip
            assert torch.equal(approx.matmul(a, b, given), approx.matmul(a, b, expected))
            assert torch.equal(approx.conv2d(x, weight, given), approx.conv2d(x, weight, expected))
        cases: Any = ((ApproxLinear, (5, 3), real), (ApproxConv2d, (3, 2, 3), image))
        for kind, sizes, t in cases:
            layer = kind(*sizes, multiplier=path)
            same = kind(*sizes, multiplier=expected)
            same.load_state_dict(layer.state_dict())
            assert torch.equal(layer(t), same(t))
            assert str(path) in repr(layer)


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "table.txt"
    a = torch.tensor([3, 2], dtype=torch.uint8)
    for factor in (1, 10):
        np.savetxt(path, factor * np.multiply.outer(np.arange(4), np.arange(4)), "%d")
        assert approx.multiply(a, a, path).tolist() == [9 * factor, 4 * factor]


@conv2d_everywhere
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("shape", [(2, 4, 9, 8), (4, 9, 8)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding": "same", "kernel_size": (4, 3)},
        {"padding": 1, "padding_mode": "reflect", "stride": 2},
        {"padding": (2, 1), "padding_mode": "circular", "groups": 2, "bias": False},
    ],
)
def test_a_convolution_with_exact_products_is_that_of_quantised_numbers(
    variant: Variant, shape: tuple[int, ...], options: Any
) -> None:
    arguments: dict[str, Any] = {"in_channels": 4, "out_channels": 6, "kernel_size": 3, **options}
    exact = approx.multiplier(torch.mul, bits=8, signed=True)
    layer = ApproxConv2d(**arguments, multiplier=exact, impl=variant.impl).to(variant.device)
    assert layer.gradient == "ste"
    theirs = nn.Conv2d(**arguments).to(variant.device)
    x = torch.randn(shape, device=variant.device)
    layer(x)
    layer.eval()
    assert layer.quantizer is not None
    on_grid, weight, *_ = layer.quantizer(x, layer.weight)
    parameters = {name: p.detach() for name, p in layer.named_parameters()} | {"weight": weight}
    leaves = [on_grid.detach().requires_grad_() for _ in range(2)]
    outs = [layer(leaves[0]), torch.func.functional_call(theirs, parameters, (leaves[1],))]
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)
    grad = torch.randn_like(outs[0])
    found = [torch.autograd.grad(*each, grad) for each in zip(outs, leaves, strict=True)]
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_layers_are_copied_and_saved_with_their_multiplier(tmp_path: Path) -> None:
    for path in files(tmp_path):
        layer: Any = ApproxLinear(5, 3, multiplier=path)
        x = torch.randn(4, 5)
        layer(x)
        expected = layer.eval()(x)
        for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert torch.equal(other(x), expected)
        state = ApproxLinear(5, 3, multiplier=path).eval()
        state.load_state_dict(layer.state_dict())
        assert torch.equal(state(x), expected)
        assert list(layer.state_dict()) == [
            "weight", "bias", "quantizer.input.least", "quantizer.input.most"
        ]  # fmt: skip


def test_what_does_not_fit_a_multiplier_of_integers_is_refused(tmp_path: Path) -> None:
    multiplier = table((4, 4), True)
    for call in (approx.multiply, approx.matmul):
        with pytest.raises(
            TypeError, match=r"^a: expected torch\.int8, an operand of LookupTable\(signed, 4 x 4 "
            r"bits, of the function coarse\), got torch\.float32; use ApproxConv2d or ApproxLinear"
        ):  # fmt: skip
            call(torch.ones(2, 2), torch.ones(2, 2), multiplier)
    for gradient in ("approx", "analytic", ("ste", "approx")):
        with pytest.raises(ValueError, match=r"^gradient: expected 'ste', .* of integers; got"):
            ApproxLinear(2, 2, multiplier=multiplier, gradient=gradient)
    layer = ApproxLinear(2, 2, multiplier=multiplier, gradient="ste")
    layer.gradient = "approx"
    with pytest.raises(ValueError, match=r"^gradient: expected 'ste'"):
        layer(torch.ones(1, 2))
    other = table((8, 8), True)
    for made, later in ((multiplier, other), (multiplier, "mbm16"), ("mbm16", other)):
        layer = ApproxLinear(2, 2, multiplier=made)
        layer.multiplier = later
        with pytest.raises(ValueError, match=r"^multiplier: cannot become .*; make a new one$"):
            layer(torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"missing.* cannot be read"):
        ApproxLinear(2, 2, multiplier=tmp_path / "missing.txt")
