"""Lightning callbacks: how fast a training run is, and the share of each operator's layers."""

from hoconv.lightning.shares import LayerShares as LayerShares
from hoconv.lightning.throughput import Throughput as Throughput
