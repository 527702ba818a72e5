"""The folders: which imports which, and how many files each holds."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path

import networkx
import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("hoconv", "datamodules", "models", "training", "scripts")
LIBRARY, APP = ("hoconv",), ("datamodules", "models", "training")
# What each may import of the others.
BELOW = {
    "hoconv": (),
    "datamodules": LIBRARY,
    "models": (*LIBRARY, "datamodules"),
    "training": (*LIBRARY, "datamodules", "models"),
    "scripts": (*LIBRARY, *APP),
}
# What each room of the library may import of its others.
INNER = {
    "jit": (),
    "dispatch": ("jit",),
    "ops": ("dispatch", "jit"),
    "recurrent": ("dispatch", "jit"),
    "tools": ("dispatch", "jit", "ops", "recurrent"),
}
LINES_OF_MAIN, LINES_OF_A_SCREEN = 25, 50
MOST_FILES = 14  # of a folder; more want rooms inside


def modules() -> dict[str, Path]:
    """Name as it is imported -> file; a package's face, which hands names on, is none."""
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    named = {}
    for path in [*files, ROOT / "train.py"]:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        named[name.removeprefix("scripts.")] = path
    return named


def imported(name: str, path: Path, known: Iterable[str]) -> set[str]:
    """The modules that a file names in its imports, wherever in the file they stand."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: say where from: {ast.unparse(node)}"
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & set(known) - {name}


@pytest.fixture(scope="module")
def imports() -> networkx.DiGraph:
    """An arrow from each module to those that it imports."""
    known = modules()
    graph = networkx.DiGraph()
    for name, path in known.items():
        graph.add_node(name, folder=path.parent.relative_to(ROOT))
    graph.add_edges_from(
        (name, other) for name, path in known.items() for other in imported(name, path, known)
    )
    return graph


def circles(graph: networkx.DiGraph) -> list[set[str]]:
    return [c for c in networkx.strongly_connected_components(graph) if len(c) > 1]


def test_no_module_imports_itself_through_others(imports: networkx.DiGraph) -> None:
    assert circles(imports) == []


def test_no_two_folders_import_each_other(imports: networkx.DiGraph) -> None:
    # A folder's own files and its inner rooms may build on each other.
    pairs = {(folder_of(imports, a), folder_of(imports, b)) for a, b in imports.edges}
    apart = {(a, b) for a, b in pairs if not (a.is_relative_to(b) or b.is_relative_to(a))}
    assert [pair for pair in apart if pair[::-1] in apart] == []


def folder_of(graph: networkx.DiGraph, name: str) -> Path:
    return graph.nodes[name]["folder"]


@pytest.mark.parametrize("room", ROOMS)
def test_arrows_run_one_way(imports: networkx.DiGraph, room: str) -> None:
    rooms = {name: (*folder_of(imports, name).parts, "train.py")[0] for name in imports}
    allowed = {room, *BELOW[room]}
    up = [f"{a} -> {b}" for a, b in imports.edges if rooms[a] == room and rooms[b] not in allowed]
    assert up == []


@pytest.mark.parametrize("room", INNER)
def test_arrows_inside_the_library_run_one_way(imports: networkx.DiGraph, room: str) -> None:
    others = {f"hoconv.{other}" for other in INNER.keys() - {room, *INNER[room]}}
    up = [
        f"{a} -> {b}"
        for a, b in imports.edges
        if a.startswith(f"hoconv.{room}.") and ".".join(b.split(".")[:2]) in others
    ]
    assert up == []


def test_no_sentence_of_the_library_names_the_app() -> None:
    """No wheel holds the app. A package that ``hoconv new`` writes may be used with it."""
    inner = "|".join(
        f"{room}[./]{path.stem}\\b"
        for room in (*APP, "scripts")
        for path in (ROOT / room).iterdir()
        if path.stem.isidentifier()
    )
    app = re.compile(rf"\b({inner}|train\.py)")
    named = [
        f"{path.relative_to(ROOT)}: {found[0]}"
        for path in (ROOT / "hoconv").rglob("*.*")
        if path.suffix in (".py", ".jinja", ".css")
        and "template" not in path.parts
        and (found := app.search(path.read_text()))
    ]
    assert named == []


def test_tools_of_the_library_serve_the_end_of_a_run_only(imports: networkx.DiGraph) -> None:
    """Training needs no command of the library's; a table of runs reads them as its report does."""
    users = {a for a, b in imports.edges if a.startswith("training.") and ".report." in b}
    assert users == {"training.results.sweep"}


def test_the_model_of_any_images_knows_no_data_set(imports: networkx.DiGraph) -> None:
    used = networkx.descendants(imports, "models.tasks.classifier")
    assert not [name for name in used if name.startswith("datamodules.coco")]


@pytest.mark.parametrize("room", [*ROOMS, "csrc"])
def test_no_folder_is_a_bag(room: str) -> None:
    crowded = {
        str(path.relative_to(ROOT)): len(files)
        for path in [ROOT / room, *(p for p in (ROOT / room).rglob("*") if p.is_dir())]
        if "__pycache__" not in path.parts
        and len(files := [p for p in path.iterdir() if p.is_file() and p.name != "__init__.py"])
        > MOST_FILES
    }
    assert crowded == {}


def test_main_is_short() -> None:
    lines = (ROOT / "train.py").read_text().splitlines()
    (main,) = (n for n in ast.parse("\n".join(lines)).body if isinstance(n, ast.FunctionDef))
    assert main.end_lineno is not None
    assert main.end_lineno - main.lineno < LINES_OF_MAIN
    assert len(lines) < LINES_OF_A_SCREEN
