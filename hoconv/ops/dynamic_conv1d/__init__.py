"""Dynamic and lightweight 1-D convolutions: a kernel for every time step, or one for all."""

from hoconv.ops.dynamic_conv1d.layers import DynamicConv1d as DynamicConv1d
from hoconv.ops.dynamic_conv1d.layers import LightweightConv1d as LightweightConv1d
from hoconv.ops.dynamic_conv1d.operator import dynamic_conv1d as dynamic_conv1d
