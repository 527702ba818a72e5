"""The whole high-order layer, the generator's convolution and its application, as one operator."""

from hoconv.high_order_layer.operator import high_order_layer as high_order_layer
