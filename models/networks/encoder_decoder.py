"""An encoder-decoder that labels every pixel, its decoder refined by high-order convolutions.

B batch, C channels, H height, W width, K classes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hoconv import HighOrderConv2d
from models.networks.backbone import encoder
from models.networks.blocks import conv_bn_relu

OWN_WEIGHT = 4.0  # before the softmax: e^4 against 1 for each neighbour


class EncoderDecoder(nn.Module):
    """From the coarsest features to the finest: upsample, join with the encoder's at that
    resolution, refine.

    Upsampled features are coarse at the borders of things. At every resolution a high-order
    convolution, whose kernels are generated from the joined features, gathers for each pixel what
    belongs to it: a weighted mean of its neighbours, as in content-aware upsampling (CARAFE,
    https://arxiv.org/abs/1905.02188).

    Args:
        num_classes: K.
        width: channels at the finest resolution, doubled at each of the next four.
        depth: how often the encoder halves the resolution: what it sees at once is about
            ``8 * 2 ** depth`` pixels wide. A backbone does it five times.
        kernel_size: of the high-order convolutions.
        weights: of a backbone of torchvision's that takes the place of the encoder, as in
            ``ResNet18_Weights.DEFAULT``; or None, for an encoder of this project that starts from
            random weights.

    Shape: (B, 3, H, W), floating point, to logits (B, K, H, W); H and W at least ``2 ** depth``.
    """

    def __init__(
        self,
        num_classes: int,
        width: int = 16,
        depth: int = 3,
        kernel_size: int = 5,
        weights: str | None = None,
    ) -> None:
        super().__init__()
        self.encoder = encoder(width, depth, weights)
        skips = self.encoder.channels[:-1]
        below = self.encoder.channels[-1]
        stages = []
        for level in reversed(range(len(skips))):
            channels = width * 2 ** min(level, 4)
            stages.append(
                nn.Sequential(
                    conv_bn_relu(below + skips[level], channels),
                    _refine(channels, kernel_size),
                )
            )
            below = channels
        self.decoder = nn.ModuleList(stages)
        self.classifier = nn.Conv2d(width, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        *skips, x = self.encoder(x)
        for stage, skip in zip(self.decoder, reversed(skips)):
            # Nearest: its gradient, unlike that of bilinear upsampling, is deterministic on a GPU.
            x = nn.functional.interpolate(x, size=skip.shape[-2:], mode="nearest")
            x = stage(torch.cat((x, skip), dim=1))
        return self.classifier(x)


def _refine(channels: int, kernel_size: int) -> HighOrderConv2d:
    """Weights that are positive with sum one; at the start most is the pixel's own."""
    layer = HighOrderConv2d(channels, kernel_size, generator_kernel_size=3, normalize="softmax")
    nn.init.zeros_(layer.generator.weight)
    assert layer.generator.bias is not None
    nn.init.zeros_(layer.generator.bias)
    nn.init.constant_(layer.generator.bias[(kernel_size**2) // 2], OWN_WEIGHT)
    return layer
