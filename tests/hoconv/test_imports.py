"""The library's files import in one direction."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import hoconv

ROOT = Path(hoconv.__file__).parents[1]


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported(path: Path, known: set[str]) -> set[str]:
    """The known modules that a file imports anywhere, for types only too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            within = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (within & known) or {str(node.module)}
    return found & known


def test_no_file_imports_in_a_circle() -> None:
    files = (ROOT / "hoconv").rglob("*.py")
    modules = {name_of(path): path for path in files}
    del modules["hoconv"]  # names what users import, from everywhere
    graph = {name: imported(path, {*modules}) - {name} for name, path in modules.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises with the circle


# Says what of the compiler of recurrent cells an import of the library loads.
LOADED = """
import sys
import hoconv

COMPILER = ("hoconv.jit.nvrtc", "hoconv.jit.generated", "hoconv.recurrent.schedule",
            "hoconv.recurrent.passes", "hoconv.recurrent.codegen")
print([name for name in COMPILER if name in sys.modules])
"""


def test_an_import_loads_no_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], text=True, capture_output=True)
    assert done.stdout == "[]\n", done.stderr
