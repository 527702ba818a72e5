"""Modules under the names that they had, which code and pickles of before may still use.

Importing one fails with the name that it has now: two modules of one file would be two sets of
classes, and a pickle holds more names than those of modules.
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
    """Asked for what no other finder has found."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> None:
        if now := MOVED.get(fullname):
            raise ModuleNotFoundError(
                f"{fullname} is {now} now: import that. A layer that was pickled under the old "
                "name is loaded with the version of hoconv that saved it: save its state_dict() "
                "there, which every version loads",
                name=fullname,
            )


def register() -> None:
    """Adds the finder, the last to be asked."""
    sys.meta_path.append(_Moved())
