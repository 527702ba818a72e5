"""Layers of look-up tables: quantisation, ranges, gradients, compiled programs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hoconv.approx import LookupTable, Observer, TableConv2d, TableLinear
from hoconv.ops.approx.operator import MATMUL
from hoconv.tools.testing.variants import Variant, variants
from tests.hoconv.ops.approx.tables import exact, random_table

everywhere = pytest.mark.parametrize("variant", variants([MATMUL]), indirect=True)
signs = pytest.mark.parametrize("signed", [True, False])


@pytest.mark.parametrize("training", [True, False])
def test_layers_on_meta_tell_shapes_and_leave_the_table_alone(training: bool) -> None:
    table = random_table(False)
    for layer, shape, expected in (
        (TableLinear(4, 5, table=table, device="meta"), (3, 4), (3, 5)),
        (TableConv2d(4, 5, 3, table=table, device="meta"), (2, 4, 6, 6), (2, 5, 4, 4)),
    ):
        x = torch.empty(shape, device="meta", requires_grad=True)
        out = layer.train(training)(x)
        out.sum().backward()
        assert (out.device.type, out.shape, out.dtype) == ("meta", expected, torch.float32)
        assert x.grad is not None
        assert x.grad.shape == shape
    assert table.products.device.type == "cpu"


@everywhere
@signs
@pytest.mark.parametrize(
    "options", [{}, {"stride": 2, "padding": 1, "groups": 2}, {"groups": 4, "dilation": (2, 1)}]
)
def test_convolution_with_the_exact_table_multiplies_quantised_numbers(
    variant: Variant, signed: bool, options: Any
) -> None:
    table = exact(signed)
    layer = TableConv2d(4, 8, 3, table=table, observer="minmax", impl=variant.impl, **options)
    layer.to(variant.device)
    x = torch.randn(2, 4, 9, 8, device=variant.device).requires_grad_()
    out = layer(x)
    x_grid, weight, (scale, zero), _ = layer.quantizer(x, layer.weight)
    assert torch.equal(x_grid, ((x / scale).round() + zero - zero) * scale)
    expected = nn.functional.conv2d(
        x_grid, weight, layer.bias, layer.stride, layer.padding, layer.dilation, layer.groups
    )  # pyright: ignore
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    grad = torch.randn_like(out)
    got = torch.autograd.grad(out, (x, layer.weight), grad)
    wanted = torch.autograd.grad(expected, (x, layer.weight), grad)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    # 8 bits are close to the real thing.
    real = nn.functional.conv2d(
        x, layer.weight, layer.bias, layer.stride, layer.padding, layer.dilation, layer.groups
    )  # pyright: ignore
    assert (out - real).norm() < 0.03 * real.norm()


@everywhere
@signs
@pytest.mark.parametrize("bits", [(2, 2), (4, 4), (8, 3), (5, 8)])
def test_layers_quantise_the_input_and_the_weight_to_the_bits_of_the_table(
    variant: Variant, signed: bool, bits: tuple[int, int]
) -> None:
    values = [np.arange(1 << n) for n in bits]
    if signed:
        values = [np.where(v < len(v) // 2, v, v - len(v)) for v in values]
    table = LookupTable(np.multiply.outer(*values), signed=signed)
    layer = TableLinear(6, 5, table=table, observer="minmax", impl=variant.impl).to(variant.device)
    x = torch.randn(50, 6, device=variant.device)
    out = layer(x)
    x_grid, weight, *_ = layer.eval().quantizer(x, layer.weight)
    for real, grid, n in ((x, x_grid, bits[0]), (layer.weight, weight, bits[1])):
        step = (real.max() - real.min()) / ((1 << n) - 1)
        assert len(grid.unique()) <= 1 << n
        assert (real - grid).abs().max() <= 1.01 * step  # half of it by rounding; the zero point
    expected = nn.functional.linear(x_grid, weight, layer.bias)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@everywhere
@signs
@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5), (0, 5)])
def test_linear_with_the_exact_table_multiplies_quantised_numbers(
    variant: Variant, signed: bool, shape: Any
) -> None:
    layer = TableLinear(5, 4, table=exact(signed), impl=variant.impl).to(variant.device)
    layer(torch.randn(20, 5, device=variant.device))  # it knows a range
    x = torch.randn(shape, device=variant.device)
    x_grid, weight, *_ = layer.eval().quantizer(x, layer.weight)
    expected = nn.functional.linear(x_grid, weight, layer.bias)
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)


@everywhere
@signs
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("options", [{}, {"stride": 2, "padding": 1, "groups": 2}])
def test_a_weight_may_have_a_scale_for_each_channel(
    variant: Variant, signed: bool, bits: int, options: Any
) -> None:
    values = np.arange(256)[:, None], np.arange(1 << bits)
    if signed:
        values = [np.where(v < v.size // 2, v, v - v.size) for v in values]
    a, b = values
    products = a * b + (a ^ b) % 3  # no exact ones
    table = LookupTable(products, signed=signed)
    layer = TableConv2d(4, 6, 3, table=table, observer="minmax", weight_scales="channel",
                        bias=False, impl=variant.impl, **options).to(variant.device)  # fmt: skip
    with torch.no_grad():
        layer.weight *= torch.tensor([1e-3, 1, 7, 0, 0.3, 50], device=variant.device).view(
            6, 1, 1, 1
        )
    x = torch.randn(2, 4, 7, 6, device=variant.device).requires_grad_()
    out = layer(x)

    # The definition, of integers in float64.
    lowest = -(1 << bits - 1) if signed else 0
    zero = lowest + (1 << bits - 1)
    w = layer.weight.detach()
    scale = w.abs().amax((1, 2, 3), keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    scale = scale / ((1 << bits - 1) - 1)
    qw = ((w / scale).round() + zero).clamp(lowest, lowest + (1 << bits) - 1)
    least, most = (x.detach().min().clamp(max=0), x.detach().max().clamp(min=0))
    of_x = (most - least) / 255
    first = -128 if signed else 0
    zero_x = (first - least / of_x).round().clamp(first, first + 255)
    qx = ((x.detach() / of_x).round() + zero_x).clamp(first, first + 255)
    o = {"stride": 1, "padding": 0, "groups": 1} | options
    p, G = o["padding"], o["groups"]
    padded = nn.functional.pad(qx, (p, p, p, p), value=zero_x.item())
    windows = padded.unfold(2, 3, o["stride"]).unfold(3, 3, o["stride"])
    windows = windows.reshape(2, G, 4 // G, *windows.shape[2:])[:, :, None]
    kernels = qw.view(1, G, 6 // G, 4 // G, 1, 1, 3, 3)
    look_up = torch.tensor(products, device=x.device, dtype=torch.float64)
    found = look_up[windows.long() % 256, kernels.long() % (1 << bits)]
    terms = found - zero * windows - zero_x * kernels + zero_x * zero
    exact = terms.double().sum((3, 6, 7)).flatten(1, 2) * (of_x * scale.view(-1, 1, 1)).double()
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)

    # The gradient is that of the product of the quantised numbers.
    x_grid, w_grid, *_ = layer.eval().quantizer(x, layer.weight)
    torch.testing.assert_close(w_grid, (qw - zero) * scale)
    straight = nn.functional.conv2d(
        x_grid, w_grid, None, layer.stride, layer.padding, layer.dilation, layer.groups
    )  # pyright: ignore
    grad = torch.randn_like(out)
    got = torch.autograd.grad(out, (x, layer.weight), grad)
    wanted = torch.autograd.grad(straight, (x, layer.weight), grad)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


def test_scales_of_a_weight_are_of_the_tensor_or_of_channels() -> None:
    with pytest.raises(ValueError, match=r"^weight_scales: expected 'tensor' or 'channel', got 8"):
        TableLinear(2, 1, table=exact(True), weight_scales=8)  # pyright: ignore
    layer = TableLinear(5, 3, table=exact(True), weight_scales="channel")
    x = torch.randn(7, 5)
    out = layer(x)
    x_grid, weight, *_ = layer.eval().quantizer(x, layer.weight)
    largest = layer.weight.abs().amax(1)
    assert torch.equal(weight.abs().amax(1), largest)
    expected = nn.functional.linear(x_grid, weight, layer.bias)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))


def test_products_are_the_tables_first_operand_the_input() -> None:
    products = np.zeros((256, 256), int)
    products[255, :] = 1000  # the largest input
    layer = TableLinear(1, 1, table=LookupTable(products, signed=False), bias=False)
    layer.weight.data.fill_(1.0)
    x = torch.tensor([[1.0], [0.0]])
    scale = (1 / 255) ** 2
    assert layer(x).flatten().tolist() == pytest.approx([1000 * scale, 0.0])


def test_observers_follow_what_they_see_in_training() -> None:
    batches = [torch.tensor([-1.0, 2.0]), torch.tensor([-3.0, 1.0])]
    minmax, average = Observer("minmax"), Observer("moving_average", 0.25)
    for batch in batches:
        minmax(batch)
        average(batch)
    assert (minmax.least.item(), minmax.most.item()) == (-3.0, 2.0)
    assert (average.least.item(), average.most.item()) == (-1.5, 1.75)
    layer = TableLinear(2, 1, table=exact(True), observer="minmax")
    for batch in batches:
        layer(batch)
    assert layer.quantizer.input.least == -3
    layer.eval()(torch.tensor([-9.0, 9.0]))
    assert layer.quantizer.input.least == -3
    other = TableLinear(2, 1, table=exact(True))
    other.load_state_dict(layer.state_dict())
    x = torch.randn(4, 2)
    assert torch.equal(other.eval()(x), layer(x))
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))


def test_evaluation_without_a_known_range_is_refused() -> None:
    layer = TableLinear(2, 1, table=exact(True)).eval()
    with pytest.raises(RuntimeError, match=r"^input: its range is not known: in training mode"):
        layer(torch.zeros(1, 2))


@pytest.mark.parametrize("observer", ["minmax", "moving_average"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_batch_that_is_not_finite_does_not_change_the_range(observer: Any, value: float) -> None:
    layer = TableLinear(2, 1, table=exact(True), observer=observer)
    x = torch.randn(4, 2)
    layer(x)
    expected = layer.eval()(x)
    assert layer.train()(x.masked_fill(x == x.max(), value)).isfinite().all()
    assert torch.equal(layer.eval()(x), expected)


@pytest.mark.parametrize("gradient", ["ste", "difference"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activations_may_be_computed_again(gradient: str, use_reentrant: bool) -> None:
    layer = TableLinear(4, 3, table=random_table(True), gradient=gradient)
    x = torch.randn(5, 4, requires_grad=True)
    layer(x)
    layer.eval()
    expected = torch.autograd.grad(layer(x).sum(), x)[0]
    out: Any = checkpoint(layer, x, use_reentrant=use_reentrant)
    out.sum().backward()
    torch.testing.assert_close(x.grad, expected)


def layers(variant: Variant) -> list[tuple[nn.Module, Tensor]]:
    """Each layer, in evaluation, and an input of it."""
    table = random_table(True)
    tables = torch.randn(256), torch.randn(256, 256)
    by_u_and_v = torch.outer(*torch.randn(2, 256))
    made = []
    for layer, shape in (
        (TableLinear(5, 4, table=table, impl=variant.impl), (3, 5)),
        (TableConv2d(4, 6, 3, table=table, impl=variant.impl, padding=1, groups=2), (2, 4, 5, 6)),
        (TableLinear(5, 4, table=table, impl=variant.impl, gradient=tables), (3, 5)),
        (TableConv2d(2, 3, 3, table=table, impl=variant.impl, gradient=(by_u_and_v, "difference"),
                     padding=1), (2, 2, 5, 6)),
        (TableLinear(5, 4, table=table, impl=variant.impl, learn_scales=True), (3, 5)),
        (TableConv2d(4, 6, 3, table=table, impl=variant.impl, learn_scales=True, padding=1,
                     weight_scales="channel", gradient="difference"), (2, 4, 5, 6)),
        (TableConv2d(4, 8, 3, table=table, impl=variant.impl, stride=2, groups=4), (2, 4, 5, 6)),
    ):  # fmt: skip
        layer, x = layer.to(variant.device), torch.randn(shape, device=variant.device)
        layer(x)
        made.append((layer.eval(), x))
    return made


def gradients(layer: Any, x: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_(), *layer.parameters()]
    return list(torch.autograd.grad(layer(leaves[0]).square().sum(), leaves))


@everywhere
def test_programs_of_layers_compute_and_learn_as_the_layers_do(
    variant: Variant, tmp_path: Path
) -> None:
    torch.compiler.reset()  # the same code is compiled again a few times only
    for layer, x in layers(variant):
        exported = torch.export.export(layer, (x,))
        torch.export.save(exported, tmp_path / "layer.pt2")
        for program in (
            exported.module(),
            torch.export.load(tmp_path / "layer.pt2").module(),
            torch.compile(layer, backend="aot_eager", fullgraph=True),
        ):
            assert torch.equal(program(x), layer(x))
            for got, wanted in zip(gradients(program, x), gradients(layer, x), strict=True):
                torch.testing.assert_close(got, wanted)


@everywhere
@pytest.mark.parametrize(
    "options", [{}, {"weight_scales": "channel"}, {"learn_scales": True, "observer": "mse"}]
)
def test_one_compiled_program_takes_batches_of_any_size(
    variant: Variant, options: dict[str, Any]
) -> None:
    torch.compiler.reset()
    layer = TableLinear(6, 4, table=exact(True), impl=variant.impl, **options).to(variant.device)
    layer(torch.randn(3, 6, device=variant.device))
    program = torch.compile(layer.eval(), backend="aot_eager", fullgraph=True)
    for size in (3, 5, 8, 1):
        x = 3 * torch.randn(size, 6, device=variant.device)  # some numbers are out of range
        assert torch.equal(program(x), layer(x))
        for got, wanted in zip(gradients(program, x), gradients(layer, x), strict=True):
            torch.testing.assert_close(got, wanted)


@everywhere
def test_programs_of_layers_with_no_range_are_refused(variant: Variant) -> None:
    if variant.device == "cuda":
        pytest.skip("there a failed assertion ends every later use of the device")
    torch.compiler.reset()
    layer, x = TableLinear(2, 1, table=exact(True), impl=variant.impl).eval(), torch.zeros(3, 2)
    program = torch.export.export(layer, (x,)).module()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for call in (program, compiled):
        with pytest.raises(RuntimeError, match="input: its range is not known: in training mode"):
            call(x)


@everywhere
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_transforms_of_layers_are_their_gradients(variant: Variant) -> None:
    for layer, x in layers(variant):
        expected = gradients(layer, x)
        parameters = {name: p.detach() for name, p in layer.named_parameters()}

        def loss(x: Tensor, parameters: Any, layer: nn.Module = layer) -> Tensor:
            return torch.func.functional_call(layer, parameters, (x,)).square().sum()

        got, of_parameters = torch.func.grad(loss, (0, 1))(x, parameters)
        for one, other in zip((got, *of_parameters.values()), expected, strict=True):
            # The same sums in another order.
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        got = torch.func.vmap(torch.func.grad(loss), (0, None))(x[:, None], parameters)
        torch.testing.assert_close(got[:, 0], expected[0])
        torch.testing.assert_close(torch.func.vmap(layer)(x[:, None])[:, 0], layer(x))


@everywhere
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # by PyTorch itself
def test_transforms_that_layers_do_not_have_are_refused(variant: Variant) -> None:
    for layer, x in layers(variant):
        with pytest.raises(NotImplementedError, match="use reverse mode: backward"):
            torch.func.jvp(layer, (x,), (x,))
        layer.train()
        for transform, argument in ((torch.func.vmap, x[None]), (torch.func.grad, x)):
            with pytest.raises(NotImplementedError, match=r"^input: .* after layer\.eval\(\)$"):
                transform(lambda x, layer=layer: layer(x).sum())(argument)


@everywhere
@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 5)])
def test_no_rows_have_a_gradient(variant: Variant, shape: tuple[int, ...]) -> None:
    layer, _ = layers(variant)[0]
    x = torch.ones(shape, device=variant.device, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer.requires_grad_(False)(x).sum(), x)
    assert gradient.shape == shape


def test_a_layer_of_sums_that_could_overflow_is_refused() -> None:
    layer = TableLinear(3, 1, table=LookupTable(np.full((256, 256), 2**30), signed=True))
    with pytest.raises(ValueError, match=r"^input: a sum of 3 products of up to 1073741824 could"):
        layer(torch.ones(1, 3))


def test_numbers_outside_the_range_get_no_gradient() -> None:
    layer = TableLinear(1, 1, table=exact(True), observer="minmax")
    layer(torch.tensor([[-1.0], [1.0]]))
    x = torch.tensor([[0.5], [3.0]]).requires_grad_()
    layer.eval()(x).sum().backward()
    assert x.grad is not None
    assert x.grad[0].abs() > 0
    assert x.grad[1] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"observer": "mean"},
            "observer: expected 'minmax', .* or 'mse', got 'mean'",
        ),
        ({"learn_scales": "no"}, "learn_scales: expected True or False, got 'no'"),
        ({"momentum": 0.0}, "momentum: expected more than 0, up to 1; got 0.0"),
        ({"impl": "fast"}, "impl: expected one of auto, .*; got 'fast' for approx_matmul"),
    ],
)
def test_wrong_option_is_refused_by_name(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        TableLinear(1, 1, table=exact(True), **options)


def test_learns_through_a_table() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 1, 6, 6)
    labels = (x[:, 0, :3].sum((1, 2)) > x[:, 0, 3:].sum((1, 2))).long()
    table = exact(True)
    network = nn.Sequential(
        TableConv2d(1, 4, 3, table=table), nn.ReLU(), nn.Flatten(), TableLinear(64, 2, table=table)
    )
    optimizer = torch.optim.Adam(network.parameters(), 0.01)
    losses = []
    for _ in range(60):
        loss = nn.functional.cross_entropy(network(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
