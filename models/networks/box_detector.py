"""A network that finds the centres of objects, and a box around each.

B batch, H height, W width, K categories, h and w of the grid of locations.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from models.arguments import require_sizes
from models.networks.backbone import make_encoder
from models.networks.blocks import conv_bn_relu
from models.networks.encoder_decoder import Decoder

# The probability of an object at a location at first: most have none, and their loss would drown
# that of the others (Lin et al., 2017, https://arxiv.org/abs/1708.02002, section 3.3).
PRIOR = 0.01
FIRST_SPREAD = 0.01  # standard deviation of the last weights of a head, as there
LOG_SIZE = 1.0  # the logarithm of width and height of a box at first, in steps of the grid


class BoxDetector(nn.Module):
    """An encoder, a :class:`Decoder`, and two heads on its features: whether a location is the
    centre of an object of each category, and the box around that centre.

    There are no anchors: a location has one box (Zhou et al., 2019,
    https://arxiv.org/abs/1904.07850).

    Args:
        num_categories: K.
        width, depth, kernel_size, weights: as of
            :class:`~models.networks.encoder_decoder.EncoderDecoder`.
        stride: of the grid of locations, in pixels, a power of 2 up to ``2 ** depth``.

    Shape: (B, 3, H, W), floating point, to logits (B, K, h, w) and boxes (B, 4, h, w): where the
    centre is, from that of the location, and the logarithm of width and height, all in steps of the
    grid.

    Raises:
        ValueError: `stride` is not one of those.
    """

    def __init__(
        self,
        num_categories: int,
        width: int = 16,
        depth: int = 3,
        kernel_size: int = 5,
        stride: int = 4,
        weights: str | None = None,
    ) -> None:
        super().__init__()
        require_sizes(width=width, depth=depth, kernel_size=kernel_size)
        self.encoder = make_encoder(width, depth, weights)
        strides = [2**level for level in range(len(self.encoder.channels))]
        if stride not in strides:
            raise ValueError(f"stride: expected one of {strides}, got {stride}")
        finest = strides.index(stride)
        self.decoder = Decoder(self.encoder.channels, width, kernel_size, finest)
        channels = self.decoder.out_channels
        unlikely = -math.log(1 / PRIOR - 1)
        self.centres = _make_head(channels, [unlikely] * num_categories)
        self.boxes = _make_head(channels, [0.0, 0.0, LOG_SIZE, LOG_SIZE])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.decoder(self.encoder(x))
        return self.centres(features), self.boxes(features)


def _make_head(channels: int, first: list[float]) -> nn.Sequential:
    """Makes a head whose outputs are near `first` at first."""
    last = nn.Conv2d(channels, len(first), 1)
    assert last.bias is not None
    nn.init.normal_(last.weight, std=FIRST_SPREAD)
    with torch.no_grad():
        last.bias.copy_(torch.tensor(first))
    return nn.Sequential(conv_bn_relu(channels, channels), last)
