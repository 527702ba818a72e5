"""Products of approximate hardware multipliers, bit for bit, and layers that use them."""

from hoconv.approx.layers import ApproxConv2d as ApproxConv2d
from hoconv.approx.layers import ApproxLinear as ApproxLinear
from hoconv.approx.multipliers import MULTIPLIERS as MULTIPLIERS
from hoconv.approx.operator import conv2d as conv2d
from hoconv.approx.operator import matmul as matmul
from hoconv.approx.operator import multiply as multiply
from hoconv.approx.quantization import Observer as Observer
from hoconv.approx.quantization import TableConv2d as TableConv2d
from hoconv.approx.quantization import TableLinear as TableLinear
from hoconv.approx.tables import LookupTable as LookupTable
from hoconv.approx.tables import table_matmul as table_matmul
