"""Layers that change after a first call: attributes, subclasses, PyTorch's classes.

A warm layer, a new one with the same change, and the reference give the same, or refuse the same.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd

import hoconv
from hoconv import approx
from hoconv import recurrent as rnn

DEVICES = [("cpp", "cpu"), pytest.param(("cuda", "cuda"), marks=pytest.mark.gpu)]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
Make = Callable[[], nn.Module]


def exact(make: Make, *shape: int) -> tuple[Make, Tensor]:
    return lambda: make().double(), torch.randn(shape, dtype=torch.float64)


def of_a_table(make: Callable[..., nn.Module], *shape: int) -> tuple[Make, Tensor]:
    """A layer whose range of inputs is known; a call in training would move it."""
    numbers, x = np.arange(-128, 128), torch.randn(shape)
    table = approx.LookupTable(numbers[:, None] * numbers, signed=True)

    def make_and_observe() -> nn.Module:
        layer = make(table=table)
        layer(x)
        return layer.eval()

    return make_and_observe, x


LAYERS: dict[str, tuple[Make, Tensor]] = {
    "high order": exact(
        lambda: hoconv.HighOrderConv2d(9, 3, generator_kernel_size=3, groups=3), 2, 9, 5, 6
    ),
    "dynamic": exact(
        lambda: hoconv.DynamicConv1d(4, 3, heads=2, generator_bias=True), 2, 4, 7
    ),
    "lightweight": exact(lambda: hoconv.LightweightConv1d(4, 3, heads=2, bias=True), 2, 4, 7),
    "linear": (lambda: approx.ApproxLinear(6, 3), torch.randn(4, 6)),
    "convolution": (lambda: approx.ApproxConv2d(4, 6, 3, groups=2), torch.randn(2, 4, 6, 6)),
    "convolution of a table": of_a_table(
        functools.partial(approx.TableConv2d, 4, 6, 3, groups=2), 2, 4, 6, 6
    ),
    "linear of a table": of_a_table(functools.partial(approx.TableLinear, 6, 3), 4, 6),
    "lstm": exact(lambda: rnn.LSTM(4, 4, 2), 4, 4, 4),
    "gru of both directions": exact(lambda: rnn.GRU(4, 4, 2, bidirectional=True), 4, 4, 4),
    "rnn": exact(lambda: rnn.RNN(rnn.peephole_lstm, 4, 4, 2), 4, 4, 4),
}  # fmt: skip

# Values of attributes that are names, or None; each has one that there is not, too.
NAMES: dict[str, tuple[Any, ...]] = {
    "impl": ("auto", "reference"),
    "schedule": ("naive", "fused"),
    "normalize": (None, "softmax"),
    "padding": ("causal", "same"),
    "padding_mode": ("zeros", "reflect", "circular"),
    "multiplier": ("exact", "mitchell16"),
    "gradient": ("ste", "analytic"),
}


def other_values(name: str, value: Any) -> tuple[Any, ...]:
    """Returns what an attribute may be set to; nothing where it has no values of a kind known."""
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return 1, 2, 2 * value + 1
    if isinstance(value, float):
        return 0.5, 2.0
    if isinstance(value, tuple) and value and all(isinstance(each, int) for each in value):
        return ((2,) * len(value),)
    if name in NAMES:
        return *NAMES[name], "nonsense"
    return ("nonsense",) if name in ("options", "runs") else ()


def attributes() -> Iterator[Any]:
    for layer, (make, _) in LAYERS.items():
        for name, value in vars(make()).items():
            if not name.startswith("_"):
                for other in other_values(name, value):
                    yield pytest.param(layer, name, other, id=f"{layer}, {name}={other!r}")


def outcome(layer: nn.Module, x: Tensor, change: Callable[[nn.Module], None] | None = None) -> Any:
    """Returns the outputs, states and gradients of a call after a change; where the layer refuses,
    the error's class and the number of its lines."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    torch.manual_seed(1)  # of the dropout
    try:
        if change:
            change(layer)
        found = layer(x)
    except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
        return type(error), len(str(error).splitlines())
    tensors = [t for each in (found if isinstance(found, tuple) else (found,))
               for t in (each if isinstance(each, tuple) else (each,))]  # fmt: skip
    torch.manual_seed(2)
    torch.autograd.backward(tensors, [torch.randn_like(t) for t in tensors])
    return tensors, [each.grad for each in (x, *layer.parameters())]


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(found[0], type) or isinstance(expected[0], type):
        assert found == expected
        return
    for ours, theirs in zip([*found[0], *found[1]], [*expected[0], *expected[1]], strict=True):
        if ours is None or theirs is None:  # None stands for zeros
            assert all(t is None or not t.any() for t in (ours, theirs))
            continue
        tolerance = TOLERANCE[ours.dtype]
        torch.testing.assert_close(ours.cpu(), theirs.cpu(), rtol=tolerance, atol=tolerance)


def make_three(name: str, impl: str, device: str) -> tuple[list[Any], Tensor]:
    """Returns a warm layer, a new one, and one of the reference, of equal weights; and an input."""
    make, x = LAYERS[name]
    warm: Any = make().to(device)
    warm.impl = impl
    cold, reference = copy.deepcopy(warm), copy.deepcopy(warm)
    reference.impl = "reference"
    x = x.to(device)
    for _ in range(2):
        warm(x)
        outcome(warm, x)
    return [warm, cold, reference], x


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize(("layer", "name", "value"), [*attributes()])
def test_an_attribute_counts_after_a_call_or_is_refused(
    layer: str, name: str, value: Any, where: tuple[str, str]
) -> None:
    layers, x = make_three(layer, *where)

    def change(module: nn.Module) -> None:
        setattr(module, name, value)

    warm, cold, reference = (outcome(each, x, change) for each in layers)
    assert_same(warm, cold)
    assert_same(cold, reference)
    if value == "nonsense":
        assert isinstance(warm[0], type)
    if isinstance(warm[0], type):
        assert warm[1] == 1


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (layer, name)
        for layer, (make, _) in LAYERS.items()
        for kind in type(make()).__mro__
        if kind.__module__.startswith("hoconv")
        for name, method in vars(kind).items()
        if callable(method) and not name.startswith("__") and name != "fixed"
    ],
)
def test_a_method_that_a_subclass_overrides_is_called_each_time(
    layer: str, name: str, where: tuple[str, str]
) -> None:
    """If the first call goes through it, later ones do."""
    layers, x = make_three(layer, *where)
    kind, calls = type(layers[0]), []

    def override(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return getattr(super(derived, self), name)(*args, **kwargs)

    derived: Any = type(kind.__name__, (kind,), {name: override})
    counts = []
    for each in layers[:2]:
        each.__class__ = derived
        for _ in range(2):
            calls.clear()
            each(x)
            counts.append(len(calls))
    assert len(set(counts)) == 1


GENERATORS = {"high order": nn.Conv2d, "dynamic": nn.Linear}


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("method", ["forward", "__call__", "_call_impl", "_conv_forward"])
def test_a_method_replaced_in_a_class_of_pytorch_computes_the_generator(
    name: str, method: str, where: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As adapters replace them; and the published one computes it when it is set back."""
    kind = GENERATORS[name]
    if not hasattr(kind, method):
        pytest.skip(f"{kind.__name__} has no {method}")
    layers, x = make_three(name, *where)
    before = outcome(layers[0], x)
    published = getattr(kind, method)
    monkeypatch.setattr(kind, method, lambda *args: 2 * published(*args))
    warm, cold, reference = (outcome(each, x) for each in layers)
    hook = layers[1].generator.register_forward_hook(lambda *_: None)
    hooked = outcome(layers[1], x)
    hook.remove()
    for each in (warm, cold, reference):
        assert_same(each, hooked)
    with pytest.raises(AssertionError):
        assert_same(warm, before)
    monkeypatch.undo()
    assert_same(outcome(layers[0], x), before)


# PyTorch's own, when it traces what the gradient reads.
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a .functools.lru_cache:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("name", ["high order", "dynamic", "linear", "lstm"])
def test_a_backward_pass_is_compiled_after_an_eager_forward(
    name: str, where: tuple[str, str]
) -> None:
    (layer, *_), x = make_three(name, *where)
    torch._dynamo.reset()
    expected = outcome(layer, x)
    with compiled_autograd._enable(torch.compile(backend="eager")):
        found = outcome(layer, x)
    assert_same(found, expected)
    torch._dynamo.reset()
