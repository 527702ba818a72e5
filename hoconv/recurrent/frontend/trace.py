"""Traces a cell to a program by running it on symbols.

I input size, n features of an operand, m features of a result.
"""

from __future__ import annotations

from dataclasses import dataclass

from hoconv.recurrent.frontend.cell import BoundCell
from hoconv.recurrent.frontend.frame import Frame, Row
from hoconv.recurrent.frontend.symbol import Builder, Symbol, fail
from hoconv.recurrent.ir.program import Param, Piece, Program, State, Type, Value, Yield, flat


@dataclass(frozen=True)
class Declaration:
    """A parameter that a cell declares. `init` is None if it is initialised as weights are."""

    name: str
    shape: tuple[int, ...]
    init: float | None = None


@dataclass(frozen=True, eq=False)
class Trace:
    """The program of a cell and the parameters that it declares."""

    program: Program
    declarations: tuple[Declaration, ...]

    @property
    def output_size(self) -> int:
        """The features of the step's output."""
        return dict(self.program.results)["output"].type.size

    @property
    def draws(self) -> bool:
        """Returns whether a step has random masks."""
        return any(op.kind == "keep" for op in flat(self.program.step))


class _Tracer(Frame):
    def __init__(self, cell: BoundCell, training: bool) -> None:
        self.cell = cell
        self.training = training
        self.builder = Builder()
        self.declarations: dict[str, Declaration] = {}
        self.params: list[Param] = []
        self.draws = 0

    def linear(self, name: str, operands: tuple[Row, ...], size: int | None, bias: bool) -> Row:
        for operand in operands:
            if not isinstance(operand, Symbol):
                fail(f"linear({name!r}): expected values of the step, got {operand!r}")
            if operand.value.type.rate == "once":
                fail(f"linear({name!r}): an operand depends on parameters alone; add it afterwards")
        size = self.cell.hidden_size if size is None else size
        if not isinstance(size, int) or size < 1:
            fail(f"linear({name!r}): size: expected an int of at least 1, got {size!r}")
        sizes = [operand.shape[-1] for operand in operands]
        weight = self._declare(f"weight_{name}", (size, sum(sizes)))
        # The bias joins the product of an operand that does not recur, if there is one: the sum of
        # both can then be computed for all steps at once.
        constant = [self._constant(operand.value) for operand in operands]
        added = None
        if bias:
            declared = self._declare(f"bias_{name}", (size,))
            added = self._param((size,), f"{name}.bias", Piece(declared))
        result, start = None, 0
        for i, operand in enumerate(operands):
            columns = (start, start + sizes[i])
            start = columns[1]
            part = self._param((size, sizes[i]), f"{name}.{i}", Piece(weight, columns))
            inputs: list[Row] = [operand, part]
            if added is not None and constant[i]:
                inputs.append(added)
                added = None
            product = self.builder.apply("linear", *inputs)
            result = product if result is None else result + product
        return result if added is None else result + Symbol(self.builder, added)

    def parameter(self, name: str, size: int | None, init: float | None) -> Row:
        shape = (self.cell.hidden_size if size is None else size,)
        declared = self._declare(name, shape, init)
        return Symbol(self.builder, self._param(shape, name, Piece(declared)))

    def keep(self, probability: float, size: int) -> Row:
        self.draws += 1
        return self.builder.apply("keep", attrs=(probability, self.draws - 1, size))

    def apply(self, kind: str, *operands: Row | float) -> Row:
        return self.builder.apply(kind, *operands)

    def _declare(self, name: str, shape: tuple[int, ...], init: float | None = None) -> str:
        if name in self.declarations:
            fail(
                f"the parameter {name!r} is made twice; a name stands for one set of weights: "
                f"choose another, or keep the value"
            )
        self.declarations[name] = Declaration(name, shape, init)
        return name

    def _param(self, shape: tuple[int, ...], hint: str, piece: Piece) -> Value:
        value = Value(Type("once", shape), hint)
        self.params.append(Param(value, (piece,)))
        return value

    def _constant(self, value: Value) -> bool:
        """Returns whether a value does not depend on a state."""
        made_by = {op.result: op for op in self.builder.ops}
        if value.type.rate != "step":
            return True
        return value in made_by and all(map(self._constant, made_by[value].values))


def trace(cell: BoundCell, training: bool = False) -> Trace:
    """Traces a cell to the program of its step, without any pass.

    Raises:
        CellError: the cell leaves the language; says the line and what to write instead.
    """
    tracer = _Tracer(cell, training)
    x = Value(Type("sequence", (cell.input_size,)), "x")
    states = {n: Value(Type("step", (size,)), n) for n, size in cell.state_sizes.items()}
    symbols = {n: Symbol(tracer.builder, v) for n, v in states.items()}
    output, following = cell.step(tracer, Symbol(tracer.builder, x), list(symbols.values()))
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
        sequences=(("x", x),),
        states=tuple(State(n, v, following[n].value) for n, v in states.items()),
        before=tuple(tracer.builder.before),
        step=tuple(tracer.builder.ops),
        yields=(Yield("output", output.value, sequence),),
        results=(("output", sequence),),
    )
    return Trace(program, tuple(tracer.declarations.values()))
