"""Layers that several networks use."""

from __future__ import annotations

from torch import nn

from hoconv import HighOrderConv2d


def conv_bn_relu(in_channels: int, out_channels: int) -> nn.Sequential:
    """Makes a 3 x 3 convolution, batch normalisation and a ReLU; H and W do not change."""
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
    )


def residual_high_order(channels: int, kernel_size: int) -> HighOrderConv2d:
    """Makes a residual high-order convolution; all channels of a pixel share its kernel.

    It starts as the identity, so that training begins as that of the network without it.
    """
    layer = HighOrderConv2d(channels, kernel_size, generator_kernel_size=3, residual=True)
    for parameter in layer.generator.parameters():
        nn.init.zeros_(parameter)
    return layer
