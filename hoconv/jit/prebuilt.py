"""Says what a wheel's libraries are compiled for, and which of them this machine can use.

A wheel has each library in a folder beside its first source, under the name that it would have in
the cache. So a library of other sources, headers or flags is not found. Nobody can change that
folder who cannot change the Python files around it: it needs no check that the cache needs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch

from hoconv.jit import compilers

FOLDER = "prebuilt"
# One library for all GPUs. The code for 8.0 runs on 8.x, that for 10.0 on 10.x, that for 12.0 on
# 12.x, that for 9.0 on 9.0 alone; the driver compiles PTX for all others that are newer than 8.0.
_GPUS = ("8.0+PTX", "9.0", "10.0", "12.0")


def targets(device: str) -> Sequence[tuple[str, ...]]:
    """Returns the architectures of each library that a wheel has for a device."""
    if device == "cuda":
        return (_GPUS,)
    here = compilers.machine("cpu")
    return [(level,) for level in compilers.LEVELS] if here else [here]


def target(device: str) -> tuple[str, ...]:
    """Returns the architectures of the library that is for this machine."""
    return _GPUS if device == "cuda" else compilers.machine("cpu")


def identity(device: str, command: str) -> str:
    """Returns what the name of a library ends with in a wheel, instead of a compiler's identity.

    Raises:
        hoconv.jit.BuildError: the compiler cannot be run.
    """
    return f"cuda{compilers.release(command).partition('.')[0]}" if device == "cuda" else "cpu"


def misfit(library: Path) -> str | None:
    """Says why this machine cannot use a library of a wheel for its GPUs; None if it can."""
    needed = re.search(r"-cuda(\d+)\.so$", library.name)
    if needed is None:
        return None
    # It has the runtime of its toolkit inside, which needs a driver of that major version.
    if int((torch.version.cuda or "0").partition(".")[0]) < int(needed[1]):
        return f"the wheel's library is for CUDA {needed[1]}, and torch is for {torch.version.cuda}"
    oldest = _GPUS[0].removesuffix("+PTX")
    for gpu in compilers.visible_gpus():
        if tuple(map(int, gpu.split("."))) < tuple(map(int, oldest.split("."))):
            return (
                f"the wheel's library is for GPUs of compute capability {oldest} and later, and "
                f"this machine has one of {gpu}"
            )
    return None
