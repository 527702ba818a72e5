"""A network that removes noise, by a kernel that it predicts for every pixel.

B batch, C channels, H height, W width.
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor, nn

from hoconv import HighOrderConv2d
from models.arguments import require_sizes
from models.networks.blocks import conv_bn_relu
from models.networks.involution import Block, Bottleneck


class Trunk(nn.Module):
    """Residual blocks at half the resolution, between convolutions at the full one.

    Args:
        width: channels at the full resolution; twice as many at half of it.
        depth: how many blocks.
        block: ``"convolution"`` or ``"involution"``, in each of them.
        out_channels: C of the result, by a 1 x 1 convolution.

    Shape: (B, 3, H, W) to (B, C, H, W).
    """

    def __init__(self, width: int, depth: int, block: Block, out_channels: int) -> None:
        super().__init__()
        self.stem = conv_bn_relu(3, width)
        self.blocks = nn.Sequential(Bottleneck(width, 2 * width, block, stride=2))
        for _ in range(depth - 1):
            self.blocks.append(Bottleneck(2 * width, 2 * width, block))
        self.head = nn.Sequential(conv_bn_relu(3 * width, width), nn.Conv2d(width, out_channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        fine = self.stem(x)
        # Nearest: its gradient, unlike that of bilinear upsampling, is deterministic on a GPU.
        coarse = nn.functional.interpolate(self.blocks(fine), size=x.shape[-2:], mode="nearest")
        return self.head(torch.cat((fine, coarse), dim=1))


class DenoisingNetwork(nn.Module):
    """Makes each pixel a weighted mean of the noisy ones around it, with weights that a
    :class:`Trunk` predicts from the image (Bako et al., Kernel-Predicting Convolutional Networks
    for Denoising Monte Carlo Renderings, SIGGRAPH 2017).

    Args:
        width, depth, block: of the trunk.
        kernel_size: of the kernels; None: the trunk predicts the noise itself, to be subtracted.

    Shape: (B, 3, H, W) to (B, 3, H, W), floating point.
    """

    def __init__(
        self,
        width: int = 32,
        depth: int = 4,
        block: Block = "convolution",
        kernel_size: int | None = 9,
    ) -> None:
        super().__init__()
        require_sizes(width=width, depth=depth)
        if block not in get_args(Block):
            raise ValueError(f"block: expected one of {', '.join(get_args(Block))}; got {block!r}")
        self.predicts_noise = kernel_size is None
        if kernel_size is None:
            self.denoise = Trunk(width, depth, block, 3)
        else:
            require_sizes(kernel_size=kernel_size)
            self.denoise = HighOrderConv2d(
                3, kernel_size, generator_kernel_size=1, padding="replicate", normalize="softmax"
            )
            self.denoise.add_module("generator", Trunk(width, depth, block, kernel_size**2))

    def forward(self, x: Tensor) -> Tensor:
        return x - self.denoise(x) if self.predicts_noise else self.denoise(x)
