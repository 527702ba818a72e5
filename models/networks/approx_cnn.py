"""A small convolutional network whose multiplications, forward and backward, are approximate.

B batch, C channels, H height, W width, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from hoconv import ApproxConv2d, ApproxLinear
from hoconv.ops.approx.gradients import Gradient
from hoconv.ops.approx.sources.find import AnyMultiplier
from models.arguments import require_sizes


class ApproxCNN(nn.Module):
    """Three stages of a 3 x 3 convolution, a ReLU and 2 x 2 max pooling, then a linear layer.

    All convolutions and the linear layer multiply approximately. With a width of 64 the forward
    pass of an image of 28 x 28 takes 29 million multiplications.

    Args:
        image_shape: (C, H, W) of an image; H and W at least 8.
        num_classes: K.
        width: channels of the first stage, doubled at each following stage.
        multiplier, gradient: as of :class:`hoconv.ApproxConv2d`.

    Shape: (B, C, H, W) to logits (B, K), float32.
    """

    def __init__(
        self,
        image_shape: Sequence[int],
        num_classes: int,
        width: int = 64,
        multiplier: AnyMultiplier = "mbm16",
        gradient: Gradient | None = None,
    ) -> None:
        super().__init__()
        require_sizes(width=width)
        channels, height, width_of_image = image_shape

        def stage(in_channels: int, out_channels: int) -> nn.Sequential:
            convolution = ApproxConv2d(
                in_channels, out_channels, 3, padding=1, multiplier=multiplier, gradient=gradient,
            )  # fmt: skip
            return nn.Sequential(convolution, nn.ReLU(inplace=True), nn.MaxPool2d(2))

        self.features = nn.Sequential(
            stage(channels, width), stage(width, 2 * width), stage(2 * width, 4 * width)
        )
        self.classifier = ApproxLinear(
            4 * width * (height // 8) * (width_of_image // 8), num_classes,
            multiplier=multiplier, gradient=gradient,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))
