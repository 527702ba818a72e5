"""Shares the steps of a program among the blocks of a cluster, which keep its weights on the chip.

Every block computes a slice of the features of each vector. What an op reads of its own features
stays in registers. What it reads of others, blocks exchange: the operands of products, the sums of
rows, and vectors that are sliced or concatenated. A step is a row of phases with an exchange after
each phase but the last, as few as its longest chain of such reads.

n features of a value, m features of a product's result, k features of its operand.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from hoconv.recurrent.ir.kinds import BY_AXES, PRODUCTS, is_reduction
from hoconv.recurrent.ir.program import Op, Program, Value, flat, step_outputs
from hoconv.recurrent.passes.cluster.reciprocals import take_reciprocals
from hoconv.recurrent.passes.cluster.sums import SPREAD, shorten_sums

# A product reads part of a vector in place where the part begins and ends at multiples of this.
COLUMNS = 32


@dataclass(frozen=True, eq=False)
class Segment:
    """A value within a concatenation: its features begin at `start`."""

    value: Value
    start: int


@dataclass(eq=False)
class Gathered:
    """A vector that all blocks get whole.

    Attributes:
        segments: the values that it consists of.
        exchange: the index of the exchange, which follows the phase of this index.
        last_read: the index of the last phase that reads it.
    """

    segments: tuple[Segment, ...]
    exchange: int
    last_read: int = 0

    @property
    def dtype(self) -> str:
        """The dtype of its values."""
        return self.segments[0].value.type.dtype


@dataclass(eq=False)
class SharedProduct:
    """A product of the step.

    Attributes:
        op: the product.
        segments: its operand.
        parts: what loops read of its result: value and first feature. The parts do not overlap.
        exchange: the index of the exchange before its result is known.
        gathered: the operand, which each block multiplies by the weights of its own results; None
            where each block multiplies its own features of the operand, and blocks add the results.
        column, in_place: the first feature of `gathered` that the operand is, and whether it is
            only a part of it.
    """

    op: Op
    segments: tuple[Segment, ...]
    parts: tuple[Segment, ...]
    exchange: int
    gathered: Gathered | None
    column: int
    in_place: bool


@dataclass(eq=False)
class Distribution:
    """The steps of a program, shared among blocks.

    Attributes:
        exchanges: the number of exchanges of a step; it has one phase more.
        phases: for each phase, the values to compute, in order. Those of one feature are computed
            by every block, by one thread for each row.
        made: the op of each value; products and slices of products' results have a `part`.
        parts: the product, and the first feature, of values that are parts of a product's result.
        reads: the vector from which a value is read, and the first feature there.
        loads: the sequence or parameter of which a value is a slice, and the first feature.
    """

    program: Program
    exchanges: int = 0
    phases: list[list[Value]] = field(default_factory=list)
    made: Mapping[Value, Op] = field(default_factory=dict)
    products: list[SharedProduct] = field(default_factory=list)
    gathered: list[Gathered] = field(default_factory=list)
    reductions: dict[Value, int] = field(default_factory=dict)
    parts: dict[Value, tuple[SharedProduct, int]] = field(default_factory=dict)
    reads: dict[Value, tuple[Gathered, int]] = field(default_factory=dict)
    loads: dict[Value, tuple[Value, int]] = field(default_factory=dict)

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the vectors that blocks share, in order."""
        values = {v for phase in self.phases for v in phase}
        values |= {s.value for s in self.program.states}
        values |= {s.value for each in (*self.gathered, *self.products) for s in each.segments}
        return tuple(sorted({v.type.size for v in values} - {1}))

    @functools.cached_property
    def scalars(self) -> tuple[Value, ...]:
        """The values of one feature that a phase computes and vectors need."""
        following = {s.value: s.next for s in self.program.states}
        found = {v for op in self.made.values() if op.result.type.size > 1 for v in op.values}
        while more := {following[v] for v in found if v in following} - found:
            found |= more
        computed = (v for phase in self.phases for v in phase if v in self.made)
        return tuple(v for v in computed if v.type.size == 1 and v in found and v not in self.loads)

    def segments(self, value: Value) -> tuple[Segment, ...]:
        """Returns what a value is concatenated of; itself if it is no concatenation."""
        op = self.made.get(value)
        if op is None or op.kind != "cat":
            return (Segment(value, 0),)
        found, start = [], 0
        for part in op.values:
            found += [Segment(s.value, start + s.start) for s in self.segments(part)]
            start += part.type.size
        return tuple(found)


def refuse(program: Program) -> str | None:
    """Says why blocks cannot share the steps of a program, or None."""
    products = [op for op in flat(program.step) if op.kind in PRODUCTS]
    if not products:
        return "its steps have no product"
    if any(v.type.rate != "once" for op in products for v in op.values[1:]):
        return "a step computes the weights of a product"
    if len({op.values[1] for op in products}) < len(products):
        return "a step multiplies by the same weights more than once"
    if any(op.kind in BY_AXES for op in flat(program.step)):
        return "a step has values of several axes"
    return None


def distribute(program: Program, alone: bool = False) -> Distribution:
    """Shares the steps of a program among the blocks of a cluster.

    Args:
        program: one that :func:`refuse` does not refuse.
        alone: whether the cluster is a single block.
    """
    return _Distributing(take_reciprocals(shorten_sums(program)), alone).shared


class _Distributing:
    def __init__(self, program: Program, alone: bool) -> None:
        self.alone = alone
        self.ops = list(flat(program.step))
        self.shared = Distribution(program, made={op.result: op for op in self.ops})
        self.outputs = set(step_outputs(program))
        self.readers: dict[Value, list[Op]] = defaultdict(list)
        for op in self.ops:
            for value in op.values:
                self.readers[value].append(op)
        self.found: dict[tuple, Gathered] = {}
        self.earliest: dict[Value, int] = defaultdict(int)
        self.needed = self._find_needed()
        for op in self.ops:
            self._place(op)
        self.shared.exchanges = max(self.earliest.values(), default=0)
        self._schedule()

    def _find_needed(self) -> set[Value]:
        """The values that a register holds: not a concatenation of which only parts are read."""
        following = {s.next for s in self.shared.program.states}
        needed = set()
        for op in self.ops:
            whole = [
                r for r in self.readers[op.result] if r.kind not in ("cat", "slice", *PRODUCTS)
            ]
            if op.kind != "cat" or whole or op.result in following:
                needed.add(op.result)
        return needed

    def _gather(self, value: Value) -> Gathered:
        segments = self.shared.segments(value)
        key = tuple((s.value, s.start) for s in segments)
        if key not in self.found:
            exchange = max(self.earliest[s.value] for s in segments)
            self.found[key] = Gathered(segments, exchange)
            self.shared.gathered.append(self.found[key])
        return self.found[key]

    def _place(self, op: Op) -> None:
        """Finds the earliest phase of an op's result, and how it gets its operands."""
        result, shared = op.result, self.shared
        if op.kind in PRODUCTS:
            self._place_product(op)
        elif op.kind == "slice":
            self._place_slice(op)
        elif op.kind == "cat":
            if result in self.needed:
                whole = self._gather(result)
                shared.reads[result] = whole, 0
                self.earliest[result] = whole.exchange + 1
        elif op.kind == SPREAD or (is_reduction(op.kind) and op.values[0].type.size > 1):
            shared.reductions[result] = self.earliest[op.values[0]]
            self.earliest[result] = self.earliest[op.values[0]] + 1
        else:
            self.earliest[result] = max((self.earliest[v] for v in op.values), default=0)

    def _place_slice(self, op: Op) -> None:
        source, start = op.values[0], int(op.attrs[0])
        if op.result in self.shared.parts:
            return
        if source.type.size == 1:
            self.earliest[op.result] = self.earliest[source]
        elif source.type.rate != "step":
            self.shared.loads[op.result] = source, start
        elif op.result in self.needed and self._is_read(op):
            whole = self._gather(source)
            self.shared.reads[op.result] = whole, start
            self.earliest[op.result] = whole.exchange + 1

    def _is_read(self, op: Op) -> bool:
        """Returns whether anything but products, which read a slice in place, reads a slice."""
        users = self.readers[op.result]
        return op.result in self.outputs or not all(
            u.kind in PRODUCTS and self._in_place(u) for u in users
        )

    def _in_place(self, op: Op) -> bool:
        """Returns whether a product reads a slice of a vector where it is."""
        made = self.shared.made.get(op.values[0])
        if made is None or made.kind != "slice" or made.values[0].type.rate != "step":
            return False
        source = made.values[0]
        segments = self.shared.segments(source)
        aligned = all(int(a) % COLUMNS == 0 for a in made.attrs)
        return len(segments) == 1 and aligned and source not in self._products()

    def _products(self) -> set[Value]:
        return {p.op.result for p in self.shared.products}

    def _place_product(self, op: Op) -> None:
        x, column = op.values[0], 0
        in_place = self._in_place(op)
        if in_place:
            made = self.shared.made[x]
            x, column = made.values[0], int(made.attrs[0])
        segments = self.shared.segments(x)
        parts = self._find_parts(op)
        ones = any(s.value.type.size == 1 for s in (*segments, *parts))
        m, k = op.result.type.size, x.type.row_bytes
        scatters = not self.alone and not ones and not in_place and 4 * m < k
        exchange = max(self.earliest[s.value] for s in segments)
        gathered = None if scatters else self._gather(x)
        made = SharedProduct(op, segments, parts, exchange, gathered, column, in_place)
        self.shared.products.append(made)
        self.earliest[op.result] = exchange + 1
        for part in parts:
            self.shared.parts[part.value] = made, part.start
            self.earliest[part.value] = exchange + 1

    def _find_parts(self, op: Op) -> tuple[Segment, ...]:
        y = op.result
        slices: dict[tuple[int, int], Value] = {}
        whole = y in self.outputs or not self.readers[y]
        for reader in self.readers[y]:
            if reader.kind == "slice":
                start, stop = map(int, reader.attrs)
                whole |= slices.setdefault((start, stop), reader.result) is not reader.result
            else:
                whole = True
        ends = sorted(slices)
        whole |= any(a[1] > b[0] for a, b in itertools.pairwise(ends))
        if whole:
            return (Segment(y, 0),)
        return tuple(Segment(slices[at], at[0]) for at in ends)

    def _schedule(self) -> None:
        """Computes each value as late as its readers allow: its operands are loaded no sooner."""
        shared = self.shared
        wanted: dict[Value, list[int]] = defaultdict(list)
        for product in shared.products:
            for segment in product.segments:
                wanted[segment.value].append(product.exchange)
        for gathered in shared.gathered:
            for segment in gathered.segments:
                wanted[segment.value].append(gathered.exchange)
        for result, exchange in shared.reductions.items():
            wanted[shared.made[result].values[0]].append(exchange)
        latest: dict[Value, int] = {}

        def settle(value: Value) -> int:
            fixed = value in shared.reductions or self._is_sum(value)
            at = min(wanted[value], default=self.earliest[value])
            latest[value] = self.earliest[value] if fixed else at
            return latest[value]

        for op in reversed(self.ops):
            at = settle(op.result)
            plain = op.kind not in (*PRODUCTS, "cat") and op.result not in shared.reductions
            if plain and not any(
                op.result in way for way in (shared.parts, shared.reads, shared.loads)
            ):
                for value in op.values:
                    wanted[value].append(at)
        last = shared.exchanges
        for output in self.outputs:
            for segment in shared.segments(output):
                wanted[segment.value].append(last)
        shared.phases = [[] for _ in range(last + 1)]
        hidden = {op.result for op in self.ops if op.kind == "slice" and self._hides(op)}
        hidden |= {
            op.result for op in self.ops if op.kind == "cat" and op.result not in self.needed
        }
        hidden |= self._products() - set(shared.parts)
        given = [v for v in wanted if v not in shared.made and v.type.rate == "sequence"]
        for value in given:
            self._compute(value, min(wanted[value]))
        for op in self.ops:
            if op.result not in hidden:
                self._compute(op.result, latest[op.result])
        for product in shared.products:
            if product.gathered:
                product.gathered.last_read = max(product.gathered.last_read, product.exchange + 1)
        for value, (gathered, _) in shared.reads.items():
            gathered.last_read = max(gathered.last_read, latest[value])

    def _hides(self, op: Op) -> bool:
        """Returns whether a slice has no register: products alone read it, in place."""
        ways = (self.shared.parts, self.shared.reads, self.shared.loads)
        return op.values[0].type.size > 1 and not any(op.result in way for way in ways)

    def _is_sum(self, value: Value) -> bool:
        """Returns whether blocks add up a part of a product's result: they do it at once."""
        part = self.shared.parts.get(value)
        return part is not None and part[0].gathered is None

    def _compute(self, value: Value, phase: int) -> None:
        self.shared.phases[phase].append(value)
