"""The high-order convolution: a convolution generates a k x k kernel for every pixel."""

from hoconv.high_order.layers import HighOrderConv2d as HighOrderConv2d
from hoconv.high_order.operator import high_order_conv2d as high_order_conv2d
