"""Compiles generated C++ and CUDA into the cache, keyed by text, headers, flags and compiler.

CUDA is compiled by NVRTC, which comes with PyTorch's CUDA wheels, as does its Python interface: no
toolkit is needed, and no GPU.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hoconv import build

# Loops over calls of inlined functions become vector instructions; infinities and NaN stay exact.
_FLAGS = ["-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-Wno-unknown-pragmas"]


def compile_cpp(name: str, text: str) -> Path:
    """Compiles a C++ source unless the cache has it.

    Args:
        name: the folder of csrc/ whose headers it includes.
        text: the source.

    Returns:
        The path of the shared library.

    Raises:
        BuildError: no compiler was found, or it failed.
    """
    command = build.compiler("cpu")
    flags = [*build._flags("cpu", ()), *_FLAGS]
    includes = ["-I", str(build.CSRC), "-isystem", f"{Path(torch.__file__).parent}/include"]
    libraries = [f"-L{Path(torch.__file__).parent}/lib", *build._libraries("cpu")]

    def make(folder: Path) -> Path:
        source, shared = folder / "source.cpp", folder / "library.so"
        source.write_text(text)
        files = ["-shared", str(source), *libraries, "-o", str(shared)]
        build._run([command, *flags, *includes, *files])
        return shared

    key = _digest(name, "*.h", text, flags)
    return _kept(f"{name}-{key}-{build._identity(command)}.so", make)


def compile_cuda(name: str, text: str, architecture: str) -> Path:
    """Compiles a CUDA source unless the cache has it.

    Args:
        name: the folder of csrc/ whose headers it includes.
        text: the source; no other header can be found.
        architecture: of the GPU, such as ``"sm_90"``.

    Returns:
        The path of the machine code, a cubin.

    Raises:
        BuildError: there is no NVRTC, or it failed.
    """
    nvrtc, (major, minor) = _nvrtc()
    flags = [f"--gpu-architecture={architecture}", "--std=c++17"]
    flags.append(f"--include-path={build.CSRC}")

    def make(folder: Path) -> Path:
        def call(function: Callable[..., tuple[Any, ...]], *arguments: Any) -> tuple[Any, ...]:
            status, *values = function(*arguments)
            if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
                raise build.BuildError(f"NVRTC failed: {status.name}{_log(nvrtc, program)}")
            return tuple(values)

        program = None
        (program,) = call(nvrtc.nvrtcCreateProgram, text.encode(), b"generated.cu", 0, [], [])
        call(nvrtc.nvrtcCompileProgram, program, len(flags), [f.encode() for f in flags])
        (size,) = call(nvrtc.nvrtcGetCUBINSize, program)
        code = bytearray(size)
        call(nvrtc.nvrtcGetCUBIN, program, code)
        call(nvrtc.nvrtcDestroyProgram, program)
        (made := folder / "kernels.cubin").write_bytes(code)
        return made

    key = _digest(name, "*.[ch]*", text, flags[:-1])
    return _kept(f"{name}-{key}-nvrtc{major}.{minor}.cubin", make)


def nvrtc_obstacle() -> str | None:
    """Why CUDA could not be compiled at run time here, with the fix. Compiles nothing."""
    try:
        _nvrtc()
    except build.BuildError as error:
        return str(error)
    return None


@functools.cache
def _nvrtc() -> tuple[Any, tuple[int, int]]:
    """NVRTC's Python interface, and its version."""
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        _, major, minor = nvrtc.nvrtcVersion()
    except ImportError as error:
        raise build.BuildError(
            f"the package cuda-bindings, which comes with PyTorch's CUDA wheels, is missing "
            f"({error}); pip install cuda-bindings"
        ) from error
    except RuntimeError as error:  # its library is looked for at the first call
        raise build.BuildError(
            f"NVRTC was not found ({str(error).splitlines()[0]}); pip install nvidia-cuda-nvrtc"
        ) from error
    return nvrtc, (major, minor)


def _log(nvrtc: Any, program: Any) -> str:
    """What the compiler said of a source."""
    if program is None:
        return ""
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    text = bytearray(size)
    nvrtc.nvrtcGetProgramLog(program, text)
    return "\n" + text.decode().strip("\0\n")


def _digest(name: str, headers: str, text: str, flags: list[str]) -> str:
    digest = hashlib.sha256(repr(flags).encode() + text.encode())
    for header in sorted((build.CSRC / name).glob(headers)):
        digest.update(header.read_bytes())
    return digest.hexdigest()[:16]


def _kept(file: str, make: Callable[[Path], Path]) -> Path:
    """A file of the cache; where it is not there yet, `make` makes it in a folder to work in."""
    target = build.cache_folder() / file
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with build._locked(target.with_suffix(".lock")):
            if not target.exists():
                with build._emptied(target.with_suffix(".build")) as folder:
                    os.replace(make(folder), target)
    except OSError as error:
        raise build.BuildError(
            f"cannot write the build cache {target.parent} ({error.strerror}); "
            "set TORCH_EXTENSIONS_DIR to a folder that can be written"
        ) from error
    return target
