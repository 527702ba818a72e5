"""Compiles ``csrc/`` into a cache on first use, or ahead of time with ``python -m hoconv.jit``.

Two libraries: ``cpu`` (the ``.cpp`` files in every ``cpu/`` and ``aten/`` of ``csrc/``) and
``cuda`` (the ``.cu`` files in every ``cuda/``), so that the first loads with a torch without CUDA.
Both use the LibTorch stable ABI only: a library compiled with one version of torch loads with every
version from 2.11 on, and with every version of Python. So neither version is part of the cache key.
Sources, flags (with the instruction set or GPU architecture) and compiler are.

The compilers are called directly, not through ``torch.utils.cpp_extension.load``: that needs ninja,
and a build killed half-way leaves a lock behind on which every later start waits for ever.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from hoconv.jit import cache
from hoconv.jit.cache import BuildError as BuildError

CSRC = Path(__file__).parents[1] / "csrc"
LIBRARIES = {"cpu": ("**/cpu/*.cpp", "**/aten/*.cpp"), "cuda": ("**/cuda/**/*.cu",)}
_ERROR = re.compile(r"error|undefined reference|no space left", re.IGNORECASE)
_SHOWN_ERRORS = 5  # of a compiler that fails
_EXPECTED_TIME = {"cpu": "about 20 s", "cuda": "one to three minutes"}

_COMMON = ["-O3", "-std=c++17", "-DTORCH_TARGET_VERSION=0x020b000000000000"]  # torch 2.11
_INSTRUCTION_SETS = {
    "AVX512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"],
    "AVX2": ["-mavx2", "-mfma", "-mf16c"],
}  # fmt: skip


_loading = threading.Lock()


def load(library: str) -> str | None:
    """Loads a library, compiled first if the cache has none. Once per process, from any thread.

    Args:
        library: ``"cpu"``, or ``"cuda"`` for the GPUs that PyTorch sees.

    Returns:
        None, or why its operators cannot be used, with the fix. Where :func:`obstacle` finds
        nothing, the library is broken.
    """
    with _loading:
        return _load_once(library)


@functools.cache
def _load_once(library: str) -> str | None:
    try:
        if library == "cuda" and not torch.cuda.is_available():
            raise BuildError(no_gpu())
        torch.ops.load_library(str(compile(library, visible_gpus() if library == "cuda" else ())))
    except (BuildError, OSError) as error:
        return f"{error} ({error.__cause__})" if error.__cause__ else str(error)
    return None


@functools.cache
def functions(library: str) -> ctypes.CDLL:
    """Returns the functions of a library that are not operators, by their C names.

    Raises:
        BuildError: the library cannot be used.
    """
    if reason := load(library):
        raise BuildError(reason)
    return ctypes.CDLL(str(compile(library, visible_gpus() if library == "cuda" else ())))


def obstacle(library: str) -> str | None:
    """Returns what is missing to compile or run a library, with the fix, or None.

    It compiles nothing.
    """
    if library == "cuda" and not torch.cuda.is_available():
        return no_gpu()
    try:
        compiler(library)
    except BuildError as error:
        try:
            return None if find(library) else str(error)
        except BuildError as unsafe:
            return f"{error}; {unsafe}"
    return None


def no_gpu() -> str:
    """Says why PyTorch has no GPU to run on, with the fix."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA; install a CUDA build"
    return "PyTorch sees no CUDA device; check nvidia-smi and the driver"


def compile(library: str, architectures: Sequence[str] = ()) -> Path:
    """Compiles a library into the cache unless it is there already.

    Args:
        library: ``"cpu"`` or ``"cuda"``.
        architectures: CUDA compute capabilities to generate code for, such as ``"9.0"``.

    Returns:
        The path of the shared library.

    Raises:
        BuildError: no compiler was found, or it failed.
    """
    try:
        command = compiler(library)
    except BuildError:
        if found := find(library, architectures):
            return found
        raise
    flags = _flags(library, architectures)
    name = _name(library, architectures, _identity(command))
    return cache.keep(name, lambda folder: _compile(library, command, flags, folder))


def find(library: str, architectures: Sequence[str] | None = None) -> Path | None:
    """Finds a library in the cache, made by this machine's compiler; without one, by any compiler.

    Args:
        architectures: as for :func:`compile`; by default those of the GPUs that PyTorch sees.

    Returns:
        The path of the shared library, or None.

    Raises:
        BuildError: the cache may not be trusted.
    """
    try:
        identity = _identity(compiler(library))
    except BuildError:
        identity = "*"
    if architectures is None:
        architectures = visible_gpus() if library == "cuda" else ()
    return cache.find(_name(library, architectures, identity))


@functools.cache
def compiler(library: str) -> str:
    """Returns the path of the compiler of a library: for ``"cuda"``, that of nvcc.

    Raises:
        BuildError: there is none; says where it was looked for.
    """
    if library == "cpu":
        wanted = os.environ.get("CXX")
        for name in [wanted] if wanted else ["c++", "g++", "clang++"]:
            if path := shutil.which(name):
                return path
        missing = f"the C++ compiler CXX={wanted}" if wanted else "a C++ compiler"
        raise BuildError(f"{missing} was not found; install g++ or clang++, or set CXX to one")
    compiler("cpu")  # nvcc needs it
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    if spec := importlib.util.find_spec("nvidia"):  # the toolkit as installed by pip
        homes += [
            str(p) for f in spec.submodule_search_locations or () for p in Path(f).glob("cu*")
        ]
    for home in filter(None, homes):
        if path := shutil.which("nvcc", path=f"{home}/bin"):
            return path
    if path := shutil.which("nvcc"):
        return path
    raise BuildError(
        "no CUDA compiler was found; install the CUDA toolkit "
        "(pip install 'nvidia-cuda-nvcc' is enough) or set CUDA_HOME to where it is"
    )


def _compile(library: str, command: str, flags: list[str], folder: Path) -> Path:
    sources = _sources(library)
    if not sources:
        raise BuildError(
            f"{CSRC} has no sources; where the checkout made a text file of a symbolic link, clone "
            "again with git clone -c core.symlinks=true"
        )
    shown = f"hoconv: compiling the {library} library, once ({_EXPECTED_TIME[library]})"
    print(shown, end=" ... ", file=sys.stderr, flush=True)
    start = time.monotonic()
    includes = ["-I", str(CSRC), "-isystem", f"{Path(torch.__file__).parent}/include"]
    objects = [f"{folder}/{i}.o" for i in range(len(sources))]
    commands = [
        [command, *flags, *includes, "-c", str(source), "-o", obj]
        for source, obj in zip(sources, objects, strict=True)
    ]
    shared = folder / "library.so"
    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        torch_libraries = f"-L{Path(torch.__file__).parent}/lib"
        libraries = [torch_libraries, *_libraries(library)]
        _run([command, "-shared", *objects, *libraries, "-o", str(shared)])
    except BuildError:
        print("failed", file=sys.stderr)
        raise
    print(f"{time.monotonic() - start:.0f} s", file=sys.stderr)
    return shared


def _run(command: list[str]) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"}
    )
    if not done.returncode:
        return
    lines = (done.stderr or done.stdout).strip().splitlines()
    errors = [line.strip() for line in lines if _ERROR.search(line)]
    first = (
        errors[:_SHOWN_ERRORS]
        or lines[:_SHOWN_ERRORS]
        or [f"no output, exit status {done.returncode}"]
    )
    if len(errors) > _SHOWN_ERRORS:
        first.append(f"... and {len(errors) - _SHOWN_ERRORS} more errors")
    said = "\n  ".join(first)
    raise BuildError(f"the compiler failed: {said}\n  command: {shlex.join(command)}")


def _flags(library: str, architectures: Sequence[str]) -> list[str]:
    if library == "cpu":
        # Honours ATEN_CPU_CAPABILITY, so that a test can compile for less than the machine has.
        capability = torch.backends.cpu.get_cpu_capability()
        return [*_COMMON, "-fPIC", "-Wall", *_INSTRUCTION_SETS.get(capability, [])]
    # 9.0a: with the instructions that only Hopper has.
    numbers = [arch.replace(".", "") + ("a" if arch == "9.0" else "") for arch in architectures]
    code = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in numbers]
    return [*_COMMON, "-DUSE_CUDA", "-Xcompiler=-fPIC,-Wall", "--expt-relaxed-constexpr",
            "-Wno-deprecated-gpu-targets", *code]  # fmt: skip


def _libraries(library: str) -> list[str]:
    # libstdc++ comes first and by its file name. Some systems would link a static one instead, and
    # torch's libraries export parts of an older one. Either would mix with the one that torch
    # loads, and an exception thrown from such a mixture crashes the process. nvcc links CUDA's
    # runtime statically, so that loading needs no particular version of it.
    cuda = ["-ltorch_cuda"] if library == "cuda" else []
    return ["-l:libstdc++.so.6", "-ltorch", "-ltorch_cpu", *cuda]


def _sources(library: str) -> list[Path]:
    return sorted({path for pattern in LIBRARIES[library] for path in CSRC.glob(pattern)})


def _name(library: str, architectures: Sequence[str], identity: str) -> str:
    flags = [*_flags(library, architectures), *_libraries(library)]
    digest = hashlib.sha256(repr(flags).encode())
    headers = [*CSRC.rglob("*.h"), *(CSRC.rglob("*.cuh") if library == "cuda" else [])]
    for path in sorted([*_sources(library), *headers]):
        digest.update(f"{path.relative_to(CSRC)}".encode() + path.read_bytes())
    return f"{library}-{digest.hexdigest()[:16]}-{identity}.so"


@functools.cache
def _identity(command: str) -> str:
    """Returns a digest of a compiler's path and version.

    Raises:
        BuildError: it cannot be run.
    """
    try:
        version = subprocess.run([command, "--version"], capture_output=True, check=False).stdout
    except OSError as error:
        raise BuildError(f"the compiler {command} cannot be run ({error.strerror})") from None
    return hashlib.sha256(command.encode() + version).hexdigest()[:8]


def visible_gpus() -> tuple[str, ...]:
    """Returns the compute capabilities of the GPUs that PyTorch sees, each once, ascending."""
    capabilities = {
        torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())
    }
    return tuple(f"{major}.{minor}" for major, minor in sorted(capabilities))
