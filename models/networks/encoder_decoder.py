"""An encoder-decoder that classifies every pixel; high-order convolutions refine its decoder.

B batch, C channels, H height, W width, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hoconv import HighOrderConv2d
from models.arguments import require_sizes
from models.networks.backbone import make_encoder
from models.networks.blocks import conv_bn_relu

# A pixel's logit for itself at first; those for its neighbours are 0, and after the softmax its own
# weight is e^4 = 55 times theirs.
OWN_LOGIT = 4.0


class Decoder(nn.ModuleList):
    """At each resolution, the coarsest first, it upsamples its features, concatenates the
    encoder's, convolves them and refines the result.

    Upsampled features are blurred at the borders of objects. The refinement, a high-order
    convolution, replaces the features of a pixel by a weighted mean over its neighbourhood. The
    weights are generated from the features there, as in content-aware upsampling (CARAFE,
    https://arxiv.org/abs/1905.02188).

    Args:
        channels: of the encoder's maps, the finest first.
        width: channels of its own at the finest resolution, doubled at each of the next four.
        kernel_size: of the high-order convolutions.
        finest: the index of the encoder's map at whose resolution it ends.

    Attributes:
        out_channels: of its result.

    Shape: the encoder's maps to (B, out_channels, H, W) of the map `finest`.
    """

    def __init__(
        self, channels: Sequence[int], width: int, kernel_size: int, finest: int = 0
    ) -> None:
        super().__init__()
        below = channels[-1]
        for level in reversed(range(finest, len(channels) - 1)):
            out_channels = width * 2 ** min(level, 4)
            self.append(
                nn.Sequential(
                    conv_bn_relu(below + channels[level], out_channels),
                    _make_refinement(out_channels, kernel_size),
                )
            )
            below = out_channels
        self.out_channels = below

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        *skips, x = features
        for stage, skip in zip(self, reversed(skips)):
            # Nearest: its gradient, unlike that of bilinear upsampling, is deterministic on a GPU.
            x = nn.functional.interpolate(x, size=skip.shape[-2:], mode="nearest")
            x = stage(torch.cat((x, skip), dim=1))
        return x


class EncoderDecoder(nn.Module):
    """An encoder, a :class:`Decoder` to full resolution, and a classifier of its features.

    Args:
        num_classes: K.
        width: channels at the finest resolution, doubled at each of the next four.
        depth: how often the encoder halves the resolution; its receptive field is about
            ``8 * 2 ** depth`` pixels wide. A backbone does it five times.
        kernel_size: of the high-order convolutions.
        weights: the name of published weights, such as ``ResNet18_Weights.DEFAULT``: their ResNet
            from torchvision is the encoder. None: :class:`~models.networks.backbone.Encoder`.

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
        require_sizes(width=width, depth=depth, kernel_size=kernel_size)
        self.encoder = make_encoder(width, depth, weights)
        self.decoder = Decoder(self.encoder.channels, width, kernel_size)
        self.classifier = nn.Conv2d(width, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.decoder(self.encoder(x)))


def _make_refinement(channels: int, kernel_size: int) -> HighOrderConv2d:
    """Makes the layer that averages neighbours; at first a pixel's own weight is the largest."""
    layer = HighOrderConv2d(channels, kernel_size, generator_kernel_size=3, normalize="softmax")
    nn.init.zeros_(layer.generator.weight)
    assert layer.generator.bias is not None
    nn.init.zeros_(layer.generator.bias)
    nn.init.constant_(layer.generator.bias[(kernel_size**2) // 2], OWN_LOGIT)
    return layer
