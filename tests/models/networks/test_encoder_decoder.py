import pytest
import torch
import torchvision
from torch import nn

from hoconv import HighOrderConv2d, approx
from hoconv.dispatch.declaration import layers
from models.networks.backbone import Backbone, WeightsNotFoundError
from models.networks.encoder_decoder import EncoderDecoder
from tests.support import set_to_reference


@pytest.mark.parametrize("size", [(8, 8), (33, 17), (64, 48)])
def test_gives_logits_for_every_pixel(size):
    network = set_to_reference(EncoderDecoder(num_classes=5, width=4))
    assert network(torch.randn(2, 3, *size)).shape == (2, 5, *size)


def test_every_resolution_is_refined_by_a_layer_that_learns():
    network = set_to_reference(EncoderDecoder(num_classes=5, width=4))
    network(torch.randn(2, 3, 16, 16)).square().sum().backward()
    found = [layer for _, layer in layers(network)]
    assert [layer.channels for layer in found] == [16, 8, 4]
    assert all(layer.generator.weight.grad.abs().max() > 0 for layer in found)


@pytest.mark.parametrize(("depth", "channels"), [(1, [4]), (5, [64, 32, 16, 8, 4])])
def test_depth_is_the_number_of_halvings(depth, channels):
    network = set_to_reference(EncoderDecoder(num_classes=5, width=4, depth=depth))
    assert network(torch.randn(2, 3, 64, 32)).shape == (2, 5, 64, 32)
    assert [layer.channels for _, layer in layers(network)] == channels
    assert network.encoder(torch.randn(2, 3, 64, 32))[-1].shape[2:] == (
        64 // 2**depth,
        32 // 2**depth,
    )


def test_refinement_starts_near_the_identity():
    network = set_to_reference(EncoderDecoder(num_classes=5, width=4))
    (layer, *_) = (layer for _, layer in layers(network))
    x = torch.randn(1, 16, 12, 12)
    error = (layer(x) - x).norm() / x.norm()
    assert 0.1 < error < 0.5, "a weighted mean, most of it the pixel's own"


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """Random weights of a ResNet-18 where torch keeps what it has downloaded."""
    torch.manual_seed(1)
    network = torchvision.models.resnet18()
    url = torchvision.models.ResNet18_Weights.DEFAULT.url
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    path = tmp_path / "checkpoints" / url.rsplit("/", 1)[1]
    torch.save(network.state_dict(), path)
    return network


def test_a_backbone_with_published_weights_replaces_the_encoder(published):
    network = set_to_reference(EncoderDecoder(3, width=4, weights="ResNet18_Weights.DEFAULT"))
    assert network(torch.randn(2, 3, 64, 40)).shape == (2, 3, 64, 40)
    assert isinstance(network.encoder, Backbone)
    network.encoder.load()
    assert network.encoder.channels == [3, 64, 64, 128, 256, 512]
    assert len([layer for _, layer in layers(network)]) == 5
    weights = network.encoder.stages.state_dict()
    assert torch.equal(weights["conv1.weight"], published.conv1.weight)
    assert torch.equal(weights["layer4.1.bn2.weight"], published.layer4[1].bn2.weight)


def test_a_backbone_of_approximate_layers_takes_published_weights(published):
    encoder = Backbone("ResNet18_Weights.DEFAULT")
    table = approx.multiplier(lambda a, b: a * b, bits=8, signed=True)
    approx.convert(encoder, table, impl="reference")
    encoder.load()
    assert torch.equal(encoder.stages.get_parameter("conv1.weight"), published.conv1.weight)


def test_features_of_a_backbone_are_those_of_the_network(published):
    encoder = Backbone("ResNet18_Weights.DEFAULT").eval()
    encoder.load()
    published.eval()
    x = torch.randn(1, 3, 32, 32)
    *_, features = encoder(x)
    expected = nn.Sequential(*list(published.children())[:-2])(x)
    torch.testing.assert_close(features, expected)


def test_a_backbone_trains_its_batch_normalisation(published):
    encoder = Backbone("ResNet18_Weights.DEFAULT")
    encoder.load()
    before = encoder.stages.state_dict()["bn1.running_mean"].clone()
    assert not before.any(), "finding out the channels leaves no trace"
    encoder(torch.randn(2, 3, 32, 32))
    assert encoder.stages.state_dict()["bn1.running_mean"].any()


@pytest.mark.parametrize("error", [OSError("no route to host"), RuntimeError("invalid hash value")])
def test_weights_that_cannot_be_had_are_an_error_with_the_fix(monkeypatch, error, tmp_path):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", fail)
    with pytest.raises(WeightsNotFoundError) as caught:
        Backbone("ResNet18_Weights.DEFAULT").load()
    message = str(caught.value)
    for expected in (str(tmp_path), "resnet18", str(error), "model.weights=null"):
        assert expected in message


@pytest.mark.parametrize(
    "weights", ["ResNet18_Weights", "ResNet18_Weights.V9", "ViT_B_16_Weights.DEFAULT"]
)
def test_unknown_weights_are_named_with_what_there_is(weights):
    with pytest.raises(ValueError, match=f"ResNet50_Weights.*got '{weights}'"):
        Backbone(weights)


def test_layers_are_high_order_convolutions():
    network = set_to_reference(EncoderDecoder(num_classes=5, width=4))
    assert all(isinstance(layer, HighOrderConv2d) for _, layer in layers(network))
