"""Random calls of the operators against their definitions: ``python scripts/fuzz.py operators``.

An operator's generator, with the definition that it compares with, is the file of its name in
``scripts/fuzzing/operators/``; what is done with a call, a function of ``fuzzing/programs.py``.
"""

from __future__ import annotations

import argparse

from fuzzing import cases
from fuzzing.cases import Key, judge
from fuzzing.workers import Function
from hoconv.commands import add_device_option
from hoconv.declaration import operators
from hoconv.implementations import ImplementationError, choose

METHOD = (
    "Each case is a call with random sizes, layouts, dtypes and options, and one thing done with "
    "it: gradients of some of the arguments, transforms of torch.func, graphs of several calls "
    "under create_graph, export and reload in another process. Compared with a definition in "
    "float64 within the operator's tolerance, more where rounding the arguments changes more; or "
    "bit for bit, where it is declared to be. Refused: arguments that do not fit, and what has no "
    "answer, by an error of ours."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    known = cases.names()
    parser.add_argument("--operator", nargs="+", choices=known, default=known,
                        help="default: all that have a generator")  # fmt: skip
    impls = list(dict.fromkeys(i for operator in operators() for i in operator.implementations))
    parser.add_argument("--impl", nargs="+", choices=impls, default=impls,
                        help="default: all that can run")  # fmt: skip
    add_device_option(parser)


def keys(arguments: argparse.Namespace) -> list[Key]:
    """One a case: of every operator, implementation and device the same numbers."""
    declared = {operator.name: operator for operator in operators()}
    numbers = [arguments.case] if arguments.case is not None else range(arguments.cases)
    made = []
    for name in arguments.operator:
        # approx_tables is no operator of its own: its products are made where matmul's are.
        operator = declared.get(name, declared["approx_matmul"])
        for device in arguments.device:
            for impl in arguments.impl:
                try:
                    choose(operator, impl, device)
                except ImplementationError as error:
                    print(f"{name} {impl} on {device}: not run: {error}")
                    continue
                made += [Key(name, impl, device, arguments.seed, n) for n in numbers]
    return made


def label(arguments: argparse.Namespace) -> str:
    """What of the results' name is this run's."""
    return "_".join(("operators", *arguments.device))


def row(key: Key) -> dict[str, str]:
    """What a line of the table is about."""
    return {"operator": key.operator, "impl": key.impl, "device": key.device}


run: Function = judge
