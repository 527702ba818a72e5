"""Ranges and scales of quantised layers: observed, calibrated and frozen, or learned."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from hoconv.approx import ApproxLinear, LookupTable, Observer, TableConv2d, TableLinear, convert
from hoconv.ops.approx.layers.quantization import STEP, TRIES, affine

LAYERS = {
    "linear": (lambda **options: TableLinear(6, 4, impl="reference", **options), (16, 6)),
    "conv": (
        lambda **options: TableConv2d(3, 4, 3, padding=1, impl="reference", **options),
        (5, 3, 6, 5),
    ),
}
signs = pytest.mark.parametrize("signed", [True, False])
scales = pytest.mark.parametrize("weight_scales", ["tensor", "channel"])
layers = pytest.mark.parametrize("layer", LAYERS)


def exact(bits: int, signed: bool) -> LookupTable:
    values = np.arange(1 << bits)
    if signed:
        values = np.where(values < 1 << bits - 1, values, values - (1 << bits))
    return LookupTable(np.multiply.outer(values, values), signed=signed)


def make(layer: str, **options: Any) -> tuple[Any, Tensor]:
    """A layer with learned scales, and an input of it, some of which is out of range later."""
    torch.manual_seed(0)
    of, shape = LAYERS[layer]
    table = options.pop("table", None) or exact(4, True)
    return of(table=table, learn_scales=True, **options), torch.randn(shape)


# Learned scales


class Lsq:
    """The paper's listing, with its gradscale and roundpass; a zero point shifts the integers."""

    def __init__(self, layer: Any, name: str, lowest: int, highest: int) -> None:
        first = getattr(layer.quantizer, name)
        zero = first.zero_point.flatten()[0].item()
        self.step = first.first.clone().requires_grad_()
        self.least, self.most = lowest - zero, highest - zero

    def __call__(self, x: Tensor) -> Tensor:
        def gradscale(x: Tensor, scale: float) -> Tensor:
            return (x - x * scale).detach() + x * scale

        def roundpass(x: Tensor) -> Tensor:
            return (x.round() - x).detach() + x

        numbers = x.numel() // self.step.numel()
        step = gradscale(self.step, 1 / math.sqrt(numbers * self.most))
        if step.dim():
            step = step.view(-1, *[1] * (x.dim() - 1))
        # Of clamp, versions of PyTorch differ in the gradient at the ends of the range.
        clipped = (x / step).where(x / step > self.least, self.least)
        return roundpass(clipped.where(clipped < self.most, self.most)) * step


@layers
@signs
@scales
def test_scales_take_the_steps_of_the_papers_listing(
    layer: str, signed: bool, weight_scales: Any
) -> None:
    """By SGD, with exact products; the weights stay, since a number at the edge of the range is
    clipped there and passed on here."""
    made, x = make(layer, table=exact(3, signed), weight_scales=weight_scales)
    made(0.6 * x)  # the range of which leaves some of x out
    lowest, highest = (-4, 3) if signed else (0, 7)
    of_x, of_weight = (Lsq(made, name, lowest, highest) for name in ("input_scale", "weight_scale"))
    learned = made.quantizer.input_scale.factor, made.quantizer.weight_scale.factor
    optimizer = torch.optim.SGD(learned, 0.01)
    expected = torch.optim.SGD([of_x.step, of_weight.step], 0.01)
    for _ in range(4):
        if layer == "linear":
            wanted = F.linear(of_x(x), of_weight(made.weight), made.bias)
        else:
            wanted = F.conv2d(of_x(x), of_weight(made.weight), made.bias, padding=1)
        found = made(x)
        torch.testing.assert_close(found, wanted)
        for out, each in ((found, optimizer), (wanted, expected)):
            each.zero_grad()
            (out - 1).square().mean().backward()
            each.step()
        for lsq, factor, name in ((of_x, learned[0], "input_scale"), (of_weight, learned[1],
                                  "weight_scale")):  # fmt: skip
            first = getattr(made.quantizer, name).first
            assert not torch.equal(factor, torch.ones_like(factor))
            torch.testing.assert_close(
                first * factor.view_as(first), lsq.step, rtol=1e-4, atol=1e-6
            )


@signs
def test_learned_scales_fit_few_bits_better_than_the_range_does(signed: bool) -> None:
    losses = {}
    for learn_scales in (False, True):
        torch.manual_seed(0)
        x = torch.randn(256, 8)
        x[:4] *= 8  # outliers, which the range has to hold
        labels = (x @ torch.randn(8, 4)).argmax(1)
        options: Any = {"table": exact(3, signed), "learn_scales": learn_scales}
        options |= {"observer": "minmax", "impl": "reference"}
        model = nn.Sequential(TableLinear(8, 32, **options), nn.ReLU(),
                              TableLinear(32, 4, **options))  # fmt: skip
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        loss = torch.tensor(0.0)
        for _ in range(300):
            loss = F.cross_entropy(model(x), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses[learn_scales] = loss.item()
    assert losses[True] < 0.7 * losses[False]


@layers
@scales
def test_the_first_batch_gives_the_scales_that_are_observed_without_learning(
    layer: str, weight_scales: Any
) -> None:
    made, x = make(layer, weight_scales=weight_scales)
    observed = LAYERS[layer][0](table=exact(4, True), weight_scales=weight_scales)
    observed.load_state_dict(made.state_dict(), strict=False)
    assert torch.equal(made(x), observed(x))
    before = copy.deepcopy(made.quantizer.state_dict())
    with torch.no_grad():
        made.weight.mul_(3).add_(1)
        made(9 * x + 1)
    for name, value in made.quantizer.state_dict().items():
        assert torch.equal(value, before[name])


def test_parameters_are_there_before_the_first_batch_and_all_have_gradients() -> None:
    made, x = make("conv", weight_scales="channel")
    shapes = {name: tuple(p.shape) for name, p in made.quantizer.named_parameters()}
    assert shapes == {"input_scale.factor": (1,), "weight_scale.factor": (4,)}
    before = {name: p.detach().clone() for name, p in made.named_parameters()}
    assert all(p.isfinite().all() for p in before.values())
    optimizer = torch.optim.Adam(made.parameters(), 0.01)
    (made(x) + made(2 * x)).square().mean().backward()  # of two calls
    optimizer.step()
    for name, parameter in made.named_parameters():
        assert not torch.equal(parameter, before[name])


@layers
def test_copies_and_loaded_layers_go_on_as_the_layer_does(layer: str) -> None:
    made, x = make(layer)
    fresh = copy.deepcopy(made)
    with torch.no_grad():
        made(x)
        made.quantizer.input_scale.factor.fill_(0.7)
        made.quantizer.weight_scale.factor.fill_(1.2)
    expected = made(x)
    fresh.load_state_dict(made.state_dict())
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made)), fresh):
        assert torch.equal(other(2 * x), made(2 * x))
        assert torch.equal(other.eval()(x), expected)


def test_a_layer_that_observed_goes_on_to_learn_from_its_range() -> None:
    made, x = make("linear")
    observed = TableLinear(6, 4, table=exact(4, True), impl="reference")
    observed.load_state_dict(made.state_dict(), strict=False)
    observed(3 * x)
    missing = made.load_state_dict(observed.state_dict(), strict=False)
    assert not missing.unexpected_keys
    expected = observed.eval()(x)
    assert torch.equal(made.eval()(x), expected)  # which changes nothing
    assert made.quantizer.input_scale.first.isnan()


def test_compiled_training_is_training() -> None:
    torch.compiler.reset()
    made, x = make("conv", weight_scales="channel")
    compiled = copy.deepcopy(made)
    program: Any = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    for layer in (made, program):
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        for each in (x, 2 * x + 1, 0.1 * x):
            optimizer.zero_grad()
            layer(each).square().mean().backward()
            optimizer.step()
    for name in ("input_scale", "weight_scale"):
        one, other = (getattr(each.quantizer, name).state_dict() for each in (made, compiled))
        for key, value in one.items():
            torch.testing.assert_close(other[key], value)


def test_autocast_keeps_scales_in_float32() -> None:
    made, x = make("linear")
    with torch.autocast("cpu", torch.bfloat16):
        out = made(x.bfloat16())
    assert out.dtype == torch.float32
    out.sum().backward()
    assert made.quantizer.input_scale.factor.grad.dtype == torch.float32


@scales
def test_zeros_alone_give_no_scale(weight_scales: Any) -> None:
    made, x = make("linear", weight_scales=weight_scales)
    with torch.no_grad():
        made.weight[1:].zero_()
        made(torch.zeros_like(x))
        made.weight[1:].fill_(0.5)
    if weight_scales == "channel":
        assert made.quantizer.weight_scale.first[1:].tolist() == pytest.approx([1 / 7] * 3)
    x = x.clamp(-0.99, 0.99)
    found, *_ = made.quantizer(x, made.weight)
    torch.testing.assert_close(found, x, rtol=0, atol=0.5001 / 7)
    made(x).sum().backward()
    assert all(p.grad.isfinite().all() for p in made.parameters())


@pytest.mark.parametrize("factor", [0.0, -1e-3, 1e-45, -2.0])
@pytest.mark.parametrize("value", [1.0, torch.nan, torch.inf])
def test_scales_stay_positive_and_gradients_finite(factor: float, value: float) -> None:
    made, x = make("linear")
    made(x)
    with torch.no_grad():
        made.quantizer.input_scale.factor.fill_(factor)
    x[0, 0] = value
    _, _, (scale, _), _ = made.quantizer(x, made.weight)
    assert scale > 0
    out = made(x)
    out.sum().backward()
    assert out.isfinite().all()
    assert all(p.grad.isfinite().all() for p in made.parameters())
    with torch.no_grad():
        made.quantizer.input_scale.factor.abs_()
    assert torch.equal(made(x), out)


def test_a_layer_without_numbers_learns_nothing() -> None:
    made, x = make("linear")
    made(x)
    made(x[:0]).sum().backward()
    assert made.quantizer.input_scale.factor.grad == 0


def test_a_converted_model_gives_an_optimizer_its_scales() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5)).eval()
    convert(model, exact(4, False), learn_scales=True, weight_scales="channel", observer="mse",
            momentum=0.5, impl="reference")  # fmt: skip
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters() if n.endswith("factor")}
    assert shapes == {
        "0.quantizer.input_scale.factor": (1,), "0.quantizer.weight_scale.factor": (4,),
        "3.quantizer.input_scale.factor": (1,), "3.quantizer.weight_scale.factor": (5,),
    }  # fmt: skip
    assert not any(module.training for module in model.modules())
    assert "weight_scales='channel', learn_scales=True, accumulator=None" in repr(model)
    assert "Observer('mse', momentum=0.5)" in repr(model)
    convert(model, exact(4, False), impl="reference")  # and back
    assert not [name for name, _ in model.named_parameters() if "quantizer" in name]


def _train_in_one_of_two(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    made, x = make("linear")
    model = DistributedDataParallel(made)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for n in range(3):
        optimizer.zero_grad()
        model((1 + rank + n) * x).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        model(x)  # the buffers of the first process
    torch.save(made.state_dict(), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_processes_have_the_same_scales(tmp_path: Path) -> None:
    spawn(_train_in_one_of_two, (str(tmp_path),), 2)
    one, other = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    learned = [name for name in one if "_scale" in name]
    assert len(learned) == 6
    for name in learned:
        assert torch.equal(one[name], other[name])


def _observe_in_one_of_two(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    torch.manual_seed(0)
    made = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))
    convert(made, exact(8, True), momentum=0.25, impl="reference")
    model = DistributedDataParallel(made)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(1 + rank)
    expected = Observer(momentum=0.25)
    for x in (1 + rank) * torch.randn(2, 8, 3, 6, 6):
        expected(x)
        optimizer.zero_grad()
        F.cross_entropy(model(x), torch.arange(8) % 5).backward()
        optimizer.step()
    after_steps = copy.deepcopy(made.state_dict())
    model.eval()(torch.randn(8, 3, 6, 6))
    torch.save((after_steps, made.state_dict(), expected.state_dict()), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_processes_have_the_same_parameters_and_then_the_ranges_of_the_first(
    tmp_path: Path,
) -> None:
    spawn(_observe_in_one_of_two, (str(tmp_path),), 2)
    (trained, first, seen), (other_trained, other, _) = (
        torch.load(tmp_path / f"{rank}.pt") for rank in range(2)
    )
    ranges = [name for name in first if ".quantizer." in name]
    assert len(ranges) == 4
    for name in first.keys() - {*ranges}:
        assert torch.equal(trained[name], other_trained[name])
    name = "3.quantizer.input.most"  # a process that trains adds its own batch
    assert trained[name] != other_trained[name]
    for name in ranges:
        assert torch.equal(first[name], trained[name])
        assert torch.equal(first[name], other[name])
    for name, value in seen.items():
        assert torch.equal(first[f"0.quantizer.input.{name}"], value)


# Calibration


def errors(x: Tensor, observer: Observer, bits: int) -> float:
    scale, zero_point = affine(observer.least, observer.most, bits, False)
    highest = (1 << bits) - 1
    quantized = torch.fake_quantize_per_tensor_affine(x, scale, zero_point, 0, highest)
    return (quantized - x).square().mean().item()


@pytest.mark.parametrize(("bits", "most_of_error"), [(3, 0.7), (4, 0.7), (8, 1)])
def test_the_least_squared_error_clips_outliers(bits: int, most_of_error: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(4096)
    x[0] = 40
    found, whole = Observer("mse", bits=bits), Observer("minmax")
    found(x)
    whole(x)
    share = (found.most / whole.most).item()
    assert min(abs(share - STEP**n) for n in range(TRIES)) < 1e-6
    assert errors(x, found, bits) <= most_of_error * errors(x, whole, bits)
    for each in (share / STEP, share * STEP):
        whole.least, whole.most = each * x.min(), each * x.max()
        assert errors(x, found, bits) <= errors(x, whole, bits) * (1 + 1e-6)


def test_ranges_of_least_error_are_averaged() -> None:
    torch.manual_seed(0)
    batches = [torch.randn(64), 3 * torch.randn(64), torch.full((4,), torch.nan), torch.zeros(0)]
    both, alone = Observer("mse", momentum=0.25, bits=4), []
    for batch in batches:
        both(batch)
        one = Observer("mse", bits=4)
        one(batch)
        alone.append(one)
    assert alone[2].least.isnan()
    assert both.most.item() == pytest.approx((0.75 * alone[0].most + 0.25 * alone[1].most).item())
    assert both.least.item() < 0


def test_the_observer_knows_the_bits_of_the_input() -> None:
    """Clipping pays off more with 2 bits than with 8."""
    torch.manual_seed(0)
    x, most = torch.randn(512, 2), {}
    for bits in (2, 8):
        layer = TableLinear(2, 1, table=exact(bits, True), observer="mse", impl="reference")
        layer(x)
        most[bits] = layer.quantizer.input.most
    assert most[2] < 0.8 * most[8]


def test_observers_alone_are_calibrated_and_frozen() -> None:
    """As the page says: dropout and statistics of batches are as in evaluation meanwhile."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 3)).eval()
    convert(model, exact(4, True), observer="mse", momentum=0.1, impl="reference")
    for module in model.modules():
        module.train(isinstance(module, Observer))
    x = torch.randn(64, 4)
    with torch.no_grad():
        for batch in x.split(16):
            model(batch)
    assert model[0].num_batches_tracked == 0
    layer: Any = model[2]
    known = layer.quantizer.input.state_dict()
    known = {name: value.clone() for name, value in known.items()}
    model.train()
    layer.quantizer.input.eval()  # weights are trained, the range stays
    model(9 * x)
    model.eval()(9 * x)
    assert layer.quantizer.input.state_dict() == known


@pytest.mark.parametrize("learn_scales", [True, False])
def test_layers_made_on_meta_are_reset(learn_scales: bool) -> None:
    with torch.device("meta"):
        model = nn.Sequential(ApproxLinear(4, 3, multiplier="exact"))
    convert(model, exact(4, True), learn_scales=learn_scales, impl="reference")
    assert all(t.is_meta for t in model.state_dict().values())
    model.to_empty(device="cpu")
    for t in model.state_dict().values():
        t.fill_(9)  # as memory may have it
    for module in model.modules():
        if reset := getattr(module, "reset_parameters", None):
            reset()
    x = torch.randn(50, 4)
    layer: Any = model[0]
    expected = F.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0.5)
    assert layer.quantizer.input.most == x.max()
