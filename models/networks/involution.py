"""Involution, and the residual block that has it in the place of a convolution.

B batch, C channels, H height, W width.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from hoconv import HighOrderConv2d

# As in the networks of the paper.
GROUP_CHANNELS = 16  # share their kernels; all where there are fewer
REDUCTION = 4  # channels of the input for one of the layer from which kernels are generated
KERNEL_SIZE = 7

Block = Literal["convolution", "involution"]


def involution(channels: int, stride: int = 1) -> HighOrderConv2d:
    """Makes an involution (Li et al., CVPR 2021, https://arxiv.org/abs/2103.06255).

    It is a high-order convolution whose kernels are generated from each pixel alone: by a 1 x 1
    convolution to few channels, batch normalisation, a ReLU and another 1 x 1 convolution. With a
    stride they are generated from the means of stride x stride pixels.

    Shape: (B, C, H, W) to (B, C, H / stride, W / stride), rounded up.
    """
    layer = HighOrderConv2d(
        channels,
        KERNEL_SIZE,
        generator_kernel_size=1,
        groups=max(1, channels // GROUP_CHANNELS),
        stride=stride,
    )
    reduced = max(1, channels // REDUCTION)
    generator = nn.Sequential(
        nn.Conv2d(channels, reduced, 1, bias=False),
        nn.BatchNorm2d(reduced),
        nn.ReLU(inplace=True),
        nn.Conv2d(reduced, layer.generator.out_channels, 1),
    )
    if stride > 1:
        generator.insert(0, nn.AvgPool2d(stride, ceil_mode=True))
    layer.add_module("generator", generator)
    return layer


class Bottleneck(nn.Module):
    """The block of a ResNet, or with an involution that of a RedNet: a 1 x 1 convolution to a
    quarter of the channels, a 3 x 3 convolution or an involution, and a 1 x 1 convolution.

    Shape: (B, in_channels, H, W) to (B, out_channels, H / stride, W / stride), rounded up.
    """

    def __init__(self, in_channels: int, out_channels: int, block: Block, stride: int = 1) -> None:
        super().__init__()
        narrow = max(1, out_channels // 4)
        self.residual = nn.Sequential(
            nn.Conv2d(in_channels, narrow, 1, bias=False),
            nn.BatchNorm2d(narrow),
            nn.ReLU(inplace=True),
            involution(narrow, stride)
            if block == "involution"
            else nn.Conv2d(narrow, narrow, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(narrow),
            nn.ReLU(inplace=True),
            nn.Conv2d(narrow, out_channels, 1, bias=False),
            nn.BatchNorm2d(out_channels),
        )
        self.shortcut = nn.Sequential()
        if stride > 1 or in_channels != out_channels:
            self.shortcut.append(nn.Conv2d(in_channels, out_channels, 1, stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(out_channels))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.shortcut(x) + self.residual(x))
