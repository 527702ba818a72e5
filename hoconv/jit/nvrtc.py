"""NVRTC, NVIDIA's compiler that is a library: the one that PyTorch's CUDA builds bring and load.

It needs no toolkit and no GPU. Its C interface is called directly: NVIDIA's Python one takes longer
to import than a cell takes to compile.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence

import torch

from hoconv import jit


def compile(text: str, flags: Sequence[str]) -> bytes:
    """Machine code of a CUDA source, a cubin.

    Raises:
        hoconv.jit.BuildError: there is no NVRTC, or it failed; with what it says of the source.
    """
    nvrtc = _library()
    program = ctypes.c_void_p()

    def checked(status: int, shown: Callable[[], str] = str) -> None:
        if status:
            reason = nvrtc.nvrtcGetErrorString(status).decode()
            raise jit.BuildError(f"NVRTC failed: {reason}{shown()}")

    def found(what: str) -> bytes:
        size = ctypes.c_size_t()
        checked(nvrtc[f"nvrtcGet{what}Size"](program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        checked(nvrtc[f"nvrtcGet{what}"](program, buffer))
        return buffer.raw

    def log() -> str:
        return "\n" + found("ProgramLog").decode().strip("\0\n")

    source = (text.encode(), b"generated.cu", 0, None, None)
    options = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
    checked(nvrtc.nvrtcCreateProgram(ctypes.byref(program), *source))
    try:
        checked(nvrtc.nvrtcCompileProgram(program, len(flags), options), log)
        return found("CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def version() -> str:
    """Its version, such as ``"13.0"``.

    Raises:
        hoconv.jit.BuildError: there is no NVRTC.
    """
    major, minor = ctypes.c_int(), ctypes.c_int()
    _library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def obstacle() -> str | None:
    """Why it cannot compile here, with the fix. Compiles nothing."""
    try:
        _library()
    except jit.BuildError as error:
        return str(error)
    return None


@functools.cache
def _library() -> ctypes.CDLL:
    if torch.version.cuda is None:
        raise jit.BuildError(jit.no_gpu())
    name = f"libnvrtc.so.{torch.version.cuda.split('.')[0]}"
    try:
        nvrtc = ctypes.CDLL(name)
    except OSError as error:
        raise jit.BuildError(
            f"NVRTC was not found ({error}); pip install nvidia-cuda-nvrtc"
        ) from error
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
    return nvrtc
