"""What the blocks of a cluster exchange: gathered operands, partial sums, and reductions of rows.

Exchange k follows phase k of a step. r a row of the cluster, i the number of steps already done, n
features of a vector, C blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

from hoconv.recurrent.codegen.cluster.threads import Threads
from hoconv.recurrent.codegen.expressions import initial, reduced
from hoconv.recurrent.ir.program import Op, Value
from hoconv.recurrent.passes.distribute import Gathered, SharedProduct
from hoconv.recurrent.passes.sums import SPREAD


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
        for index, op in self._reduced(phase):
            if op.values[0].type.size == n and op.kind != SPREAD:
                place = f"i % 2 * {self._count_units(n)} + r * {layout.units(n)} + unit"
                yield f"rows{index}[{place}] = {self.threads.register(op.values[0], n)};"

    def scattered(self, exchange: int) -> list[tuple[int, SharedProduct]]:
        """The products of which blocks add up partial results in an exchange."""
        found = enumerate(self.shared.products)
        return [(i, p) for i, p in found if p.gathered is None and p.exchange == exchange]

    def _reduced(self, exchange: int) -> list[tuple[int, Op]]:
        """The reductions of rows in an exchange."""
        found = enumerate(self.shared.reductions.items())
        return [(i, self.shared.made[value]) for i, (value, at) in found if at == exchange]

    def _count_units(self, n: int) -> int:
        return self.shape.rows * self.layout.units(n)

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
        for index, op in self._reduced(k):
            to = self._parts(op.result)
            yield f"push_reduced<C, THREADS, ROWS>(exchanges, totals{index}, {to});"

    def reduce(self, k: int) -> Iterator[str]:
        """Reduces a block's own features of rows, before any is sent: they do not wait in turn."""
        values = list(self.shared.reductions)
        for index, op in self._reduced(k):
            n = op.values[0].type.size
            units = self.layout.units(n)
            own = f"min({units}, {n} - rank * {units})"
            rows = f"rows{values.index(op.values[1]) if op.kind == SPREAD else index}"
            given = f"totals{index}, {rows} + i % 2 * {self._count_units(n)}, {own}"
            yield f"{self.wide} totals{index}[ROUNDS<THREADS, ROWS>];"
            if op.kind == SPREAD:
                yield f"spread_rows<THREADS, ROWS, {units}>({given});"
                continue
            given += f", {initial(op)}, {self._function(op)}"
            yield f"reduce_rows<THREADS, ROWS, {units}>({given});"

    def combine(self, k: int) -> Iterator[str]:
        """Combines what blocks have reduced their own features of rows to in an exchange."""
        values = list(self.shared.reductions)
        for index, op in self._reduced(k) if self.shape.blocks > 1 else ():
            parts, whole = self._parts(op.result), self.whole(op.result)
            if op.kind == SPREAD:
                x, total = op.values
                sizes = f"C, THREADS, ROWS, {self.layout.units(x.type.size)}, {x.type.size}"
                given = f"totals{values.index(total)}, {parts}, {self._parts(total)}, {whole}"
                yield f"combine_spreads<{sizes}>({given});"
                continue
            given = f"totals{index}, {parts}, {whole}, {initial(op)}, {self._function(op)}"
            yield f"combine_rows<C, THREADS, ROWS>({given});"

    def _parts(self, value: Value) -> str:
        """What each block has reduced its own features of each row to in this step."""
        index, exchange = list(self.shared.reductions).index(value), self.shared.reductions[value]
        copy = self.copy(exchange, exchange + 1, self.shape.blocks * self.shape.rows)
        return f"(reduced{index} + {copy})"

    def whole(self, value: Value) -> str:
        """What each row is reduced to in this step."""
        if self.shape.blocks == 1:
            return self._parts(value)
        return f"whole{list(self.shared.reductions).index(value)}"

    def _function(self, op: Op) -> str:
        return f"[]({self.wide} a, {self.wide} b) {{ return {reduced(op, 'a', 'b')}; }}"

    def count_bytes(self, exchange: int, ahead: int) -> int:
        """The bytes of the exchange so many ahead, of those that have any; 0 of none."""
        all_bytes = list(map(self.layout.expected_bytes, range(self.shared.exchanges)))
        counted = [k for k, bytes in enumerate(all_bytes) if bytes]
        before = sum(k < exchange for k in counted)
        return all_bytes[counted[(before + ahead) % len(counted)]] if counted else 0
