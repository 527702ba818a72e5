"""Builds a wheel of a package that has its operators' libraries compiled for other machines.

The package's own build backend makes the wheel of its sources; the libraries are put beside these,
and auditwheel names the oldest glibc with which all of it loads.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from hoconv.jit import BuildError, Library

_TOOLS = ("auditwheel", "wheel")  # of the extra hoconv[wheel]
_PLATFORM = "linux_x86_64"


def belongs(library: Library, package: Path) -> bool:
    """Returns whether a library's sources are in the folder of a package."""
    return Path(library.sources[0]).resolve().is_relative_to(package.resolve())


def build_wheel(package: Path, libraries: Sequence[Library]) -> Path:
    """Builds a wheel in the folder ``dist`` of a package.

    Args:
        package: the folder of its pyproject.toml; the build backend that this names is installed.
        libraries: those that the wheel is to have compiled.

    Returns:
        The path of the wheel.

    Raises:
        BuildError: a tool is missing or fails, or the wheel has no sources of a library.
    """
    if missing := [name for name in _TOOLS if importlib.util.find_spec(name) is None]:
        raise BuildError(f"a wheel needs {', '.join(missing)}; pip install 'hoconv[wheel]'")
    with TemporaryDirectory() as temporary:
        made, tree = Path(temporary, "made"), Path(temporary, "tree")
        # setuptools would keep its folder `build`, and put files into the wheel that were removed.
        apart = Path(temporary, "build.cfg")
        apart.write_text(f"[build]\nbuild_base = {temporary}/build\n")
        # Without isolation: what the backend needs is installed, and nothing is downloaded. Of a
        # path without a slash pip makes the name of a package on the index.
        _run("pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", str(made),
             str(package.absolute()), DIST_EXTRA_CONFIG=str(apart))  # fmt: skip
        (plain,) = made.iterdir()
        _run("wheel", "unpack", str(plain), "-d", str(tree))
        plain.unlink()
        (root,) = tree.iterdir()
        for library in libraries:
            library.place(_find_folder(library, root))
        _run("wheel", "pack", str(root), "-d", str(made))
        (packed,) = made.iterdir()
        _run("wheel", "tags", "--remove", "--platform-tag", _PLATFORM, str(packed))
        (tagged,) = made.iterdir()
        repaired = Path(temporary, "repaired")
        _run("auditwheel", "repair", "--patcher", "none", "--strip", "--exclude", "libtorch*",
             "-w", str(repaired), str(tagged))  # fmt: skip
        (done,) = repaired.iterdir()
        (package / "dist").mkdir(exist_ok=True)
        return Path(shutil.move(done, package / "dist" / done.name))


def _find_folder(library: Library, root: Path) -> Path:
    """Returns the folder of a library's first source in an unpacked wheel."""
    source = Path(library.sources[0])
    for parent in reversed(source.parents):
        if (found := root / source.relative_to(parent)).is_file():
            return found.parent
    raise BuildError(
        f"{library.name}: the wheel has no {source.name}; add the sources to the package's data"
    )


def _run(module: str, *arguments: str, **environment: str) -> None:
    """Runs a module's command.

    Raises:
        BuildError: it fails; with what it says.
    """
    command = [sys.executable, "-m", module, *arguments]
    merged = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=merged)
    if done.returncode:
        raise BuildError(f"{module} {arguments[0]} failed:\n{(done.stderr or done.stdout).strip()}")
