"""Compiles hoconv's libraries ahead of their first use."""

import argparse
import sys

from hoconv.jit import LIBRARIES, BuildError, compile, obstacle, visible_gpus


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m hoconv.jit", description=__doc__)
    parser.add_argument("library", nargs="?", choices=LIBRARIES,
                        help="which to compile; by default all that this machine can")  # fmt: skip
    parser.add_argument("--arch", action="append", metavar="X.Y",
                        help="compute capability to compile for, such as 9.0; needs no GPU; "
                             "repeat it, in ascending order, for one library for several; "
                             "default: those of this machine's GPUs")  # fmt: skip
    arguments = parser.parse_args()
    if arguments.arch and arguments.library != "cuda":
        parser.error("--arch is for the library cuda only")
    chosen = [arguments.library] if arguments.library else list(LIBRARIES)
    for library in chosen:
        if not arguments.arch and (missing := obstacle(library)):
            if arguments.library:
                sys.exit(f"{library}: {missing}")
            print(f"{library}: not compiled: {missing}", file=sys.stderr)
            continue
        architectures = visible_gpus() if library == "cuda" else ()
        try:
            print(compile(library, arguments.arch or architectures))
        except BuildError as error:
            sys.exit(f"{library}: {error}")


if __name__ == "__main__":
    main()
