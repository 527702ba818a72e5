"""Research layers with fast kernels: each has a `reference`, a `cpp` and a `cuda` implementation.

Layers: :class:`HighOrderConv2d`, :class:`LightweightConv1d`, :class:`DynamicConv1d`,
:class:`ApproxConv2d`, :class:`ApproxLinear`, :class:`ApproxMatmul` and
:class:`ApproxMultiheadAttention`. The functions that they call:
:func:`high_order_layer`, :func:`high_order_conv2d`, its adjoint :func:`splat`,
:func:`dynamic_conv1d` and those of :mod:`hoconv.approx`. :mod:`hoconv.recurrent` is a language for
recurrent cells.
:func:`implementations` says what can run on this machine; :func:`set_impl` chooses for a model.
"""

from hoconv import approx as approx
from hoconv import recurrent as recurrent
from hoconv.approx import ApproxConv2d as ApproxConv2d
from hoconv.approx import ApproxLinear as ApproxLinear
from hoconv.approx import ApproxMatmul as ApproxMatmul
from hoconv.approx import ApproxMultiheadAttention as ApproxMultiheadAttention
from hoconv.dispatch.implementations import implementations as implementations
from hoconv.dispatch.implementations import set_impl as set_impl
from hoconv.ops.dynamic_conv1d import DynamicConv1d as DynamicConv1d
from hoconv.ops.dynamic_conv1d import LightweightConv1d as LightweightConv1d
from hoconv.ops.dynamic_conv1d import dynamic_conv1d as dynamic_conv1d
from hoconv.ops.high_order import HighOrderConv2d as HighOrderConv2d
from hoconv.ops.high_order import high_order_conv2d as high_order_conv2d
from hoconv.ops.high_order import high_order_layer as high_order_layer
from hoconv.ops.high_order import splat as splat

__version__ = "0.1.0"
