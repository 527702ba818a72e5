"""The shared libraries that an exported program needs where there is no Python."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from hoconv.dispatch.registration import find_code
from hoconv.jit import Library
from hoconv.jit.generated import compile_cpp


def compile_operators(program: torch.export.ExportedProgram) -> list[Path]:
    """Compiles what a program calls on a CPU beside PyTorch's own operators.

    A process that loads all of these libraries, in any order, has those operators without Python:
    one library has their schemas, which Python defines otherwise, the others have the kernels.

    Returns:
        The paths of the libraries, in hoconv's cache or a wheel; none where PyTorch's operators
        are all that the program calls.

    Raises:
        TypeError: `program` is none.
        ValueError: an operator is neither PyTorch's nor of compiled code.
        hoconv.jit.BuildError: there is no compiler, or it failed.
    """
    if not isinstance(program, torch.export.ExportedProgram):
        raise TypeError(f"program: expected one of torch.export, got {type(program).__name__}")
    ops = _find_operators(program)
    libraries = dict.fromkeys(map(_require_code, ops))
    paths = [library.compile() for library in libraries]
    return [compile_cpp("schemas", _define_schemas(ops)), *paths] if ops else []


def _find_operators(program: torch.export.ExportedProgram) -> list[torch._ops.OpOverload]:
    """Returns the operators that are not PyTorch's, each once, those of loops and branches too."""
    found = {
        node.target: None
        for module in program.graph_module.modules()
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
    }
    return [op for op in found if op.namespace != "aten"]


def _require_code(op: torch._ops.OpOverload) -> Library:
    if code := find_code(op):
        return code
    raise ValueError(
        f"the program calls {op.name()}, which has no compiled code that runs without Python; use "
        "an implementation that has, or the reference"
    )


def _define_schemas(ops: list[torch._ops.OpOverload]) -> str:
    """Returns a C++ source that defines operators."""
    lines = ["#include <torch/csrc/stable/library.h>"]
    for op in ops:
        quoted = json.dumps(str(op._schema))  # as C++ quotes it, too
        lines.append(f"STABLE_TORCH_LIBRARY_FRAGMENT({op.namespace}, m) {{ m.def({quoted}); }}")
    return "\n".join([*lines, ""])
