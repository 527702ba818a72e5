"""What the blocks of a cluster exchange: gathered operands, partial sums, and reductions of rows.

Exchange k follows phase k of a step. r a row of the cluster, i the number of steps already done, n
features of a vector, C blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

from hoconv.recurrent.codegen.cluster.reductions import ReductionGroup
from hoconv.recurrent.codegen.cluster.threads import Threads
from hoconv.recurrent.codegen.expressions import initial, reduced
from hoconv.recurrent.ir.program import Op, Value
from hoconv.recurrent.passes.cluster.distribute import Gathered, SharedProduct
from hoconv.recurrent.passes.cluster.sums import SPREAD


class Exchanges:
    """Writes a kernel's exchanges."""

    def __init__(self, threads: Threads) -> None:
        self.threads, self.layout, self.shared = threads, threads.layout, threads.shared
        self.shape, self.wide = threads.layout.shape, threads.wide

    def copy(self, exchange: int, last_read: int, count: int) -> str:
        """The first element of this step's copy of what is pushed in an exchange."""
        return f"i % 2 * {count}" if self.layout.copies(exchange, last_read) == 2 else "0"

    def rows_of(self, gathered: Gathered) -> str:
        """The first element of this step's rows of a gathered vector."""
        index = self.shared.gathered.index(gathered)
        count = self.shape.rows * self.layout.gathered_stride(gathered)
        return f"gathered{index} + {self.copy(gathered.exchange, gathered.last_read, count)}"

    def element(self, gathered: Gathered, feature: str) -> str:
        """A feature of row r of a gathered vector."""
        column = ""
        for index, segment in reversed(list(enumerate(gathered.segments))):
            own = f"{feature} + {self.layout.segment_column(gathered, index) - segment.start}"
            end = segment.start + segment.value.type.size
            column = f"{feature} < {end} ? {own} : {column}" if column else own
        stride = self.layout.gathered_stride(gathered)
        return f"({self.rows_of(gathered)})[r * {stride} + ({column})]"

    def publish(self, phase: int, n: int) -> Iterator[str]:
        """Writes what others read of the loop over vectors of n to shared memory."""
        layout, shared = self.layout, self.shared
        unit = "" if n == 1 else f" + rank * {layout.units(n)} + unit"
        for gathered in shared.gathered:
            for index, segment in enumerate(gathered.segments):
                if gathered.exchange == phase and segment.value.type.size == n:
                    column = f"{layout.segment_column(gathered, index)}{unit}"
                    place = f"r * {layout.gathered_stride(gathered)} + {column}"
                    value = self.threads.typed(segment.value, n)
                    yield f"({self.rows_of(gathered)})[{place}] = {value};"
        for index, product in self.scattered(phase):
            before = 0
            for segment in product.segments:
                if segment.value.type.size == n:
                    place = f"r * {layout.operand_stride(index)} + {before} + unit"
                    yield f"x{index}[{place}] = {self.threads.typed(segment.value, n)};"
                before += layout.units(segment.value.type.size)
        for group in self._groups(phase):
            for index, vector in enumerate(group.vectors):
                if vector.type.size == n:
                    place = f"({index} * ROWS + r) * {layout.reduced_stride(group)} + unit"
                    yield f"{group.name}[{place}] = {self.threads.register(vector, n)};"

    def scattered(self, exchange: int) -> list[tuple[int, SharedProduct]]:
        """The products of which blocks add up partial results in an exchange."""
        found = enumerate(self.shared.products)
        return [(i, p) for i, p in found if p.gathered is None and p.exchange == exchange]

    def _groups(self, exchange: int) -> tuple[ReductionGroup, ...]:
        """The reductions of rows in an exchange."""
        found = self.layout.reductions.get(exchange)
        return found.groups if found else ()

    def multiply(self, index: int, x: str, x_stride: int) -> str:
        strides = f"{x_stride}, {self.layout.slices[index].stride}"
        return f"product{index}.multiply<{strides}>({x}, y{index}, rest{index}, far{index});"

    def pushes(self, k: int) -> Iterator[str]:
        """What a block sends in an exchange."""
        layout, shared = self.layout, self.shared
        for gathered in shared.gathered if self.shape.blocks > 1 else ():
            for index, segment in enumerate(gathered.segments):
                n = segment.value.type.size
                if gathered.exchange == k and n > 1:
                    units = layout.units(n)
                    given = f"C, THREADS, ROWS, {units}, {layout.gathered_stride(gathered)}"
                    column = f"{layout.segment_column(gathered, index)} + rank * {units}"
                    start = f"{self.rows_of(gathered)} + {column}"
                    yield f"push_rows<{given}>(exchanges, {start});"
        for index, product in self.scattered(k):
            copy = self.copy(k, k + 1, layout.count_partial(product))
            for part in product.parts:
                row = layout.part_row(product, part.value)
                sizes = f"{layout.units(part.value.type.size)}, {layout.slices[index].stride}"
                given = f"C, THREADS, ROWS, {sizes}, {layout.count_sums(index)}"
                to = f"sums{index} + {copy} + {row * self.shape.rows}"
                yield f"push_sums<{given}>(exchanges, y{index} + {row}, {to});"

    def reduce(self, k: int) -> Iterator[str]:
        """Reduces a block's own features of rows."""
        for group in self._groups(k):
            units = self.layout.units(group.size)
            own = f"min({units}, {group.size} - rank * {units})"
            mine = f"{self._reduced(k)} + {group.column}"
            if self.shape.blocks > 1:
                mine += f" + rank * {self._count_reduced(k)}"
            sizes = f"{self._sizes(k, group)}, {units}"
            given = f"{group.name}, {own}, {mine}"
            if group.op.kind == SPREAD:
                yield f"spread_rows<{sizes}>({given});"
            else:
                given += f", {initial(group.op)}, {self._function(group.op)}"
                yield f"reduce_rows<{sizes}>({given});"

    def push_reduced(self, k: int) -> Iterator[str]:
        """What a block sends of that."""
        if k in self.layout.reductions and self.shape.blocks > 1:
            stride = self.layout.reductions[k].stride
            mine = f"{self._reduced(k)} + rank * {self._count_reduced(k)}"
            yield f"push_rows<C, THREADS, ROWS, {stride}, {stride}>(exchanges, {mine});"

    def combine(self, k: int) -> Iterator[str]:
        """Combines what blocks have reduced their own features of rows to in an exchange."""
        for group in self._groups(k) if self.shape.blocks > 1 else ():
            parts, whole = f"{self._reduced(k)} + {group.column}", f"whole{k} + {group.column}"
            if group.op.kind == SPREAD:
                sizes = f"{self._sizes(k, group)}, {self.layout.units(group.size)}, {group.size}"
                yield f"combine_spreads<C, {sizes}>({parts}, {whole});"
            else:
                given = f"{parts}, {whole}, {initial(group.op)}, {self._function(group.op)}"
                yield f"combine_rows<C, {self._sizes(k, group)}>({given});"

    def _sizes(self, exchange: int, group: ReductionGroup) -> str:
        lanes = group.lanes(self.shape.rows, self.shape.threads)
        stride = self.layout.reductions[exchange].stride
        return f"THREADS, ROWS, {len(group.vectors)}, {lanes}, {stride}"

    def _count_reduced(self, exchange: int) -> int:
        """The numbers to which a block reduces its own features of all rows."""
        return self.shape.rows * self.layout.reductions[exchange].stride

    def _reduced(self, exchange: int) -> str:
        """What the blocks have reduced their own features to in this step."""
        count = self.shape.blocks * self._count_reduced(exchange)
        return f"reduced{exchange} + {self.copy(exchange, exchange + 1, count)}"

    def whole(self, value: Value) -> str:
        """What row r is reduced to in this step."""
        exchange = self.shared.reductions[value]
        found = self.layout.reductions[exchange]
        rows = f"whole{exchange}" if self.shape.blocks > 1 else f"({self._reduced(exchange)})"
        return f"{rows}[r * {found.stride} + {found.columns[value]}]"

    def _function(self, op: Op) -> str:
        return f"[]({self.wide} a, {self.wide} b) {{ return {reduced(op, 'a', 'b')}; }}"

    def count_bytes(self, exchange: int, ahead: int) -> int:
        """The bytes of the exchange so many ahead, of those that have any; 0 of none."""
        all_bytes = list(map(self.layout.expected_bytes, range(self.shared.exchanges)))
        counted = [k for k, bytes in enumerate(all_bytes) if bytes]
        before = sum(k < exchange for k in counted)
        return all_bytes[counted[(before + ahead) % len(counted)]] if counted else 0
