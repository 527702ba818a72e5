"""Checks every implementation of every declared operator against the reference in float64, or bit
for bit where the operator is declared to give the reference's bits.

For each device and dtype, over the operator's samples with fresh random values: the relative error
``|a - b| / |b|`` (Euclidean norms) of the output and of every gradient. One element of many hardly
changes it, so none may be wrong by more than eight times the tolerance, relative to the largest.
New tensors are filled with NaN, which never passes, so that an element that was never written is
found. Two more calls, without that fill, show whether the same inputs give the same bits. Then
other values are written into the same tensors: a result that was kept, or that another stream
computes too early, is wrong. Inputs, and the results of earlier calls, must stay as they are. Each
sample is called in other forms, too: with other strides of each argument and of the gradient of the
output, with the gradient of a sum, with fewer arguments that require a gradient, and with none,
where the output must be a new dense tensor.

One sample of each dtype, with ``--thorough`` each, is also called from several threads at once,
twenty times more, with values that are small at every other index of a dimension, with zeros, huge
values and NaN. It is called a thousand times, with ``--thorough`` ten thousand, or as often as two
seconds allow: memory must not grow all the time. Some calls have a size that no sample has; the
reference says whether there is such a call. Where the reference in the same dtype is wrong for such
a call, too, no result is judged.
An error as large as that of a lower precision is a failure, whatever the tolerance, unless the
reference has it, too.

The exit code is 0 if all implementations that run here are right; 1 if one is not, or is broken, or
a package of operators is, unless others were asked for, or if there was nothing to check; 3 if
nothing but the reference could be checked; 4 if one of the implementations that were asked for by
name could not.

For NVIDIA's compute-sanitizer, which must see every allocation::

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \\
        python -m hoconv.tools.check --device cuda --small
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hoconv.dispatch.declaration import Operator, operators
from hoconv.dispatch.implementations import BrokenImplementationError, ImplementationError, choose
from hoconv.tools import commands
from hoconv.tools.checking import trials
from hoconv.tools.checking.row import Row, summary
from hoconv.tools.commands import dtype_name
from hoconv.tools.tables import print_line
from hoconv.tools.testing import supervision
from hoconv.tools.testing.cases import (
    BrokenDefinitionError,
    Case,
    make_cases,
    make_cases_of_other_sizes,
)

SMALL = (torch.float32, torch.bfloat16)
SEVERAL = 2  # threads
ENOUGH = 200  # numbers of an output
CALLS, MANY_CALLS = 1000, 10_000  # after which memory must not have grown
SIZES, MANY_SIZES = 4, 100  # that are not among the samples, for each dtype
ONLY_THE_REFERENCE, NOT_ALL_JUDGED = 3, 4  # exit codes
MUCH_WORSE = 2  # times the reference's error
# What the error of a result is at least, if its numbers had fewer digits than those of its dtype.
LOWER = {
    torch.float64: (1e-9, "float32"),
    torch.float32: (2e-4, "TF32 or half precision"),
    torch.float16: (1.5e-3, "bfloat16"),
    torch.bfloat16: (2e-2, "float8"),
}


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parse(argv)
    torch.backends.cudnn.allow_tf32 = False  # float32 is checked as float32
    # Kernels must be right on several threads, also where there is one core.
    torch.set_num_threads(max(SEVERAL, torch.get_num_threads()))
    print(f"seed {arguments.seed}")
    rows = []
    for operator in operators():
        if arguments.operator and operator.name not in arguments.operator:
            continue
        for device in arguments.device:
            checked = check(operator, device, arguments, _say)
            _say("")
            _show_table(operator.name, device, checked)
            rows += checked
    _show_failures(rows)
    if arguments.json:
        head = commands.record("hoconv check", argv)
        contents = head | {"seed": arguments.seed, "rows": [*map(_for_json, rows)]}
        commands.write_json(arguments.json, contents)
    broken = commands.report_broken_packages() and not arguments.operator
    return _verdict(rows, arguments, broken)


def _verdict(rows: list[Row], arguments: argparse.Namespace, broken: bool) -> int:
    """Prints what was judged; returns the exit code."""
    failures = sum(len(row.failures) for row in rows)
    cases = sum(row.cases for row in rows)
    print(f"{cases} cases, {failures} failures")
    if failures or broken:
        return 1
    judged = {row.impl for row in rows if row.cases}
    if missing := [impl for impl in arguments.impl or () if impl not in judged]:
        print(f"not checked: {', '.join(missing)}")
        found = {row.impl for row in rows}
        for impl in missing:
            if impl not in found:
                print(f"no operator that was checked has an implementation {impl}")
        return NOT_ALL_JUDGED
    if not cases:
        return 1
    if judged == {"reference"} and arguments.impl != ["reference"]:
        print("only the reference was checked")
        return ONLY_THE_REFERENCE
    return 0


def _say(what: str) -> None:
    supervision.say(what)
    _show_progress(what)


def _show_progress(what: str) -> None:
    """Shows a line on a terminal; the next call replaces it."""
    if sys.stderr.isatty():
        shown = what[: shutil.get_terminal_size().columns - 1]  # a second line would stay
        print(f"\r\033[K{shown}", end="", file=sys.stderr, flush=True)


def check(
    operator: Operator, device: str, arguments: argparse.Namespace, say: Callable[[str], None]
) -> list[Row]:
    """Checks the implementations of one operator on one device; `say` shows progress."""
    runnable, others = [], []
    for impl in operator.implementations:
        if arguments.impl and impl not in arguments.impl:
            continue
        try:
            choose(operator, impl, device)
            runnable.append(impl)
        except BrokenImplementationError as error:
            others.append(Row(operator.name, impl, device, failures=[str(error)]))
        except ImplementationError as error:
            others.append(Row(operator.name, impl, device, unavailable=str(error)))
    rows = []
    for dtype, tolerance in operator.tolerances.items():
        if not runnable or (arguments.small and dtype not in SMALL):
            continue
        name = dtype_name(dtype)
        say(f"{operator.name}: {name} on {device}, reference")
        try:
            cases, others_of = (
                make_cases(operator, device, dtype)
                for _ in _seeded(arguments.seed, arguments.seed + 1)
            )
        except BrokenDefinitionError as error:
            row = Row(operator.name, "reference", device, name, tolerance, failures=[str(error)])
            row.output_error = row.gradient_error = math.inf
            rows.append(row)
            continue
        pairs = [*zip(cases, others_of, strict=True)]
        sized = make_cases_of_other_sizes(
            operator, device, [case.sample for case in cases],
            MANY_SIZES if arguments.thorough else SIZES, random.Random(arguments.seed),
        )  # fmt: skip
        for impl in runnable:
            row = Row(operator.name, impl, device, name, tolerance)
            where = f"{operator.name}: {name} on {device}, {impl}"
            for pair in pairs:
                say(f"{where}, {pair[0].sample.name}")
                trials.try_all(operator, *pair, row)
            if not cases:
                row.fail("the operator has no samples")
            elif not row.failures:
                say(f"{where}, in threads, with other values")
                for pair in pairs if arguments.thorough else [_typical(pairs)]:
                    calls = MANY_CALLS if arguments.thorough else CALLS
                    trials.try_more(operator, *pair, row, calls)
                trials.try_sizes(operator, sized, row)
                _judge_precision(operator, dtype, pairs, row)
            rows.append(row)
    return rows + others


def _typical(pairs: list[tuple[Case, Case]]) -> tuple[Case, Case]:
    """Returns the smallest case with enough numbers to judge parts of them, or else the largest."""

    def elements(pair: tuple[Case, Case]) -> int:
        return min(t.numel() for what, t in pair[0].expected.items() if what in pair[0].dtypes)

    ordered = sorted(pairs, key=elements)
    return next((pair for pair in ordered if elements(pair) >= ENOUGH), ordered[-1])


def _judge_precision(
    operator: Operator, dtype: torch.dtype, pairs: list[tuple[Case, Case]], row: Row
) -> None:
    """Notes errors as large as those of a lower precision, which the reference does not have."""
    least, lower = LOWER.get(dtype, (math.inf, ""))
    for what in ("output", "gradient"):
        error = getattr(row, f"{what}_error")
        if error < least:
            continue
        reference = Row(row.operator, "reference", row.device, row.dtype, math.inf)
        for case, other in pairs:
            trials.try_all(operator, case, other, reference)
        if error > MUCH_WORSE * getattr(reference, f"{what}_error"):
            row.fail(f"{what}: error {error:.1e} is that of {lower}, not of {row.dtype}")


def _seeded(*seeds: int) -> Iterator[None]:
    """Goes once through a loop for each seed of the random values."""
    for seed in seeds:
        torch.manual_seed(seed)
        yield


def _show_failures(rows: list[Row]) -> None:
    """Prints a line for each failure, one for those of several samples, and each compiler's further
    lines once."""
    shown = {""}
    for failure in summary(rows):
        line, *details = failure.splitlines()
        print_line(line, indent=2)
        if (said := "\n".join(details)) not in shown:
            print(said)
        shown.add(said)


def _show_table(operator: str, device: str, rows: list[Row]) -> None:
    """Prints the rows of a device, relative errors among them, and why others could not be checked:
    80 columns, unless a name is long."""
    columns = "impl", "dtype", "cases", "output", "gradient", "tolerance", "same bits", "result"
    lines = [columns, *(_cells(row) for row in rows if not row.unavailable)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(f"{operator} on {device}: relative errors")
    for line in lines:
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print(f"  {'  '.join(padded)}".rstrip())
    for row in rows:
        if row.unavailable:
            print_line(f"  {row.impl}: {row.unavailable}", indent=4)


def _cells(row: Row) -> tuple[str, ...]:
    if row.dtype is None:
        return row.impl, *[""] * 6, "broken"
    errors = (f"{e:.1e}" for e in (row.output_error, row.gradient_error, row.tolerance or 0))
    result = f"{len(row.failures)} failed" if row.failures else "pass"
    return row.impl, row.dtype, str(row.cases), *errors, "yes" if row.same_bits else "no", result


def _for_json(row: Row) -> dict[str, Any]:
    """Converts a row for JSON, which has no infinity and no NaN: such errors become strings."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(row).items()
        if name != "samples"
    }


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    impls = list(dict.fromkeys(i for operator in operators() for i in operator.implementations))
    parser = argparse.ArgumentParser(
        prog="hoconv check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands.add_operator_option(parser)
    parser.add_argument("--impl", nargs="+", choices=impls, help="default: all that run here")
    commands.add_device_option(parser)
    parser.add_argument("--small", action="store_true", help="float32 and bfloat16 only")
    parser.add_argument("--thorough", action="store_true",
                        help="all samples in the ways that take long, many sizes")  # fmt: skip
    parser.add_argument("--seed", type=int, default=random.randrange(2**31),
                        help="of the random values; default: a new one, printed")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows here too")
    return parser.parse_args(commands.mark_operators(argv))


if __name__ == "__main__":
    sys.exit(main())
