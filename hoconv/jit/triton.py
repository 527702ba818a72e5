"""The requirements of kernels in Triton, which compiles them on their first call.

Triton itself is imported on use only: that takes a second.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

import torch

from hoconv.jit.compilers import no_gpu


def obstacle() -> str | None:
    """Returns what is missing to compile and run kernels in Triton, with the fix, or None.

    It imports and compiles nothing.
    """
    if not torch.cuda.is_available():
        return no_gpu()
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; pip install triton"
    # Triton compiles its own access to the driver.
    if command := os.environ.get("CC"):
        if shutil.which(command) is None:
            return f"the C compiler CC={command} was not found; set CC to one for Triton"
    elif not (shutil.which("gcc") or shutil.which("clang")):
        return "Triton found no C compiler; install gcc, or set CC"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        return f"Triton needs {header}; install the headers of Python (python3-dev)"
    return None


def load() -> None:
    """Loads Triton and its access to the GPU; raises where that fails."""
    from triton.runtime import driver

    driver.active.get_current_target()
