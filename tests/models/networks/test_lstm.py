import pytest
import torch
from torch import nn

from hoconv.dispatch.declaration import layers
from models.networks.lstm import ImageReader, NarrowLinear
from tests.support import set_to_reference


@pytest.mark.parametrize("steps", ["rows", "pixels"])
@pytest.mark.parametrize("cell", ["lstm", "gru", "projected_lstm"])
@pytest.mark.parametrize("image_shape", [(1, 8, 8), (3, 5, 4)])
def test_gives_a_logit_for_each_class(cell, steps, image_shape):
    network = set_to_reference(ImageReader(image_shape, 7, cell, steps, hidden_size=4))
    assert network(torch.randn(2, *image_shape)).shape == (2, 7)


@pytest.mark.parametrize("steps", ["rows", "pixels"])
def test_reads_all_of_the_image_in_order(steps):
    network = set_to_reference(ImageReader((1, 3, 4), 2, "gru", steps, hidden_size=4))
    x = torch.randn(1, 1, 3, 4, requires_grad=True)
    network(x).sum().backward()
    assert x.grad is not None
    assert (x.grad != 0).all()
    assert not torch.allclose(network(x), network(x.flip(2)))
    sequence = torch.arange(12.0).view(1, 1, 3, 4)
    seen = []
    network.recurrent.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    network(sequence)
    expected = torch.arange(12.0).view((3, 1, 4) if steps == "rows" else (12, 1, 1))
    assert torch.equal(seen[0], expected)


def test_forget_gates_start_open():
    network = set_to_reference(ImageReader((1, 28, 28), 10, "lstm", "pixels"))
    bias = network.recurrent.get_parameter("bias_f_l0")
    assert bias.min() >= 0
    assert bias.max() > 6


def test_set_impl_reaches_its_layer():
    network = set_to_reference(ImageReader((1, 8, 8), 10))
    assert [(name, layer.impl) for name, layer in layers(network)] == [("recurrent", "reference")]


def test_unknown_cells_and_steps_are_refused():
    with pytest.raises(ValueError, match=r"cell: expected one of coupled_lstm, .*; got 'fast'"):
        ImageReader((1, 8, 8), 10, "fast")
    with pytest.raises(ValueError, match="steps: expected 'rows' or 'pixels', got 'columns'"):
        ImageReader((1, 8, 8), 10, steps="columns")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_narrow_linear_is_pytorchs_linear(rows, bias):
    narrow = NarrowLinear(5, 3, bias=bias, dtype=torch.float64)
    linear = nn.Linear(5, 3, bias=bias, dtype=torch.float64)
    linear.load_state_dict(narrow.state_dict())
    x = torch.randn(rows, 5, dtype=torch.float64, requires_grad=True)
    found, expected = narrow(x), linear(x)
    torch.testing.assert_close(found, expected)
    cotangent = torch.randn_like(expected)
    of_narrow = torch.autograd.grad(found, [x, *narrow.parameters()], cotangent)
    of_linear = torch.autograd.grad(expected, [x, *linear.parameters()], cotangent)
    torch.testing.assert_close(of_narrow, of_linear)
