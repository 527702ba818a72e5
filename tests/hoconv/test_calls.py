"""Eager calls of every declared operator, which skip the dispatcher where they can: whatever
watches or replaces the calls of PyTorch still does."""

from __future__ import annotations

import copy
import functools
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import hoconv
from hoconv import approx
from hoconv import recurrent as rnn
from hoconv.dispatch.declaration import Sample, operators
from hoconv.tools.testing.call_forms import unlike
from hoconv.tools.testing.comparison import differentiable, output_and_gradients, same_bits
from hoconv.tools.testing.variants import Variant, variants


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "variant" in metafunc.fixturenames:
        metafunc.parametrize("variant", variants(operators()), indirect=True)


@pytest.fixture
def sample(variant: Variant) -> Sample:
    """A sample whose tensors all have elements."""
    return next(
        s
        for s in variant.samples(torch.float32)
        if all(a.numel() for a in s.args if isinstance(a, Tensor))
    )


class Recorder:
    """A mode that notes whether a function or an op of the library is called."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def record(self, function: Any, args: Any, kwargs: Any) -> Any:
        is_op = isinstance(function, torch._ops.OpOverload)
        home = function.namespace if is_op else getattr(function, "__module__", None) or ""
        self.found |= home.partition(".")[0] == "hoconv"
        return function(*args, **(kwargs or {}))


class Functions(Recorder, TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.record(func, args, kwargs)


class Kernels(Recorder, TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.record(func, args, kwargs)


class Holder(Tensor):
    """A tensor that holds another, which it gives to every function of PyTorch."""

    held: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> Holder:
        holder = torch.Tensor._make_subclass(cls, tensor.detach())
        holder.held = tensor
        return holder

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = tree_map_only(Holder, lambda t: t.held, (args, kwargs or {}))
        return func(*args, **kwargs)


@pytest.mark.parametrize("mode", [Functions, Kernels])
@pytest.mark.parametrize("grad", [False, True], ids=["no gradient", "gradient"])
def test_mode_sees_the_call(variant: Variant, sample: Sample, mode: type, grad: bool) -> None:
    if variant.impl == "reference":
        pytest.skip("it calls PyTorch's own ops")
    args = differentiable(sample.args) if grad else sample.args
    variant.call(*args, **sample.kwargs)  # compiles what it needs
    with mode() as seen:
        variant.call(*args, **sample.kwargs)
    if (variant.operator.name, variant.device, mode) == ("recurrent", "cuda", Kernels):
        pytest.skip("the first sample is an LSTM, for which it calls PyTorch's own op")
    assert seen.found


def test_tensor_that_holds_another_passes_its_gradient_on(variant: Variant, sample: Sample) -> None:
    def call_with_holders(*args: Any, **kwargs: Any) -> Any:
        held = (Holder.of(a) if isinstance(a, Tensor) else a for a in args)
        return variant.call(*held, **kwargs)

    got = output_and_gradients(call_with_holders, sample.args, sample.kwargs)
    expected = output_and_gradients(variant.call, sample.args, sample.kwargs)
    assert got.keys() == expected.keys()
    # cuDNN computes an LSTM, but not where a call is overridden.
    rounds_alike = (variant.operator.name, variant.device) != ("recurrent", "cuda")
    same = same_bits if rounds_alike else functools.partial(torch.allclose, rtol=1e-4, atol=1e-5)
    assert all(same(got[name], expected[name]) for name in expected)


def test_inference_mode_gives_the_same_output(variant: Variant, sample: Sample) -> None:
    expected = tree_leaves(variant.call(*differentiable(sample.args), **sample.kwargs))
    with torch.inference_mode():
        got = tree_leaves(variant.call(*sample.args, **sample.kwargs))
        with torch.enable_grad():  # which changes nothing
            for args in (sample.args, differentiable(sample.args)):
                again = tree_leaves(variant.call(*args, **sample.kwargs))
                assert not any(t.requires_grad for t in again)
                assert all(same_bits(a, b) for a, b in zip(again, expected, strict=True))
    assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))
    assert all(t.is_inference() for t in got)


LAYERS: dict[str, Any] = {
    "HighOrderConv2d": lambda: hoconv.HighOrderConv2d(3, 3),
    "LightweightConv1d": lambda: hoconv.LightweightConv1d(3, 3),
    "DynamicConv1d": lambda: hoconv.DynamicConv1d(3, 3),
    "ApproxLinear": lambda: approx.ApproxLinear(3, 3),
    "ApproxConv2d": lambda: approx.ApproxConv2d(3, 3, 3),
    "LSTM": lambda: rnn.LSTM(3, 3),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (None, "expected a tensor.*, got NoneType"),
        (np.zeros((3, 3)), "expected a tensor.*, got ndarray"),
        (torch.eye(3).to_sparse(), "expected a dense tensor, got torch.sparse_coo"),
        (
            torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(3, 3)], layout=torch.jagged),
            "expected a dense tensor, got a nested one",
        ),
    ],
    ids=["None", "array", "sparse", "nested"],
)
def test_what_is_no_dense_tensor_is_refused_by_name(layer: str, x: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        LAYERS[layer]()(x)


def test_what_does_not_fit_is_refused_by_one_line_that_names_an_argument(
    variant: Variant, sample: Sample
) -> None:
    for i, given in enumerate(sample.args):
        for name, args in unlike(sample.args, i) if isinstance(given, Tensor) else ():
            try:
                variant.call(*args, **sample.kwargs)
            except (TypeError, ValueError) as error:
                said = str(error)
                assert re.match(r"\w+: (expected|its) .*$", said), (name, said)


def test_gradient_of_zeros_without_memory(variant: Variant, sample: Sample) -> None:
    args = differentiable(sample.args)
    outputs = tree_leaves(variant.call(*args, **sample.kwargs))
    make: Any = torch._efficientzerotensor  # pyright: ignore[reportPrivateImportUsage]
    zeros = [make(t.shape, dtype=t.dtype, device=t.device) for t in outputs]
    wanted = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    for gradient in torch.autograd.grad(outputs, wanted, zeros, allow_unused=True):
        assert gradient is None or not gradient.any()


def negate(t: Tensor) -> Tensor:
    """A tensor equal to another, of which memory holds the numbers with the other sign."""
    found = torch.complex(torch.zeros_like(t), -t).conj().imag
    assert found.is_neg()
    return found


def test_an_earlier_call_decides_nothing_of_a_later_one(variant: Variant, sample: Sample) -> None:
    def call(args: Any) -> list[Tensor]:
        return tree_leaves(variant.call(*args, **sample.kwargs))

    def are_floating(t: Any) -> bool:
        return isinstance(t, Tensor) and t.is_floating_point()

    with torch.no_grad():
        expected = call(sample.args)
    assert not any(t.requires_grad for t in call(sample.args))
    assert all(t.requires_grad for t in call(differentiable(sample.args)))
    for change in (negate, Tensor.clone, nn.Parameter):
        args = [change(a) if are_floating(a) else a for a in sample.args]
        assert all(same_bits(a, b) for a, b in zip(call(args), expected, strict=True)), change
    one = [a[None] if isinstance(a, Tensor) else a for a in sample.args]
    dims = tuple(0 if isinstance(a, Tensor) else None for a in one)
    found = torch.func.vmap(lambda *args: tuple(call(args)), dims)(*one)
    assert all(torch.allclose(a[0], b, 1e-4, 1e-5) for a, b in zip(found, expected, strict=True))
    with torch.inference_mode():
        assert all(t.is_inference() for t in call(sample.args))
    assert not any(t.is_inference() for t in call(sample.args))


class Double(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        return 2 * value


@pytest.mark.parametrize(
    ("made", "inner", "shape"),
    [
        (hoconv.HighOrderConv2d(3, 3), "generator", (1, 3, 5, 5)),
        (hoconv.LightweightConv1d(4, 3, bias=True), "", (1, 4, 6)),
        (hoconv.DynamicConv1d(4, 3, generator_bias=True), "generator", (1, 4, 6)),
        (approx.ApproxLinear(8, 4), "", (2, 8)),
        (approx.ApproxConv2d(3, 3, 3), "", (1, 3, 5, 5)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_a_parametrization_takes_the_place_of_a_parameter(
    made: nn.Module, inner: str, shape: tuple[int, ...]
) -> None:
    x = torch.randn(shape)
    for name in ("weight", "bias"):
        doubled, parametrized = copy.deepcopy(made), copy.deepcopy(made)
        with torch.no_grad():
            getattr(doubled.get_submodule(inner), name).uniform_().mul_(2)
            value = getattr(doubled.get_submodule(inner), name) / 2
            getattr(parametrized.get_submodule(inner), name).copy_(value)
        parametrize.register_parametrization(parametrized.get_submodule(inner), name, Double())
        assert torch.equal(parametrized(x), doubled(x))
