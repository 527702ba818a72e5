"""The layer, and a network that has it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hoconv.dispatch.implementations import check_name
from soft_clip.operator import OPERATOR, soft_clip


class SoftClip(nn.Module):
    """limit tanh(x / limit), with a learned limit for each channel.

    Args:
        channels: C.
        impl: the name of an implementation, or ``"auto"``: the fastest that runs.

    Shape: (B, C, ...) to the same.
    """

    operator = OPERATOR  # hoconv.set_impl and the start-up table of a training find it by this

    def __init__(self, channels: int, impl: str = "auto") -> None:
        super().__init__()
        check_name(OPERATOR, impl)
        self.impl = impl
        self.limit = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        return soft_clip(x, self.limit, impl=self.impl)


class SoftClipNetwork(nn.Sequential):
    """Two convolutions, each with the layer after it; a classifier of the average over positions.

    Args:
        image_shape: (C, H, W) of an image.
        num_classes: K.
        width: channels of the convolutions.

    Shape: (B, C, H, W) to logits (B, K).
    """

    def __init__(self, image_shape: Sequence[int], num_classes: int, width: int = 32) -> None:
        super().__init__(
            nn.Conv2d(image_shape[0], width, 3, padding=1),
            SoftClip(width),
            nn.Conv2d(width, width, 3, padding=1),
            SoftClip(width),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(4 * width, num_classes),
        )
