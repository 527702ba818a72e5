"""Calls that are like earlier ones, against the same calls when none is kept."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import hoconv
from hoconv import approx
from hoconv.registration import Repeats

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "high order": (lambda: hoconv.HighOrderConv2d(4, 3, generator_kernel_size=3), (2, 4, 5, 6)),
    "high order, no bias": (
        lambda: hoconv.HighOrderConv2d(4, 3, groups=2, bias=False, normalize="softmax"),
        (1, 4, 7, 5),
    ),
    "dynamic": (lambda: hoconv.DynamicConv1d(4, 3, heads=2, generator_bias=True), (2, 4, 7)),
    "dynamic, bias": (lambda: hoconv.DynamicConv1d(4, 3, bias=True, padding="same"), (2, 4, 7)),
    "linear": (lambda: approx.ApproxLinear(6, 3), (4, 6)),
    "linear of more dimensions": (lambda: approx.ApproxLinear(6, 3, bias=False), (2, 4, 6)),
    "conv": (lambda: approx.ApproxConv2d(4, 6, 3, padding=1, groups=2), (2, 4, 6, 5)),
    "conv, same": (lambda: approx.ApproxConv2d(4, 6, 4, padding="same"), (2, 4, 6, 5)),
}
pytestmark = [
    pytest.mark.parametrize("device", DEVICES),
    pytest.mark.parametrize("name", LAYERS),
]


@contextmanager
def nothing_kept() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Repeats, "find", lambda *_: None)
        yield


class Functions(TorchFunctionMode):
    """Notes what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Ops(TorchDispatchMode):
    """Likewise, the ops."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


CONTEXTS: dict[str, Callable[[str], Any]] = {
    "none": lambda _: nullcontext(),
    "no_grad": lambda _: torch.no_grad(),
    "inference": lambda _: torch.inference_mode(),
    "autocast": lambda device: torch.autocast(device, torch.bfloat16),
    "functions": lambda _: Functions(),
    "ops": lambda _: Ops(),
    "default device": lambda device: torch.device(device),
}


def run(layer: nn.Module, x: Tensor, context: Any) -> list[Any]:
    """What a call and its gradient do: tensors and what a mode has seen, or an error."""
    leaves = [t for t in (x, *layer.parameters()) if t.requires_grad]
    try:
        with context:
            out = layer(x)
            found: list[Any] = [out, getattr(context, "seen", None)]
            if out.requires_grad:
                found += torch.autograd.grad(out.float().square().sum(), leaves, allow_unused=True)
    except Exception as error:  # whatever it is, it has to be the same
        return [type(error), str(error)]
    return found


def assert_same(got: list[Any], expected: list[Any]) -> None:
    assert len(got) == len(expected), (got, expected)
    for mine, other in zip(got, expected, strict=True):
        if not isinstance(mine, Tensor) or not isinstance(other, Tensor):
            assert mine == other
            continue
        assert (mine.dtype, mine.shape, mine.stride()) == (other.dtype, other.shape, other.stride())
        assert mine.requires_grad == other.requires_grad
        assert mine.is_inference() == other.is_inference()
        torch.testing.assert_close(mine, other, equal_nan=True)


def change(layer: Any, name: str, draw: random.Random) -> None:
    """Something that a user does to a layer between calls."""
    weights = [m for m in layer.modules() if isinstance(getattr(m, "weight", None), Tensor)]
    module: Any = draw.choice(weights)
    weight: Any = module.weight
    match draw.randrange(10):
        case 0:
            weight.requires_grad_(not weight.requires_grad)
        case 1:
            with torch.no_grad():
                weight.mul_(1.5)
        case 2:
            weight.data = torch.randn_like(weight)
        case 3:
            module.weight = nn.Parameter(weight.detach().flip(0).contiguous())
        case 4:
            layer.impl = draw.choice(["auto", "reference"])
        case 5:
            layer.train(not layer.training)
        case 6 if not name.startswith(("linear", "conv")):
            layer.to(draw.choice([torch.float64, torch.float32]))
        case 7 if name.startswith("high order"):
            layer.residual, layer.dilation = draw.random() < 0.5, draw.choice([1, 2])
        case 8 if name.startswith(("linear", "conv")):
            layer.multiplier = draw.choice(["mbm16", "exact", "mitchell16"])
            layer.gradient = draw.choice(["approx", "ste", ("approx", "ste")])
        case 9 if module.bias is not None:
            with torch.no_grad():
                module.bias.add_(0.1)


def test_any_calls_in_any_order(device: str, name: str) -> None:
    make, shape = LAYERS[name]
    draw = random.Random(0)
    torch.manual_seed(0)
    layer = make().to(device)
    for _ in range(60):
        change(layer, name, draw)
        dtype = draw.choice([next(layer.parameters()).dtype] * 4 + [torch.float64, torch.int64])
        sizes = [n if i == 1 or draw.random() < 0.7 else draw.randrange(4) for i, n in
                 enumerate(shape)]  # fmt: skip
        x = (8 * torch.randn(sizes, device=device)).to(dtype)
        if draw.random() < 0.3 and x.dim() > 2:
            x = x.transpose(0, -1).contiguous().transpose(0, -1)
        if dtype.is_floating_point and draw.random() < 0.3:
            x.requires_grad_()
        for context in draw.sample([*CONTEXTS.values()], 3):
            with nothing_kept():
                expected = run(layer, x, context(device))
            for _ in range(2):
                assert_same(run(layer, x, context(device)), expected)


def test_transforms_are_seen(device: str, name: str) -> None:
    make, shape = LAYERS[name]
    layer, x = make().to(device), torch.randn(shape, device=device)
    for _ in range(2):
        layer(x)
    if name.startswith(("linear", "conv")):
        return  # which the tests of transforms of each operator are about
    many = torch.randn(3, *shape, device=device)
    with torch.no_grad():
        layer(x)
        found = torch.func.vmap(layer)(many)
        for one, each in zip(many, found, strict=True):
            torch.testing.assert_close(each, layer(one))
    gradient = torch.func.grad(lambda x: layer(x).square().sum())(x)
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(layer(leaf).square().sum(), leaf)
    torch.testing.assert_close(gradient, expected)
    tangent = torch.func.jvp(layer, (x,), (torch.ones_like(x),))[1]
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        out = torch.autograd.forward_ad.unpack_dual(layer(dual))
        torch.testing.assert_close(out.tangent, tangent)


def test_an_earlier_call_is_found(device: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, shape = LAYERS[name]
    layer, x = make().to(device), torch.randn(shape, device=device)
    found: list[Any] = []
    own = Repeats.find

    def note(*args: Any) -> Any:
        found.append(own(*args))
        return found[-1]

    monkeypatch.setattr(Repeats, "find", note)
    for _ in range(2):
        layer(x)
    assert (found[-1] is not None) == (name != "linear of more dimensions" and "same" not in name)


def test_options_that_are_lists(device: str, name: str) -> None:
    if not name.startswith(("linear", "conv")):
        pytest.skip("its options are numbers and names")
    make, shape = LAYERS[name]
    layer: Any = make().to(device)
    x = torch.randn(shape, device=device)
    expected = layer(x)
    layer.gradient = ["approx", "ste"]
    for _ in range(2):
        torch.testing.assert_close(layer(x), expected)
