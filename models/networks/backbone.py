"""Encoders: networks from an image to feature maps at falling resolutions.

B batch, C channels, H height, W width.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models import ResNet, WeightsEnum
from torchvision.models.feature_extraction import create_feature_extractor

from models.networks.blocks import conv_bn_relu


class WeightsNotFoundError(FileNotFoundError):
    """Published weights are not on this machine and cannot be downloaded; says what to do."""


def make_encoder(width: int, depth: int, weights: str | None) -> Encoder | Backbone:
    """Makes the backbone that `weights` belong to, or without them an encoder."""
    return Encoder(width, depth) if weights is None else Backbone(weights)


def load_backbones(model: nn.Module) -> None:
    """Loads the published weights of the backbones in a model.

    Raises:
        WeightsNotFoundError: they cannot be downloaded.
    """
    for module in model.modules():
        if isinstance(module, Backbone):
            module.load()


class Encoder(nn.Module):
    """A convolution at full resolution, then two at half resolution, two at a quarter, and so on.

    Args:
        width: channels of the first feature map, doubled at each of the next four resolutions.
        depth: how often the resolution is halved.

    Attributes:
        channels: of each feature map, the finest first.

    Shape: (B, 3, H, W) to ``depth + 1`` maps; H and W at least ``2 ** depth``.
    """

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.channels = [width * 2 ** min(level, 4) for level in range(depth + 1)]
        self.stages = nn.ModuleList([conv_bn_relu(3, width)])
        for before, after in pairwise(self.channels):
            self.stages.append(
                nn.Sequential(
                    nn.MaxPool2d(2), conv_bn_relu(before, after), conv_bn_relu(after, after)
                )
            )

    def forward(self, x: Tensor) -> list[Tensor]:
        features = []
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        return features


class Backbone(nn.Module):
    """A ResNet of torchvision: returns the image and the feature maps at strides 2, 4, 8, 16, 32.

    It starts from random weights; `load` loads the published ones.

    Args:
        weights: torchvision's name of them, such as ``ResNet18_Weights.DEFAULT``.

    Attributes:
        channels: of the image and each feature map, the finest first.

    Raises:
        ValueError: `weights` is not the name of weights of a ResNet.
    """

    def __init__(self, weights: str) -> None:
        super().__init__()
        name, self._weights = _find_weights(weights)
        network = torchvision.models.get_model(name)
        stages = ["relu", "layer1", "layer2", "layer3", "layer4"]
        self.stages = create_feature_extractor(network, stages)
        with torch.no_grad():
            self.stages.eval()
            maps = self.stages(torch.zeros(1, 3, 32, 32)).values()
            self.stages.train()
        self.channels = [3, *(features.shape[1] for features in maps)]

    def load(self) -> None:
        """Loads the published weights; downloads them where torch's hub folder does not hold them.

        Raises:
            WeightsNotFoundError: they cannot be downloaded.
        """
        try:
            state = self._weights.get_state_dict(progress=True, check_hash=True)
        except (OSError, RuntimeError) as error:  # no network; a wrong hash
            folder = Path(torch.hub.get_dir()) / "checkpoints"
            raise WeightsNotFoundError(
                f"the weights {self._weights} are not in {folder} and could not be downloaded from "
                f"{self._weights.url} ({error}). Put the file there, or train from random weights "
                "with model.weights=null"
            ) from error
        published = {n: v for n, v in state.items() if not n.startswith("fc.")}
        # Layers that have become approximate may have a state of their own, which stays.
        self.stages.load_state_dict(self.stages.state_dict() | published)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [x, *self.stages(x).values()]


def _find_weights(weights: str) -> tuple[str, WeightsEnum]:
    """Returns the name of the network that weights belong to, and torchvision's entry of them."""
    models = torchvision.models
    families = {
        models.get_model_weights(name).__name__: name
        for name in models.list_models(models)
        if models.get_model_builder(name).__annotations__["return"] is ResNet
    }
    family, _, version = weights.partition(".")
    try:
        return families[family], models.get_model_weights(families[family])[version]
    except KeyError:
        raise ValueError(
            f"weights: expected <family>.DEFAULT or another version of one of "
            f"{', '.join(sorted(families))}; got {weights!r}"
        ) from None
