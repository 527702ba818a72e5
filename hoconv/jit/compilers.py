"""The compilers of C++ and CUDA: where they are, their options, and what they say when they fail.

Code is compiled against the LibTorch stable ABI only: what was compiled with one version of torch
loads with every version from 2.11 on, and with every version of Python. So neither version is part
of a key. torch's headers of any other kind are an error.

The compilers are called directly, not through ``torch.utils.cpp_extension.load``: that needs ninja,
and a build killed half-way leaves a lock behind on which every later start waits for ever.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from hoconv.jit.cache import BuildError

CORES = len(os.sched_getaffinity(0))
_ERROR = re.compile(r"error|undefined reference|no space left", re.IGNORECASE)
_SHOWN_ERRORS = 5  # of a compiler that fails
_COMMON = ["-O3", "-std=c++17", "-DTORCH_TARGET_VERSION=0x020b000000000000"]  # torch 2.11
# They let the compiler vectorise loops over inlined functions; infinities and NaN stay exact.
LOOP_FLAGS = ["-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-Wno-unknown-pragmas"]
# The levels of x86-64 that PyTorch has code for, with those of their instructions that it looks
# for. Compilers before 2020 do not know the names.
LEVELS = {
    "x86-64-v2": ["-msse4.2", "-mpopcnt"],
    "x86-64-v3": ["-mavx2", "-mfma", "-mf16c"],
    "x86-64-v4": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"],
}
# What is compiled to see how fast this machine is now; a core of its own takes half a second.
PROBE = """
#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <vector>
int main() {
    std::map<std::string, std::vector<std::string>> words;
    words["a"].push_back("b");
    std::sort(words["a"].begin(), words["a"].end());
    return static_cast<int>(words.size());
}
"""
_running = threading.BoundedSemaphore(CORES)  # compilers of this process, of all its builds


class MissingCompilerError(BuildError):
    """There is no compiler: says where it was looked for, and what to do."""


def obstacle(device: str) -> str | None:
    """Returns what is missing to compile and run code for a device, with the fix, or None.

    It compiles nothing.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
    """
    if device == "cuda" and not torch.cuda.is_available():
        return no_gpu()
    try:
        compiler(device)
    except BuildError as error:
        return str(error)
    return None


def no_gpu() -> str:
    """Says why PyTorch has no GPU to run on, with the fix."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA; install a CUDA build"
    return "PyTorch sees no CUDA device; check nvidia-smi and the driver"


def visible_gpus() -> tuple[str, ...]:
    """Returns the compute capabilities of the GPUs that PyTorch sees, each once, ascending."""
    capabilities = {
        torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())
    }
    return tuple(f"{major}.{minor}" for major, minor in sorted(capabilities))


@functools.cache
def compiler(device: str) -> str:
    """Returns the path of the compiler of code for a device: for ``"cuda"``, that of nvcc.

    Raises:
        MissingCompilerError: there is none.
    """
    if device == "cpu":
        wanted = os.environ.get("CXX")
        for name in [wanted] if wanted else ["c++", "g++", "clang++"]:
            if path := shutil.which(name):
                return path
        missing = f"the C++ compiler CXX={wanted}" if wanted else "a C++ compiler"
        raise MissingCompilerError(
            f"{missing} was not found; install g++ or clang++, or set CXX to one"
        )
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
    raise MissingCompilerError(
        "no CUDA compiler was found; install the CUDA toolkit "
        "(pip install 'nvidia-cuda-nvcc' is enough) or set CUDA_HOME to where it is"
    )


@functools.cache
def probe_seconds() -> float | None:
    """Returns how long the C++ compiler takes for `PROBE`; None where it fails."""
    options = [*flags("cpu", machine("cpu")), "-x", "c++", "-S", "-", "-o", os.devnull]
    begin = time.monotonic()
    try:
        subprocess.run(
            [compiler("cpu"), *options], input=PROBE.encode(), capture_output=True, check=True
        )
    except (BuildError, OSError, subprocess.CalledProcessError):
        return None
    return time.monotonic() - begin


@functools.cache
def identity(command: str) -> str:
    """Returns a digest of a compiler's path and version.

    Raises:
        BuildError: it cannot be run.
    """
    try:
        version = subprocess.run([command, "--version"], capture_output=True, check=False).stdout
    except OSError as error:
        raise BuildError(f"the compiler {command} cannot be run ({error.strerror})") from None
    return hashlib.sha256(command.encode() + version).hexdigest()[:8]


def machine(device: str) -> tuple[str, ...]:
    """Returns the architectures that this machine's code for a device is compiled for."""
    if device == "cuda":
        return visible_gpus()
    if platform.machine() != "x86_64":
        return ()
    # Honours ATEN_CPU_CAPABILITY, so that a test can compile for less than the machine has.
    capability = torch.backends.cpu.get_cpu_capability()
    return ({"AVX512": "x86-64-v4", "AVX2": "x86-64-v3"}.get(capability, "x86-64-v2"),)


def release(command: str) -> str:
    """Returns the version of nvcc, such as ``"13.0"``.

    Raises:
        BuildError: it cannot be run, or does not say its version.
    """
    try:
        said = subprocess.run([command, "--version"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"the compiler {command} cannot be run ({error.strerror})") from None
    if found := re.search(r"release (\d+\.\d+)", said.stdout):
        return found[1]
    raise BuildError(f"the compiler {command} does not say its release")


def flags(device: str, architectures: Sequence[str]) -> list[str]:
    """Returns the options that compile code for a device.

    Args:
        architectures: CUDA compute capabilities to generate code for, such as ``"9.0"``, and with
            ``+PTX`` for later ones too; or a level of x86-64, such as ``"x86-64-v3"``.
    """
    if device == "cpu":
        return [*_COMMON, "-fPIC", "-Wall", *(o for level in architectures for o in LEVELS[level])]
    code = []
    for arch in architectures:
        number = arch.removesuffix("+PTX").replace(".", "")
        number += "a" * (number == "90")  # with the instructions that only Hopper has
        kinds = f"[sm_{number},compute_{number}]" if arch.endswith("+PTX") else f"sm_{number}"
        code.append(f"-gencode=arch=compute_{number},code={kinds}")
    if len(code) > 1:  # most of it is for GPUs of other machines
        code.append("--compress-mode=size")
    return [*_COMMON, "-DUSE_CUDA", "-Xcompiler=-fPIC,-Wall", "--expt-relaxed-constexpr",
            "-Wno-deprecated-gpu-targets", *code]  # fmt: skip


def include_flags(folders: Sequence[Path]) -> list[str]:
    """Returns the options that let a compiler find headers in these folders, and PyTorch's."""
    found = [option for folder in folders for option in ("-I", str(folder))]
    return [*found, "-isystem", f"{Path(torch.__file__).parent}/include"]


def link_flags(device: str) -> list[str]:
    """Returns the libraries that code for a device is linked with, after its objects."""
    # libstdc++ comes first and by its file name. Some systems would link a static one instead, and
    # torch's libraries export parts of an older one. Either would mix with the one that torch
    # loads, and an exception thrown from such a mixture crashes the process. nvcc links CUDA's
    # runtime statically, so that loading needs no particular version of it.
    cuda = ["-ltorch_cuda"] if device == "cuda" else []
    folder = f"-L{Path(torch.__file__).parent}/lib"
    return [folder, "-l:libstdc++.so.6", "-ltorch", "-ltorch_cpu", *cuda]


def run(command: list[str]) -> None:
    """Runs a compiler; waits while as many run as there are cores.

    Raises:
        BuildError: it fails; with its first errors.
    """
    environment = {**os.environ, "LC_ALL": "C"}
    with _running:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
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
