"""Checks every implementation of every declared operator against the reference in float64, or bit
for bit where the operator is declared to give the reference's bits.

For each device and dtype, over the operator's samples with fresh random values: the relative error
``|a - b| / |b|`` (Euclidean norms) of the output and of every gradient. NaN never passes, and new
tensors are made of NaN, so that an element never written is seen. Two more calls, with memory as it
comes, show whether the same inputs give the same bits. Exit code 1 where a case fails, where an
implementation or a package of operators is broken, or where nothing could be checked.

For NVIDIA's compute-sanitizer, which must see every allocation::

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \\
        python scripts/check.py --device cuda --small
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import (
    add_device_option,
    add_operator_option,
    broken_packages_named,
    console,
    differentiable,
    dtype_name,
    is_floating,
    record,
    write_json,
)
from rich.console import Console
from rich.table import Table
from torch import Tensor

from hoconv.declaration import Operator, Sample, operators
from hoconv.implementations import BrokenImplementationError, ImplementationError, choose

SMALL = (torch.float32, torch.bfloat16)


@dataclass
class Row:
    """One implementation on one device in one dtype.

    Attributes:
        cases: how many samples were compared.
        output_error, gradient_error: the worst over the cases; infinite where a call failed.
        same_bits: whether two calls gave the same output and gradients, bit for bit, in every case.
        failures: what is wrong, a line for each output and gradient, with the sample's name; or,
            without a dtype, why the implementation does not compile or load.
        unavailable: what it misses on this machine; then nothing else is filled in.
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


@dataclass(frozen=True)
class Case:
    """A sample, the gradient of its output, and what the reference makes of both."""

    sample: Sample
    grad: Tensor
    dtype: torch.dtype  # of the reference's output for this sample
    output: Tensor
    gradients: list[Tensor]


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parse(argv)
    torch.backends.cudnn.allow_tf32 = False  # float32 is checked as float32
    print(f"seed {arguments.seed}")
    rows = []
    with Console(stderr=True).status("") as status:
        for operator in operators():
            if operator.name not in arguments.operator:
                continue
            for device in arguments.device:
                checked = check(operator, device, arguments, status.update)
                console().print(_table(operator.name, device, checked))
                rows += checked
    _show_failures(rows)
    if arguments.json:
        head = record("check.py", argv)
        write_json(arguments.json, head | {"seed": arguments.seed, "rows": [*map(_json, rows)]})
    failures = sum(len(row.failures) for row in rows)
    cases = sum(row.cases for row in rows)
    print(f"{cases} cases, {failures} failures")
    return 1 if broken_packages_named() or failures or not cases else 0


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
        torch.manual_seed(arguments.seed)
        cases = [_case(operator, s) for s in operator.samples(torch.device(device), dtype)]
        for impl in runnable:
            say(f"{operator.name}: {name} on {device}, {impl}")
            row = Row(operator.name, impl, device, name, tolerance)
            for case in cases:
                _compare(operator, case, row)
            if not cases:
                row.failures.append("the operator has no samples")
            rows.append(row)
    return rows + others


def _case(operator: Operator, sample: Sample) -> Case:
    """Computed on the CPU: independent of the device that is checked."""

    def exact(value: Any) -> Any:
        wide = is_floating(value) and not operator.bitwise
        return value.cpu().double() if wide else _on_cpu(value)

    plain = _converted(sample, _on_cpu)
    with torch.no_grad():
        like = operator.function(*plain.args, impl="reference", **plain.kwargs)
    grad = torch.randn(like.shape, dtype=torch.float64).to(like.dtype)
    output, gradients = _call(operator, "reference", _converted(sample, exact), exact(grad))
    return Case(sample, grad, like.dtype, output, gradients)


def _converted(sample: Sample, convert: Callable[[Any], Any]) -> Sample:
    kwargs = {name: convert(value) for name, value in sample.kwargs.items()}
    return Sample(tuple(map(convert, sample.args)), kwargs)


def _compare(operator: Operator, case: Case, row: Row) -> None:
    """Runs one implementation on one case, and adds what comes of it to the row."""
    assert row.tolerance is not None
    row.cases += 1
    name = case.sample.name or f"case {row.cases}"
    try:
        grad = case.grad.to(row.device)
        with _new_tensors_are_nan():
            output, gradients = _call(operator, row.impl, case.sample, grad)
        runs = [_call(operator, row.impl, case.sample, grad) for _ in range(2)]
    except Exception as error:  # whatever an implementation raises is its failure, not ours
        row.output_error = row.gradient_error = math.inf
        row.failures.append(f"{name}: {type(error).__name__}: {error}")
        return
    (once, gradients_once), (again, gradients_again) = runs
    pairs = zip((once, *gradients_once), (again, *gradients_again), strict=True)
    row.same_bits &= all(_same_bits(a, b) for a, b in pairs)

    if (output.shape, output.dtype) != (case.output.shape, case.dtype):
        row.output_error = math.inf
        got, expected = (tuple(output.shape), output.dtype), (tuple(case.output.shape), case.dtype)
        row.failures.append(f"{name}: output: expected shape and dtype {expected}, got {got}")
        return
    error = _relative_error(output, case.output)
    row.output_error = _worse(row.output_error, error)
    if not error <= row.tolerance:
        row.failures.append(f"{name}: output: error {error:.1e}")
    for i, (gradient, expected) in enumerate(zip(gradients, case.gradients, strict=True)):
        error = _relative_error(gradient, expected)
        row.gradient_error = _worse(row.gradient_error, error)
        if not error <= row.tolerance:
            row.failures.append(f"{name}: gradient {i}: error {error:.1e}")


def _call(
    operator: Operator, impl: str, sample: Sample, grad: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """The output, and the gradients of the floating-point tensors among the arguments."""
    args, leaves = differentiable(sample)
    output = operator.function(*args, impl=impl, **sample.kwargs)
    if not leaves:
        return output, []
    gradients = torch.autograd.grad(output, leaves, grad, materialize_grads=True)
    return output.detach(), list(gradients)


@contextmanager
def _new_tensors_are_nan() -> Iterator[None]:
    """For ``empty`` and its like, in Python and in C++ alike."""
    with warnings.catch_warnings(action="ignore"):  # operators that have no deterministic form
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


def _relative_error(result: Tensor, expected: Tensor) -> float:
    error = (result.cpu().double() - expected).norm()
    return 0.0 if error == 0 else (error / expected.norm()).item()


def _worse(a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    a, b = (t.contiguous().flatten().view(torch.uint8) for t in (a, b))
    return torch.equal(a, b)


def _on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def _show_failures(rows: list[Row]) -> None:
    """Each in a line; what else a compiler says of one, the first time that it says so."""
    shown = {""}
    for row in rows:
        where = " ".join(filter(None, (row.operator, row.impl, row.device, row.dtype)))
        for failure in row.failures:
            line, *details = failure.splitlines()
            print(f"{where}: {line}")
            if (said := "\n".join(details)) not in shown:
                print(said)
            shown.add(said)


def _table(operator: str, device: str, rows: list[Row]) -> Table:
    table = Table("implementation", "dtype", title=f"{operator} on {device}")
    for column in ("cases", "output error", "gradient error", "tolerance"):
        table.add_column(column, justify="right")
    table.add_column("same bits")
    table.add_column("result")
    for row in rows:
        if row.unavailable:
            table.add_row(row.impl, "", "", "", "", "", "", f"[yellow]{row.unavailable}")
            continue
        if row.dtype is None:
            table.add_row(row.impl, "", "", "", "", "", "", "[red]broken")
            continue
        errors = [f"{e:.1e}" for e in (row.output_error, row.gradient_error, row.tolerance or 0)]
        bits = "yes" if row.same_bits else "[yellow]no"
        result = f"[red]{len(row.failures)} failures" if row.failures else "[green]pass"
        table.add_row(row.impl, row.dtype, str(row.cases), *errors, bits, result)
    return table


def _json(row: Row) -> dict[str, Any]:
    """JSON has no infinity and no NaN: such errors are written as strings."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(row).items()
    }


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    impls = list(dict.fromkeys(i for operator in operators() for i in operator.implementations))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
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
