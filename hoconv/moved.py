"""Former names of modules, which older code and pickles may still use.

An import of a former name fails with an error that gives the new name. A second module of the same
file would not do: its classes would be others than those of the first, and a pickle also holds
names of classes and attributes, which may have changed too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from typing import Any

MOVED = {
    "hoconv.build": "hoconv.jit",
    "hoconv.operators": "hoconv.declaration",
    "hoconv.high_order_layer": "hoconv.high_order.layer",
    "hoconv.high_order.operator": "hoconv.high_order.conv2d.operator",
    "hoconv.recurrent.cell": "hoconv.recurrent.frontend.cell",
    "hoconv.recurrent.trace": "hoconv.recurrent.frontend.trace",
}


class _Moved(MetaPathFinder):
    """A finder that is asked for modules that no other finder found."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> None:
        if now := MOVED.get(fullname):
            raise ModuleNotFoundError(
                f"{fullname} is {now} now: import that. A layer that was pickled under the old "
                "name is loaded with the version of hoconv that saved it: save its state_dict() "
                "there, which every version loads",
                name=fullname,
            )


def register() -> None:
    """Adds the finder after all others."""
    sys.meta_path.append(_Moved())
