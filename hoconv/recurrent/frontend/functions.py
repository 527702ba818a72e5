"""The functions of the table, as cells call them: ``tanh(x)``, ``where(condition, a, b)``.

Each is an attribute of this module, made of its entry in :mod:`hoconv.recurrent.ir.functions`.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from hoconv.recurrent.frontend.frame import Row, apply
from hoconv.recurrent.frontend.symbol import INSTEAD
from hoconv.recurrent.ir.functions import FUNCTIONS, Function


def __getattr__(name: str) -> Callable[..., Row]:
    entry = FUNCTIONS.get(name)
    if entry is None or not entry.doc:
        public = [n for n in dir(sys.modules["hoconv.recurrent"]) if not n.startswith("_")]
        close = difflib.get_close_matches(name, public, 1, 0.7)
        said = f"write {INSTEAD[name]}" if name in INSTEAD else "docs/use/recurrent.md lists all"
        if close:
            said = f"did you mean {close[0]}? {said}"
        raise AttributeError(f"hoconv.recurrent has no function {name!r}; {said}")
    return _callable(entry)


def __dir__() -> list[str]:
    return [entry.name for entry in FUNCTIONS.values() if entry.doc]


@functools.cache
def _callable(entry: Function) -> Callable[..., Row]:
    """The function of an entry, the same one every time: a cell that holds it can be pickled."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(name, kind) for name in entry.operands])

    def function(*operands: Any, **named: Any) -> Row:
        if named or len(operands) != len(entry.operands):
            try:
                operands = signature.bind(*operands, **named).args
            except TypeError as error:
                raise TypeError(f"{entry.name}() {error}") from error
        return apply(entry.name, *operands)

    function.__name__ = function.__qualname__ = entry.name
    function.__doc__ = entry.doc
    function.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
    return function
