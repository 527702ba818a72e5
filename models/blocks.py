"""What the networks are built of."""

from __future__ import annotations

from torch import nn


def conv_bn_relu(in_channels: int, out_channels: int) -> nn.Sequential:
    """A 3 x 3 convolution, batch normalisation and a ReLU; H and W stay."""
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
    )
