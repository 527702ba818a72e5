import pytest
import torch
from torch import nn

from hoconv import HighOrderConv2d
from hoconv.dispatch.declaration import layers
from models.networks.cnn import CNN
from tests.support import set_to_reference


@pytest.mark.parametrize("image_shape", [(1, 8, 8), (1, 28, 28), (3, 33, 17), (1, 4, 4)])
def test_gives_a_logit_for_each_class(image_shape):
    network = set_to_reference(CNN(image_shape, num_classes=7, width=4))
    assert network(torch.randn(2, *image_shape)).shape == (2, 7)


def test_high_order_layers_start_as_the_identity_and_learn():
    torch.manual_seed(0)
    network = set_to_reference(CNN((1, 8, 8), num_classes=10, width=4))
    x = torch.randn(2, 1, 8, 8)
    logits = network(x)
    logits.logsumexp(1).sum().backward()

    found = [layer for _, layer in layers(network)]
    assert len(found) == 2
    assert all(layer.generator.weight.grad.abs().max() > 0 for layer in found)

    for i, module in enumerate(network.features):
        if isinstance(module, HighOrderConv2d):
            network.features[i] = nn.Identity()
    torch.testing.assert_close(network(x), logits)
