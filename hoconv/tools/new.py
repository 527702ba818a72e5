"""Writes a package with an operator of its own: ``hoconv new NAME [DIR]``.

The package in ``hoconv/tools/template/`` is complete, under another name: every file of it runs as
it is.
"""

from __future__ import annotations

import argparse
import keyword
import re
import shlex
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from hoconv.dispatch.declaration import operators

# Words of C++ that are names in Python: the kernel is a function with the operator's name.
_CPP_WORDS = {
    "alignas", "alignof", "and_eq", "asm", "auto", "bitand", "bitor", "bool", "case", "catch",
    "char", "co_await", "co_return", "co_yield", "compl", "concept", "const", "const_cast",
    "consteval", "constexpr", "constinit", "decltype", "default", "delete", "do", "double",
    "dynamic_cast", "enum", "explicit", "export", "extern", "false", "float", "friend", "goto",
    "inline", "int", "long", "main", "mutable", "namespace", "new", "noexcept", "not_eq",
    "nullptr", "operator", "or_eq", "private", "protected", "public", "register",
    "reinterpret_cast", "requires", "short", "signed", "sizeof", "static", "static_assert",
    "static_cast", "struct", "switch", "template", "this", "thread_local", "throw", "true",
    "typedef", "typeid", "typename", "union", "unsigned", "using", "virtual", "void", "volatile",
    "xor", "xor_eq",
}  # fmt: skip
TEMPLATE = Path(__file__).parent / "template"
_NAME, _CLASS = "soft_clip", "SoftClip"  # of the template


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="hoconv new", description=__doc__)
    parser.add_argument("name", metavar="NAME", help="of the operator and of the package: carafe")
    parser.add_argument("folder", metavar="DIR", nargs="?", type=Path,
                        help="where to write it; default: a folder NAME here")  # fmt: skip
    arguments = parser.parse_args(argv)
    folder = arguments.folder or Path(arguments.name)
    try:
        write_package(arguments.name, folder)
    except (ValueError, FileExistsError) as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"DIR: {folder} cannot be written ({error.strerror}); give another folder")
    print(f"{folder} has an operator, its kernels, a layer and a network. Next:")
    print(f"  pip install -e {shlex.quote(str(folder))}\n  hoconv check {arguments.name}")
    print(f"  hoconv test {arguments.name}\nIts README.md says how it trains.")
    return 0


def write_package(name: str, folder: Path) -> None:
    """Writes a package.

    Args:
        name: of the operator and of the package, in snake_case.
        folder: where; it is made.

    Raises:
        ValueError: `name` is not in snake_case, is a word of Python, C++ or the package's own code,
            ends like a type of C, is an installed package, or is an operator that is declared
            already.
        FileExistsError: `folder` has files already.
        OSError: it cannot be written.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name):
        raise ValueError(f"NAME: expected a name in snake_case, such as carafe; got {name!r}")
    if name in _CPP_WORDS:
        raise ValueError(f"NAME: {name!r} is a word of C++; choose another name")
    if name.endswith("_t"):
        raise ValueError(f"NAME: {name!r} ends like a type of C, such as size_t; drop the _t")
    if name in {operator.name for operator in operators()}:
        raise ValueError(f"NAME: there is an operator {name!r} already; choose another name")
    # Installing the template compiled it: that is no part of it.
    files = [p for p in TEMPLATE.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    if name != _NAME and any(name in re.findall(r"\w+", path.read_text()) for path in files):
        raise ValueError(f"NAME: the code of the package uses {name!r} itself; choose another name")
    if find_spec(name):
        raise ValueError(f"NAME: a package {name!r} is installed already; choose another name")
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(
            f"DIR: {folder} has files already; give another folder, such as {folder / name}"
        )
    in_class = "".join(word.title() for word in name.split("_"))

    def renamed(text: str) -> str:
        return text.replace(_NAME, name).replace(_CLASS, in_class)

    for path in files:
        made = folder / renamed(str(path.relative_to(TEMPLATE)))
        made.parent.mkdir(parents=True, exist_ok=True)
        made.write_text(renamed(path.read_text()))
