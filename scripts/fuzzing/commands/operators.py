"""Random calls of the operators against their definitions: ``python scripts/fuzz.py operators``.

The generator of an operator, and its definition, is the file of its name in
``scripts/fuzzing/operators/``. A function of ``fuzzing/programs.py`` runs a call.
"""

from __future__ import annotations

import argparse

from fuzzing import cases
from fuzzing.cases import Key, judge
from fuzzing.workers import Function
from hoconv.dispatch.declaration import operators
from hoconv.dispatch.implementations import ImplementationError, choose
from hoconv.tools.commands import add_device_option

METHOD = (
    "Each case is a call with random sizes, layouts, dtypes and options, run by one program: "
    "gradients of some of the arguments, transforms of torch.func, graphs of several calls under "
    "create_graph, export and reload in another process. The results are compared with a "
    "definition in float64, within the operator's tolerance, or within more where rounding of the "
    "arguments changes more; bit for bit where the operator declares that. Refused: arguments that "
    "do not fit, and calls without a defined result, by an error of the library."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    known = cases.operator_names()
    parser.add_argument("--operator", nargs="+", choices=known, default=known,
                        help="default: all that have a generator")  # fmt: skip
    impls = list(dict.fromkeys(i for operator in operators() for i in operator.implementations))
    parser.add_argument("--impl", nargs="+", choices=impls, default=impls,
                        help="default: all that can run")  # fmt: skip
    add_device_option(parser)


def keys(arguments: argparse.Namespace) -> list[Key]:
    """Returns the keys: the same case numbers for every operator, implementation and device."""
    declared = {operator.name: operator for operator in operators()}
    numbers = [arguments.case] if arguments.case is not None else range(arguments.cases)
    found = []
    for name in arguments.operator:
        # approx_tables is not declared: its products run where those of approx_matmul run.
        operator = declared.get(name, declared["approx_matmul"])
        for device in arguments.device:
            for impl in arguments.impl:
                if impl not in operator.implementations:  # of another operator
                    continue
                try:
                    choose(operator, impl, device)
                except ImplementationError as error:
                    print(f"{name} {impl} on {device}: not run: {error}")
                    continue
                found += [Key(name, impl, device, arguments.seed, n) for n in numbers]
    return found


def label(arguments: argparse.Namespace) -> str:
    """Returns the part of the file's name that depends on the options."""
    return "_".join(("operators", *arguments.device))


def row(key: Key) -> dict[str, str]:
    """Returns what identifies the row of a case."""
    return {"operator": key.operator, "impl": key.impl, "device": key.device}


run: Function = judge
