"""Takes elementwise ops part by part where they read rows that are put together of parts.

The gradient of a cell that takes parts of its input ends so::

    add(cat(a, b), cat(c, d))       becomes     cat(add(a, c), add(b, d))

A kernel puts a row together in memory, so that it would write and read both rows, and its threads
would wait for each other in between. Of the parts, the sums stay in registers, each is stored where
it belongs in the result, and a feature depends on no other one. Where the parts of two rows differ,
both are cut wherever a part ends, which zeros and what is in memory can be. So are rows of which
only slices are read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from hoconv.recurrent.ir.kinds import is_elementwise, is_reduction
from hoconv.recurrent.ir.program import Group, Op, Operand, Program, Rate, Type, Value
from hoconv.recurrent.passes.rows import find_outputs
from hoconv.recurrent.passes.simplify import find_equal

# Each part takes code, and of many small parts few threads would compute much.
_MOST_PARTS = 16

Bounds = tuple[int, ...]  # of the parts of a row: 0, where the second one starts, ..., its size


def take_parts(program: Program, steps: bool = False) -> Program:
    """A program whose groups before and after the loop compute with the parts of rows that are put
    together, where these are few.

    Args:
        program: one that has been fused: what other kernels have written is in memory already, and
            a load takes any part of it.
        steps: whether the groups of the loop do so, too.
    """

    def region(items: tuple[Op | Group, ...]) -> tuple[Op | Group, ...]:
        return tuple(
            _Parts(item, find_outputs(program, item)).run() if isinstance(item, Group) else item
            for item in items
        )

    program = replace(program, before=region(program.before), after=region(program.after))
    return replace(program, step=region(program.step)) if steps else program


class _Parts:
    """Takes parts in a group.

    Attributes:
        made: the op of each value that the group computes, also of the new ones.
        ops: those that the group has then.
        parts: by the result of each op that was taken part by part, its parts.
    """

    def __init__(self, group: Group, outputs: set[Value]) -> None:
        self.group = group
        self.outputs = outputs
        self.rate: Rate = group.ops[-1].result.type.rate
        self.made = {op.result: op for op in group.ops}
        self.ops: list[Op] = []
        self.parts: dict[Value, tuple[Value, ...]] = {}
        self.seen: dict[tuple, Value] = {}

    def run(self) -> Group:
        bounds = self._find_bounds()
        if not bounds:
            return self.group
        for op in self.group.ops:
            if op.result in bounds:
                self._split(op, bounds[op.result])
            elif op.kind == "cat":  # of cats: it stores the parts of these
                parts = tuple(leaf for part in op.values for leaf in self._list_leaves(part))
                self.ops.append(replace(op, inputs=parts))
            elif (part := self._find_part(op)) is not None:
                self.ops.append(Op("cast", (part,), op.result))  # to the same dtype, which is free
            else:
                self.ops.append(op)
        return Group(tuple(self._eliminate_dead()))

    def _find_bounds(self) -> dict[Value, Bounds]:
        """Finds the bounds of parts by the result of each op to take part by part: all elementwise
        ops that read each other's results, or none of them."""
        together: dict[Value, list[Op]] = {}
        for op in self.group.ops:
            if is_elementwise(op.kind) and op.result.type.size > 1:
                own = {id(ops): ops for v in op.values if (ops := together.get(v)) is not None}
                joined = [op, *(other for ops in own.values() for other in ops)]
                together.update((each.result, joined) for each in joined)
        chosen = {id(ops): self._choose_bounds(ops) for ops in together.values()}
        return {v: bounds for v, ops in together.items() if (bounds := chosen[id(ops)])}

    def _choose_bounds(self, ops: Sequence[Op]) -> Bounds | None:
        """Chooses the bounds of the parts of all that some ops read and compute; None if these are
        to stay whole."""
        results = {op.result for op in ops}
        operands = {v for op in ops for v in op.values if v.type.size > 1} - results
        ends = (
            itertools.accumulate(leaf.type.size for leaf in self._list_leaves(v)) for v in operands
        )
        bounds = tuple(sorted({0, *itertools.chain(*ends), *self._list_cuts(results)}))
        sizes = [stop - start for start, stop in itertools.pairwise(bounds)]
        if not 2 <= len(sizes) <= _MOST_PARTS or min(sizes) == 1:
            return None
        reduced = {v for op in self.group.ops if is_reduction(op.kind) for v in op.values}
        if results & reduced:  # of all features, which are in registers
            return None
        return bounds if all(self._can_cut(v, bounds) for v in operands) else None

    def _list_cuts(self, results: set[Value]) -> set[int]:
        """Lists where slices cut what some ops compute, if nothing else reads it."""
        readers = [op for op in self.group.ops if results & {*op.values}]
        slices = [op for op in readers if op.kind == "slice"]
        whole = {op.result for op in readers} - {op.result for op in slices}
        if results & self.outputs or not whole <= results:
            return set()
        return {int(at) for op in slices for at in op.attrs}

    def _can_cut(self, value: Value, bounds: Bounds) -> bool:
        """Returns whether a value has parts of these bounds, which cost nothing."""
        if len(bounds) == 2:
            return True
        if self._kind(value) == "cat":
            return all(self._can_cut(part, own) for part, own in self._share(value, bounds))
        return self._is_zero(value) or self._is_load(value)

    def _cut(self, value: Value, bounds: Bounds) -> tuple[Value, ...]:
        """The parts of a value that can be cut so, or whose op was taken part by part."""
        if len(bounds) == 2:
            return (value,)
        if value in self.parts:
            return self.parts[value]
        if self._kind(value) == "cat":
            shares = self._share(value, bounds)
            return tuple(each for part, own in shares for each in self._cut(part, own))
        zero, dtype = self._is_zero(value), value.type.dtype
        return tuple(
            self._zeros(stop - start, dtype) if zero else self._slice(value, start, stop)
            for start, stop in itertools.pairwise(bounds)
        )

    def _share(self, value: Value, bounds: Bounds) -> Iterator[tuple[Value, Bounds]]:
        """The parts that a row is put together of, and where each is cut."""
        start = 0
        for part in self.made[value].values:
            stop = start + part.type.size
            yield part, tuple(at - start for at in bounds if start <= at <= stop)
            start = stop

    def _kind(self, value: Value) -> str:
        """The kind of the op that computes a value; empty if another kernel does."""
        return self.made[value].kind if value in self.made else ""

    def _list_leaves(self, value: Value) -> tuple[Value, ...]:
        """Lists the parts that a row is put together of; the value itself if it is not."""
        if value in self.parts:
            return self.parts[value]
        if self._kind(value) != "cat":
            return (value,)
        return tuple(leaf for part in self.made[value].values for leaf in self._list_leaves(part))

    def _is_load(self, value: Value) -> bool:
        """Returns whether a value is in memory before the group is computed."""
        if self._kind(value) == "slice":
            return self._is_load(self.made[value].values[0])
        return value not in self.made

    def _is_zero(self, operand: Operand) -> bool:
        if not isinstance(operand, Value) or operand not in self.made:
            return False
        op = self.made[operand]
        if op.kind == "cast":
            return self._is_zero(op.inputs[0])
        return op.kind == "fill" and op.attrs[0] == 0

    def _split(self, op: Op, bounds: Bounds) -> None:
        """Computes an op part by part."""
        sizes = [stop - start for start, stop in itertools.pairwise(bounds)]
        operands = [
            self._cut(i, bounds) if isinstance(i, Value) and i.type.size > 1 else (i,) * len(sizes)
            for i in op.inputs
        ]
        self.parts[op.result] = tuple(
            self._compute(op, inputs, size) for size, *inputs in zip(sizes, *operands, strict=True)
        )
        self.ops.append(Op("cat", self.parts[op.result], op.result))

    def _compute(self, op: Op, inputs: Sequence[Operand], size: int) -> Value:
        """Computes an op of parts, unless one of 0 leaves nothing to compute. (-0.0 + 0.0 would be
        0.0; of a gradient, -0.0 is as good.)"""
        dtype = op.result.type.dtype
        if op.kind == "cast" and self._is_zero(inputs[0]):
            return self._zeros(size, dtype)
        if op.kind == "add":
            for one, other in (inputs, inputs[::-1]):
                if self._is_zero(one) and isinstance(other, Value) and other.type.size == size:
                    return other
        return self._make(op.kind, tuple(inputs), size, dtype, op.attrs)

    def _zeros(self, size: int, dtype: str) -> Value:
        return self._make("fill", (), size, dtype, (0.0, size))

    def _slice(self, value: Value, start: int, stop: int) -> Value:
        if value in self.made:  # a slice itself
            first = int(self.made[value].attrs[0])
            return self._slice(self.made[value].values[0], first + start, first + stop)
        return self._make("slice", (value,), stop - start, value.type.dtype, (start, stop))

    def _make(
        self, kind: str, inputs: tuple[Operand, ...], size: int, dtype: str,
        attrs: tuple[int | float, ...],
    ) -> Value:  # fmt: skip
        """The result of an op of parts; what is computed already is not computed again."""
        op = Op(kind, inputs, Value(Type(self.rate, (size,), dtype)), attrs)
        numbers = tuple(repr(i) if isinstance(i, float) else i for i in inputs)
        key = (kind, numbers, repr(attrs), dtype)
        found = self.seen.get(key) or find_equal(op, self.made)
        if found is not None:
            return found
        self.ops.append(op)
        self.made[op.result] = op
        self.seen[key] = op.result
        return op.result

    def _find_part(self, op: Op) -> Value | None:
        """Finds the part that a slice takes of a row that was taken part by part."""
        parts = self.parts.get(op.values[0], ()) if op.kind == "slice" else ()
        start = 0
        for part in parts:
            if op.attrs == (start, start + part.type.size) and part.type.dtype != "bool":
                return part
            start += part.type.size
        return None

    def _eliminate_dead(self) -> list[Op]:
        wanted, kept = set(self.outputs), []
        for op in reversed(self.ops):
            if op.result in wanted:
                wanted.update(op.values)
                kept.append(op)
        return kept[::-1]
