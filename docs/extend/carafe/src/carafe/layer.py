"""CARAFE with its kernel predictor, and a network that has it."""

from __future__ import annotations

from collections.abc import Sequence

from carafe.operator import OPERATOR, carafe
from torch import Tensor, nn

from hoconv.dispatch.implementations import check_name


class Carafe(nn.Module):
    """Upsamples with kernels that it predicts from the input, each with the sum 1.

    Args:
        channels: C.
        scale: s.
        kernel_size: k, odd.
        encoder_kernel_size: of the convolution that predicts the kernels.
        compressed: channels of its input.
        impl: the name of an implementation, or ``"auto"``: the fastest that runs.

    Shape: (B, C, H, W) to (B, C, s * H, s * W).
    """

    operator = OPERATOR  # hoconv.set_impl and the start-up table of a training find it by this

    def __init__(
        self,
        channels: int,
        scale: int = 2,
        kernel_size: int = 5,
        encoder_kernel_size: int = 3,
        compressed: int = 64,
        impl: str = "auto",
    ) -> None:
        super().__init__()
        check_name(OPERATOR, impl)
        self.impl = impl
        self.shape = (kernel_size**2, scale**2)
        self.predictor = nn.Sequential(
            nn.Conv2d(channels, compressed, 1),
            nn.Conv2d(compressed, kernel_size**2 * scale**2, encoder_kernel_size, padding="same"),
        )

    def forward(self, x: Tensor) -> Tensor:
        weight = self.predictor(x).unflatten(1, self.shape).softmax(1)
        return carafe(x, weight, impl=self.impl)


class CarafeNetwork(nn.Sequential):
    """Halves an image, upsamples it again, and classifies the average over positions.

    Args:
        image_shape: (C, H, W) of an image.
        num_classes: K.
        width: channels of the convolutions.

    Shape: (B, C, H, W) to logits (B, K).
    """

    def __init__(self, image_shape: Sequence[int], num_classes: int, width: int = 32) -> None:
        super().__init__(
            nn.Conv2d(image_shape[0], width, 3, stride=2, padding=1),
            nn.ReLU(),
            Carafe(width),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(4 * width, num_classes),
        )
