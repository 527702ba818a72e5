import pytest
import torch
from omegaconf import OmegaConf
from torch.utils.flop_counter import FlopCounterMode

from hoconv import ApproxConv2d, ApproxLinear
from hoconv.dispatch.declaration import layers
from models.networks.approx_cnn import ApproxCNN


@pytest.mark.parametrize("image_shape", [(1, 8, 8), (3, 17, 26)])
def test_gives_a_logit_for_each_class(image_shape):
    network = ApproxCNN(image_shape, num_classes=7, width=2)
    assert network(torch.randn(2, *image_shape)).shape == (2, 7)


def test_every_product_is_approximate_forward_and_backward():
    network = ApproxCNN((1, 28, 28), num_classes=10)
    with FlopCounterMode(display=False) as counter:
        loss = network(torch.randn(1, 1, 28, 28)).sum()
    forward = counter.get_flop_counts()["Global"]
    assert {str(op) for op in forward} == {"hoconv.approx_conv2d", "hoconv.approx_matmul"}
    assert counter.get_total_flops() == pytest.approx(2 * 29.4e6, rel=0.01)
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    assert all(str(op).startswith("hoconv.approx") for op in counter.get_flop_counts()["Global"])


def test_multiplier_and_gradient_reach_every_layer():
    gradient = OmegaConf.create(["approx", "ste"])  # as it comes from a configuration
    network = ApproxCNN((1, 8, 8), 10, 2, "mbm14", gradient)
    found = [layer for _, layer in layers(network)]
    assert [type(layer) for layer in found] == [ApproxConv2d] * 3 + [ApproxLinear]
    assert {(x.multiplier, x.gradient) for x in found} == {("mbm14", ("approx", "ste"))}


def test_a_file_of_a_multiplier_quantises_every_layer(tmp_path):
    path = tmp_path / "mul4u.txt"
    path.write_text("\n".join(" ".join(str(a * b) for b in range(16)) for a in range(16)))
    network = ApproxCNN((1, 8, 8), 10, 2, str(path))
    network(torch.randn(2, 1, 8, 8)).sum().backward()
    found = [layer for _, layer in layers(network)]
    assert {layer.quantizer.multiplier for layer in found} == {found[0].multiplier}
    assert {(layer.gradient, layer.operator.name) for layer in found} == {("ste", "approx_matmul")}
