"""Compiles hoconv's libraries ahead of their first use."""

import argparse
import sys

import torch

from hoconv.build import LIBRARIES, BuildError, compile, no_gpu, visible_gpus


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m hoconv.build", description=__doc__)
    parser.add_argument("library", nargs="?", choices=LIBRARIES,
                        help="which to compile; by default all that this machine can")  # fmt: skip
    parser.add_argument("--arch", action="append", metavar="X.Y",
                        help="compute capability, such as 9.0, needs no GPU; repeated, in "
                             "ascending order: one library for several; by default those of "
                             "the GPUs here")  # fmt: skip
    arguments = parser.parse_args()
    if arguments.arch and arguments.library != "cuda":
        parser.error("--arch goes with the library cuda")
    chosen = [arguments.library] if arguments.library else list(LIBRARIES)
    for library in chosen:
        try:
            if library == "cpu":
                print(compile(library))
                continue
            if not arguments.arch and not torch.cuda.is_available():
                raise BuildError(no_gpu())
            print(compile(library, arguments.arch or visible_gpus()))
        except BuildError as error:
            if arguments.library:
                sys.exit(f"{library}: {error}")
            print(f"{library}: not compiled: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
