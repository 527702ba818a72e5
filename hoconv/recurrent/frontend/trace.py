"""Traces a cell to a program by running it on symbols.

I input size, n features of an operand, m features of a result.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from hoconv.recurrent.frontend.cell import BoundCell
from hoconv.recurrent.frontend.frame import Frame, Init, Map, Row
from hoconv.recurrent.frontend.symbol import Builder, Symbol, fail
from hoconv.recurrent.ir.kinds import SOURCES
from hoconv.recurrent.ir.program import Param, Piece, Program, State, Type, Value, Yield, flat


@dataclass(frozen=True)
class Declaration:
    """A parameter that a cell declares.

    Attributes:
        shape: of the layer's parameter.
        init: what its elements begin with.
        learned: whether it is a parameter of the layer; else a buffer.
        row: whether programs read it as a row of features, and not as a weight.
    """

    name: str
    shape: tuple[int, ...]
    init: Init = None
    row: bool = False
    learned: bool = True

    @property
    def read_shape(self) -> tuple[int, ...]:
        """Returns the shape of what programs read."""
        return (math.prod(self.shape),) if self.row else self.shape


@dataclass(frozen=True, eq=False)
class Trace:
    """The program of a cell, the parameters that it declares, and its outputs: their sizes by name,
    or None of one that has no name. A trace that is read from its text has none, either."""

    program: Program
    declarations: tuple[Declaration, ...]
    outputs: Mapping[str, int] | None = None

    @property
    def output_size(self) -> int:
        """The features of the step's output."""
        return dict(self.program.results)["output"].type.size

    @property
    def draws(self) -> bool:
        """Returns whether a step has random masks."""
        return any(op.kind == "keep" for op in flat(self.program.step))


@dataclass(frozen=True, eq=False)
class _Weights:
    """A linear map in a program: the sizes of its operands, the weights of each, and its bias."""

    sizes: list[int]
    weights: list[Value]
    bias: Value | None


class _Tracer(Frame):
    def __init__(self, cell: BoundCell, training: bool, delayed: Collection[Value]) -> None:
        self.delayed = delayed
        self.hidden_size = cell.hidden_size
        self.training = training
        self.builder = Builder()
        self.declarations: dict[str, Declaration] = {}
        self.maps: dict[tuple[str, Map], _Weights] = {}  # by the cell within the cell
        self.params: list[Param] = []
        self.draws = 0

    def linear(self, map: Map, operands: tuple[Row, ...]) -> Row:
        name = self.prefix + map.name
        for operand in operands:
            if not isinstance(operand, Symbol):
                fail(f"linear({name!r}): expected values of the step as arguments, got {operand!r}")
            if operand.value.type.rate == "once":
                fail(f"linear({name!r}): an operand depends on parameters alone, the same in every "
                     "step; add it to the result instead")  # fmt: skip
        sizes = [operand.value.type.size for operand in operands]
        shape = map.shape or (self.hidden_size,)
        key = self.prefix, map
        if key not in self.maps:
            self.maps[key] = self._declare_map(name, sizes, math.prod(shape), map.bias)
        made = self.maps[key]
        if sizes != made.sizes:
            fail(f"linear({name!r}): expected operands of the sizes {made.sizes}, as at its first "
                 f"use, got {sizes}")  # fmt: skip
        # The bias joins the product of an operand that does not recur, if there is one: the sum of
        # both can then be computed for all steps at once.
        constant = [self._constant(operand.value) for operand in operands]
        added = made.bias
        result: Symbol | None = None
        for i, operand in enumerate(operands):
            inputs: list[Row] = [operand.value, made.weights[i]]
            if added is not None and constant[i]:
                inputs.append(added)
                added = None
            product = self.builder.apply("linear", *inputs)
            result = product if result is None else result + product
        assert result is not None  # a map has an operand
        if added is not None:
            result = result + Symbol(self.builder, added)
        return Symbol(self.builder, result.value, shape)

    def _declare_map(self, name: str, sizes: list[int], size: int, bias: bool) -> _Weights:
        weight = self._declare(f"weight_{name}", (size, sum(sizes)))
        added = None
        if bias:
            declared = self._declare(f"bias_{name}", (size,), row=True)
            added = self._param((size,), f"{name}.bias", Piece(declared))
        ends = itertools.accumulate(sizes)
        weights = [
            self._param((size, n), f"{name}.{i}", Piece(weight, (end - n, end)))
            for i, (n, end) in enumerate(zip(sizes, ends, strict=True))
        ]
        return _Weights(sizes, weights, added)

    def parameter(self, name: str, shape: tuple[int, ...], init: Init, learned: bool) -> Row:
        declared = self._declare(name, shape, init, row=True, learned=learned)
        value = self._param((math.prod(shape),), name, Piece(declared))
        return Symbol(self.builder, value, shape)

    def keep(self, probability: float, shape: tuple[int, ...]) -> Row:
        self.draws += 1
        attrs = probability, self.draws - 1, math.prod(shape)
        return Symbol(self.builder, self.builder.apply("keep", attrs=attrs).value, shape)

    def apply(self, kind: str, *operands: Row | float) -> Row:
        return self.builder.apply(kind, *operands)

    def _declare(
        self, name: str, shape: tuple[int, ...], init: Init = None, row: bool = False,
        learned: bool = True,
    ) -> str:  # fmt: skip
        if name in self.declarations:
            fail(
                f"the parameter {name!r} is made twice; a name stands for one set of weights: "
                f"choose another, or keep the value"
            )
        self.declarations[name] = Declaration(name, shape, init, row, learned)
        return name

    def _param(self, shape: tuple[int, ...], hint: str, piece: Piece) -> Value:
        value = Value(Type("once", shape), hint)
        self.params.append(Param(value, (piece,)))
        return value

    def _constant(self, value: Value) -> bool:
        """Returns whether a value does not depend on a state, but for delayed ones."""
        made_by = {op.result: op for op in self.builder.ops}
        if value.type.rate != "step" or value in self.delayed:
            return True
        return value in made_by and all(map(self._constant, made_by[value].values))


def trace(cell: BoundCell, training: bool = False) -> Trace:
    """Traces a cell to the program of its step, without any pass.

    Raises:
        CellError: the cell leaves the language; says the line and what to write instead.
    """
    made = _trace(cell, training, ())
    # Again, now that it is known which states are sequences, as the last input is.
    delayed = _find_delayed(made.program)
    return _trace(cell, training, delayed) if delayed else made


def _trace(cell: BoundCell, training: bool, delayed: Collection[str]) -> Trace:
    x = Value(Type("sequence", (cell.row_size,)), "x")
    shapes = cell.state_shapes
    states = {n: Value(Type("step", (math.prod(shape),)), n) for n, shape in shapes.items()}
    tracer = _Tracer(cell, training, {states[name] for name in delayed})
    symbols = {n: Symbol(tracer.builder, v, shapes[n]) for n, v in states.items()}
    constants = {
        n: Value(Type("constant", (math.prod(shape),)), n)
        for n, shape in cell.constant_shapes.items()
    }
    given = [Symbol(tracer.builder, v, cell.constant_shapes[n]) for n, v in constants.items()]
    output, following, outputs = cell.step(
        tracer, Symbol(tracer.builder, x), list(symbols.values()), given
    )
    for name, value in {"output": output, **following}.items():
        if not isinstance(value, Symbol):
            raise cell.error(f"{name}: expected a value of the step, got {type(value).__name__}")
        if value.value.type.dtype == "bool":
            raise cell.error(f"{name}: is true or false; write rnn.where({name}, 1.0, 0.0)")
        if value.value.type.rate == "once":
            raise cell.error(f"{name}: depends on parameters alone; it must depend on x or a state")
    sequence = Value(Type("sequence", output.value.type.shape), "output")
    program = Program(
        name=f"{cell.name} forward",
        params=tuple(tracer.params),
        sequences=(("x", x), *((f"constant_{n}", v) for n, v in constants.items())),
        states=tuple(State(n, v, following[n].value) for n, v in states.items()),
        before=tuple(tracer.builder.before),
        step=tuple(tracer.builder.ops),
        yields=(Yield("output", output.value, sequence),),
        results=(("output", sequence),),
    )
    return Trace(program, tuple(tracer.declarations.values()), outputs)


def _find_delayed(program: Program) -> set[str]:
    """Finds the states whose next values depend on no state, or on such states alone: a step need
    not compute them."""
    found: set[str] = set()
    free: set[Value] = set()
    while True:
        free |= {s.value for s in program.states if s.name in found}
        for op in flat(program.step):
            waits = any(v.type.rate == "step" and v not in free for v in op.values)
            if not (op.kind in SOURCES or waits):
                free.add(op.result)
        more = {s.name for s in program.states if s.next in free or s.next.type.rate != "step"}
        if more <= found:
            return found
        found |= more
