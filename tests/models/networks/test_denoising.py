import pytest
import torch

from hoconv.dispatch.declaration import layers
from models.networks.denoising import DenoisingNetwork
from tests.support import set_to_reference


@pytest.mark.parametrize("block", ["convolution", "involution"])
@pytest.mark.parametrize("kernel_size", [9, 21, 4, None])
@pytest.mark.parametrize("size", [(16, 16), (33, 17)])
def test_gives_an_image_of_the_same_size(block, kernel_size, size):
    network = set_to_reference(DenoisingNetwork(8, 2, block, kernel_size))
    assert network(torch.randn(2, 3, *size)).shape == (2, 3, *size)


@pytest.mark.parametrize("kernel_size", [5, None])
def test_everything_learns(kernel_size):
    network = set_to_reference(DenoisingNetwork(8, 2, "involution", kernel_size))
    network(torch.randn(2, 3, 12, 12)).square().sum().backward()
    still = [name for name, p in network.named_parameters() if p.grad is None or not p.grad.any()]
    assert still == []


def test_a_pixel_is_a_mean_of_those_around_it():
    """Keeps an image of one colour, at the border too, and every value between its neighbours'."""
    network = set_to_reference(DenoisingNetwork(8, 2, kernel_size=3))
    flat = torch.full((1, 3, 12, 10), 0.7)
    torch.testing.assert_close(network(flat), flat)
    x = torch.randn(1, 3, 12, 10)
    padded = torch.nn.functional.pad(x, [1] * 4, mode="replicate")
    highest = torch.nn.functional.max_pool2d(padded, 3, 1)
    assert (network(x) < highest).all()
    assert (network(x) > -torch.nn.functional.max_pool2d(-padded, 3, 1)).all()


def test_without_kernels_it_subtracts_what_the_trunk_predicts():
    network = DenoisingNetwork(8, 2, kernel_size=None)
    assert not list(layers(network))
    state = network.state_dict()
    state["denoise.head.1.weight"].zero_()
    state["denoise.head.1.bias"].fill_(0.25)
    x = torch.randn(1, 3, 8, 8)
    torch.testing.assert_close(network(x), x - 0.25)


@pytest.mark.parametrize(("block", "count"), [("convolution", 1), ("involution", 4)])
def test_every_layer_gets_the_requested_implementation(block, count):
    network = set_to_reference(DenoisingNetwork(8, 3, block))
    assert [layer.impl for _, layer in layers(network)] == count * ["reference"]


def test_both_ways_have_about_as_many_weights():
    """And so, at each pixel, about as many products."""
    kernels, plain = (
        sum(p.numel() for p in DenoisingNetwork(kernel_size=k).parameters()) for k in (9, None)
    )
    assert plain < kernels < 1.1 * plain


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": "dense"}, "block: expected one of convolution, involution; got 'dense'"),
        ({"width": 0}, "width: expected a whole number of at least 1"),
        ({"kernel_size": 32}, "kernel_size: expected an int from 1 to 31"),
    ],
)
def test_what_it_cannot_be_made_of(options, message):
    with pytest.raises(ValueError, match=message):
        DenoisingNetwork(**options)
