"""Writes a kernel repository for Hugging Face's hub: ``hoconv publish OPERATOR DIR``.

``kernel-builder`` compiles such a repository for all versions of CUDA, and the package ``kernels``
loads what it made. The repository has the operator's compiled code and its ops. Each build has a
namespace of ops of its own, so that several versions can be loaded into one process.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import textwrap
from collections.abc import Sequence
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from hoconv.dispatch.declaration import Operator, operators
from hoconv.dispatch.registration import find_ops
from hoconv.jit import CSRC, BuildError, Library, headers, prebuilt

_ABI = "2.11"  # the oldest PyTorch whose stable ABI the code uses
_BY_HAND = (
    "The Python package in torch-ext/ hands the ops on as they are. Add checks of arguments, and "
    "by torch.library, under add_op_namespace_prefix(NAME), gradients and fakes for torch.compile. "
    "hoconv's layers are no part of it: they import hoconv, which a kernel must not.",
    "In build.toml, check the licence and add [general.hub] with repo-id. CPU kernels are compiled "
    "for every CPU: add cxx-flags where they are to use AVX2.",
    "Commit it all to git, run kernel-builder, and test what it built on a GPU.",
)
_FLAKE = """{
  inputs.kernel-builder.url = "github:huggingface/kernels";
  outputs = { self, kernel-builder }:
    kernel-builder.lib.genKernelFlakeOutputs { inherit self; path = ./.; };
}
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="hoconv publish", description=__doc__)
    parser.add_argument("operator", metavar="OPERATOR", help="with compiled code: high_order_layer")
    parser.add_argument("folder", metavar="DIR", type=Path, help="where to write it")
    arguments = parser.parse_args(argv)
    found = {operator.name: operator for operator in operators() if _find_libraries(operator)}
    if arguments.operator not in found:
        parser.error(f"OPERATOR: expected one of {', '.join(found)}; got {arguments.operator!r}")
    try:
        write_repository(found[arguments.operator], arguments.folder)
    except (ValueError, FileExistsError, BuildError) as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"DIR: {arguments.folder} cannot be written ({error.strerror})")
    print(f"{arguments.folder} has the kernels and the ops of {arguments.operator}. By hand:")
    for step in _BY_HAND:
        print(textwrap.fill(step, 98, initial_indent="- ", subsequent_indent="  "))
    return 0


def write_repository(operator: Operator, folder: Path) -> None:
    """Writes a kernel repository: build.toml of edition 5, flake.nix, the sources with the headers
    that they include in ``csrc/``, and in ``torch-ext/`` the schemas and a Python package.

    Raises:
        ValueError: its libraries have options, which build.toml takes in other forms.
        FileExistsError: `folder` has files already.
        hoconv.jit.BuildError: a macro names a header.
        OSError: a source cannot be read, or the folder not be written.
    """
    libraries = _find_libraries(operator)
    for library in libraries:
        if library.flags:
            raise ValueError(
                f"OPERATOR: the library {library.name} has flags {[*library.flags]}; expected none"
            )
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"DIR: {folder} has files already; give another folder")
    package = folder / "torch-ext" / operator.name
    package.mkdir(parents=True)
    spaces = {op.namespace for op in chain(*libraries.values())}
    places = {library: _copy(library, folder, spaces) for library in libraries}
    (folder / "build.toml").write_text(_configure(operator, places))
    (folder / "flake.nix").write_text(_FLAKE)
    (package.parent / "torch_binding.cpp").write_text(_bind(libraries))
    (package / "__init__.py").write_text(_hand_on(operator, libraries))


def _find_libraries(operator: Operator) -> dict[Library, list[torch._ops.OpOverload]]:
    """Returns the libraries that have ops of an operator, and these."""
    given = [lib for each in operator.implementations.values() for lib in each.libraries]
    return {lib: ops for lib in dict.fromkeys(given) if (ops := find_ops(lib))}


def _copy(library: Library, folder: Path, spaces: set[str]) -> dict[str, list[str]]:
    """Copies sources and headers, such that they find each other; returns paths in the repository:
    of the files, and of the folders in which to look for headers."""
    include = [*map(Path, library.include), headers.PUBLIC]
    sources = [Path(os.path.normpath(source)) for source in library.sources]
    files = dict.fromkeys([*sources, *(h for s in sources for h in headers.find(s, include))])
    own = [str(path.parent) for path in files if not path.is_relative_to(CSRC)]
    root = Path(os.path.commonpath(own)) if own else CSRC

    def place(path: Path) -> str | None:
        base = next((each for each in (CSRC, root) if path.is_relative_to(each)), None)
        return None if base is None else str("csrc" / path.relative_to(base))

    renamed = re.compile(rf"\b(STABLE_TORCH_LIBRARY\w*\()\s*({'|'.join(map(re.escape, spaces))}),")
    for path in files:
        made = folder / str(place(path))
        made.parent.mkdir(parents=True, exist_ok=True)
        made.write_text(renamed.sub(r"\1TORCH_EXTENSION_NAME,", path.read_text()))
    return {
        "src": [str(place(path)) for path in files],
        "include": [each for path in include if (each := place(path))],
    }


def _configure(operator: Operator, places: dict[Library, dict[str, list[str]]]) -> str:
    """Returns build.toml."""
    tables: list[tuple[str, dict[str, Any]]] = [
        ("general", {
            "name": operator.name.replace("_", "-"), "version": 1, "edition": 5,
            "license": _find_licence(operator),
            "backends": sorted({library.device for library in places}),
        }),
        ("torch", {"src": ["torch-ext/torch_binding.cpp"], "stable-abi": _ABI}),
    ]  # fmt: skip
    for library, paths in places.items():
        table = {"backend": library.device, "depends": ["torch"], **paths}
        if library.device == "cuda":
            (targets,) = prebuilt.targets("cuda")
            # With the instructions that only Hopper has.
            table["cuda-capabilities"] = ["9.0a" if each == "9.0" else each for each in targets]
            table["cuda-flags"] = ["--expt-relaxed-constexpr"]
        tables.append((f"kernel.{library.name}_{library.device}", table))
    return "\n".join(
        f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
        for name, table in tables
    )


def _find_licence(operator: Operator) -> str:
    """Returns the SPDX expression of the package that declares an operator."""
    try:
        described = metadata.metadata(operator.function.__module__.partition(".")[0])
    except metadata.PackageNotFoundError:
        return "unknown"
    return str(described.json.get("license_expression", "unknown"))


def _bind(libraries: dict[Library, list[torch._ops.OpOverload]]) -> str:
    """Returns a C++ source that defines the ops of the device for which it is compiled."""
    lines = ["#include <torch/csrc/stable/library.h>", "", '#include "registration.h"', ""]
    lines.append("STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, m) {")
    for device in sorted({library.device for library in libraries}):
        lines.append(f"#ifdef {device.upper()}_KERNEL")
        for op in chain(*(ops for lib, ops in libraries.items() if lib.device == device)):
            lines.append(f"  m.def({json.dumps(str(op._schema).partition('::')[2])});")
        lines.append("#endif")
    return "\n".join([*lines, "}", "", "REGISTER_EXTENSION(TORCH_EXTENSION_NAME)", ""])


def _hand_on(operator: Operator, libraries: dict[Library, list[torch._ops.OpOverload]]) -> str:
    """Returns the Python module of a package; of each op a build has one overload."""
    names = {op.name().partition("::")[2].partition(".")[0] for op in chain(*libraries.values())}
    lines = [f'"""The compiled ops of {operator.name}."""', "", "from ._ops import ops", ""]
    lines += [f"{name} = ops.{name}" for name in sorted(names)]
    return "\n".join([*lines, "", f"__all__ = {json.dumps(sorted(names))}", ""])
