"""Random operations on one layer against copies of it: ``python scripts/fuzz.py sequences``.

The layers, calls and changes are in ``scripts/fuzzing/sequences/``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from fuzzing.sequences import run as sequence
from fuzzing.sequences.calls import DERIVED, OUTPUTS
from fuzzing.sequences.layers import KINDS
from fuzzing.verdicts import Verdict
from hoconv.dispatch.declaration import operators
from hoconv.dispatch.implementations import ImplementationError, choose
from hoconv.tools.commands import add_device_option

METHOD = (
    f"Each case is a sequence of {sequence.LENGTH} operations on one layer in float64: calls in "
    "modes of autograd, under transforms of torch.func, in threads and in compiled autograd, and "
    "between them changes of parameters, hooks, attributes, methods, classes and settings. Every "
    "call is compared with a copy of the layer that was never called, with the same of "
    "impl='reference', and with one that calls its generator. They give the same results and "
    "gradients, to 1e-9, or the same type of error. A sequence that fails is shrunk to the "
    "operations that matter."
)
SECONDS = 900.0  # the most that a case may take: it compiles loops, and is shrunk
_SHRINKING = 90.0  # seconds


class Key(NamedTuple):
    """One case; `only` are the operations that run, all where it is empty."""

    layer: str
    impl: str
    device: str
    seed: int
    number: int
    only: tuple[int, ...] = ()
    without: tuple[str, ...] = ()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layer", nargs="+", choices=[*KINDS], default=[*KINDS],
                        help="default: all")  # fmt: skip
    parser.add_argument("--only", nargs="+", type=int, default=[],
                        help="the operations that run, with --case")  # fmt: skip
    parser.add_argument("--without", nargs="+", default=[], metavar="NAME",
                        choices=[*OUTPUTS, *DERIVED],
                        help="ways of calls that are left out")  # fmt: skip
    add_device_option(parser)


def keys(arguments: argparse.Namespace) -> list[Key]:
    """Returns the keys; the cases are divided among the layers."""
    numbers = [arguments.case] if arguments.case is not None else range(arguments.cases)
    (operator,) = (o for o in operators() if o.name == "recurrent")
    found = []
    for device in arguments.device:
        impl = "cpp" if device == "cpu" else "cuda"
        try:
            choose(operator, impl, device)
        except ImplementationError as error:
            print(f"{impl} on {device}: not run: {error}")
            continue
        found += [
            Key(arguments.layer[n % len(arguments.layer)], impl, device, arguments.seed, n,
                tuple(arguments.only), tuple(arguments.without))
            for n in numbers
        ]  # fmt: skip
    return found


def label(arguments: argparse.Namespace) -> str:
    """Returns the part of the file's name that depends on the options."""
    return "_".join(("sequences", *arguments.device))


def row(key: Key) -> dict[str, str]:
    """Returns what identifies the row of a case."""
    return {"layer": key.layer, "impl": key.impl, "device": key.device}


def run(key: Key, folder: Path, tell: Callable[[str], None]) -> Verdict:
    """Judges one sequence."""
    name = f"{key.layer} {key.seed} {key.number}"
    seeds = sequence.operations(name)
    chosen = [seeds[i] for i in key.only] if key.only else seeds
    tell(f"{key.layer}: ")
    case = sequence.Case(key.layer, key.impl, key.device, name, key.without)
    fault = sequence.run(case, chosen, lambda text: tell(f"{key.layer}: {text}"))
    if fault is None:
        return Verdict("equal")
    kept, fault = sequence.shrink(case, chosen, fault, _SHRINKING)
    tell(f"{key.layer}: {'; '.join(fault.said)}")
    numbers = " ".join(str(seeds.index(s)) for s in kept)
    again = f"--layer {key.layer} --seed {key.seed} --case {key.number} --only {numbers}"
    lines = "".join(f"\n    {line}" for line in fault.said)
    return Verdict("wrong", f"{fault.why}\n  {again}{lines}")
