"""Lowers what the host does in a run of a program to instructions on numbered tensors.

What a program does before and after its loop is known when the program is. Its instructions are
written out as a function of Python (:mod:`hoconv.recurrent.runtime.host`), or run by one call of
C++ (:mod:`hoconv.recurrent.runtime.compiled_host`).

B batch, T time steps, n features.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hoconv.recurrent.ir.program import Group, Op, Param, Piece, Program, Value, flat
from hoconv.recurrent.runtime.packing import find_sources, group_params


@dataclass(frozen=True)
class Instruction:
    """Computes tensors from others.

    Attributes:
        kind: with its `attrs`, where it has some,
            ``cat`` (dimension): the inputs beside each other;
            ``contiguous``; ``unsqueeze``: with a first dimension of 1;
            ``narrow`` (first, count): some columns;
            ``columns`` (what they are, the shape, first): a view of some columns of a packed
            weight, whose rows have to be those of the shape;
            ``cast`` (dtype);
            ``linear``, ``linear_t``: x W^T, or x W, plus a bias if there is a third input;
            ``outer``: g^T x of the first whole sequence with each of the others, beside each other;
            ``sum`` (dimensions, dtype): of each input;
            ``zero_rows`` (n, dtype): zeros of the batch of the input, which nothing writes to;
            ``zeros_like``; ``zeros`` (shape): of the input's dtype and device;
            ``split``: rows of the first input, as many as each of the others has;
            ``loop`` (values): runs the steps, given these values and then the initial states;
            results are the sequences that they write and then the states after the last step;
            ``op`` (an op), ``group`` (a group, what it reads): what else there is.
        inputs, outputs: numbers of tensors.
    """

    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    attrs: tuple[Any, ...] = ()


@dataclass(frozen=True)
class HostProgram:
    """What the host does in a run of a program.

    Attributes:
        sequences, states, parameters: how many of each are given; they are the first tensors.
        instructions: in their order.
        results: the tensors that a run returns.
        separate: whether results may share memory with each other or with what is given, so that
            some have to be copied.
    """

    program: Program
    sequences: int
    states: int
    parameters: int
    instructions: tuple[Instruction, ...]
    results: tuple[int, ...]
    separate: bool

    @property
    def inputs(self) -> int:
        """The number of tensors that are given."""
        return self.sequences + self.states + self.parameters


def lower(program: Program, parameters: Sequence[str], backward: bool) -> HostProgram:
    """Lowers what the host does in a run of a program.

    Args:
        parameters: the names of the cell's parameters, in the order in which they are given.
        backward: whether a run returns the gradients of x and of the parameters, instead of the
            program's results; then the states after the last step.
    """
    return _Lowering(program, parameters).lower(backward)


def _join_products(
    instructions: Sequence[Instruction], results: Sequence[int]
) -> tuple[Instruction, ...]:
    """Makes one instruction of outer products that are only read beside each other."""
    uses = Counter((*results, *(t for each in instructions for t in each.inputs)))
    outer = {i.outputs[0]: i for i in instructions if i.kind == "outer" and uses[i.outputs[0]] == 1}
    found: list[Instruction] = []
    for each in instructions:
        parts = [outer[t] for t in each.inputs if t in outer]
        beside = each.kind == "cat" and each.attrs == (-1,) and len(parts) == len(each.inputs)
        if beside and len({part.inputs[0] for part in parts}) == 1:
            found = [other for other in found if other not in parts]
            inputs = (parts[0].inputs[0], *(part.inputs[1] for part in parts))
            each = Instruction("outer", inputs, each.outputs)
        found.append(each)
    return (*found,)


def _join_sums(instructions: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """Makes one instruction of the sums over the batch, which begin with results of the loop: they
    are read after all of these."""
    sums = [each for each in instructions if each.kind == "sum" and each.attrs[0] == (0,)]
    found: list[Instruction] = []
    for each in instructions:
        alike = [other for other in sums if other.attrs == each.attrs] if each in sums else [each]
        if alike[0] is each:
            inputs = tuple(t for other in alike for t in other.inputs)
            outputs = tuple(t for other in alike for t in other.outputs)
            each = replace(each, inputs=inputs, outputs=outputs) if len(alike) > 1 else each
            found.append(each)
    return (*found,)


class _Lowering:
    def __init__(self, program: Program, parameters: Sequence[str]) -> None:
        self.program = program
        self.instructions: list[Instruction] = []
        self.count = 0
        self.tensors: dict[Value, int] = {v: self.new() for _, v in program.sequences}
        self.states = [s for s in program.states if s.total is None]  # those that are given
        self.first = [self.new() for _ in self.states]
        self.parameters = {name: self.new() for name in parameters}
        # Running sums of which nothing but the total over the rows is read.
        others = (op for op in flat((*program.before, *program.after)) if op.kind != "total")
        read = {v for op in others for v in op.values} | {v for _, v in program.results}
        self.summed = {s.total: s for s in program.states if s.total and s.total not in read}

    def new(self) -> int:
        self.count += 1
        return self.count - 1

    def emit(self, kind: str, inputs: Iterable[int], *attrs: Any) -> int:
        """Adds an instruction with one result."""
        return self.emit_many(kind, inputs, 1, *attrs)[0]

    def emit_many(self, kind: str, inputs: Iterable[int], count: int, *attrs: Any) -> list[int]:
        made = [self.new() for _ in range(count)]
        self.instructions.append(Instruction(kind, (*inputs,), (*made,), attrs))
        return made

    def lower(self, backward: bool) -> HostProgram:
        given = len(self.program.sequences), len(self.states), len(self.parameters)
        self.pack()
        for item in self.program.before:
            self.compute(item)
        last = self.run()
        for item in self.program.after:
            self.compute(item)
        values = [value for _, value in self.program.results]
        found = self.unpack() if backward else [self.tensors[v] for v in values]
        # The loop writes each yield to memory of its own; of gradients, some may share memory.
        written = {y.sequence for y in self.program.yields}
        apart = len({*values}) == len(values) and written.issuperset(values)
        results = (*found, *last)
        instructions = _join_sums(_join_products(self.instructions, results))
        return HostProgram(self.program, *given, instructions, results, not (backward or apart))

    def pack(self) -> None:
        """Makes the params of the program: :func:`hoconv.recurrent.runtime.packing.pack`."""
        p = self.program
        used = {v for op in flat((*p.before, *p.after)) for v in op.values} | p.read
        used |= {value for _, value in p.results}
        wholes: dict[tuple[str, ...], int] = {}
        for param, names in zip(p.params, group_params(p)[0], strict=True):
            if param.value not in used:
                continue
            if names is None:
                made = self.concatenate([self.read(piece) for piece in param.pieces])
            else:
                if names not in wholes:
                    wholes[names] = self.concatenate([self.parameters[name] for name in names])
                made = self.view(wholes[names], param)
            self.tensors[param.value] = made

    def read(self, piece: Piece) -> int:
        whole = self.parameters[piece.parameter]
        if piece.columns is None:
            return whole
        start, stop = piece.columns
        return self.emit("narrow", [whole], start, stop - start)

    def view(self, whole: int, param: Param) -> int:
        of = param.pieces[0]
        if of.columns is None:
            return whole
        return self.emit("columns", [whole], str(of), param.value.type.shape, of.columns[0])

    def concatenate(self, tensors: Sequence[int], dim: int = 0) -> int:
        if len(tensors) == 1:
            return self.emit("contiguous", tensors)
        return self.emit("cat", tensors, dim)

    def run(self) -> list[int]:
        """Runs the loop; returns the last of the states that are given."""
        p = self.program
        # Running sums begin with zeros, which nothing writes to: those of one type share them.
        zeros: dict[Any, int] = {}
        for state in p.states:
            if state.total is not None and (type := state.value.type) not in zeros:
                zeros[type] = self.emit("zero_rows", self.first[:1], type.size, type.dtype)
        given = iter(self.first)
        initial = [
            self.emit("cast", [next(given)], s.value.type.dtype)
            if s.total is None
            else zeros[s.value.type]
            for s in p.states
        ]
        params = (each.value for each in p.params if each.value in p.read)
        values = (*dict.fromkeys((*params, *(v for _, v in p.sequences), *p.made_before)),)
        inputs = [*(self.tensors[v] for v in values), *initial]
        made = self.emit_many("loop", inputs, len(p.yields) + len(p.states), values)
        written, last = made[: len(p.yields)], made[len(p.yields) :]
        self.tensors |= zip((y.sequence for y in p.yields), written, strict=True)
        for state, tensor in zip(p.states, last, strict=True):
            if state.total in self.summed:
                self.tensors[state.total] = tensor  # (B, n): as its one step is
            elif state.total is not None:
                self.tensors[state.total] = self.emit("unsqueeze", [tensor])
        return [t for s, t in zip(p.states, last, strict=True) if s.total is None]

    def compute(self, item: Op | Group) -> None:
        if isinstance(item, Group):
            made = [op.result for op in item.ops]
            read = (*dict.fromkeys(v for op in item.ops for v in op.values if v not in made),)
            inputs = [self.tensors[v] for v in read]
            outputs = self.emit_many("group", inputs, len(made), item, read)
            self.tensors |= zip(made, outputs, strict=True)
            return
        inputs = [self.tensors[v] for v in item.values]
        match item.kind:
            case "linear" | "linear_t" | "outer":
                made = self.emit(item.kind, inputs)
            case "total":
                dims = (0,) if item.inputs[0] in self.summed else (0, 1)
                made = self.emit("sum", inputs, dims, item.result.type.dtype)
            case "cast":
                made = self.emit("cast", inputs, item.result.type.dtype)
            case _:
                made = self.emit("op", inputs, item)
        self.tensors[item.result] = made

    def unpack(self) -> list[int]:
        """The gradients of x and of each parameter, 0 where the program has none; some are rows of
        one tensor, beside each other."""
        values = dict(self.program.results)
        found: dict[str, int] = {}
        for of, sources in find_sources(self.program):
            parts = []
            for i, number in sources:
                param = self.program.params[i]
                pieces = [self.parameters[piece.parameter] for piece in param.pieces]
                if value := values.get(f"d_{i}"):
                    part = self.tensors[value]
                else:
                    part = self.emit("zeros", pieces[:1], param.value.type.shape)
                if number is not None and len(pieces) > 1:
                    part = self.split(part, pieces)[number]
                parts.append(part)
            whole = self.concatenate(parts, -1)
            rows = self.split(whole, [self.parameters[n] for n in of]) if len(of) > 1 else [whole]
            found |= zip(of, rows, strict=True)
        if value := values.get("d_x"):
            d_x = self.tensors[value]
        else:
            x = self.tensors[self.program.sequences[0][1]]
            d_x = self.emit("zeros_like", [x])
        return [d_x, *(found[name] for name in self.parameters)]

    def split(self, whole: int, like: Sequence[int]) -> list[int]:
        return self.emit_many("split", [whole, *like], len(like))
