"""Private names of other packages: CONTRIBUTING lists each, with the reason for it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("hoconv", "datamodules", "models", "training")
# Of named tuples, of configurations, and of modules' own paths in them: documented.
PUBLIC = {"_asdict", "_fields", "_replace", "_target_"}


def sources() -> Iterator[ast.Module]:
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            if not {"template", "testing"}.intersection(path.parts):
                yield ast.parse(path.read_text())


def is_private(word: str) -> bool:
    return re.match(r"_[a-zA-Z]", word) is not None


def of_self(node: ast.Attribute) -> bool:
    return ast.unparse(node.value) in ("self", "cls")


def defined(tree: ast.Module) -> Iterator[str]:
    """Yields the private names that a file defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and of_self(node):
            yield node.attr


def used(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """Yields the private names that a file takes from elsewhere; of a path, such as
    ``torch._C._functorch.name``, the last name.

    Args:
        own: names that, of any object, may be the project's.
    """
    inner = {node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(ROOMS):
            parts = (node.module or "").split(".")
            for alias in node.names:
                if any(map(is_private, [*parts, alias.name])):
                    yield parts[-1] if parts[-1] == "_pytree" else alias.name
        elif isinstance(node, ast.Attribute) and node not in inner:
            path, root = [node.attr], node.value
            while isinstance(root, ast.Attribute):
                path.append(root.attr)
                root = root.value
            of_torch = isinstance(root, ast.Name) and root.id == "torch"
            if (
                any(map(is_private, path))
                if of_torch
                else is_private(path[0]) and path[0] not in own
            ):
                yield path[0]


def test_each_is_listed_with_its_reason() -> None:
    trees = list(sources())
    own = {name for tree in trees for name in defined(tree)} | PUBLIC
    found = {name for tree in trees for name in used(tree, own)}
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## Private names")[2]
    table = re.findall(r"^\| (`.*?) \|", section.partition("\n## ")[0], re.MULTILINE)
    listed = {name for cell in table for name in re.findall(r"`(\w+)`", cell)}
    assert found - listed == set()
    # Of names that the project has, too, the sources only say that they are there.
    words = {
        node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)
    }
    assert listed - found - words == set()
