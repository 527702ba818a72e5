"""Runs a script or a module under AddressSanitizer and UndefinedBehaviorSanitizer::

    python scripts/sanitize.py -m hoconv.tools.check --small --device cpu --impl cpp

The CPU libraries and generated code are compiled by a wrapper of GCC that adds the sanitizers'
flags, into a cache of their own in outputs/. Every finding is printed with its stack, once for each
place. The exit code is 1 if there is a finding or the script fails.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from common import ROOT

from hoconv import jit

FOLDER = ROOT / "outputs" / "sanitized"  # the wrapper of the compiler, and its cache
# They follow the library's own flags and override them: stacks need frames, and -O3 takes too long.
_FLAGS = "-O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fsanitize-recover=all"
# Python and torch do not free all memory at exit, and libraries that they load share symbols.
_OPTIONS = "detect_leaks=0:detect_odr_violation=0:halt_on_error=0:print_stacktrace=1"
_FINDING = re.compile(r"ERROR: AddressSanitizer|: runtime error: ")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    environment = os.environ | {
        "CXX": str(_compiler()), "TORCH_EXTENSIONS_DIR": str(FOLDER),
        "PYTHONPATH": str(ROOT), "LD_PRELOAD": _preloaded(),
        "ASAN_OPTIONS": _OPTIONS, "UBSAN_OPTIONS": _OPTIONS,
    }  # fmt: skip
    findings = 0
    with subprocess.Popen(
        [sys.executable, *["-m"] * arguments.module, *arguments.script], env=environment, cwd=ROOT,
        stderr=subprocess.PIPE, text=True, errors="replace",
    ) as process:  # fmt: skip
        for line in process.stderr or ():  # where both sanitizers write
            print(line, end="", flush=True)
            findings += bool(_FINDING.search(line))
    print(f"{shlex.join(arguments.script)}: exit code {process.returncode}, {findings} findings")
    return 1 if process.returncode or findings else 0


def _compiler() -> Path:
    """Writes a wrapper of the compiler that adds the flags, without preloads; returns its path."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    program = FOLDER / "c++"
    text = f'#!/bin/sh\nunset LD_PRELOAD\nexec {shlex.quote(jit.compiler("cpu"))} "$@" {_FLAGS}\n'
    if not program.exists() or program.read_text() != text:
        program.write_text(text)
        program.chmod(0o755)
    return program


def _preloaded() -> str:
    """Returns the libraries to load before Python: the sanitizer, and libstdc++, whose exceptions
    the sanitizer intercepts and which Python itself does not load."""
    names = ("libasan.so", "libstdc++.so.6")
    return ":".join(
        subprocess.run(
            [jit.compiler("cpu"), f"-print-file-name={name}"],
            capture_output=True, text=True, check=True,
        ).stdout.strip()
        for name in names
    )  # fmt: skip


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", action="store_true", dest="module", help="run a module, by its name")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="and its options")
    arguments = parser.parse_args(argv)
    if not arguments.script:
        parser.error("script: expected a script or, after -m, a module, and its options")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
