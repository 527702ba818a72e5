"""Compiles CUDA kernels as C++, for a GPU that gpu.h emulates, and runs their tests."""

from __future__ import annotations

import hashlib
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from hoconv import jit
from hoconv.jit import cache, compilers, headers

_ROOT = Path(__file__).parents[4]
_INSTRUCTIONS = "high_order/tensor_cores.cuh"  # which gpu.h has
_INCLUDE = re.compile(r'^#include "(.*)"\n', re.MULTILINE)
_LAUNCH = re.compile(r"^( *)(\S.*?)<<<", re.MULTILINE)


def run(module: str, argument: Path | str) -> None:
    """Runs a module that tests kernels, and fails where it ends with an error.

    It has a process of its own: what it registers for tensors of a CPU stays.

    Args:
        argument: of the module: a library of emulated kernels, or "cuda" for those of a GPU.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(_ROOT), *sys.path)),
        "MALLOC_PERTURB_": "85",  # what is freed is no number that a kernel may read
    }
    done = subprocess.run(
        [sys.executable, "-m", module, str(argument)], env=environment, cwd=_ROOT,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def report(differences: Iterable[str]) -> int:
    """Loads the library that :func:`run` names, prints the differences, and returns the exit code:
    1 where there is any."""
    if sys.argv[1] != "cuda":
        torch.ops.load_library(sys.argv[1])
    torch.manual_seed(0)
    random.seed(0)
    failed = False
    for difference in differences:
        print(difference, flush=True)
        failed = True
    return int(failed)


def compile_kernels(folder: str, *names: str) -> Path:
    """Returns a library that registers each op's overload ``cuda`` for tensors of a CPU.

    Args:
        folder, names: those of the sources in csrc, without ``.cu``.
    """
    sources = [f"{folder}/{name}.cu" for name in names]
    command, flags = compilers.compiler("cpu"), compilers.flags("cpu", ())
    # Compiled once, run for a second.
    flags = [*(flag for flag in flags if not flag.startswith("-O")), "-O1", "-w"]
    texts = [_as_cpp("".join(_flatten(source, set()))) for source in sources]
    includes = compilers.include_flags((jit.CSRC, headers.PUBLIC))

    def make(folder: Path) -> Path:
        def compile_one(number: int) -> str:
            path = folder / f"{number}.cpp"
            path.write_text(texts[number])
            compilers.run([command, *flags, *includes, "-c", str(path), "-o", f"{path}.o"])
            return f"{path}.o"

        with ThreadPoolExecutor(2) as pool:
            objects = list(pool.map(compile_one, range(len(texts))))
        shared = folder / "library.so"
        files = ["-shared", *objects, *compilers.link_flags("cpu"), "-o", str(shared)]
        compilers.run([command, *files])
        return shared

    key = hashlib.sha256("\n".join((*texts, *flags)).encode()).hexdigest()[:16]
    return cache.keep(f"emulated-{key}-{compilers.identity(command)}.so", make)


def _flatten(file: str, seen: set[str]) -> Iterator[str]:
    """Yields a source with the project's headers in the place of their includes."""
    if file in seen or file == _INSTRUCTIONS:
        return
    seen.add(file)
    folder = next(f for f in (jit.CSRC, headers.PUBLIC) if (f / file).exists())
    text = (folder / file).read_text().replace("#pragma once", "")
    at = 0
    for found in _INCLUDE.finditer(text):
        yield text[at : found.start()]
        yield from _flatten(found[1], seen)
        at = found.end()
    yield text[at:]


def _as_cpp(text: str) -> str:
    header = (Path(__file__).parent / "gpu.h").read_text().replace("#pragma once", "")
    text = re.sub(
        r"#include <cuda_\w+\.h>\n|#include <torch/csrc/stable/accelerator\.h>\n", "", text
    )
    text = _without(text, "class Launch {", "\n};\n")
    text = _without(text, "inline int device_attribute(", "\n}\n")
    if "copy_async" in text:
        text = _without(text, "template <int Bytes>\n__device__ __forceinline__ void copy_async(",
                        "\n}\n")  # fmt: skip
        text = text.replace("copy_async<", "gpu::copy_async<")
        text = re.sub(
            r'asm volatile\("cp\.async\.wait_all;".*?\);', "gpu::wait_for_copies();", text
        )
    text = text.replace("extern __shared__ uint4 shared[];",
                        "uint4* const shared = gpu::shared_memory();")  # fmt: skip
    text = text.replace(
        "extern __shared__ uint16_t products[];",
        "uint16_t* const products = reinterpret_cast<uint16_t*>(gpu::shared_memory());",
    )
    text = text.replace("(hoconv, CUDA, m)", "(hoconv, CPU, m)")
    assert "asm volatile" not in text, "gpu.h emulates no other instruction"
    return header + _launched(text)


def _without(text: str, head: str, end: str) -> str:
    start = text.index(head)
    return text[:start] + text[text.index(end, start) + len(end) :]


def _launched(text: str) -> str:
    """Replaces ``kernel<<<grid, threads, bytes, stream>>>(arguments)`` by calls of gpu::launch."""
    while found := _LAUNCH.search(text):
        configured = text.index(">>>", found.end())
        grid, threads, rest = _split(text[found.end() : configured])[:3]
        begin = text.index("(", configured)
        end = begin + _closing(text[begin:])
        call = f"{found[2]}{text[begin:end]}"
        launch = f"{found[1]}gpu::launch({grid}, {threads}, {rest}, [&] {{ {call}; }})"
        text = text[: found.start()] + launch + text[end:]
    return text


def _split(arguments: str) -> list[str]:
    parts, depth = [""], 0
    for character in arguments:
        depth += (character in "(<{") - (character in ")>}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _closing(text: str) -> int:
    """Returns where the parenthesis that a text begins with is closed, and one more."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return i + 1
    raise AssertionError("a parenthesis is not closed")
