"""Cells: Python functions over one time step, with their states and options.

B batch, I input size, H hidden size, n features.
"""

from __future__ import annotations

import dis
import importlib
import inspect
import itertools
import math
import operator
import pickle
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from hoconv.recurrent.frontend.axes import cat, reshape
from hoconv.recurrent.frontend.errors import CellError, find_line, locate_error
from hoconv.recurrent.frontend.frame import Frame, Row, check_name, current_frame, enter_frame
from hoconv.recurrent.frontend.symbol import MOST_AXES, Symbol, fail

HIDDEN = "hidden_size"
_GIVEN = ("input_size", HIDDEN)
# The arguments of RNN, so that an option can be one beside them.
_TAKEN = (
    "cell", *_GIVEN, "num_layers", "bidirectional", "dropout", "batch_first", "schedule", "impl",
    "device", "dtype", "recompute", "output",
)  # fmt: skip
_CALLED = ("x", "state", "lengths", "reset")  # those of a layer's call


Size = str | int


@dataclass(frozen=True, eq=False)
class Cell:
    """A function over one time step that :func:`cell` has decorated.

    Attributes:
        name: the name of the function.
        function: ``function(x, *inputs, *states, **options) -> (output, {state: next})``.
        inputs: the inputs beside x, as `states`; the last of them are constants of a sequence.
        constants: the names of those.
        states: name of a state -> the sizes of its axes, each an int, the name of an option,
            ``hidden_size`` or ``input_size``, or a product of them.
        options: name of an option -> its default, `inspect.Parameter.empty` where it has none.
    """

    name: str
    function: Callable[..., Any]
    inputs: Mapping[str, tuple[Size, ...]]
    constants: frozenset[str]
    states: Mapping[str, tuple[Size, ...]]
    options: Mapping[str, Any]

    def __reduce__(self) -> Any:
        """Pickles the cell as functions are pickled: by the name under which it can be imported."""
        where = self.function.__module__, self.function.__qualname__
        try:
            found = _find(*where)
        except (ImportError, AttributeError):
            found = None
        if found is not self:
            raise pickle.PicklingError(
                f"the cell {self.name} cannot be pickled: {'.'.join(where)} is not it; define it "
                "at the top of a module under its function's name, or save the layer's state_dict()"
            )
        return _find, where

    def __deepcopy__(self, memo: Any) -> Cell:
        return self

    def bind(self, input_size: int, hidden_size: int, options: Mapping[str, Any]) -> BoundCell:
        """Gives the cell its sizes and options.

        Raises:
            TypeError: an option that the cell does not have, or a missing one.
            ValueError: a size that is not a positive whole number.
        """
        known: dict[str, Any] = {"input_size": input_size, HIDDEN: hidden_size}
        if unknown := [name for name in options if name not in self.options]:
            listed = ", ".join(n for n in self.options if n not in known) or "none"
            raise TypeError(f"{unknown[0]}: not an option of the cell {self.name}; it has {listed}")
        values = {
            name: known.get(name, options.get(name, default))
            for name, default in self.options.items()
        }
        if missing := [n for n, v in values.items() if v is inspect.Parameter.empty]:
            raise TypeError(f"{missing[0]}: the cell {self.name} needs this option: a value")
        known |= values

        def evaluate(what: str, size: Size) -> int:
            result = 1
            for factor in _factors(size):
                value = known[factor] if isinstance(factor, str) else factor
                if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                    raise ValueError(
                        f"{factor}: the size of the {what} of the cell {self.name}: expected an "
                        f"int of at least 1, got {value!r}"
                    )
                result *= value
            return result

        def bind(what: str, of: Mapping[str, tuple[Size, ...]]) -> dict[str, tuple[int, ...]]:
            return {
                name: tuple(evaluate(f"{what} {name!r}", size) for size in sizes)
                for name, sizes in of.items()
            }

        inputs, states = bind("input", self.inputs), bind("state", self.states)
        return BoundCell(self, input_size, hidden_size, values, inputs, states)

    def __call__(
        self, name: str = "", *values: Row, hidden_size: int | None = None, **options: Any
    ) -> tuple[Any, dict[str, Row]]:
        """Runs a step of this cell within another one, as part of its step::

            output, following = rnn.gru("lower", x, h)

        Args:
            name: unique in the cell, as of a linear map; the names of the parameters contain it,
                ``weight_<name>_r_l<layer>``.
            values: x, a row, then inputs, constants and states, in their order.
            hidden_size: by default that of the cell around it.
            options: the cell's own.

        Returns:
            The output or outputs, and the next states by name.
        """
        check_name(self.name, name)
        frame = current_frame(f"the cell {self.name}")
        called, names = f"{self.name}({name!r})", ("x", *self.inputs, *self.states)
        if len(values) != len(names):
            listed = ", ".join(names)
            fail(f"{called}: expected the values ({listed}) in this order, got {len(values)}")
        hidden = frame.hidden_size if hidden_size is None else hidden_size
        features = [getattr(value, "shape", ())[1:] for value in values]
        if len(features[0]) != 1:
            fail(f"{called}: x: expected a row of features, got {values[0]!r}")
        try:
            bound = self.bind(features[0][0], hidden, options)
        except (TypeError, ValueError) as error:
            fail(f"{called}: {error}")
        shapes = (features[0], *bound.input_shapes.values(), *bound.state_shapes.values())
        for argument, shape, value, found in zip(names, shapes, values, features, strict=True):
            if tuple(found) != tuple(shape):
                got = _show(found) if found else repr(value)
                fail(f"{called}: {argument}: expected a value of size {_show(shape)}, got {got}")
        with frame.enter_cell(name, hidden):
            return bound.run(values)


def _find(module: str, qualname: str) -> Cell:
    """Imports a pickled cell from the module that defines it."""
    return operator.attrgetter(qualname)(importlib.import_module(module))


@dataclass(frozen=True, eq=False)
class BoundCell:
    """A cell with sizes and options.

    Attributes:
        options: all of its keyword-only arguments.
        input_shapes: name of an input beside x -> the sizes of its axes, without the batch.
        state_shapes: likewise of the states.
    """

    cell: Cell
    input_size: int
    hidden_size: int
    options: Mapping[str, Any]
    input_shapes: Mapping[str, tuple[int, ...]]
    state_shapes: Mapping[str, tuple[int, ...]]

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Bound again: what was pickled may be of another version.
        cell, sizes = state["cell"], (state["input_size"], state["hidden_size"])
        vars(self).update(vars(cell.bind(*sizes, state["options"])))

    @property
    def state_sizes(self) -> dict[str, int]:
        """Name of a state -> its number of features."""
        return {name: math.prod(shape) for name, shape in self.state_shapes.items()}

    @property
    def row_size(self) -> int:
        """The features of all inputs beside each other: x, then the others in their order, without
        constants."""
        return self.input_size + sum(
            math.prod(shape)
            for name, shape in self.input_shapes.items()
            if name not in self.cell.constants
        )

    @property
    def constant_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name of a constant of a sequence -> the sizes of its axes, without the batch."""
        shapes = self.input_shapes.items()
        return {name: shape for name, shape in shapes if name in self.cell.constants}

    @property
    def name(self) -> str:
        return self.cell.name

    def step(
        self, frame: Frame, x: Row, states: Sequence[Row], constants: Sequence[Row] = ()
    ) -> Step:
        """Runs the cell for one time step.

        Args:
            frame: provides parameters and random numbers.
            x: (B, row_size).
            states, constants: (B, ...) of each, in the order of their declaration.

        Raises:
            CellError: the cell that is traced raised an exception, or returned something else.
                One that computes with tensors raises what PyTorch does.
        """
        with enter_frame(frame):
            output, following = self.run([*self._split(x), *constants, *states])
        named = isinstance(output, dict)
        outputs = output if named else {"output": output}
        rows = [reshape(value, math.prod(value.shape[1:])) for value in outputs.values()]
        sizes = {name: row.shape[1] for name, row in zip(outputs, rows, strict=True)}
        row = cat(*rows) if len(rows) > 1 else rows[0]
        return Step(row, following, sizes if named else None)

    def run(self, values: Sequence[Row]) -> tuple[Any, dict[str, Row]]:
        """Calls the function, in a frame, with x, inputs, constants and states; returns its output
        or outputs, and the next states in the order of their declaration."""
        function = self.cell.function
        try:
            result = function(*values, **self.options)
        except Exception as error:
            filename = function.__code__.co_filename
            line = find_line(error.__traceback__, function.__code__)
            if isinstance(error, CellError):
                where = locate_error("called", filename, line, self.name)
                if str(error).startswith(f"{filename}:{line}: "):
                    raise
                raise CellError(f"{error}\n{where}") from error.__cause__
            # PyTorch's own: out of memory, say, or a checkpoint's end.
            if isinstance(values[0], Tensor):
                error.add_note(f"{filename}:{line}: in the cell {self.name}")
                raise
            raise locate_error(_explain(error), filename, line, self.name) from error
        return self._check_result(result)

    def _split(self, x: Row) -> list[Row]:
        """The inputs, of a row of all of them."""
        if self.row_size == self.input_size:
            return [x]
        found, start = [x[:, : self.input_size]], self.input_size
        for name, shape in self.input_shapes.items():
            if name in self.cell.constants:
                continue
            part = x[:, start : start + math.prod(shape)]
            found.append(reshape(part, *shape) if len(shape) > 1 else part)
            start += math.prod(shape)
        return found

    def _check_result(self, result: Any) -> tuple[Any, dict[str, Row]]:
        names = list(self.state_shapes)
        expected = f"(output, dict({', '.join(f'{n}=...' for n in names)}))"
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
            raise self.error(f"it must return {expected}, got {_describe(result)}")
        output, states = result
        outputs = output if isinstance(output, dict) else {"output": output}
        if not outputs:
            raise self.error("it returns no output: name one, as in dict(h=h)")
        for name, value in (*outputs.items(), *states.items()):
            if not isinstance(name, str):
                raise self.error(
                    f"expected names of outputs and states, as in dict(h=h), got {name!r}"
                )
            if not hasattr(value, "shape") or len(value.shape) < 2:
                raise self.error(
                    f"{name}: expected a value of the step, (B, n), got {_describe(value)}; "
                    + (
                        "several outputs have names: return dict(a=a, b=b), ...; a cell within "
                        'returns two, output, following = rnn.gru("lower", x, h)'
                        if isinstance(value, tuple | list)
                        else "a row of zeros is 0.0 times a row"
                    )
                )
        for name in states:
            if name not in names:
                raise self.error(
                    f"it returns the state {name!r}, which it does not have; its states are "
                    f"{', '.join(names)}: add it to @rnn.cell(state=...) or leave it out"
                )
        for name, shape in self.state_shapes.items():
            if name not in states:
                raise self.error(f"it does not return the state {name!r}; return {expected}")
            if (found := tuple(states[name].shape[1:])) != shape:
                raise self.error(
                    f"the state {name!r} has size {_show(shape)} and becomes a value of size "
                    f"{_show(found)}; declare it: @rnn.cell(state={{{name!r}: ...}})"
                )
        return output, {name: states[name] for name in names}

    def error(self, message: str) -> CellError:
        """An error that shows the line of the cell's return, or its first where it has several."""
        code = self.cell.function.__code__
        instructions = dis.get_instructions(code)
        returns = {
            at.positions.lineno
            for before, at in itertools.pairwise(instructions)
            if at.opname == "RETURN_VALUE" and at.positions and at.positions.lineno
            and (before.opname, before.argval) != ("LOAD_CONST", None)  # of a function that ends
        }  # fmt: skip
        line = returns.pop() if len(returns) == 1 else code.co_firstlineno
        return locate_error(message, code.co_filename, line, self.name)


class Step(NamedTuple):
    """The result of a step.

    Attributes:
        output: a row (B, n), of all outputs beside each other.
        states: (B, ...) of each next state, by name.
        outputs: the sizes of outputs that have names, in order; None of one that has none.
    """

    output: Row
    states: dict[str, Row]
    outputs: dict[str, int] | None


def _explain(error: Exception) -> str:
    """Returns what an exception of Python in a cell says, and what to write instead."""
    message = f"{type(error).__name__}: {error}"
    language = sys.modules["hoconv.recurrent"]  # which imports this module
    called = re.match(r"(\w+)\(\) ", str(error))
    function = called and getattr(language, called[1], None)
    if isinstance(error, NameError) and callable(getattr(language, error.name or "", None)):
        message += f"; write rnn.{error.name}"
    elif isinstance(error, TypeError) and callable(function):
        arguments = inspect.signature(function).parameters.values()
        listed = ", ".join(str(a.replace(annotation=a.empty)) for a in arguments)
        message += f"; it is rnn.{function.__name__}({listed})"
        if "'keepdim'" in message:
            message += ", and an axis along which it goes stays, of size 1"
    elif "does not support ufuncs" in message:
        message += "; NumPy's functions are outside of the language: write those of rnn"
    return message


def _describe(value: Any) -> str:
    """Describes what a cell returned, without the text of values."""
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} ({', '.join(map(_describe, value))})"
    if isinstance(value, Symbol):
        return "a value"
    return repr(value) if isinstance(value, int | float | str) else type(value).__name__


def _show(shape: tuple[int, ...]) -> str:
    return str(shape[0]) if len(shape) == 1 else str(shape)


def _factors(size: Size) -> list[Size]:
    """The factors of a size: numbers and names."""
    if not isinstance(size, str):
        return [size]
    factors = [factor.strip() for factor in size.split("*")]
    return [int(factor) if factor.isdecimal() else factor for factor in factors]


def _is_size(size: Any, names: Collection[str]) -> bool:
    """Returns whether it is an int of at least 1, one of the names, or a product of them."""
    return all(
        factor in names
        if isinstance(factor, str)
        else isinstance(factor, int) and not isinstance(factor, bool) and factor >= 1
        for factor in _factors(size)
    )


def _tuples(sizes: Mapping[str, Size | tuple[Size, ...]]) -> dict[str, tuple[Size, ...]]:
    return {name: of if isinstance(of, tuple) else (of,) for name, of in sizes.items()}


def cell(
    state: Sequence[str] | Mapping[str, Size | tuple[Size, ...]],
    inputs: Mapping[str, Size | tuple[Size, ...]] | None = None,
    constants: Mapping[str, Size | tuple[Size, ...]] | None = None,
) -> Callable[[Callable[..., Any]], Cell]:
    """Makes a cell of a function over one time step.

    The function takes x, other inputs, constants, its states, and options as keyword-only
    arguments; an option named ``input_size`` or ``hidden_size`` receives the size of the layer. The
    function returns the output of the step, or a dict of several, and a dict of the next states. It
    uses the functions of this package and Python's operators::

        @rnn.cell(state=("h",))
        def elman(x, h):
            h = rnn.tanh(rnn.linear("ih", x) + rnn.linear("hh", h))
            return h, dict(h=h)

    Args:
        state: the names of the states. A dict gives their sizes, each an int, the name of an
            option, ``"input_size"`` or ``"hidden_size"``, or a product, as in ``"2 * heads"``; or a
            tuple of up to three, one for each axis. A sequence of names gives all the hidden size.
        inputs: the names of inputs beside x, which a layer takes by name, and their sizes, as those
            of states.
        constants: likewise, of what is the same at every step of a sequence, such as a memory that
            the cell attends to.

    Raises:
        CellError: arguments of the function that do not fit.
    """
    if callable(state):
        raise CellError('cell: expected names of states, as in @rnn.cell(state=("h",)); got a '
                        "function: the decorator is missing its argument")  # fmt: skip
    problem = _find_problem(state, inputs, constants)
    given = {} if problem else state if isinstance(state, Mapping) else dict.fromkeys(state, HIDDEN)
    sizes = _tuples(given)
    beside = {} if problem else _tuples({**(inputs or {}), **(constants or {})})

    def decorate(function: Callable[..., Any]) -> Cell:
        if not inspect.isfunction(function):
            raise CellError(f"cell: expected a function, got {function!r}; write one that calls it")
        code = function.__code__

        def refuse(message: str) -> CellError:
            line = code.co_firstlineno
            return locate_error(message, code.co_filename, line, function.__name__)

        if problem:
            raise refuse(problem)
        arguments = inspect.signature(function).parameters.values()
        positional = [a.name for a in arguments if a.kind == a.POSITIONAL_OR_KEYWORD]
        if positional != [positional[0] if positional else "x", *beside, *sizes]:
            raise refuse(
                f"expected the arguments (x, {', '.join((*beside, *sizes))}), the inputs, the "
                f"constants and the states in their order; got ({', '.join(positional)})"
            )
        for name in beside:
            if name in _CALLED:
                raise refuse(f"input {name!r}: is an argument of a layer's call itself; choose "
                             "another name")  # fmt: skip
        options = {a.name: a.default for a in arguments if a.kind == a.KEYWORD_ONLY}
        for name in options:
            if name in _TAKEN and name not in _GIVEN:
                raise refuse(f"option {name!r}: is an argument of RNN itself; choose another name")
        named = [(f"state {name!r}", of) for name, of in sizes.items()]
        for name, of in beside.items():
            kind = "constant" if name in (constants or {}) else "input"
            named.append((f"{kind} {name!r}", of))
        for what, of in named:
            if not 1 <= len(of) <= MOST_AXES:
                raise refuse(f"{what}: expected 1 to {MOST_AXES} sizes, got {of!r}")
            for size in of:
                known = (*options, *_GIVEN)
                if not _is_size(size, known):
                    no = "no option of the cell" if isinstance(size, str) else "none"
                    axes = "; several are a tuple" if isinstance(size, list) else ""
                    raise refuse(
                        f"{what}: its size {size!r} is {no}; expected an int of at least 1, "
                        f"{', '.join(map(repr, known))}, or a product of them{axes}"
                    )
        return Cell(function.__name__, function, beside, frozenset(constants or {}), sizes, options)

    return decorate


def _find_problem(state: Any, inputs: Any, constants: Any) -> str | None:
    """Says what is wrong with the arguments of :func:`cell`, whatever the function is."""
    for what, of, example in (("inputs", inputs, "mask"), ("constants", constants, "memory")):
        if of is not None and not isinstance(of, Mapping):
            return f'{what}: expected names and sizes, as in {what}={{"{example}": 1}}; got {of!r}'
    if isinstance(state, str) or not isinstance(state, Sequence | Mapping) or not state:
        return f"state: expected a tuple of names, or a dict of names and sizes, got {state!r}"
    for name in (*state, *(inputs or {}), *(constants or {})):
        if not isinstance(name, str) or not name.isidentifier():
            return f"expected names of arguments, as in state=('h',), got {name!r}"
    if len({*state}) < len(state):
        return f"state: a name is there twice in {state!r}"
    kinds = {"an input": inputs or {}, "a constant": constants or {}, "a state": state}
    for (one, names), (other, others) in itertools.combinations(kinds.items(), 2):
        if both := [name for name in names if name in others]:
            return f"{both[0]!r} is the name of {one} and of {other}"
    return None
