"""Which files of the app import which: train.py, then training, models, datamodules, hoconv."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A room -> those that it may import.
ROOMS = {
    "train": {"training"},
    "training": {"models", "datamodules", "hoconv"},
    "models": {"datamodules", "hoconv"},
    "datamodules": {"hoconv"},
}
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for room in ROOMS
    for path in (ROOT.glob("train.py") if room == "train" else (ROOT / room).rglob("*.py"))
}


def imported(path: Path) -> Iterator[str]:
    """The modules that a file imports anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                module = f"{node.module}.{name.name}"
                yield module if module in FILES else node.module


@pytest.mark.parametrize("name", FILES)
def test_a_file_imports_only_its_own_room_and_those_below(name):
    room = name.partition(".")[0]
    found = {each.partition(".")[0] for each in imported(FILES[name])}
    assert found & {*ROOMS, "hoconv", "scripts", "tests"} <= {room, *ROOMS[room]}


def test_no_files_import_each_other():
    graph = {
        name: {each for each in imported(path) if each in FILES and each != name}
        for name, path in FILES.items()
    }
    assert sum(map(len, graph.values())) > 100
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_main_is_short():
    lines = (ROOT / "train.py").read_text().splitlines()
    assert len(lines) < 50
    (main,) = (n for n in ast.parse("\n".join(lines)).body if isinstance(n, ast.FunctionDef))
    assert main.name == "main"
    assert main.end_lineno is not None
    assert main.end_lineno - main.lineno < 25
