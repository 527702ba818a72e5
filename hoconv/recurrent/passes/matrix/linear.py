"""Finds steps whose state is a matrix that decays and takes outer products, and their gradients::

    S' = diag(d) S + k v^T        the output reads S'^T q, d_output is the gradient of that

For the gradient G of S, with G' = G + q d_output^T::

    d_q = S' d_output    d_k = G' v    d_v = G'^T k    d_d = the sums of G' S over columns

A decay may be the same for all keys of a head, and keys and queries for all heads.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from hoconv.recurrent.ir.program import Op, Program, Value, Yield, flat
from hoconv.recurrent.passes.matrix.axes import Axes, Axis
from hoconv.recurrent.passes.matrix.columns import Columns, find_columns
from hoconv.recurrent.passes.matrix.separate import separate


@dataclass(frozen=True)
class Rows:
    """Rows that each step reads or writes: of a sequence, or the same for all steps.

    Attributes:
        value: the sequence.
        start: the first feature.
        axes: of the features, the last one fastest.
    """

    value: Value
    start: int
    axes: Axes

    def stride(self, axis: Axis | None) -> int:
        """Returns how many features apart neighbours along an axis lie; 0 for one it has not."""
        if axis not in self.axes:
            return 0
        stride = 1
        for other in itertools.takewhile(lambda each: each is not axis, reversed(self.axes)):
            stride *= other.size
        return stride


@dataclass(frozen=True, eq=False)
class Linear:
    """The operands of such steps, and what they write.

    Attributes:
        heads: None where there is one matrix.
        state: the axes of the state.
        reads: the operands by the letters above; without ``d`` nothing decays.
        writes: what steps write by name: ``output``, or the gradients; ``states`` is the state
            before each step.
    """

    heads: Axis | None
    keys: Axis
    columns: Axis
    state: Rows
    reads: dict[str, Rows]
    writes: dict[str, Rows]

    def sums_heads(self, name: str) -> bool:
        """Returns whether steps write a sum over heads under a name."""
        return self.heads is not None and self.heads not in self.writes[name].axes

    @property
    def shares_decays(self) -> bool:
        """Returns whether all keys of a head have the same decays."""
        return "d" not in self.reads or self.keys not in self.reads["d"].axes


class _Differs(Exception):
    """A step is not of this form; says what differs."""


def find_linear(program: Program) -> Linear | str:
    """Finds the operands of a program's steps; says in words why they are not of this form."""
    program = separate(program)
    columns = find_columns(program)
    if isinstance(columns, str):
        return columns
    reason = ""
    for keys, values in itertools.permutations((columns.keys, columns.columns)):
        try:
            return _Finder(program, columns, keys, values).find()
        except _Differs as error:
            reason = reason or str(error)
    return reason


class _Finder:
    def __init__(self, program: Program, of: Columns, keys: Axis, columns: Axis) -> None:
        self.program = program
        self.of = of
        self.keys, self.columns = keys, columns
        self.made = {op.result: op for op in flat(program.step)}
        self.reads: dict[str, Rows] = {}
        self.writes: dict[str, Rows] = {}

    def find(self) -> Linear:
        program = self.program
        if len(program.states) != 1 or len(program.replays) > 1 or program.states[0].total:
            raise _Differs("there is more than one state")
        (state,) = program.states
        if {*self.of.axes(state.value)} != {self.keys, self.columns} | {self.of.heads} - {None}:
            raise _Differs("the state is no matrix")
        before, after = state.value, state.next
        if program.replays:
            before, after = program.replays[0].value, program.replays[0].next
        self.find_update(before, after)
        grown = self.find_gradient(state.value, state.next) if program.replays else None
        for each in program.yields:
            axes = self.of.axes(each.source)
            if each.source is before and each.sparse:
                name = "states"
            else:
                name = self.find_name(each, before, after, grown)
            if name in self.writes:
                raise _Differs(f"{name} is written twice")
            self.writes[name] = Rows(each.sequence, 0, axes)
        needed = {"d_q", "d_k", "d_v"} if program.replays else {"output"}
        if "d" in self.reads and program.replays:
            needed.add("d_d")
        if missing := sorted(needed - self.writes.keys()):
            raise _Differs(f"{missing[0]} is not written")
        of_state = Rows(state.value, 0, self.of.axes(state.value))
        return Linear(self.of.heads, self.keys, self.columns, of_state, self.reads, self.writes)

    def find_update(self, before: Value, after: Value) -> None:
        """Finds k, v and d, of which a step computes a state."""
        scaled, product = self.split(after)
        self.find_pair(product, "k", "v")
        if scaled is before:
            return
        op = self.made.get(scaled)
        if op is None or op.kind != "mul" or len(op.values) != 2 or before not in op.values:
            raise _Differs("the state is not scaled by a decay")
        decay = op.values[1 - op.values.index(before)]
        self.reads["d"] = self.find_decay(decay)

    def find_decay(self, matrix: Value) -> Rows:
        op = self.made.get(matrix)
        repeated = op is not None and op.kind == "arrange"
        found = self.load(op.values[0] if op is not None and repeated else matrix)
        if not repeated and matrix.type.size > 1:
            raise _Differs("the decay is not repeated for all columns")
        if self.columns in found.axes:
            raise _Differs("columns decay")
        return found

    def is_decay(self, value: Value) -> bool:
        try:
            return self.find_decay(value) == self.reads["d"]
        except _Differs:
            return False

    def find_gradient(self, before: Value, after: Value) -> Value:
        """Finds q and d_output; returns the gradient of the state after a step."""
        grown = after
        if "d" in self.reads:
            op = self.made.get(after)
            scales = op is not None and op.kind == "mul" and len(op.values) == 2
            decays = [v for v in op.values if self.is_decay(v)] if op and scales else []
            if op is None or len(decays) != 1:
                raise _Differs("the gradient is not scaled by the decay")
            grown = op.values[1 - op.values.index(decays[0])]
        same, product = self.split(grown)
        if same is not before:
            raise _Differs("the gradient is scaled twice")
        self.find_pair(product, "q", "d_output")
        return grown

    def split(self, total: Value) -> tuple[Value, Op]:
        """Returns the terms of a state: what is left of the last one, and an outer product."""
        op = self.made.get(total)
        if op is None or op.kind != "add" or len(op.values) != 2:
            raise _Differs("a state is no sum of two")
        for product, other in itertools.permutations(op.values):
            made = self.made.get(product)
            pair = made is not None and made.kind == "einsum" and len(made.values) == 2
            if made is not None and pair and not self.of.summed(made):
                return other, made
        raise _Differs("a state takes no outer product")

    def find_pair(self, product: Op, of_keys: str, of_columns: str) -> None:
        """Notes which operand of an outer product lies along keys, and which along columns."""
        for key, value in itertools.permutations(product.values):
            axes = {*self.of.axes(key)}, {*self.of.axes(value)}
            if self.keys in axes[0] and self.columns not in axes[0] and self.columns in axes[1]:
                if self.keys in axes[1] or (self.of.heads and self.of.heads not in axes[1]):
                    break
                self.note(of_keys, key)
                self.note(of_columns, value)
                return
        raise _Differs("the operands of an outer product lie along other axes")

    def note(self, name: str, value: Value) -> None:
        load = self.load(value)
        if self.reads.setdefault(name, load) != load:
            raise _Differs(f"{name} is read from two places")

    def load(self, value: Value) -> Rows:
        """Returns where a row is read."""
        axes, start, at = self.of.axes(value), 0, value
        while at.type.rate == "step":
            op = self.made.get(at)
            if op is None or op.kind not in ("slice", "cast"):
                raise _Differs("a step computes an operand")
            start += int(op.attrs[0]) if op.kind == "slice" else 0
            at = op.values[0]
        return Rows(at, start, axes)

    def find_name(self, each: Yield, before: Value, after: Value, grown: Value | None) -> str:
        """Returns what a step writes."""
        op = self.made.get(each.source)
        if op is not None and op.kind == "cast":
            op = self.made.get(op.values[0])
        if op is None or op.kind not in ("einsum", "sum"):
            raise _Differs("a step writes something else")
        heads = {self.of.heads} - {None}
        summed = self.of.summed(op)
        over_keys, over_columns = summed == {self.keys}, summed - heads == {self.columns}
        if grown is None:
            if after in op.values and len(op.values) == 2 and over_keys:
                query = op.values[1 - op.values.index(after)]
                if self.columns not in self.of.axes(query):
                    self.note("q", query)
                    return "output"
        elif len(op.values) == 2:
            for state, name, by, fits in (
                (after, "d_q", "d_output", over_columns),
                (grown, "d_k", "v", over_columns),
                (grown, "d_v", "k", over_keys),
            ):
                if state in op.values and fits:
                    other = self.load(op.values[1 - op.values.index(state)])
                    if other == self.reads[by]:
                        return name
        elif (made := self.made.get(op.values[0])) and made.kind == "mul":
            decay = self.reads.get("d")
            of_decay = decay is not None and {*self.of.axes(op.result)} == {*decay.axes}
            if of_decay and {*made.values} == {grown, before}:
                return "d_d"
        raise _Differs("a step writes another sum")
