"""Finds steps whose state is a matrix that decays and takes outer products, and their gradients::

    S' = diag(d) S + k v^T        the output reads S'^T q, d_output is the gradient of that

For the gradient G of S, with G' = G + q d_output^T::

    d_q = S' d_output    d_k = G' v    d_v = G'^T k    d_d = the sums of G' S over columns

A decay may be the same for all keys of a head, and keys and queries for all heads.

A step may also read the state first, as delta rules do, by a key of its own, p for prediction::

    v = c + S^T p

Then d_v is the gradient of c, G has d_v p^T more, and::

    d_p = S d_v

Or the output may read the state before, as that of RWKV-6 does: S^T q. Then G' is G, and the
gradient of S has q d_output^T more; d_q = S d_output.
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
        reads: the operands by the letters above; without ``d`` nothing decays, without ``p`` and
            ``c`` steps predict nothing. What steps compute, as ``v``, they do not read.
        writes: what steps write by name: ``output`` and ``v``, or the gradients; ``states`` is the
            state before each step.
        solved: ``v``, or ``d_v``, as steps that predict compute it, whether it is written or not.
        early: whether the output reads the state before the step.
    """

    heads: Axis | None
    keys: Axis
    columns: Axis
    state: Rows
    reads: dict[str, Rows]
    writes: dict[str, Rows]
    solved: Rows | None
    early: bool

    @property
    def backward(self) -> bool:
        """Returns whether steps compute gradients."""
        return "d_q" in self.writes

    def find(self, name: str) -> Rows | None:
        """Returns what steps read, compute or write under a name."""
        if self.solved and name == ("d_v" if self.backward else "v"):
            return self.solved
        return self.reads.get(name) or self.writes.get(name)

    def sums_heads(self, name: str) -> bool:
        """Returns whether steps write a sum over heads under a name."""
        rows = self.find(name)
        return self.heads is not None and rows is not None and self.heads not in rows.axes

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
        # Values of steps: v and d_v, where steps compute them from states; the gradient of the
        # state after a step.
        self.v: Value | None = None
        self.d_v: Value | None = None
        self.grown: Value | None = None
        self.early = False

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
        if program.replays:
            self.find_gradient(state.value, state.next)
        for each in program.yields:
            name = self.find_name(each, before, after)
            if name in self.writes:
                raise _Differs(f"{name} is written twice")
            self.writes[name] = Rows(each.sequence, 0, self.of.axes(each.source))
        needed = {"d_q", "d_k", "d_v"} if program.replays else {"output"}
        if "p" in self.reads and program.replays:
            needed.add("d_p")
        if missing := sorted(needed - self.writes.keys()):
            raise _Differs(f"{missing[0]} is not written")
        of_state = Rows(state.value, 0, self.of.axes(state.value))
        found = self.d_v if program.replays else self.v
        solved = Rows(found, 0, self.of.axes(found)) if found else None
        axes = self.of.heads, self.keys, self.columns
        return Linear(*axes, of_state, self.reads, self.writes, solved, self.early)

    def find_update(self, before: Value, after: Value) -> None:
        """Finds k, v and d, of which a step computes a state."""
        scaled, product = self.split(after)
        key, value = self.find_pair(product)
        self.note("k", key)
        if not self.find_prediction(before, value):
            self.note("v", value)
        if scaled is before:
            return
        if self.is_kind(scaled, "add") or self.is_kind(scaled, "sub"):
            raise _Differs("the state takes outer products of more than one key")
        op = self.made.get(scaled)
        if op is None or op.kind != "mul" or len(op.values) != 2 or before not in op.values:
            raise _Differs("the state is not scaled by a decay")
        decay = op.values[1 - op.values.index(before)]
        self.reads["d"] = self.find_decay(decay)

    def find_prediction(self, before: Value, value: Value) -> bool:
        """Finds p and c, of which a step computes v; returns whether it does."""
        op = self.made.get(value)
        if op is None or op.kind != "add" or len(op.values) != 2:
            return False
        for prediction, constant in itertools.permutations(op.values):
            made = self.made.get(prediction)
            if made is None or made.kind != "einsum" or self.of.summed(made) != {self.keys}:
                continue
            if before in made.values and len(made.values) == 2:
                self.note("p", made.values[1 - made.values.index(before)])
                self.note("c", constant)
                self.v = value
                return True
        return False

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

    def find_gradient(self, before: Value, after: Value) -> None:
        """Finds q, d_output and p, of which a step computes the gradient of a state."""
        self.grown, d_v = self.find_grown()
        self.early = self.grown is before
        products, rest = [], after
        while rest is not self.grown and self.is_kind(rest, "add"):
            rest, product = self.split(rest)
            products.append(product)
        if "d" in self.reads:
            op = self.made.get(rest)
            scaled = op.values if op is not None and op.kind == "mul" else ()
            if self.grown not in scaled or not any(map(self.is_decay, scaled)):
                raise _Differs("the gradient is not scaled by the decay")
        elif rest is not self.grown:
            raise _Differs("the gradient is scaled")
        if not self.early:
            same, product = self.split(self.grown)
            products.append(product)
            if same is not before:
                raise _Differs("the gradient takes more than one outer product")
        for key, value in map(self.find_pair, products):
            if value is d_v:
                self.note("p", key)
                self.d_v = value
            else:
                self.note("q", key)
                self.note("d_output", value)
        if len(products) != 1 + (self.d_v is not None):
            raise _Differs("the gradient takes other outer products")

    def find_grown(self) -> tuple[Value, Value]:
        """Finds the gradient of the state after a step, and that of v, which is its sum with k."""
        for op in self.made.values():
            if op.kind == "einsum" and len(op.values) == 2 and self.of.summed(op) == {self.keys}:
                for key, state in itertools.permutations(op.values):
                    if self.of.is_matrix(state) and self.is_read(key, "k"):
                        return state, op.result
        raise _Differs("the gradient of values is not computed")

    def is_kind(self, value: Value, kind: str) -> bool:
        op = self.made.get(value)
        return op is not None and op.kind == kind

    def is_read(self, value: Value, name: str) -> bool:
        """Returns whether a value is what steps read under a name."""
        try:
            return self.load(value) == self.reads[name]
        except _Differs:
            return False

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

    def find_pair(self, product: Op) -> tuple[Value, Value]:
        """Returns the operand of an outer product that lies along keys, and that along columns."""
        for key, value in itertools.permutations(product.values):
            axes = {*self.of.axes(key)}, {*self.of.axes(value)}
            if self.keys in axes[0] and self.columns not in axes[0] and self.columns in axes[1]:
                if self.keys in axes[1] or (self.of.heads and self.of.heads not in axes[1]):
                    break
                return key, value
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

    def find_name(self, each: Yield, before: Value, after: Value) -> str:
        """Returns what a step writes."""
        if each.source is before and each.sparse:
            return "states"
        if each.source is self.v:
            return "v"
        op = self.made.get(each.source)
        if op is not None and op.kind == "cast":
            op = self.made.get(op.values[0])
        if op is None or op.kind not in ("einsum", "sum"):
            raise _Differs("a step writes something else")
        name = self.find_product(op, before, after)
        if name is None:
            raise _Differs("a step writes another sum")
        return name

    def find_product(self, op: Op, before: Value, after: Value) -> str | None:
        """Returns which sum of products an op computes; None for another one."""
        heads = {self.of.heads} - {None}
        summed = self.of.summed(op)
        over_keys, over_columns = summed == {self.keys}, summed - heads == {self.columns}
        if self.grown is None:
            state = next((v for v in op.values if v in (before, after)), None)
            if state is not None and len(op.values) == 2 and over_keys:
                query = op.values[1 - op.values.index(state)]
                if self.columns not in self.of.axes(query):
                    self.note("q", query)
                    self.early = state is before
                    return "output"
        elif len(op.values) == 2:
            if over_columns and {*op.values} == {before, self.d_v}:
                return "d_p"
            for state, name, by, fits in (
                (before if self.early else after, "d_q", "d_output", over_columns),
                (self.grown, "d_k", "v", over_columns),
                (self.grown, "d_v", "k", over_keys),
            ):
                if state in op.values and fits:
                    other = self.load(op.values[1 - op.values.index(state)])
                    differs = name == "d_v" and self.d_v not in (None, op.result)
                    if other == self.reads[by] and not differs:
                        return name
        elif (made := self.made.get(op.values[0])) and made.kind == "mul":
            decay = self.reads.get("d")
            of_decay = decay is not None and {*self.of.axes(op.result)} == {*decay.axes}
            if of_decay and {*made.values} == {self.grown, before}:
                return "d_d"
        return None
