"""A small convolutional network with high-order convolutions.

B batch, C channels, H height, W width, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from models.arguments import require_sizes
from models.networks.blocks import conv_bn_relu, residual_high_order


class CNN(nn.Module):
    """Three convolution stages at full, half and quarter resolution, then global average pooling.

    The second and third stage begin with a residual high-order convolution.

    Args:
        image_shape: (C, H, W) of an image; H and W at least 4.
        num_classes: K.
        width: channels of the first stage, doubled at each following stage.
        kernel_size: of the high-order convolutions.

    Shape: (B, C, H, W) to logits (B, K), floating point.
    """

    def __init__(
        self,
        image_shape: Sequence[int],
        num_classes: int,
        width: int = 16,
        kernel_size: int = 5,
    ) -> None:
        super().__init__()
        require_sizes(width=width, kernel_size=kernel_size)
        self.features = nn.Sequential(
            conv_bn_relu(image_shape[0], width),
            nn.MaxPool2d(2),
            residual_high_order(width, kernel_size),
            conv_bn_relu(width, 2 * width),
            nn.MaxPool2d(2),
            residual_high_order(2 * width, kernel_size),
            conv_bn_relu(2 * width, 4 * width),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.classifier = nn.Linear(4 * width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x))
