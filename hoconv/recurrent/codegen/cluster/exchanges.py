"""Exchanges among the blocks of a cluster: gathered operands, partial sums, reductions of rows.

What all blocks of a cluster get of a large vector comes from the L2 cache: a block puts its columns
there, and one copy brings them to all others. In a team of two clusters, a block posts its columns
to its partner, too, which relays them to its own cluster. Of a product whose partial sums are
exchanged, it posts its operand: each cluster multiplies all of the operand, and adds up the results
that its own blocks need. Either way tensor cores multiply what the own cluster has while the rest
is on its way.

Exchange k follows phase k of a step. r a row of the cluster, i the number of steps already done, n
features of a vector, C blocks of a cluster, MEMBERS blocks of a team.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hoconv.recurrent.codegen.cluster.reductions import ReductionGroup
from hoconv.recurrent.codegen.cluster.threads import Threads
from hoconv.recurrent.codegen.expressions import TYPES, initial, reduced
from hoconv.recurrent.ir.program import BYTES, Op, Value
from hoconv.recurrent.passes.cluster.distribute import Gathered, SharedProduct
from hoconv.recurrent.passes.cluster.sums import SPREAD

_WORD = 8  # bytes of data in a word of a mailbox


@dataclass(frozen=True)
class _Slice:
    """The part that a block has in shared memory of something that others need.

    Attributes:
        own: where it is.
        to: where that of its partner is.
        bytes: of each.
        relayed: whether all blocks of the cluster get these.
        room: where they get it from in global memory, if they do.
        word: of a mailbox, the first.
    """

    own: str
    to: str
    bytes: int
    relayed: bool
    room: str | None
    word: int


class Exchanges:
    """Writes a kernel's exchanges."""

    def __init__(self, threads: Threads) -> None:
        self.threads, self.layout, self.shared = threads, threads.layout, threads.shared
        self.shape, self.wide = threads.layout.shape, threads.wide
        expected = map(threads.layout.expected_bytes, range(threads.shared.exchanges))
        self.rounds = [(k, bytes) for k, all_bytes in enumerate(expected) for bytes in all_bytes]

    def copy(self, exchange: int, last_read: int, count: int) -> str:
        """The first element of this step's copy of what is pushed in an exchange."""
        return f"i % 2 * {count}" if self.layout.copies(exchange, last_read) == 2 else "0"

    def rows_of(self, gathered: Gathered) -> str:
        """The first element of this step's rows of a gathered vector; those of the own cluster."""
        index = self.shared.gathered.index(gathered)
        layout = self.layout
        count = layout.count_panels(gathered.dtype, layout.gathered_columns(gathered))
        return f"gathered{index} + {self.copy(gathered.exchange, gathered.last_read, count)}"

    def element(self, gathered: Gathered, feature: str) -> str:
        """A feature of row r of a gathered vector."""
        column = ""
        for index, segment in reversed(list(enumerate(gathered.segments))):
            own = f"{feature} + {self.layout.segment_column(gathered, index) - segment.start}"
            end = segment.start + segment.value.type.size
            column = f"{feature} < {end} ? {own} : {column}" if column else own
        return f"({self.rows_of(gathered)})[{self._place(gathered.dtype, column)}]"

    def _place(self, dtype: str, column: str) -> str:
        """Returns where a column of row r is in an array in panels."""
        return f"Panels<{TYPES[dtype]}, ROWS>::at(r, {column})"

    def publish(self, phase: int, n: int) -> Iterator[str]:
        """Writes what others read of the loop over vectors of n to shared memory."""
        layout, shared = self.layout, self.shared
        unit = "0" if n == 1 else "unit"
        for gathered in shared.gathered:
            for index, segment in enumerate(gathered.segments):
                if gathered.exchange == phase and segment.value.type.size == n:
                    start = self._columns_of(gathered, index, "rank" if n > 1 else "0")
                    place = self._place(gathered.dtype, unit)
                    value = self.threads.typed(segment.value, n)
                    yield f"({start})[{place}] = {value};"
        for index, product in self.scattered(phase):
            before = 0
            for segment in product.segments:
                if segment.value.type.size == n:
                    place = self._place(segment.value.type.dtype, f"{before} + unit")
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

    def multiply(self, index: int) -> Iterator[str]:
        """Multiplies an operand of which all has come, or the second half of it."""
        layout, each = self.layout, self.layout.slices[index]
        product = self.shared.products[index]
        begin = each.turns // 2 * layout.halves(product)
        x, memory = self._operand(index, of_partner=begin > 0), f"rest{index}, far{index}"
        if layout.pushes_sums(index):
            copy = self.copy(product.exchange, product.exchange + 1, layout.count_partial(product))
            given = f"{begin}, C, {layout.units(product.parts[0].value.type.size)}"
            rounded = BYTES[layout.sum_dtype(product)] == 2
            stage = f"reinterpret_cast<uint4*>(stage{index})" if rounded else "nullptr"
            to = f"exchanges, sums{index} + {copy}, {stage}"
            yield f"product{index}.add_and_push<{given}>(total{index}, {x}, {memory}, {to});"
        elif begin:
            yield f"product{index}.add<{begin}, {each.turns}>(total{index}, {x}, {memory});"
            yield f"product{index}.write<{each.stride}>(total{index}, y{index});"
        else:
            yield f"product{index}.multiply<{each.stride}>({x}, y{index}, {memory});"

    def multiply_half(self, index: int) -> Iterator[str]:
        """Multiplies what the own cluster, or block, has of an operand, if that lies by itself."""
        halves = self.layout.halves(self.shared.products[index])
        if halves or self.layout.pushes_sums(index):
            yield f"decltype(product{index})::Sums total{index} = {{}};"
        if halves:
            given = f"total{index}, {self._operand(index)}, rest{index}, far{index}"
            yield f"product{index}.add<0, {self.layout.slices[index].turns // 2}>({given});"

    def _operand(self, index: int, of_partner: bool = False) -> str:
        """The first element of an operand.

        Args:
            of_partner: whether of what the partner, or its cluster, has of it.
        """
        product = self.shared.products[index]
        height = self.layout.height(product.op.values[0].type.dtype)
        if product.gathered is None:
            return f"x{index} + {self.layout.own_columns(product) * height * of_partner}"
        if of_partner:
            return f"relayed{self.shared.gathered.index(product.gathered)}"
        return f"{self.rows_of(product.gathered)} + {product.column * height}"

    def pushes(self, k: int) -> Iterator[str]:
        """Returns what a block sends in an exchange."""
        layout, shared = self.layout, self.shared
        for gathered in shared.gathered if self.shape.blocks > 1 else ():
            for index, segment in enumerate(gathered.segments):
                if gathered.exchange == k and segment.value.type.size > 1:
                    given = f"C, THREADS, {layout.slice_bytes(segment.value)}"
                    start = self._columns_of(gathered, index, "rank")
                    if room := self._room(gathered, index):
                        yield f"spread_slice<{given}>(exchanges, {start}, {room});"
                    else:
                        yield f"push_slice<{given}>(exchanges, {start});"
        for index, product in self.scattered(k):
            copy = self.copy(k, k + 1, layout.count_partial(product))
            for part in product.parts if not layout.pushes_sums(index) else ():
                row = layout.part_row(product, part.value)
                sizes = f"{layout.units(part.value.type.size)}, {layout.slices[index].stride}"
                given = f"C, THREADS, ROWS, {sizes}, {layout.count_sums(index)}"
                to = f"sums{index} + {copy} + {row * self.shape.rows}"
                yield f"push_sums<{given}>(exchanges, y{index} + {row}, {to});"

    def _columns_of(self, gathered: Gathered, index: int, rank: str) -> str:
        """The columns of a segment of a gathered vector that a block has: `rank` or `partner`."""
        units = self.layout.units(gathered.segments[index].value.type.size)
        rows = self.rows_of(gathered)
        if self.layout.parts_from_clusters(gathered):
            if rank == "partner":
                rows = f"relayed{self.shared.gathered.index(gathered)}"
            rank += " % C"
        column = f"{self.layout.segment_column(gathered, index)} + {rank} * {units}"
        return f"{rows} + ({column}) * {self.layout.height(gathered.dtype)}"

    def _room(self, gathered: Gathered, index: int, relayed: bool = False) -> str | None:
        """Returns where a block puts its columns of a segment for others, or those it relays to
        them."""
        layout, at = self.layout, 0
        for each in self.shared.gathered:
            for of, segment in enumerate(each.segments):
                if layout.spreads(segment.value):
                    bytes = layout.slice_bytes(segment.value)
                    if each is gathered and of == index:
                        at += relayed * bytes
                        return f"room + i % 2 * {layout.room_bytes} + {at}"
                    at += self.shape.clusters * bytes
        return None

    def posts(self, k: int, reduced: bool) -> Iterator[str]:
        """Returns what a block sends to its partner in an exchange: what it reduces, or all
        else."""
        for each, is_reduced in self._list_posted(k):
            if is_reduced == reduced:
                yield f"post_slice<THREADS, {each.bytes}>(mail, {each.word}, {each.own});"

    def look(self, k: int) -> Iterator[str]:
        """Looks for what the partner has posted, but what it reduces, before it is needed."""
        for each, is_reduced in self._list_posted(k):
            if not is_reduced and (each.room or not each.relayed):
                given = f"look_for<THREADS, {each.bytes}>(mail, {each.word})"
                yield f"auto {self._found(k, each)} = {given};"

    def _found(self, k: int, each: _Slice) -> str:
        """The name of what a look finds."""
        return f"found{k}_{each.word}"

    def receive(self, k: int) -> Iterator[str]:
        """Gets from the partner what this block alone needs."""
        for each, _ in self._list_posted(k):
            if not each.relayed:
                given = f"mail, {each.word}, {self._found(k, each)}, {each.to}"
                yield f"receive_slice<THREADS, {each.bytes}>({given});"

    def relay(self, k: int) -> Iterator[str]:
        """Gets from the partner what all blocks of the cluster need; ends the exchange with it."""
        for each, _ in self._list_posted(k):
            sizes, to = f"C, THREADS, {each.bytes}", f"exchanges, {each.to}"
            if each.room:
                given = f"mail, {each.word}, {self._found(k, each)}, {to}, {each.room}"
                yield f"spread_received<{sizes}>({given});"
            elif each.relayed:
                yield f"relay_slice<{sizes}>(mail, {each.word}, {to});"
        if self.layout.posted_bytes(k):
            yield "++mail.number;"

    def _list_posted(self, k: int) -> Iterator[tuple[_Slice, bool]]:
        """Returns what partners post to each other in an exchange, and whether they reduce it
        first."""
        if self.shape.clusters == 1:
            return
        layout, word = self.layout, 0
        for gathered in self.shared.gathered:
            for index, segment in enumerate(gathered.segments):
                if gathered.exchange == k and segment.value.type.size > 1:
                    own, to = (self._columns_of(gathered, index, r) for r in ("rank", "partner"))
                    bytes = layout.slice_bytes(segment.value)
                    room = self._room(gathered, index, relayed=True)
                    yield _Slice(own, to, bytes, True, room, word), False
                    word += bytes // _WORD
        for index, product in self.scattered(k):
            bytes = sum(layout.slice_bytes(s.value) for s in product.segments)
            own, to = f"x{index}", self._operand(index, of_partner=True)
            yield _Slice(own, to, bytes, False, None, word), False
            word += bytes // _WORD
        if k in layout.reductions:
            own, to = (self._reduced_by(k, r) for r in ("rank", "partner"))
            yield _Slice(own, to, layout.reduced_bytes(k), True, None, word), True

    def reduce(self, k: int) -> Iterator[str]:
        """Reduces a block's own features of rows."""
        for group in self._groups(k):
            units = self.layout.units(group.size)
            own = f"min({units}, {group.size} - rank * {units})"
            mine = f"{self._reduced_by(k, 'rank')} + {group.column}"
            sizes = f"{self._sizes(k, group)}, {units}"
            given = f"{group.name}, {own}, {mine}"
            if group.op.kind == SPREAD:
                yield f"spread_rows<{sizes}>({given});"
            else:
                given += f", {initial(group.op)}, {self._function(group.op)}"
                yield f"reduce_rows<{sizes}>({given});"

    def push_reduced(self, k: int) -> Iterator[str]:
        """Returns what a block sends of that."""
        if k in self.layout.reductions and self.shape.blocks > 1:
            bytes, mine = self.layout.reduced_bytes(k), self._reduced_by(k, "rank")
            yield f"push_slice<C, THREADS, {bytes}>(exchanges, {mine});"

    def combine(self, k: int) -> Iterator[str]:
        """Combines what blocks have reduced their own features of rows to in an exchange."""
        for group in self._groups(k) if self.shape.blocks > 1 else ():
            parts, whole = f"{self._reduced(k)} + {group.column}", f"whole{k} + {group.column}"
            if group.op.kind == SPREAD:
                sizes = f"{self._sizes(k, group)}, {self.layout.units(group.size)}, {group.size}"
                yield f"combine_spreads<MEMBERS, {sizes}>({parts}, {whole});"
            else:
                given = f"{parts}, {whole}, {initial(group.op)}, {self._function(group.op)}"
                yield f"combine_rows<MEMBERS, {self._sizes(k, group)}>({given});"

    def _sizes(self, exchange: int, group: ReductionGroup) -> str:
        lanes = group.lanes(self.shape.rows, self.shape.threads)
        stride = self.layout.reductions[exchange].stride
        return f"THREADS, ROWS, {len(group.vectors)}, {lanes}, {stride}"

    def _count_reduced(self, exchange: int) -> int:
        """The numbers to which a block reduces its own features of all rows."""
        return self.shape.rows * self.layout.reductions[exchange].stride

    def _reduced(self, exchange: int) -> str:
        """Returns what the blocks have reduced their own features to in this step."""
        count = self.shape.members * self._count_reduced(exchange)
        return f"reduced{exchange} + {self.copy(exchange, exchange + 1, count)}"

    def _reduced_by(self, exchange: int, rank: str) -> str:
        """Returns what a block has reduced its own features to in this step."""
        return f"{self._reduced(exchange)} + {rank} * {self._count_reduced(exchange)}"

    def whole(self, value: Value) -> str:
        """Returns what row r is reduced to in this step."""
        exchange = self.shared.reductions[value]
        found = self.layout.reductions[exchange]
        rows = f"whole{exchange}" if self.shape.blocks > 1 else f"({self._reduced(exchange)})"
        return f"{rows}[r * {found.stride} + {found.columns[value]}]"

    def _function(self, op: Op) -> str:
        return f"[]({self.wide} a, {self.wide} b) {{ return {reduced(op, 'a', 'b')}; }}"

    def waits(self, exchange: int) -> list[str]:
        """Returns the statements that wait for each round of an exchange."""
        own = [at for at, (k, _) in enumerate(self.rounds) if k == exchange]
        return [f"exchanges.wait({self.count_bytes(at + 2)});" for at in own]

    def count_bytes(self, at: int) -> int:
        """The bytes of a round, counted from the first of the first step on; 0 if there is none."""
        return self.rounds[at % len(self.rounds)][1] if self.rounds else 0
