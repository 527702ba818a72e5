import pytest
import torch
import torch.nn.functional as F

from hoconv.dispatch.declaration import layers
from models.networks.involution import Bottleneck, involution
from tests.support import set_to_reference


@pytest.mark.parametrize(("channels", "groups"), [(32, 2), (16, 1), (4, 1)])
@pytest.mark.parametrize("stride", [1, 2])
def test_it_is_the_involution_of_the_paper(channels, groups, stride):
    """The sum over a window of 7 x 7 of kernels that are generated from the mean of the pixels in
    its middle; 16 channels share a kernel."""
    layer = set_to_reference(involution(channels, stride)).double()
    x = torch.randn(2, channels, 8, 6, dtype=torch.float64)
    means = F.avg_pool2d(x, stride)
    modules = layer.generator.modules()
    reduce, span = (module for module in modules if isinstance(module, torch.nn.Conv2d))
    reduced = F.batch_norm(reduce(means), None, None, training=True).relu()
    kernels = span(reduced).unflatten(1, (49, groups))
    windows = F.unfold(x, 7, padding=3, stride=stride)
    windows = windows.view(2, groups, channels // groups, 49, *means.shape[2:])
    expected = torch.einsum("bgcihw,bighw->bgchw", windows, kernels).flatten(1, 2)
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("block", ["convolution", "involution"])
@pytest.mark.parametrize("stride", [1, 2])
def test_a_block_takes_images_of_any_size_and_learns(block, stride):
    network = set_to_reference(Bottleneck(8, 16, block, stride))
    x = torch.randn(2, 8, 9, 5)
    out = network(x)
    assert out.shape == (2, 16, -(-9 // stride), -(-5 // stride))
    out.square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in network.parameters())
    assert len(list(layers(network))) == (block == "involution")
