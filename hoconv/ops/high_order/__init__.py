"""The high-order convolution: a convolution generates a k x k kernel for every pixel."""

from hoconv.ops.high_order.conv2d.operator import high_order_conv2d as high_order_conv2d
from hoconv.ops.high_order.conv2d.splat import splat as splat
from hoconv.ops.high_order.layer.operator import high_order_layer as high_order_layer
from hoconv.ops.high_order.layers import HighOrderConv2d as HighOrderConv2d
