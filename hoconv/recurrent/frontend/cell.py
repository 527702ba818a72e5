"""Cells: Python functions over one time step, with their states and options.

B batch, I input size, H hidden size, n features.
"""

from __future__ import annotations

import dis
import importlib
import inspect
import itertools
import operator
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hoconv.recurrent.frontend.errors import CellError, find_line, locate_error
from hoconv.recurrent.frontend.frame import Frame, Row, enter_frame

HIDDEN = "hidden_size"
_GIVEN = ("input_size", HIDDEN)
# The arguments of RNN, so that an option can be one beside them.
_TAKEN = (
    "cell", *_GIVEN, "num_layers", "bidirectional", "dropout", "batch_first", "schedule", "impl",
    "device", "dtype",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Cell:
    """A function over one time step that :func:`cell` has decorated.

    Attributes:
        name: the name of the function.
        function: ``function(x, *states, **options) -> (output, {state: next})``.
        states: name of a state -> its size: an int, the name of an option, ``hidden_size`` or
            ``input_size``.
        options: name of an option -> its default, `inspect.Parameter.empty` where it has none.
    """

    name: str
    function: Callable[..., Any]
    states: Mapping[str, str | int]
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
        known = {"input_size": input_size, HIDDEN: hidden_size}
        if unknown := [name for name in options if name not in self.options]:
            listed = ", ".join(n for n in self.options if n not in known) or "none"
            raise TypeError(f"{unknown[0]}: not an option of the cell {self.name}; it has {listed}")
        values = {
            name: known.get(name, options.get(name, default))
            for name, default in self.options.items()
        }
        if missing := [n for n, v in values.items() if v is inspect.Parameter.empty]:
            raise TypeError(f"{missing[0]}: the cell {self.name} needs this option: a value")
        sizes = {}
        for state, size in self.states.items():
            sizes[state] = {**known, **values}[size] if isinstance(size, str) else size
            if not isinstance(sizes[state], int) or sizes[state] < 1:
                raise ValueError(
                    f"{size}: the size of the state {state!r} of the cell {self.name}: expected an "
                    f"int of at least 1, got {sizes[state]!r}"
                )
        return BoundCell(self, input_size, hidden_size, values, sizes)


def _find(module: str, qualname: str) -> Cell:
    """Imports a pickled cell from the module that defines it."""
    return operator.attrgetter(qualname)(importlib.import_module(module))


@dataclass(frozen=True, eq=False)
class BoundCell:
    """A cell with sizes and options. `options` are all of its keyword-only arguments."""

    cell: Cell
    input_size: int
    hidden_size: int
    options: Mapping[str, Any]
    state_sizes: Mapping[str, int]

    @property
    def name(self) -> str:
        return self.cell.name

    def step(self, frame: Frame, x: Row, states: Sequence[Row]) -> tuple[Row, dict[str, Row]]:
        """Runs the cell for one time step.

        Args:
            frame: provides parameters and random numbers.
            x: (B, I).
            states: (B, n) of each state, in the order of their declaration.

        Returns:
            The output of the step, (B, n), and the next states by name.

        Raises:
            CellError: the cell that is traced raised an exception, or returned something else.
                One that computes with tensors raises what PyTorch does.
        """
        function = self.cell.function
        try:
            with enter_frame(frame):
                result = function(x, *states, **self.options)
        except CellError:
            raise
        except Exception as error:
            filename = function.__code__.co_filename
            line = find_line(error.__traceback__, function.__code__)
            if isinstance(x, Tensor):  # PyTorch's own: out of memory, say, or a checkpoint's end
                error.add_note(f"{filename}:{line}: in the cell {self.name}")
                raise
            message = f"{type(error).__name__}: {error}"
            raise locate_error(message, filename, line, self.name) from error
        return self._check_result(result)

    def _check_result(self, result: Any) -> tuple[Row, dict[str, Row]]:
        names = list(self.state_sizes)
        shape = f"(output, dict({', '.join(f'{n}=...' for n in names)}))"
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
            raise self.error(f"it must return {shape}, got {type(result).__name__}")
        output, states = result
        for name, value in {"output": output, **states}.items():
            if not hasattr(value, "shape") or len(value.shape) != 2:
                raise self.error(
                    f"{name}: expected a value of the step, (B, n), got {value!r}; a row of zeros "
                    "is 0.0 times a row"
                )
        for name in states:
            if name not in names:
                raise self.error(
                    f"it returns the state {name!r}, which it does not have; its states are "
                    f"{', '.join(names)}: add it to @rnn.cell(state=...) or leave it out"
                )
        for name, size in self.state_sizes.items():
            if name not in states:
                raise self.error(f"it does not return the state {name!r}; return {shape}")
            if states[name].shape[-1] != size:
                raise self.error(
                    f"the state {name!r} has size {size} and becomes a value of size "
                    f"{states[name].shape[-1]}; declare it: @rnn.cell(state={{{name!r}: ...}})"
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


def cell(state: Sequence[str] | Mapping[str, str | int]) -> Callable[[Callable[..., Any]], Cell]:
    """Makes a cell of a function over one time step.

    The function takes x, its states, and options as keyword-only arguments; an option named
    ``input_size`` or ``hidden_size`` receives the size of the layer. The function returns the
    output of the step and a dict of the next states. It uses the functions of this package and
    Python's operators::

        @rnn.cell(state=("h",))
        def elman(x, h):
            h = rnn.tanh(rnn.linear("ih", x) + rnn.linear("hh", h))
            return h, dict(h=h)

    Args:
        state: the names of the states. A dict gives their sizes, each an int or the name of an
            option, ``"input_size"`` or ``"hidden_size"``; a sequence, the hidden size to all.

    Raises:
        CellError: arguments of the function that do not fit.
    """
    if callable(state):
        raise CellError('cell: expected names of states, as in @rnn.cell(state=("h",)); got a '
                        "function: the decorator is missing its argument")  # fmt: skip
    sizes = dict(state) if isinstance(state, Mapping) else dict.fromkeys(state, HIDDEN)

    def decorate(function: Callable[..., Any]) -> Cell:
        code = function.__code__

        def refuse(message: str) -> CellError:
            line = code.co_firstlineno
            return locate_error(message, code.co_filename, line, function.__name__)

        arguments = inspect.signature(function).parameters.values()
        positional = [a.name for a in arguments if a.kind == a.POSITIONAL_OR_KEYWORD]
        if isinstance(state, str) or not sizes:
            raise refuse(f"state: expected a tuple of names, got {state!r}")
        if positional != [positional[0] if positional else "x", *sizes]:
            raise refuse(
                f"expected the arguments (x, {', '.join(sizes)}), the input and the states in "
                f"their order; got ({', '.join(positional)})"
            )
        options = {a.name: a.default for a in arguments if a.kind == a.KEYWORD_ONLY}
        for name in options:
            if name in _TAKEN and name not in _GIVEN:
                raise refuse(f"option {name!r}: is an argument of RNN itself; choose another name")
        for name, size in sizes.items():
            if isinstance(size, str) and size not in (*options, *_GIVEN):
                raise refuse(
                    f"state {name!r}: its size {size!r} is no option of the cell; expected an int, "
                    f"{', '.join(map(repr, (*options, *_GIVEN)))}"
                )
        return Cell(function.__name__, function, sizes, options)

    return decorate
