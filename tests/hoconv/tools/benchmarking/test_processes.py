"""Work in processes of its own."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from hoconv.tools.benchmarking.processes import call_each


def _write(folder: Path, name: str) -> None:
    if name == "ends":
        os._exit(1)
    Path(folder, name).touch()


def test_what_ends_its_process_stops_no_other_call(tmp_path: Path) -> None:
    assert len([*call_each(partial(_write, tmp_path), ["ends", "stays"], at_once=1)]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["stays"]
