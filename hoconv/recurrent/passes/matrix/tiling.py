"""Divides a matrix among the threads of blocks.

A block has some columns, a slab. A warp has whole columns: some of its lanes divide the keys of a
column among them, so that a sum over keys takes a few shuffles, and no barrier of the block.
"""

from __future__ import annotations

from dataclasses import dataclass

WARP = 32
_MOST_ROWS = 16  # keys of a thread
MOST_KEYS = WARP * _MOST_ROWS
_COLUMNS, _MOST_COLUMNS = 2, 8  # of a thread
_MOST_WARPS = 8  # of a block
_MOST_BYTES = _MOST_WARPS * 1024  # of a column of each warp
# Of a block: with more there would be too few blocks, with fewer too many parts of sums over them.
_SLAB = 64


@dataclass(frozen=True)
class Tiling:
    """How a matrix of keys and columns is divided.

    Attributes:
        keys, columns: its sizes.
        lanes: of a warp that divide the keys of a column.
        rows: keys of a thread.
        vector: keys of a thread that follow each other.
        own: columns of a thread.
        warps: of a block.
        slab: columns of a block; of the last one it may be fewer.
        slabs: blocks.
    """

    keys: int
    columns: int
    lanes: int
    rows: int
    vector: int
    own: int
    warps: int
    slab: int
    slabs: int

    @property
    def threads(self) -> int:
        """The threads of a block."""
        return self.warps * WARP

    @property
    def padded_keys(self) -> int:
        """The keys for which threads have room."""
        return self.lanes * self.rows

    @property
    def padded_slab(self) -> int:
        """The columns of a block for which threads have room."""
        return WARP // self.lanes * self.own * self.warps


def choose_tiling(keys: int, columns: int, number_bytes: int, whole: bool) -> Tiling | str:
    """Divides a matrix; says in words why it cannot.

    Args:
        number_bytes: of a number.
        whole: whether one block has all columns.
    """
    lanes = 1
    while -(-keys // lanes) > _MOST_ROWS:
        lanes *= 2
    if lanes > WARP:
        return f"{keys} keys are more than {MOST_KEYS}"
    rows = -(-keys // lanes)
    if lanes > 1:
        rows = -(-rows // 4) * 4
    own, of_column = _COLUMNS, lanes * rows * number_bytes
    while whole and own < _MOST_COLUMNS and columns > WARP // lanes * own * _MOST_WARPS:
        own *= 2
    of_warp = WARP // lanes * own
    most = max(1, min(_MOST_WARPS, _MOST_BYTES // of_column, _SLAB // of_warp))
    if whole and columns > of_warp * 2 * _MOST_WARPS:
        return f"{columns} columns that depend on each other are too many for a block"
    slabs = 1 if whole else -(-columns // (of_warp * most))
    slab = -(-columns // slabs)
    warps = -(-slab // of_warp)
    vector = 4 if rows % 4 == 0 else 1
    return Tiling(keys, columns, lanes, rows, vector, own, warps, slab, slabs)
