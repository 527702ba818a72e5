import pytest
import torch
from torch import nn

from hoconv.dispatch.declaration import layers
from hoconv.recurrent import Cell, cells
from models.networks.lstm import ImageReader, NarrowLinear
from tests.support import set_to_reference


@pytest.mark.parametrize("steps", ["rows", "pixels"])
@pytest.mark.parametrize("cell", ["lstm", "gru", "projected_lstm"])
@pytest.mark.parametrize("image_shape", [(1, 8, 8), (3, 5, 4)])
def test_gives_a_logit_for_each_class(cell, steps, image_shape):
    network = set_to_reference(ImageReader(image_shape, 7, cell, steps, hidden_size=4))
    assert network(torch.randn(2, *image_shape)).shape == (2, 7)


@pytest.mark.parametrize("cell", sorted(n for n, v in vars(cells).items() if isinstance(v, Cell)))
def test_every_cell_of_the_library_reads_images(cell):
    if getattr(cells, cell).inputs:
        with pytest.raises(ValueError, match="cell: expected one of"):
            ImageReader((1, 4, 4), 7, cell)
        return
    network = ImageReader((1, 4, 4), 7, cell, "permuted", hidden_size=8, num_layers=2)
    logits = set_to_reference(network)(torch.randn(2, 1, 4, 4))
    assert logits.shape == (2, 7)
    logits.sum().backward()
    assert all(p.grad is not None for p in network.parameters())


def test_pixels_are_read_in_one_random_order():
    first, second = (
        set_to_reference(ImageReader((1, 3, 4), 2, "gru", "permuted", hidden_size=4))
        for _ in range(2)
    )
    seen = []
    for network in (first, second):
        network.recurrent.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
        network(torch.arange(12.0).view(1, 1, 3, 4))
    assert torch.equal(*seen)
    assert not torch.equal(seen[0].flatten(), torch.arange(12.0))
    assert torch.equal(seen[0].flatten().sort()[0], torch.arange(12.0))


def test_options_reach_the_cell():
    network = ImageReader((1, 4, 4), 7, "gla", hidden_size=8, options={"heads": 2, "keys": 3})
    assert network.recurrent.options == {"heads": 2, "keys": 3, "values": 2}
    with pytest.raises(TypeError, match="head: not an option of the cell gla; it has heads, keys"):
        ImageReader((1, 4, 4), 7, "gla", options={"head": 2})


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
    with pytest.raises(ValueError, match=r"cell: expected one of block_gru, .*; got 'fast'"):
        ImageReader((1, 8, 8), 10, "fast")
    with pytest.raises(ValueError, match="steps: expected 'rows', 'pixels' or 'permuted', got"):
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
