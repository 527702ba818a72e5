"""Compiles the libraries of all declared operators ahead of their first use."""

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from hoconv.dispatch.declaration import libraries
from hoconv.jit import BuildError, Library, obstacle

DEVICES = ("cpu", "cuda")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="hoconv build", description=__doc__)
    parser.add_argument("device", nargs="?", choices=DEVICES,
                        help="whose libraries to compile; by default all that this machine "
                             "can")  # fmt: skip
    parser.add_argument("--arch", action="append", metavar="X.Y",
                        help="compute capability to compile for, such as 9.0; needs no GPU; "
                             "repeat it, in ascending order, for one library for several; "
                             "default: those of this machine's GPUs")  # fmt: skip
    arguments = parser.parse_args(argv)
    if arguments.arch and arguments.device != "cuda":
        parser.error("--arch is for the libraries of cuda only")
    chosen = []
    for device in [arguments.device] if arguments.device else DEVICES:
        if not arguments.arch and (missing := obstacle(device)):
            if arguments.device:
                sys.exit(f"{device}: {missing}")
            print(f"{device}: not compiled: {missing}", file=sys.stderr)
        else:
            chosen += libraries(device)
    if failed := _compile(chosen, arguments.arch):
        sys.exit("\n".join(failed))


def _compile(chosen: Sequence[Library], architectures: Sequence[str] | None) -> list[str]:
    """Compiles libraries side by side and prints their paths; returns what failed, and why."""
    failed = []
    with ThreadPoolExecutor(max(len(chosen), 1)) as pool:
        compiling = [pool.submit(each.compile, architectures) for each in chosen]
    for library, made in zip(chosen, compiling, strict=True):
        try:
            print(made.result())
        except BuildError as error:
            failed.append(f"{library.name} for {library.device}: {error}")
    return failed


if __name__ == "__main__":
    main()
