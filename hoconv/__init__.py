"""Research layers, fast: each as `reference`, `cpp` and `cuda` implementations.

See :class:`HighOrderConv2d`, :func:`high_order_conv2d`, :func:`high_order_layer`,
:class:`LightweightConv1d`, :class:`DynamicConv1d`, :func:`dynamic_conv1d`,
:class:`ApproxConv2d`, :class:`ApproxLinear`, :mod:`hoconv.approx`, :func:`implementations`,
:func:`set_impl`;
:mod:`hoconv.recurrent`, a language for recurrent cells.
"""

from hoconv import approx as approx
from hoconv import moved as _moved
from hoconv import recurrent as recurrent
from hoconv.approx import ApproxConv2d as ApproxConv2d
from hoconv.approx import ApproxLinear as ApproxLinear
from hoconv.dynamic_conv1d import DynamicConv1d as DynamicConv1d
from hoconv.dynamic_conv1d import LightweightConv1d as LightweightConv1d
from hoconv.dynamic_conv1d import dynamic_conv1d as dynamic_conv1d
from hoconv.high_order import HighOrderConv2d as HighOrderConv2d
from hoconv.high_order import high_order_conv2d as high_order_conv2d
from hoconv.high_order import high_order_layer as high_order_layer
from hoconv.implementations import implementations as implementations
from hoconv.implementations import set_impl as set_impl

_moved.register()

__version__ = "0.1.0"
