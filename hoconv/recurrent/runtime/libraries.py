"""The compiled code of recurrent layers that no call generates.

The loops of ready cells are only in a wheel, compiled: :mod:`hoconv.recurrent.ready` writes them.
"""

from __future__ import annotations

from hoconv.jit import CSRC, Library
from hoconv.jit.compilers import LOOP_FLAGS

LOOPS = CSRC / "recurrent" / "ready"  # their folder
PRODUCTS = Library(
    "recurrent", [CSRC / "recurrent" / "cpu" / "products.cpp"], include=[CSRC], flags=LOOP_FLAGS
)
_loops = sorted(LOOPS.glob("*.cpp"))
READY = Library("recurrent_ready", _loops, include=[CSRC], flags=LOOP_FLAGS) if _loops else None
