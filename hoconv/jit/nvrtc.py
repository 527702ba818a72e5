"""Calls NVRTC, NVIDIA's CUDA compiler as a library, which PyTorch's CUDA builds install and load.

It needs neither a toolkit nor a GPU. Its C interface is called directly, since NVIDIA's Python
interface takes longer to import than a cell takes to compile.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence

import torch

from hoconv import jit


def compile(text: str, flags: Sequence[str]) -> bytes:
    """Compiles a CUDA source to machine code, a cubin.

    Raises:
        hoconv.jit.BuildError: there is no NVRTC, or it failed; with its log.
    """
    nvrtc = _library()
    program = ctypes.c_void_p()

    def check(status: int, details: Callable[[], str] = str) -> None:
        if status:
            reason = nvrtc.nvrtcGetErrorString(status).decode()
            raise jit.BuildError(f"NVRTC failed: {reason}{details()}")

    def read(what: str) -> bytes:
        size = ctypes.c_size_t()
        check(nvrtc[f"nvrtcGet{what}Size"](program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        check(nvrtc[f"nvrtcGet{what}"](program, buffer))
        return buffer.raw

    def read_log() -> str:
        return "\n" + read("ProgramLog").decode().strip("\0\n")

    source = (text.encode(), b"generated.cu", 0, None, None)
    options = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
    check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), *source))
    try:
        check(nvrtc.nvrtcCompileProgram(program, len(flags), options), read_log)
        return read("CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def version() -> str:
    """Returns NVRTC's version, such as ``"13.0"``.

    Raises:
        hoconv.jit.BuildError: there is no NVRTC.
    """
    major, minor = ctypes.c_int(), ctypes.c_int()
    _library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def obstacle() -> str | None:
    """Returns why NVRTC cannot compile on this machine, with the fix, or None.

    It compiles nothing.
    """
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
