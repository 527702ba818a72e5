"""hoconv.tools.benchmarking.marks: what counts as a layer's time, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hoconv import HighOrderConv2d
from hoconv.tools.benchmarking import marks


class Clock:
    """Stands for the time, which the modules below take."""

    now = 0.0


class Pass(torch.autograd.Function):
    """Takes the two given times, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, forward_s: float, backward_s: float):
        Clock.now += forward_s
        ctx.backward_s = backward_s
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        Clock.now += ctx.backward_s
        return grad, grad.sum(), None, None


class Module(nn.Module):
    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.times = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        return Pass.apply(x, self.scale, *self.times)  # pyright: ignore


class Layer(Module):
    operator = HighOrderConv2d.operator


class Outer(nn.Module):
    """A layer that holds another one, whose time is its own."""

    operator = HighOrderConv2d.operator

    def __init__(self) -> None:
        super().__init__()
        self.inner = Layer(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


NAME = HighOrderConv2d.operator.name


def now() -> float:
    return Clock.now


@pytest.mark.parametrize("first", [True, False])
def test_layers_are_marked_forward_and_backward(first: bool) -> None:
    modules = [Module(100, 200), Layer(1, 2), Module(1000, 2000), Layer(10, 20), Module(5, 5)]
    model = nn.Sequential(*modules[first:])  # the first layer's input has a gradient, or not
    marked = marks.LayerMarks(model, now)
    for _ in range(2):
        marked.clear()
        model(torch.ones(3)).sum().backward()
        assert marked.milliseconds() == {NAME: 1e3 * (1 + 2 + 10 + 20)}
    marked.remove()
    marked.clear()
    model(torch.ones(3)).sum().backward()
    assert marked.milliseconds() == {}


def test_a_layer_within_a_layer_counts_once() -> None:
    model = nn.Sequential(Module(100, 200), Outer())
    marked = marks.LayerMarks(model, now)
    model(torch.ones(3)).sum().backward()
    assert marked.milliseconds() == {NAME: 1e3 * (3 + 4)}


def test_a_layer_that_is_called_twice() -> None:
    layer, between = Layer(1, 2), Module(100, 200)
    marked = marks.LayerMarks(layer, now)
    x = torch.ones(3, requires_grad=True)
    layer(between(layer(x))).sum().backward()
    assert marked.milliseconds() == {NAME: 1e3 * (1 + 2) * 2}


def test_a_call_whose_end_is_not_seen_leaves_its_operator_out() -> None:
    layer = Layer(1, 2)
    marked = marks.LayerMarks(layer, now)
    x = torch.ones(3)  # without a gradient, only the parameters' is seen, once for both calls
    (layer(x) + layer(x)).sum().backward()
    assert marked.milliseconds() == {}
