"""Formulas of floating-point operations, for ``torch.utils.flop_counter``.

That module imports Triton, a compiler, which takes longer than all of hoconv. So the formulas wait
until something else imports it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any, TypeVar

Formula = TypeVar("Formula", bound=Callable[..., int])

_COUNTER = "torch.utils.flop_counter"
_waiting: list[tuple[Any, Callable[..., int]]] = []


def register_flop_formula(ops: Any) -> Callable[[Formula], Formula]:
    """Returns a decorator: that of the counter's function of this name, applied when it can be."""

    def register(formula: Formula) -> Formula:
        if counter := sys.modules.get(_COUNTER):
            counter.register_flop_formula(ops)(formula)
        else:
            _waiting.append((ops, formula))
        return formula

    return register


class _Finder(MetaPathFinder):
    """A finder that has the counter take the formulas when it is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: Any = None
    ) -> ModuleSpec | None:
        if fullname != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: Any) -> None:
            execute(module)
            for ops, formula in _waiting:
                module.register_flop_formula(ops)(formula)

        spec.loader.exec_module = execute_and_register
        return spec


sys.meta_path.insert(0, _Finder())
