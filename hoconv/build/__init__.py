"""Compiles ``csrc/`` on first use, into a cache; ``python -m hoconv.build`` does it ahead.

Two libraries: ``cpu`` (every ``csrc/*/cpu/*.cpp`` and ``csrc/*/aten/*.cpp``) and ``cuda`` (every
``csrc/*/cuda/*.cu``), so that the first loads beside a torch without CUDA. Both use the LibTorch
stable ABI only: a library compiled beside one torch loads beside every torch from 2.11 on, whatever
the Python version, so neither is part of the cache key. Sources, flags (with them the instruction
set or GPU architecture) and compiler are.

The compilers are called directly, not through ``torch.utils.cpp_extension.load``: that needs ninja,
and a build killed half-way leaves a lock behind on which every later start waits for ever.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

CSRC = Path(__file__).parents[1] / "csrc"
LIBRARIES = {"cpu": ("*/cpu/*.cpp", "*/aten/*.cpp"), "cuda": ("*/cuda/*.cu",)}
_EXPECTED = {"cpu": "about 20 s", "cuda": "one to three minutes"}

_COMMON = ["-O3", "-std=c++17", "-DTORCH_TARGET_VERSION=0x020b000000000000"]  # torch 2.11
_INSTRUCTION_SETS = {
    "AVX512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"],
    "AVX2": ["-mavx2", "-mfma", "-mf16c"],
}  # fmt: skip


class BuildError(RuntimeError):
    """The library could not be compiled: says why, and what to do."""


@functools.cache
def load(library: str) -> str | None:
    """Loads a library, compiling it where the cache has none. Once a process.

    Args:
        library: ``"cpu"``, or ``"cuda"`` for the GPUs that PyTorch sees.

    Returns:
        None, or why its operators cannot be used, with the fix.
    """
    try:
        if library == "cuda" and not torch.cuda.is_available():
            raise BuildError(no_gpu())
        torch.ops.load_library(str(compile(library, visible_gpus() if library == "cuda" else ())))
    except (BuildError, OSError) as error:
        return f"{error} ({error.__cause__})" if error.__cause__ else str(error)
    return None


def obstacle(library: str) -> str | None:
    """Why a library could not be compiled or run here, with the fix. Compiles nothing."""
    if library == "cuda" and not torch.cuda.is_available():
        return no_gpu()
    gpus = visible_gpus() if library == "cuda" else ()
    try:
        if not _cached(library, gpus):
            compiler(library)
    except BuildError as error:
        return str(error)
    return None


def no_gpu() -> str:
    """Why PyTorch has no GPU to run on, with the fix."""
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
    if found := _cached(library, architectures):
        return found
    command = compiler(library)
    target = _path(library, architectures, _identity(command))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_suffix(".lock")):
            if not target.exists():  # another process may have compiled it while this one waited
                _compile(library, command, _flags(library, architectures), target)
    except OSError as error:
        raise BuildError(
            f"cannot write the build cache {target.parent} ({error.strerror}); "
            "set TORCH_EXTENSIONS_DIR to a folder that can be written"
        ) from error
    return target


@functools.cache
def compiler(library: str) -> str:
    """The path of the compiler of a library: of nvcc for ``"cuda"``.

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


def cache_folder() -> Path:
    """Where compiled libraries are kept: in ``TORCH_EXTENSIONS_DIR`` where that is set."""
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache") / "hoconv"


def _compile(library: str, command: str, flags: list[str], target: Path) -> None:
    shown = f"hoconv: compiling the {library} library, once ({_EXPECTED[library]})"
    print(shown, end=" ... ", file=sys.stderr, flush=True)
    start = time.monotonic()
    includes = ["-I", str(CSRC), "-isystem", f"{Path(torch.__file__).parent}/include"]
    with _emptied(target.with_suffix(".build")) as folder:
        sources = _sources(library)
        objects = [f"{folder}/{i}.o" for i in range(len(sources))]
        commands = [
            [command, *flags, *includes, "-c", str(source), "-o", obj]
            for source, obj in zip(sources, objects, strict=True)
        ]
        shared = f"{folder}/{target.name}"
        try:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(_run, commands))
            torch_libraries = f"-L{Path(torch.__file__).parent}/lib"
            libraries = [torch_libraries, *_libraries(library)]
            _run([command, "-shared", *objects, *libraries, "-o", shared])
        except BuildError:
            print("failed", file=sys.stderr)
            raise
        os.replace(shared, target)  # whole or not at all, also when killed
    print(f"{time.monotonic() - start:.0f} s", file=sys.stderr)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        first = next(
            (line for line in lines if "error" in line), lines[0] if lines else "no output"
        )
        raise BuildError(f"the compiler failed: {first.strip()}\n  command: {' '.join(command)}")


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
    # libstdc++ by its file name and first: a static one, which some systems prefer, or the pieces
    # of an older one that torch's libraries export, would mix with torch's own, and an exception
    # thrown from a mixture crashes. nvcc links CUDA's runtime statically by itself: no version of
    # it is asked for at load time.
    cuda = ["-ltorch_cuda"] if library == "cuda" else []
    return ["-l:libstdc++.so.6", "-ltorch", "-ltorch_cpu", *cuda]


def _sources(library: str) -> list[Path]:
    return sorted(path for pattern in LIBRARIES[library] for path in CSRC.glob(pattern))


def _cached(library: str, architectures: Sequence[str]) -> Path | None:
    """The library as the present compiler makes it; without a compiler, as any one made it."""
    try:
        path = _path(library, architectures, _identity(compiler(library)))
        return path if path.exists() else None
    except BuildError:
        pattern = _path(library, architectures, "*")
        return next(iter(sorted(pattern.parent.glob(pattern.name))), None)


def _path(library: str, architectures: Sequence[str], identity: str) -> Path:
    flags = [*_flags(library, architectures), *_libraries(library)]
    digest = hashlib.sha256(repr(flags).encode())
    headers = [*CSRC.rglob("*.h"), *(CSRC.rglob("*.cuh") if library == "cuda" else [])]
    for path in sorted([*_sources(library), *headers]):
        digest.update(f"{path.relative_to(CSRC)}".encode() + path.read_bytes())
    return cache_folder() / f"{library}-{digest.hexdigest()[:16]}-{identity}.so"


@functools.cache
def _identity(command: str) -> str:
    version = subprocess.run([command, "--version"], capture_output=True, check=False).stdout
    return hashlib.sha256(command.encode() + version).hexdigest()[:8]


def visible_gpus() -> tuple[str, ...]:
    """The compute capabilities of the GPUs that PyTorch sees, each once, ascending."""
    capabilities = {
        torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())
    }
    return tuple(f"{major}.{minor}" for major, minor in sorted(capabilities))


@contextmanager
def _emptied(folder: Path) -> Iterator[Path]:
    """A folder to work in, without what a build that was killed left there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time; the system frees the lock of a process that was killed."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
