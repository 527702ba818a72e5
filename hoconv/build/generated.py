"""Compiles generated C++ into the cache, keyed by its text, the headers, flags and compiler."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch

from hoconv import build

# Loops over calls of inlined functions become vector instructions; infinities and NaN stay exact.
_FLAGS = ["-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-Wno-unknown-pragmas"]


def compile_text(name: str, text: str) -> Path:
    """Compiles a C++ source unless the cache has it.

    Args:
        name: what the library's file name begins with.
        text: the source; it may include the headers of csrc/.

    Returns:
        The path of the shared library.

    Raises:
        BuildError: no compiler was found, or it failed.
    """
    command = build.compiler("cpu")
    flags = [*build._flags("cpu", ()), *_FLAGS]
    digest = hashlib.sha256(repr(flags).encode() + text.encode())
    for header in sorted((build.CSRC / name).glob("*.h")):
        digest.update(header.read_bytes())
    file = f"{name}-{digest.hexdigest()[:16]}-{build._identity(command)}.so"
    target = build.cache_folder() / file
    if target.exists():
        return target
    includes = ["-I", str(build.CSRC), "-isystem", f"{Path(torch.__file__).parent}/include"]
    libraries = [f"-L{Path(torch.__file__).parent}/lib", *build._libraries("cpu")]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with build._locked(target.with_suffix(".lock")):
            if not target.exists():
                with build._emptied(target.with_suffix(".build")) as folder:
                    source, shared = folder / "source.cpp", folder / target.name
                    source.write_text(text)
                    build._run(
                        [command, *flags, *includes, "-shared", str(source), *libraries, "-o",
                         str(shared)]
                    )  # fmt: skip
                    os.replace(shared, target)
    except OSError as error:
        raise build.BuildError(
            f"cannot write the build cache {target.parent} ({error.strerror}); "
            "set TORCH_EXTENSIONS_DIR to a folder that can be written"
        ) from error
    return target
