"""Compiles generated C++ and CUDA into the cache, keyed by text, headers, flags and compiler."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from hoconv.jit import cache, compilers, headers, nvrtc

_FOLDERS = (headers.CSRC, headers.PUBLIC)
# Division in float32 to two units in the last place, square roots to one: exact ones branch.
_QUICK_FLOATS = ("--prec-div=false", "--prec-sqrt=false")


def compile_cpp(name: str, text: str, options: Sequence[str] = ()) -> Path:
    """Compiles a C++ source unless the cache has it.

    Args:
        name: what files of the cache begin with.
        text: the source, which can include headers of csrc/.
        options: of the compiler, beside those of all loops.

    Returns:
        The path of the shared library.

    Raises:
        BuildError: no compiler was found, or it failed.
    """
    command = compilers.compiler("cpu")
    machine = compilers.machine("cpu")
    flags = [*compilers.flags("cpu", machine), *compilers.LOOP_FLAGS, *options]

    def make(folder: Path) -> Path:
        source, shared = folder / "source.cpp", folder / "library.so"
        source.write_text(text)
        includes = compilers.include_flags(_FOLDERS)
        files = ["-shared", str(source), *compilers.link_flags("cpu"), "-o", str(shared)]
        compilers.run([command, *flags, *includes, *files])
        return shared

    key = _digest(text, flags)
    return cache.keep(f"{name}-{key}-{compilers.identity(command)}.so", make)


def compile_cuda(
    name: str, text: str, architecture: str, options: Sequence[str] = _QUICK_FLOATS
) -> Path:
    """Compiles a CUDA source unless the cache has it.

    Args:
        name: what files of the cache begin with.
        text: the source, which can include headers of csrc/ and no others.
        architecture: of the GPU, such as ``"sm_90"``.
        options: of NVRTC, beside those of the architecture, the language and the headers.

    Returns:
        The path of the machine code, a cubin.

    Raises:
        BuildError: there is no NVRTC, or it failed.
    """
    flags = [f"--gpu-architecture={architecture}", "--std=c++17", *options]
    includes = [f"--include-path={folder}" for folder in _FOLDERS]

    def make(folder: Path) -> Path:
        cubin = folder / "kernels.cubin"
        cubin.write_bytes(nvrtc.compile(text, [*flags, *includes]))
        return cubin

    key = _digest(text, flags)
    return cache.keep(f"{name}-{key}-nvrtc{nvrtc.version()}.cubin", make)


def _digest(text: str, flags: list[str]) -> str:
    contents = headers.digest(text.encode(), None, _FOLDERS)
    return hashlib.sha256(repr((flags, contents)).encode()).hexdigest()[:16]
