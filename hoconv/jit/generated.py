"""Compiles generated C++ and CUDA into the cache, keyed by text, headers, flags and compiler."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import torch

from hoconv import jit
from hoconv.jit import cache, nvrtc

# They let the compiler vectorise loops over inlined functions; infinities and NaN stay exact.
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
    command = jit.compiler("cpu")
    flags = [*jit._flags("cpu", ()), *_FLAGS]
    includes = ["-I", str(jit.CSRC), "-isystem", f"{Path(torch.__file__).parent}/include"]
    libraries = [f"-L{Path(torch.__file__).parent}/lib", *jit._libraries("cpu")]

    def make(folder: Path) -> Path:
        source, shared = folder / "source.cpp", folder / "library.so"
        source.write_text(text)
        files = ["-shared", str(source), *libraries, "-o", str(shared)]
        jit._run([command, *flags, *includes, *files])
        return shared

    key = _digest(name, "*.h", text, flags)
    return cache.keep(f"{name}-{key}-{jit._identity(command)}.so", make)


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
    # Division in float32 to two units in the last place: the exact one branches.
    flags = [f"--gpu-architecture={architecture}", "--std=c++17", "--prec-div=false"]
    include = f"--include-path={jit.CSRC}"

    def make(folder: Path) -> Path:
        cubin = folder / "kernels.cubin"
        cubin.write_bytes(nvrtc.compile(text, [*flags, include]))
        return cubin

    key = _digest(name, "*.[ch]*", text, flags)
    return cache.keep(f"{name}-{key}-nvrtc{nvrtc.version()}.cubin", make)


def _digest(name: str, headers: str, text: str, flags: list[str]) -> str:
    digest = hashlib.sha256(repr(flags).encode() + text.encode())
    digest.update(_read_headers(name, headers))
    return digest.hexdigest()[:16]


@functools.cache
def _read_headers(name: str, headers: str) -> bytes:
    """Returns the text of a folder's headers, one after another."""
    return b"".join(path.read_bytes() for path in sorted((jit.CSRC / name).glob(headers)))
