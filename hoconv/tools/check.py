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
output, with the gradient of a sum, and with fewer arguments that require a gradient. The exit code
is 1 if a case fails, if an implementation or a package of operators is broken, or if nothing could
be checked.

For NVIDIA's compute-sanitizer, which must see every allocation::

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \\
        python -m hoconv.tools.check --device cuda --small
"""

from __future__ import annotations

import argparse
import functools
import math
import random
import shutil
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hoconv.dispatch.declaration import Operator, operators
from hoconv.dispatch.implementations import BrokenImplementationError, ImplementationError, choose
from hoconv.tools.commands import (
    add_device_option,
    add_operator_option,
    dtype_name,
    record,
    report_broken_packages,
    write_json,
)
from hoconv.tools.tables import print_line
from hoconv.tools.testing.cases import BrokenDefinitionError, Case, make_cases
from hoconv.tools.testing.comparison import output_and_gradients, relative_error, same_bits
from hoconv.tools.testing.crashes import CrashReporter

SMALL = (torch.float32, torch.bfloat16)
SEVERAL = 2  # threads
# Times the tolerance: what an element may be wrong by, relative to the largest element.
_ELEMENT = 8
# For so many cycles a GPU's stream waits before inputs change: some milliseconds.
_WAIT_CYCLES = 10_000_000


@dataclass
class Row:
    """One implementation on one device in one dtype.

    Attributes:
        cases: how many samples were compared.
        output_error, gradient_error: the worst over the cases; infinite where a call failed.
        same_bits: whether two calls gave the same output and gradients, bit for bit, in every case.
        failures: what is wrong, a line for each output and gradient, with the sample's name; or,
            without a dtype, why the implementation does not compile or load.
        unavailable: what is missing to run it on this machine; then the other results are not set.
    """

    operator: str
    impl: str
    device: str
    dtype: str | None = None
    tolerance: float | None = None
    cases: int = 0
    output_error: float = 0.0
    gradient_error: float = 0.0
    same_bits: bool = True
    failures: list[str] = field(default_factory=list)
    unavailable: str | None = None


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parse(argv)
    torch.backends.cudnn.allow_tf32 = False  # float32 is checked as float32
    # Kernels must be right on several threads, also where there is one core.
    torch.set_num_threads(max(SEVERAL, torch.get_num_threads()))
    print(f"seed {arguments.seed}")
    rows = []
    with CrashReporter() as reporter:

        def say(what: str) -> None:
            reporter.say(what)
            _show_progress(what)

        for operator in operators():
            if operator.name not in arguments.operator:
                continue
            for device in arguments.device:
                checked = check(operator, device, arguments, say)
                say("")
                _show_table(operator.name, device, checked)
                rows += checked
    _show_failures(rows)
    if arguments.json:
        head = record("hoconv check", argv)
        write_json(arguments.json, head | {"seed": arguments.seed, "rows": [*map(_for_json, rows)]})
    failures = sum(len(row.failures) for row in rows)
    cases = sum(row.cases for row in rows)
    print(f"{cases} cases, {failures} failures")
    return 1 if report_broken_packages() or failures or not cases else 0


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
        if impl not in arguments.impl:
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
        for impl in runnable:
            row = Row(operator.name, impl, device, name, tolerance)
            for case, other in zip(cases, others_of, strict=True):
                say(f"{operator.name}: {name} on {device}, {impl}, {case.sample.name}")
                if _compare(operator, case, row):
                    _compare_changed(operator, case, other, row)
                    _compare_forms(operator, case, row)
            if not cases:
                row.failures.append("the operator has no samples")
            rows.append(row)
    return rows + others


def _seeded(*seeds: int) -> Iterator[None]:
    """Goes once through a loop for each seed of the random values."""
    for seed in seeds:
        torch.manual_seed(seed)
        yield


def _compare(operator: Operator, case: Case, row: Row) -> bool:
    """Runs one implementation on one case, and adds the outcome to the row.

    Returns:
        Whether nothing is wrong with it.
    """
    failures = len(row.failures)
    _compare_results(operator, case, row)
    return len(row.failures) == failures


def _compare_results(operator: Operator, case: Case, row: Row) -> None:
    assert row.tolerance is not None
    row.cases += 1
    name = case.sample.name or f"case {row.cases}"
    function = functools.partial(operator.function, impl=row.impl)
    args = case.sample.args
    call = function, args, case.sample.kwargs, case.cotangent
    before = [a.clone() if isinstance(a, Tensor) else a for a in args]
    try:
        results = _call_filled(*call)
        once, again = output_and_gradients(*call), output_and_gradients(*call)
    except Exception as error:  # whatever an implementation raises is its failure, not ours
        row.output_error = row.gradient_error = math.inf
        row.failures.append(f"{name}: {type(error).__name__}: {error}")
        return
    finally:
        for i, (a, b) in enumerate(zip(args, before, strict=True)):
            if isinstance(a, Tensor) and not same_bits(a, b):
                row.failures.append(f"{name}: argument {i} was changed")
                a.copy_(b)  # for the other implementations
    row.same_bits &= once.keys() == again.keys() and all(
        same_bits(once[name], again[name]) for name in once
    )
    if results.keys() != case.expected.keys():
        row.output_error = math.inf
        row.failures.append(f"{name}: expected {[*case.expected]}, got {[*results]}")
        return
    for what, dtype in case.dtypes.items():
        got = tuple(results[what].shape), results[what].dtype
        expected = tuple(case.expected[what].shape), dtype
        if got != expected:
            row.output_error = math.inf
            row.failures.append(f"{name}: {what}: expected shape and dtype {expected}, got {got}")
            return
    _judge(name, results, case.expected, case, row)


def _judge(
    name: str, results: dict[str, Tensor], expected: dict[str, Tensor], case: Case, row: Row
) -> None:
    """Adds the errors of the results of a call to the row."""
    assert row.tolerance is not None
    for what, result in results.items():
        error = relative_error(result, expected[what], case.expected[what])
        if what in case.dtypes:
            row.output_error = _worse(row.output_error, error)
        else:
            row.gradient_error = _worse(row.gradient_error, error)
        _judge_error(f"{name}: {what}", error, result, expected[what], case.expected[what], row)


def _judge_error(
    what: str, error: float, result: Tensor, exact: Tensor, typical: Tensor | None, row: Row
) -> None:
    """Adds to the row's failures an error that is too large, of the whole result or of an
    element."""
    tolerance = row.tolerance or 0
    if not error <= tolerance:
        row.failures.append(f"{what}: error {error:.1e}")
        return
    element = relative_error(result, exact, typical, order=math.inf)
    if not element <= _ELEMENT * tolerance:
        row.failures.append(
            f"{what}: an element is wrong by {element:.1e} of the largest; the error of all of "
            f"them, {error:.1e}, is small"
        )


def _compare_forms(operator: Operator, case: Case, row: Row) -> None:
    """Calls an implementation in the other forms of a case."""
    function = functools.partial(operator.function, impl=row.impl)
    for form, expected in case.forms:
        name = f"{case.sample.name or f'case {row.cases}'}, {form.name}"
        call = function, form.args, case.sample.kwargs, form.cotangent
        try:
            results = _call_filled(*call, positions=form.positions)
        except Exception as error:
            row.output_error = row.gradient_error = math.inf
            row.failures.append(f"{name}: {type(error).__name__}: {error}")
            continue
        _judge(name, results, expected, case, row)


def _compare_changed(operator: Operator, case: Case, other: Case, row: Row) -> None:
    """Calls an implementation, writes the values of another case into its arguments, and calls it
    again."""
    name = f"{case.sample.name or f'case {row.cases}'}, then other values in the same tensors"
    function = functools.partial(operator.function, impl=row.impl)
    args = [a.clone() if isinstance(a, Tensor) else a for a in case.sample.args]
    values = other.sample.args
    if [_shape(a) for a in args] != [_shape(v) for v in values]:
        return  # the operator draws shapes, too
    first = output_and_gradients(function, args, case.sample.kwargs, case.cotangent)
    kept = {what: t.clone() for what, t in first.items()}
    if any(isinstance(a, Tensor) and a.is_cuda for a in args):
        torch.cuda._sleep(_WAIT_CYCLES)  # another stream would read the values of before
    for a, v in zip(args, values, strict=True):
        if isinstance(a, Tensor):
            a.copy_(v)
    for what, result in output_and_gradients(
        function, args, other.sample.kwargs, other.cotangent
    ).items():
        exact = other.expected[what]
        error = relative_error(result, exact)
        _judge_error(f"{name}: {what}", error, result, exact, None, row)
        if not same_bits(first[what], kept[what]):
            row.failures.append(f"{name}: {what}: the result of the first call changed")


def _call_filled(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    cotangent: Any,
    positions: Collection[int] | None = None,
) -> dict[str, Tensor]:
    """Returns what :func:`output_and_gradients` does where new tensors are filled with NaN.

    On a GPU the results are those of a call without that fill, unless they have a NaN only with it:
    PyTorch fills in its deterministic mode alone, in which cuDNN takes other algorithms for
    convolutions. One of them has 1000 times the error of others in float32.
    """
    call = functools.partial(
        output_and_gradients, function, args, kwargs, cotangent, positions=positions
    )
    with _fill_new_tensors():
        filled = call()
    if not any(isinstance(a, Tensor) and a.is_cuda for a in args):
        return filled
    return call() | {what: result for what, result in filled.items() if _has_fill(result)}


def _has_fill(result: Tensor) -> bool:
    """Returns whether there are values in a tensor with which PyTorch fills new ones."""
    if result.is_floating_point() or result.is_complex():
        return bool(result.isnan().any())
    return result.dtype != torch.bool and bool((result == torch.iinfo(result.dtype).max).any())


def _shape(value: Any) -> Any:
    return (value.shape, value.dtype) if isinstance(value, Tensor) else None


@contextmanager
def _fill_new_tensors() -> Iterator[None]:
    """Fills what ``empty`` and similar functions allocate, in Python and in C++: with NaN, or with
    the largest integer."""
    with warnings.catch_warnings(action="ignore"):  # of ops that have no deterministic form
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


def _worse(a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


def _show_failures(rows: list[Row]) -> None:
    """Prints a line for each failure, and each compiler's further lines once."""
    shown = {""}
    for row in rows:
        where = " ".join(filter(None, (row.operator, row.impl, row.device, row.dtype)))
        for failure in row.failures:
            line, *details = failure.splitlines()
            print_line(f"{where}: {line}", indent=2)
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
    }


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    impls = list(dict.fromkeys(i for operator in operators() for i in operator.implementations))
    parser = argparse.ArgumentParser(
        prog="hoconv check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_operator_option(parser)
    parser.add_argument("--impl", nargs="+", choices=impls, default=impls, help="default: all")
    add_device_option(parser)
    parser.add_argument("--small", action="store_true", help="float32 and bfloat16 only")
    parser.add_argument("--seed", type=int, default=random.randrange(2**31),
                        help="of the random values; default: a new one, printed")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows here too")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
