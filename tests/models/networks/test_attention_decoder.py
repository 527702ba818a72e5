import pytest
import torch

from hoconv import approx
from hoconv.dispatch.declaration import layers
from models.networks.attention_decoder import AttentionDecoder
from models.networks.backbone import Backbone
from tests.support import set_to_reference

V = 11


def decoder(**options) -> AttentionDecoder:
    network = set_to_reference(AttentionDecoder(width=4, hidden_size=8, **options))
    network.set_vocabulary(V)
    return network


def test_a_classifier_that_became_approximate_stays_so_for_other_words():
    network = AttentionDecoder(width=4, hidden_size=8)
    approx.convert(network, {"classifier": "mbm16"})
    network.set_vocabulary(V)
    assert network.classifier.multiplier == "mbm16"
    assert network.classifier.weight.shape == (V, 8)
    assert network.classifier.out_features == len(network.classifier.bias) == V


@pytest.mark.parametrize("size", [(8, 8), (33, 17)])
def test_gives_logits_of_the_next_word_at_every_word(size):
    logits = decoder()(torch.randn(2, 3, *size), torch.randint(V, (2, 5)))
    assert logits.shape == (2, 5, V)


def test_a_word_depends_only_on_the_image_and_earlier_words():
    network = decoder().double().eval()
    images, words = torch.randn(2, 3, 16, 16, dtype=torch.float64), torch.randint(V, (2, 6))
    logits = network(images, words)
    changed = words.clone()
    changed[:, 3] = (changed[:, 3] + 1) % V
    differs = (network(images, changed) - logits).abs().amax((0, 2)) > 1e-9
    assert differs.tolist() == [False, False, False, True, True, True]
    assert ((network(images.flip(3), words) - logits).abs().amax((0, 2)) > 1e-9).all()


def test_step_by_step_is_the_same_as_all_at_once():
    """Three sentences of each image side by side, as a beam search asks."""
    network = decoder().double().eval()
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    words = torch.randint(V, (2, 3, 4))
    grid = network.look(images)
    state = tuple(s.repeat_interleave(3, 1) for s in grid.state)
    for t in range(4):
        outputs, state = network.recur(words[:, :, t].flatten()[:, None], state)
        logits = network.attend(outputs.view(2, 3, -1), grid)
        for beam in range(3):
            expected = network(images, words[:, beam])[:, t]
            torch.testing.assert_close(logits[:, beam], expected)


def test_everything_learns():
    """Returns what has no gradient at first is what the residual high-order convolutions generate
    their kernels from; their biases have one."""
    network = decoder(dropout=0.0)
    network(torch.randn(2, 3, 16, 16), torch.randint(V, (2, 9))).square().sum().backward()
    still = [name for name, p in network.named_parameters() if p.grad is None or not p.grad.any()]
    assert still == []


def test_every_kind_of_layer_gets_the_requested_implementation():
    found = {name: layer.impl for name, layer in layers(decoder())}
    assert found == dict.fromkeys(("stem", "gather", "recurrence"), "reference")


def test_a_backbone_with_published_weights_replaces_the_encoder():
    network = decoder(weights="ResNet18_Weights.DEFAULT")
    assert isinstance(network.encoder, Backbone)
    assert network(torch.randn(2, 3, 64, 40), torch.randint(V, (2, 3))).shape == (2, 3, V)


def test_an_image_is_described_the_same_in_any_batch():
    network = decoder().double().eval()
    images, words = torch.randn(3, 3, 16, 16, dtype=torch.float64), torch.randint(V, (3, 4))
    torch.testing.assert_close(network(images, words)[1:2], network(images[1:2], words[1:2]))
