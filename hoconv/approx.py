"""Products of approximate hardware multipliers, bit for bit, and layers that use them."""

from hoconv.ops.approx.layers.approximate import ApproxConv2d as ApproxConv2d
from hoconv.ops.approx.layers.approximate import ApproxLinear as ApproxLinear
from hoconv.ops.approx.layers.approximate import ApproxMatmul as ApproxMatmul
from hoconv.ops.approx.layers.attention import (
    ApproxMultiheadAttention as ApproxMultiheadAttention,
)
from hoconv.ops.approx.layers.convert import Conversion as Conversion
from hoconv.ops.approx.layers.convert import convert as convert
from hoconv.ops.approx.layers.cost import LayerCost as LayerCost
from hoconv.ops.approx.layers.cost import ModelCost as ModelCost
from hoconv.ops.approx.layers.cost import cost as cost
from hoconv.ops.approx.layers.quantization import Observer as Observer
from hoconv.ops.approx.layers.table import TableConv2d as TableConv2d
from hoconv.ops.approx.layers.table import TableLinear as TableLinear
from hoconv.ops.approx.mantissas import MantissaTable as MantissaTable
from hoconv.ops.approx.multipliers import MULTIPLIERS as MULTIPLIERS
from hoconv.ops.approx.operator import conv2d as conv2d
from hoconv.ops.approx.operator import matmul as matmul
from hoconv.ops.approx.operator import multiply as multiply
from hoconv.ops.approx.sources.c_functions import CFunction as CFunction
from hoconv.ops.approx.sources.find import multiplier as multiplier
from hoconv.ops.approx.tables import LookupTable as LookupTable
from hoconv.ops.approx.tables import table_matmul as table_matmul
