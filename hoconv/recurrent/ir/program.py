"""The intermediate representation: one recurrent layer in one direction as a program in SSA form.

A program has three regions. ``before`` runs once, on whole sequences and on parameters; ``step``
runs at every time step; ``after`` runs once, on the sequences that the steps have written. The
forward computation is a program, and its gradient is another, whose steps run backwards in time.

Everything is immutable: a pass takes a program and returns another. Values are compared by
identity; printing numbers them.

B batch, T time steps, n features of a value, m features of a result.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Rate = Literal["once", "constant", "sequence", "step"]
# Steps of a segment: of a state of 128 x 128 numbers, one in so many takes 1 KB a step, about as
# much as the 768 bytes of keys, values and queries in half precision.
SEGMENT = 64
BYTES = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2, "bool": 1, "real": 4}


@dataclass(frozen=True)
class Type:
    """The type of a value, without the batch dimension.

    Attributes:
        rate: ``step``: (B, n), computed at every time step; ``sequence``: (T, B, n), of which step
            t reads entry t; ``constant``: (1, B, n), which every step reads; ``once``: of
            parameters, without batch and time.
        shape: (n,), or (m, n) of a weight.
        dtype: ``f64``, ``f32``, ``bf16``, ``f16``, ``bool``; ``real`` until dtypes are inferred.
    """

    rate: Rate
    shape: tuple[int, ...]
    dtype: str = "real"

    @property
    def size(self) -> int:
        """The number of features of a row."""
        return self.shape[-1]

    @property
    def row_bytes(self) -> int:
        """The bytes of a row."""
        return BYTES[self.dtype] * self.size

    def __str__(self) -> str:
        return f"{self.rate} {self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, eq=False)
class Value:
    """The result of one op, or an input of the program. `hint` is a name to print, or empty."""

    type: Type
    hint: str = ""


Operand = Value | float


@dataclass(frozen=True, eq=False)
class Op:
    """One operation; `kind` is a name that :mod:`hoconv.recurrent.ir.kinds` knows."""

    kind: str
    inputs: tuple[Operand, ...]
    result: Value
    attrs: tuple[int | float, ...] = ()

    @functools.cached_property
    def values(self) -> tuple[Value, ...]:
        """The inputs that are not constants."""
        return tuple(i for i in self.inputs if isinstance(i, Value))


@dataclass(frozen=True, eq=False)
class Group:
    """Ops that one kernel computes, row by row: elementwise ops, reductions, slices."""

    ops: tuple[Op, ...]


@dataclass(frozen=True)
class Piece:
    """A parameter of the layer, or the columns of it that a linear map applies to one operand."""

    parameter: str
    columns: tuple[int, int] | None = None

    def __str__(self) -> str:
        where = "" if self.columns is None else f"[:, {self.columns[0]}:{self.columns[1]}]"
        return f"{self.parameter}{where}"


@dataclass(frozen=True, eq=False)
class Param:
    """A parameter as the program reads it: pieces, concatenated by rows."""

    value: Value
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, eq=False)
class State:
    """A state: a step reads `value` and computes `next`, which is `value` of the following step.

    A running sum has a `total`: it starts with zeros, and the ops after the loop read its last
    value as a sequence of one step, (1, B, n).
    """

    name: str
    value: Value
    next: Value
    total: Value | None = None


@dataclass(frozen=True, eq=False)
class Delay:
    """A state that no step computes, since its next values are a sequence: so it is one, too.

    Attributes:
        initial: (B, n), the state before the first step.
        value: (T, B, n), the result of an op ``delay``: the state before each step.
    """

    name: str
    initial: Value
    value: Value


@dataclass(frozen=True, eq=False)
class Yield:
    """A value (B, n) that every step writes to a sequence (T, B, n).

    Attributes:
        sparse: whether a loop may write the entries alone at which a segment of steps begins: who
            reads the sequence has a :class:`Replay` for the others.
    """

    name: str
    source: Value
    sequence: Value
    sparse: bool = False


@dataclass(frozen=True, eq=False)
class Replay:
    """How a step of a gradient computes a state again, one step of the sequence further on.

    Attributes:
        value: a sequence: the state before each step of the sequence.
        next: what the gradient's step computes of it: the state after that step, which is the
            entry of the following one.
    """

    value: Value
    next: Value


@dataclass(frozen=True, eq=False)
class Program:
    """One layer in one direction, or its gradient.

    Attributes:
        sequences: the input sequences by name: (T, B, n); after the first one, which is x, come
            the constants of the sequences, (1, B, n).
        states: (B, n); the caller gives their values before the first step and gets those after
            the last one, except for running sums.
        delays: the other states that the caller gives and gets.
        yields: sequences that the steps write.
        results: the other results by name: values of rate ``sequence`` or ``once``.
        replays: of a gradient, the sequences that may be sparse.
        reverse: whether the steps run from the last to the first.
    """

    name: str
    params: tuple[Param, ...]
    sequences: tuple[tuple[str, Value], ...]
    states: tuple[State, ...]
    step: tuple[Op | Group, ...]
    results: tuple[tuple[str, Value], ...]
    before: tuple[Op | Group, ...] = ()
    after: tuple[Op | Group, ...] = ()
    delays: tuple[Delay, ...] = ()
    yields: tuple[Yield, ...] = ()
    replays: tuple[Replay, ...] = ()
    reverse: bool = False

    @functools.cached_property
    def read(self) -> frozenset[Value]:
        """Returns what the steps read."""
        return frozenset(v for op in flat(self.step) for v in op.values) | {*step_outputs(self)}

    @functools.cached_property
    def constants(self) -> tuple[tuple[str, Value], ...]:
        """Returns the constants that the caller gives, by name."""
        after_x = self.sequences[1:]
        return tuple(itertools.takewhile(lambda each: each[1].type.rate == "constant", after_x))

    @functools.cached_property
    def returned(self) -> frozenset[Value]:
        """Returns what the caller gets of whole sequences and of parameters."""
        return frozenset((*(v for _, v in self.results), *(d.value for d in self.delays)))

    @property
    def wide(self) -> str:
        """Returns the dtype of the states, in which sums are computed."""
        first = self.states[0].value if self.states else self.delays[0].initial
        return first.type.dtype

    @functools.cached_property
    def made_before(self) -> tuple[Value, ...]:
        """The results of ops before the loop that the steps read."""
        return tuple(op.result for op in flat(self.before) if op.result in self.read)

    def __str__(self) -> str:
        return _Printer().program(self)


def flat(items: Iterable[Op | Group]) -> Iterator[Op]:
    """The ops of a region in order, including those in groups."""
    for item in items:
        if isinstance(item, Group):
            yield from item.ops
        else:
            yield item


def find_operands(ops: Iterable[Op], results: Iterable[Value]) -> set[Value]:
    """Finds the values that some results of ops are computed from, and these."""
    found = set(results)
    for op in reversed([*ops]):
        if op.result in found:
            found.update(op.values)
    return found


def find_rate(values: Iterable[Value]) -> Rate:
    """Finds the rate of what is computed of values for all steps at once."""
    rates = {value.type.rate for value in values}
    if rates == {"once"}:
        return "once"
    return "constant" if "constant" in rates <= {"once", "constant"} else "sequence"


def count_segments(T: int) -> int:
    """The number of segments of T steps."""
    return (T + SEGMENT - 1) // SEGMENT


def step_outputs(program: Program) -> list[Value]:
    """The outputs of a step: next states, the sources of yields, and states computed again."""
    found = [s.next for s in program.states] + [y.source for y in program.yields]
    return found + [r.next for r in program.replays]


class _Printer:
    """Prints a program; numbers values in the order in which they appear."""

    def __init__(self) -> None:
        self.names: dict[Value, str] = {}
        self.count = 0

    def name(self, operand: Operand) -> str:
        if not isinstance(operand, Value):
            return f"{operand:g}"
        if operand not in self.names:
            taken = self.names.values()
            if operand.hint and f"%{operand.hint}" not in taken:
                self.names[operand] = f"%{operand.hint}"
            else:
                self.names[operand] = f"%{self.count}"
                self.count += 1
        return self.names[operand]

    def typed(self, value: Value) -> str:
        return f"{self.name(value)}: {value.type}"

    def region(self, title: str, items: tuple[Op | Group, ...]) -> list[str]:
        lines = [f"  {title}"] if items else []
        for item in items:
            if isinstance(item, Group):
                lines += ["    kernel", *(f"      {self.op(op)}" for op in item.ops)]
            else:
                lines.append(f"    {self.op(item)}")
        return lines

    def op(self, op: Op) -> str:
        operands = ", ".join([*map(self.name, op.inputs), *(f"{a:g}" for a in op.attrs)])
        return f"{self.typed(op.result)} = {op.kind}({operands})"

    def program(self, p: Program) -> str:
        lines = [p.name]
        for param in p.params:
            pieces = ", ".join(map(str, param.pieces))
            lines.append(f"  param {self.typed(param.value)} = {pieces}")
        lines += [f"  read {name} = {self.typed(v)}" for name, v in p.sequences]
        lines += [
            f"  {'state' if s.total is None else 'sum'} {s.name} = {self.typed(s.value)}"
            for s in p.states
        ]
        lines += [f"  delayed {d.name} = {self.typed(d.initial)}" for d in p.delays]
        lines += self.region("before", p.before)
        order = "each step, from the last to the first" if p.reverse else "each step"
        lines += self.region(order, p.step) or [f"  {order}"]
        lines += [f"    next {s.name} = {self.name(s.next)}" for s in p.states]
        lines += [
            f"    {self.typed(y.sequence)} <- {self.name(y.source)}{', sparse' * y.sparse}"
            for y in p.yields
        ]
        lines += [f"    {self.name(r.value)} of the next = {self.name(r.next)}" for r in p.replays]
        lines += [f"    {self.typed(s.total)} <- {self.name(s.next)}, the last"
                  for s in p.states if s.total is not None]  # fmt: skip
        lines += self.region("after", p.after)
        lines += [f"  next {d.name} = {self.name(d.value)} after the last" for d in p.delays]
        lines += [f"  return {name} = {self.name(v)}" for name, v in p.results]
        return "\n".join(lines)
