"""Compiles the libraries of all declared operators ahead of their first use, or builds a wheel that
has those of a package compiled."""

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hoconv.dispatch.declaration import libraries
from hoconv.jit import BuildError, Library, obstacle, prebuilt
from hoconv.tools import wheel

DEVICES = ("cpu", "cuda")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="hoconv build", description=__doc__)
    parser.add_argument("device", nargs="?", choices=DEVICES,
                        help="whose libraries to compile; by default all that this machine "
                             "can")  # fmt: skip
    parser.add_argument("--arch", action="append", metavar="X.Y",
                        help="compute capability to compile for, such as 9.0, or 9.0+PTX for later "
                             "ones too; needs no GPU; repeat it, in ascending order, for one "
                             "library for several; default: those of this machine's "
                             "GPUs")  # fmt: skip
    parser.add_argument("--wheel", metavar="DIR", type=Path,
                        help="build a wheel of the package in this folder, into DIR/dist, with its "
                             "libraries compiled for all machines; needs no GPU")  # fmt: skip
    arguments = parser.parse_args(argv)
    if arguments.arch and (arguments.device != "cuda" or arguments.wheel):
        parser.error("--arch is for the libraries of cuda only, and for no wheel")
    chosen = []
    for device in [arguments.device] if arguments.device else DEVICES:
        if not (arguments.arch or arguments.wheel) and (missing := obstacle(device)):
            if arguments.device:
                sys.exit(f"{device}: {missing}")
            print(f"{device}: not compiled: {missing}", file=sys.stderr)
        else:
            chosen += libraries(device)
    if arguments.wheel:
        chosen = [library for library in chosen if wheel.belongs(library, arguments.wheel)]
        if not chosen:
            parser.error(f"--wheel: no installed operator has sources in {arguments.wheel}; "
                         f"pip install -e {arguments.wheel}")  # fmt: skip
        jobs = [(library, each) for library in chosen for each in prebuilt.targets(library.device)]
    else:
        jobs = [(library, arguments.arch) for library in chosen]
    if failed := _compile(jobs):
        sys.exit("\n".join(failed))
    if arguments.wheel:
        try:
            print(wheel.build_wheel(arguments.wheel, chosen))
        except BuildError as error:
            sys.exit(str(error))


def _compile(jobs: Sequence[tuple[Library, Sequence[str] | None]]) -> list[str]:
    """Compiles libraries for architectures side by side and prints their paths; returns what
    failed, and why."""
    failed = []
    with ThreadPoolExecutor(max(len(jobs), 1)) as pool:
        compiling = [pool.submit(library.compile, each) for library, each in jobs]
    for (library, _), made in zip(jobs, compiling, strict=True):
        try:
            print(made.result())
        except BuildError as error:
            failed.append(f"{library.name} for {library.device}: {error}")
    return failed


if __name__ == "__main__":
    main()
