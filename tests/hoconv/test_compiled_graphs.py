"""How many graphs torch.compile makes of a layer, as batches, sizes, gradients and modes change:
no more than of a layer of PyTorch's own."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import hoconv
from hoconv import approx
from hoconv import recurrent as rnn

IMAGES = [(2, 4, 8, 8), (3, 4, 8, 8), (3, 4, 10, 10), (5, 4, 12, 12)]
SEQUENCES = [(2, 4, 8), (3, 4, 8), (3, 4, 10), (5, 4, 12)]
ROWS = [(2, 4), (3, 4), (5, 4), (7, 4)]
STEPS = [(3, 2, 4), (3, 3, 4), (4, 3, 4), (5, 5, 4)]


def count_graphs(layer: nn.Module, shapes: list[tuple[int, ...]], dynamic: bool | None) -> int:
    """Calls a compiled layer with each shape, in training and evaluation, with and without
    gradients."""
    torch.compiler.reset()
    counter = CompileCounter()
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=dynamic)
    for training, grad, shape in itertools.product((True, False), (True, False), shapes):
        layer.train(training)
        with torch.set_grad_enabled(grad):
            compiled(torch.randn(shape))
    return counter.frame_count


@pytest.mark.parametrize(
    ("layer", "shapes", "like"),
    [
        (hoconv.HighOrderConv2d(4, 3), IMAGES, nn.Conv2d(4, 4, 3)),
        (approx.ApproxConv2d(4, 4, 3, multiplier="mbm16"), IMAGES, nn.Conv2d(4, 4, 3)),
        (approx.ApproxLinear(4, 4, multiplier="mbm16"), ROWS, nn.Linear(4, 4)),
        (hoconv.DynamicConv1d(4, 3), SEQUENCES, nn.Conv1d(4, 4, 3)),
        (hoconv.DynamicConv1d(4, 3, weight_dropout=0.1), SEQUENCES, nn.Dropout(0.1)),
        (rnn.LSTM(4, 4), STEPS, nn.Dropout(0.1)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_a_layer_costs_no_more_graphs_than_one_of_pytorch(
    layer: nn.Module, shapes: list[tuple[int, ...]], like: nn.Module
) -> None:
    assert count_graphs(layer, shapes, None) <= count_graphs(like, shapes, None) + 1
    # One for each of with and without gradients; where it computes otherwise in training, twice.
    assert count_graphs(layer, shapes, True) <= count_graphs(like, shapes, True)
