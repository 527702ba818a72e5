"""Lays a distributed program out on clusters: features, rows, weights and memory of a block.

A cluster, or a team of two, shares some rows of the batch and all features. Two blocks of equal
rank in the clusters of a team are partners.

n features of a value, m features of a product's result, k features of its operand.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from hoconv.recurrent.codegen.cluster.reductions import ReductionGroup, find_reductions
from hoconv.recurrent.ir.program import BYTES, Value
from hoconv.recurrent.passes.cluster.distribute import (
    COLUMNS,
    Distribution,
    Gathered,
    SharedProduct,
)

# Features of a block: whole vectors of 16 bytes, so that pushes are wide.
_UNITS = 8
_TILE = 16  # rows of the weights in a tile of the tensor cores
_TILE_COLUMNS = 8  # rows of the batch in a tile
_BARRIERS = 16  # bytes
_SUM_PADDING = 4  # elements between rows of sums, so that rows begin in different banks
# Vectors of which a block gets so many bytes come from the L2 cache, in one copy for all blocks of
# a cluster: that takes longer to begin than pushes do.
_SPREAD_BYTES = 6144
# Registers of a thread for weights, by warps: what a multiprocessor has less what a step needs, of
# which each further row and feature of a thread takes some.
_REGISTERS, _REGISTERS_OF_PAIR, _MOST_PAIRS = {8: 160, 12: 112}, 16, 4
_AHEAD = 40  # registers for weights that are read from global memory ahead of their use
_SUMS = 32  # registers that a product of tensor cores needs for sums in any case
_TOGETHER = 24  # registers that products of four warps do not need for operands
_MOST_SPLITS = 8
# Without tensor cores: registers for sums that any product needs, and that one has at most.
_PLAIN_SUMS, _MOST_SUMS = 16, 48
# The shared memory of a block of compute capability 9.0.
SHARED_BYTES = 232448


@dataclass(frozen=True)
class ClusterShape:
    """The layout of a kernel.

    Attributes:
        blocks: of a cluster.
        rows: of the batch, which a team of clusters shares.
        warps: of a block.
        clusters: of a team, 1 or 2.
    """

    blocks: int
    rows: int
    warps: int
    clusters: int = 1

    @property
    def members(self) -> int:
        """The blocks of a team."""
        return self.blocks * self.clusters

    @property
    def threads(self) -> int:
        """The threads of a block."""
        return 32 * self.warps


@dataclass(frozen=True)
class Slice:
    """A block's slice of the weights of a product.

    Attributes:
        rows, columns: of the slice, padded.
        splits, held, kept, each, turns: as SPLIT, HELD, KEPT, EACH and SLICES or TURNS of
            ``Product``.
        turn_bytes: what a turn reads.
        batch: as BATCH of ``PlainProduct``; 0 for tensor cores.
    """

    rows: int
    columns: int
    splits: int
    held: int
    kept: int
    each: int
    turns: int
    turn_bytes: int
    batch: int = 0

    @property
    def register_bytes(self) -> int:
        """Returns what lies in registers."""
        return self.held * self.turn_bytes

    @property
    def shared_bytes(self) -> int:
        """Returns what lies in shared memory."""
        return self.kept * self.turn_bytes

    @property
    def far_bytes(self) -> int:
        """Returns what lies in global memory."""
        return (self.turns - self.held - self.kept) * self.turn_bytes

    @property
    def stride(self) -> int:
        """The elements of a row of sums."""
        return self.rows + _SUM_PADDING


@dataclass(frozen=True)
class Array:
    """An array in the shared memory of a block; `dtype` is one of the program's."""

    name: str
    dtype: str
    first_byte: int


class ClusterLayout:
    """The place of everything that a kernel has.

    Args:
        most_shared_bytes: the most shared memory of a block.

    Attributes:
        wide: the dtype in which products and reductions are summed.
        tiled: whether tensor cores multiply.
        loops: the sizes of vectors over which a thread loops; 1 for values of one feature, which
            every block computes, and whose threads share them with those of vectors.
        reductions: of rows, by exchange.
        arrays: in shared memory, in order; after them come weights.
        slices: of the weights, for each product.
    """

    def __init__(
        self, shared: Distribution, shape: ClusterShape, most_shared_bytes: int = SHARED_BYTES
    ) -> None:
        self.shared, self.shape = shared, shape
        self.wide = shared.program.wide
        self.tiled = any(p.op.values[0].type.dtype != self.wide for p in shared.products)
        self.loops = (1, *shared.sizes)
        self.reductions = find_reductions(shared, self.wide)
        # Shared memory has room for arrays first: where these are depends on the slices' sizes.
        self.slices = self._slice_weights(0, 0)
        self.arrays: list[Array] = []
        self.array_bytes = _BARRIERS
        self._place_arrays()
        room = max(0, most_shared_bytes - self.array_bytes)
        self.slices = self._slice_weights(0, room)
        if self.far_bytes:
            self.slices = self._slice_weights(_AHEAD, room)

    @property
    def shared_bytes(self) -> int:
        """The shared memory of a block."""
        return self.array_bytes + self.kept_bytes

    @property
    def register_bytes(self) -> int:
        """The weights that a block holds in registers."""
        return sum(each.register_bytes for each in self.slices)

    @property
    def kept_bytes(self) -> int:
        """The weights that a block keeps in shared memory."""
        return sum(each.shared_bytes for each in self.slices)

    @property
    def far_bytes(self) -> int:
        """The weights that a block reads from global memory at every step."""
        return sum(each.far_bytes for each in self.slices)

    def count_tile_products(self, each: Slice) -> int:
        """The products of a warp by tensor cores in a step, of 16 x 16 by 16 x 8 numbers."""
        tiles = -(-self.shape.rows // _TILE_COLUMNS)
        return 2 * tiles * each.each * each.turns * self.tiled

    def together(self, each: Slice) -> bool:
        """Returns whether four warps multiply together, as ``Product::TOGETHER``."""
        tiles = -(-self.shape.rows // _TILE_COLUMNS)
        return self.tiled and tiles == 3 and self.shape.warps // each.splits % 4 == 0

    @property
    def plain_products(self) -> int:
        """The multiply-adds of a thread in a step, without tensor cores."""
        if self.tiled:
            return 0
        rows = self.shape.rows
        return sum(4 * _round(rows, each.batch) * each.each * each.turns for each in self.slices)

    @functools.cached_property
    def pushed_bytes(self) -> int:
        """Returns the bytes per step that a block receives from others of its cluster."""
        return sum(sum(self.expected_bytes(k)) for k in range(self.shared.exchanges))

    @property
    def spread_bytes(self) -> int:
        """Returns the bytes per step that a block receives through L2."""
        return self.room_bytes * self.shape.blocks - self.room_bytes // self.shape.clusters

    def register_dtype(self, value: Value) -> str:
        """The dtype in which a thread holds a value: parts of products are as they are summed."""
        return self.wide if value in self.shared.parts else value.type.dtype

    def expected_bytes(self, exchange: int) -> list[int]:
        """Returns the bytes that others push to a block in each round of an exchange.

        Blocks push what they have, and in a second round what their partners have posted to them.
        """
        blocks, rows = self.shape.blocks, self.shape.rows
        if blocks == 1:
            return []
        sums = sum(
            BYTES[self.sum_dtype(product)] * self.units(part.value.type.size)
            for product in self.shared.products
            for part in product.parts
            if product.gathered is None and product.exchange == exchange
        )
        given = self._given_bytes(exchange)
        own = (blocks - 1) * given + blocks * rows * sums
        relayed = blocks * given * (self.shape.clusters - 1)
        return [bytes for bytes in (own, relayed) if bytes]

    def posted_bytes(self, exchange: int) -> int:
        """Returns the bytes that a block posts to its partner in an exchange."""
        if self.shape.clusters == 1:
            return 0
        operands = sum(
            self.slice_bytes(segment.value)
            for product in self.shared.products
            for segment in product.segments
            if product.gathered is None and product.exchange == exchange
        )
        return self._given_bytes(exchange) + operands

    @functools.cached_property
    def mail_bytes(self) -> int:
        """The two mailboxes of a block, where each number of an exchange is beside its data."""
        return 4 * max(map(self.posted_bytes, range(self.shared.exchanges)), default=0)

    def _given_bytes(self, exchange: int) -> int:
        """Returns the bytes that a block gives to all others in an exchange."""
        gathered = sum(
            self.slice_bytes(s.value)
            for g in self.shared.gathered
            for s in g.segments
            if g.exchange == exchange and s.value.type.size > 1
        )
        return gathered + self.reduced_bytes(exchange)

    def slice_bytes(self, value: Value) -> int:
        """Returns the bytes that a block has of a vector that others read."""
        dtype = value.type.dtype
        return BYTES[dtype] * self.units(value.type.size) * self.height(dtype)

    def reduced_bytes(self, exchange: int) -> int:
        """Returns the bytes of what a block reduces its own features to in an exchange."""
        if exchange not in self.reductions:
            return 0
        return self.shape.rows * self.reductions[exchange].stride * BYTES[self.wide]

    def spreads(self, value: Value) -> bool:
        """Returns whether blocks get a gathered value from the L2 cache."""
        enough = self.shape.blocks * self.slice_bytes(value) >= _SPREAD_BYTES
        return value.type.size > 1 and self.shape.blocks > 1 and enough

    @property
    def room_bytes(self) -> int:
        """The room in the L2 cache for what a block gives or, in a team, relays in a step."""
        given = (s.value for g in self.shared.gathered for s in g.segments)
        return self.shape.clusters * sum(self.slice_bytes(v) for v in given if self.spreads(v))

    @functools.cached_property
    def own_bytes(self) -> int:
        """The global memory of a block: weights, and that room for two steps."""
        return self.far_bytes + 2 * self.room_bytes

    # Features

    def units(self, n: int) -> int:
        """The features of a block, of vectors of n."""
        return 1 if n == 1 else _round(-(-n // self.shape.members), _UNITS)

    def pairs(self, n: int) -> int:
        """The rows and features of a thread, of vectors of n."""
        return -(-self.units(n) * self.shape.rows // self.shape.threads)

    def width(self, n: int) -> int:
        """The columns of a vector of n in a row that has all blocks' features."""
        return _UNITS if n == 1 else self.units(n) * self.shape.members

    def cluster_width(self, n: int) -> int:
        """The columns of a vector of n in a row that has the features of a cluster's blocks."""
        return self.units(n) * self.shape.blocks

    # Products

    def halves(self, product: SharedProduct) -> bool:
        """Returns whether a block multiplies an operand in two halves, the second of the other
        cluster."""
        if product.gathered:
            return self.parts_from_clusters(product.gathered)
        return self.tiled and self.shape.clusters > 1

    def parts_from_clusters(self, gathered: Gathered) -> bool:
        """Returns whether what each cluster of a team has of a gathered vector lies in an array of
        its own.

        Only products of all of it read it.
        """
        value = gathered.segments[0].value
        return (
            self.tiled
            and self.shape.clusters > 1
            and len(gathered.segments) == 1
            and value.type.size > 1
            and self.cluster_width(value.type.size) % COLUMNS == 0
            and not any(p.in_place for p in self.shared.products if p.gathered is gathered)
            and not any(whole is gathered for whole, _ in self.shared.reads.values())
        )

    def pushes_sums(self, index: int) -> bool:
        """Returns whether blocks push partial sums from registers: what a lane has belongs to one
        block."""
        product = self.shared.products[index]
        one = len(product.parts) == 1 and self.slices[index].splits == 1
        return self.halves(product) and product.gathered is None and one

    def sum_dtype(self, product: SharedProduct) -> str:
        """The dtype in which blocks push partial sums.

        In teams bfloat16 where the result has it, to have room: the errors of 16 rounded parts of a
        sum, which are smaller than the sum, add up to about that of a rounded sum. In float16 a
        part might be infinite where the sum is not.
        """
        rounded = self.shape.clusters > 1 and product.op.result.type.dtype == "bf16"
        return "bf16" if rounded else self.wide

    def _slice_weights(self, ahead: int, room: int) -> list[Slice]:
        """Puts the weights into registers, but `ahead`, then into `room` bytes of shared memory."""
        most = min(max(map(self.pairs, self.loops)), _MOST_PAIRS)
        registers = _REGISTERS.get(self.shape.warps, _REGISTERS[8]) - _REGISTERS_OF_PAIR * most
        registers -= ahead
        found = []
        for product in self.shared.products:
            m, k = self._count_rows(product), self._count_columns(product)
            if self.tiled:
                halves = 1 + self.halves(product)
                made = self._slice_tiles(m, k, halves, registers, room, ahead)
            else:
                made = self._slice(m, k, registers, room)
            found.append(made)
            registers -= made.register_bytes // (4 * self.shape.threads)
            room -= made.shared_bytes
        return found

    def _slice_tiles(
        self, m: int, k: int, halves: int, registers: int, room: int, ahead: int
    ) -> Slice:
        """Of tiles for tensor cores: a turn is 16 rows by 32 columns of a warp."""
        tiles, warps = m // _TILE, self.shape.warps
        splits = self._choose_splits(m, k // COLUMNS, halves)
        each, turns = -(-tiles * splits // warps), k // COLUMNS // splits
        sums = 4 * each * -(-self.shape.rows // _TILE_COLUMNS)
        own = each * warps * _TILE * COLUMNS * 2
        made = Slice(m, k, splits, 0, 0, each, turns, own)
        registers += _TOGETHER * (self.together(made) and not ahead) - max(0, sums - _SUMS)
        held = max(0, min(turns, registers // (8 * each)))
        return replace(made, held=held, kept=min(turns - held, room // own))

    def _choose_splits(self, m: int, columns: int, halves: int) -> int:
        """The parts of K of which warps have tiles, so that a product takes the least time.

        The more parts there are, the more tiles a warp has, for which it reads x once; but sums of
        all parts are written and read again.
        """
        warps, rows = self.shape.warps, self.shape.rows
        possible = [n for n in (1, 2, 4, 8) if warps % n == 0 and columns // halves % n == 0]

        def estimate(n: int) -> float:
            """About the clocks of a product."""
            each, turns = -(-m // _TILE * n // warps), columns // n
            sums = n * (rows * m / 10 + 80)
            if self.together(Slice(m, 0, n, 0, 0, each, turns, 0)):
                return 80 * each * turns + sums
            return -(-rows // _TILE_COLUMNS) * turns * warps * (2 * each + 4) + sums

        return min(possible, key=estimate)

    def _slice(self, m: int, k: int, registers: int, room: int) -> Slice:
        """Of plain multiply-adds: a turn is 4 columns of the rows of a thread."""
        threads, splits = self.shape.threads, 1
        while 2 * splits <= min(4 * threads // m, _MOST_SPLITS):
            splits *= 2
        each, turns = -(-m * splits // threads), k // 4 // splits
        own = BYTES[self.wide] * each // 4  # registers of a row's sums
        passes = -(-self.shape.rows // max(1, _MOST_SUMS // own))
        batch = -(-self.shape.rows // passes)
        registers -= max(0, own * batch - _PLAIN_SUMS)
        held = max(0, min(turns, registers // (4 * own)))
        turn_bytes = 16 * own * threads
        kept = min(turns - held, room // turn_bytes)
        return Slice(m, k, splits, held, kept, each, turns, turn_bytes, batch)

    def _count_rows(self, product: SharedProduct) -> int:
        own = self.units if product.gathered else self.cluster_width
        return _round(sum(own(part.value.type.size) for part in product.parts), _TILE)

    def _count_columns(self, product: SharedProduct) -> int:
        if product.in_place:
            return _round(product.op.values[0].type.size, COLUMNS)
        if product.gathered is None:
            return self.shape.clusters * self.own_columns(product)
        return _round(sum(self.width(s.value.type.size) for s in product.segments), COLUMNS)

    def own_columns(self, product: SharedProduct) -> int:
        """The columns of a block's own features of an operand; those of its partner follow."""
        return _round(sum(self.units(s.value.type.size) for s in product.segments), COLUMNS)

    def count_sums(self, index: int) -> int:
        """The sums of a row that a product writes: one for each part of K, if tiles are split."""
        return self.slices[index].splits if self.tiled else 1

    def part_row(self, product: SharedProduct, value: Value) -> int:
        """The first row of a part among the block's rows of the weights, or among all rows."""
        own = self.units if product.gathered else self.cluster_width
        values = [part.value for part in product.parts]
        return sum(own(v.type.size) for v in values[: values.index(value)])

    # Shared memory

    def gathered_columns(self, gathered: Gathered) -> int:
        """The columns of an array of a gathered vector."""
        own = self.cluster_width if self.parts_from_clusters(gathered) else self.width
        return _round(sum(own(s.value.type.size) for s in gathered.segments), COLUMNS)

    def copies(self, exchange: int, last_read: int) -> int:
        """Of what is pushed in an exchange: two, if others may push the next while it is read."""
        return 1 if last_read - exchange < self.shared.exchanges else 2

    def height(self, dtype: str) -> int:
        """The rows of an array in panels, as ``Panels::HEIGHT``."""
        rows = self.shape.rows
        return {"bf16": rows, "f16": rows, "bool": rows + rows % 2}.get(dtype, rows | 1)

    def count_panels(self, dtype: str, columns: int) -> int:
        """The elements of an array in panels; tensor cores read whole tiles of rows."""
        past = -self.shape.rows % _TILE_COLUMNS * _TILE_COLUMNS
        return self.height(dtype) * columns + past * self.tiled

    def segment_column(self, gathered: Gathered, index: int) -> int:
        """The first column of a segment of a gathered vector."""
        return sum(self.width(s.value.type.size) for s in gathered.segments[:index])

    def reduced_stride(self, group: ReductionGroup) -> int:
        """The elements of a row of a block's own features that are reduced."""
        return self.units(group.size) + group.lanes(self.shape.rows, self.shape.threads)

    def count_partial(self, product: SharedProduct) -> int:
        """The sums that all blocks of a cluster push to one."""
        columns = sum(self.cluster_width(part.value.type.size) for part in product.parts)
        return self.shape.rows * columns

    def _place_arrays(self) -> None:
        rows, shared = self.shape.rows, self.shared
        for index, gathered in enumerate(shared.gathered):
            copies = self.copies(gathered.exchange, gathered.last_read)
            count = self.count_panels(gathered.dtype, self.gathered_columns(gathered))
            self._place(f"gathered{index}", gathered.dtype, copies * count)
            if self.parts_from_clusters(gathered):
                # One copy: it is relayed when all blocks have pushed what follows reading it.
                self._place(f"relayed{index}", gathered.dtype, count)
        for index, product in enumerate(shared.products):
            count = self.count_sums(index) * rows * self.slices[index].stride
            if not self.pushes_sums(index):
                self._place(f"y{index}", self.wide, count)
            elif BYTES[self.sum_dtype(product)] == 2:
                tiles = self.shape.warps * -(-rows // _TILE_COLUMNS)
                self._place(f"stage{index}", self.sum_dtype(product), tiles * 8 * _TILE)
            if product.gathered is None:
                dtype = product.op.values[0].type.dtype
                self._place(
                    f"x{index}", dtype, self.count_panels(dtype, self.slices[index].columns)
                )
                copies = self.copies(product.exchange, product.exchange + 1)
                count = copies * self.count_partial(product)
                self._place(f"sums{index}", self.sum_dtype(product), count)
        for index, value in enumerate(shared.scalars):
            self._place(f"scalar{index}", self.register_dtype(value), rows)
        for exchange, reductions in self.reductions.items():
            for group in reductions.groups:
                count = len(group.vectors) * rows * self.reduced_stride(group)
                self._place(group.name, self.wide, count)
            count = self.copies(exchange, exchange + 1) * self.shape.members * rows
            self._place(f"reduced{exchange}", self.wide, count * reductions.stride)
            if self.shape.blocks > 1:
                self._place(f"whole{exchange}", self.wide, rows * reductions.stride)

    def _place(self, name: str, dtype: str, count: int) -> None:
        self.arrays.append(Array(name, dtype, self.array_bytes))
        self.array_bytes += _round(count * BYTES[dtype], 16)


def _round(number: int, to: int) -> int:
    return -(-number // to) * to
