"""Tries an implementation in many ways. Each trial notes what is wrong in a row.

An implementation may raise anything, SystemExit too: that is its failure, not the check's.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hoconv.dispatch.declaration import Operator, Sample
from hoconv.tools.checking.row import Row
from hoconv.tools.testing.cases import Case, address, make_case
from hoconv.tools.testing.comparison import named, on_cpu, output_and_gradients, same_bits
from hoconv.tools.testing.many_calls import at_once, growth, private_memory
from hoconv.tools.testing.variations import of_other_scales, of_special_values

RAISED = Exception, SystemExit
# For so many cycles a GPU's stream waits before inputs change: some milliseconds.
_WAIT_CYCLES = 10_000_000
_MORE_CALLS = 20  # longer than a ring of buffers that somebody may reuse
_THREADS, _EACH = 4, 25  # calls of each
_SECONDS = 2.0  # of many calls


def try_all(operator: Operator, case: Case, other: Case, row: Row) -> None:
    """Tries one case, whose arguments have the values of another case for a while."""
    row.cases += 1
    name = case.sample.name or f"case {row.cases}"
    row.samples.append(name)
    function = functools.partial(operator.function, impl=row.impl)
    failures = len(row.failures)
    compare(function, name, case, row)
    if len(row.failures) > failures:
        return  # what is wrong in the simplest call is wrong in the others
    compare_changed(function, name, case, other, row)
    compare_forms(function, name, case, row)
    compare_without_gradients(function, name, case, row)


def try_more(operator: Operator, case: Case, other: Case, row: Row, calls: int) -> None:
    """Tries what takes many calls, or other values, of one case.

    Args:
        calls: after which memory must not have grown.
    """
    function = functools.partial(operator.function, impl=row.impl)
    name = case.sample.name or "a case"
    failures = len(row.failures)
    compare_after_more_calls(function, name, case, other, row)
    compare_in_threads(function, name, case, other, row)
    look_at_memory(function, name, case, row, calls)
    if len(row.failures) == failures:
        compare_scales(operator, case, row)
        compare_special_values(operator, case, row)


def try_sizes(operator: Operator, cases: Sequence[Case], row: Row) -> None:
    """Tries cases whose sizes no sample has."""
    for case in cases:
        _note(operator, row, functools.partial(compare, name=case.sample.name, case=case))


def compare(function: Callable[..., Any], name: str, case: Case, row: Row) -> None:
    """Calls as most users do, where new tensors are filled with NaN, and twice without that."""
    args = case.sample.args
    call = function, args, case.sample.kwargs, case.cotangent
    before = [a.clone() if isinstance(a, Tensor) else a for a in args]
    try:
        results = _call_filled(*call)
        once, again = output_and_gradients(*call), output_and_gradients(*call)
    except RAISED as error:
        row.fail_call(name, error)
        return
    finally:
        for i, (a, b) in enumerate(zip(args, before, strict=True)):
            if isinstance(a, Tensor) and not same_bits(a, b):
                row.fail(f"{name}: argument {i} was changed")
                a.copy_(b)  # for the other implementations
    row.same_bits &= once.keys() == again.keys() and all(
        same_bits(once[what], again[what]) for what in once
    )
    if results.keys() != case.expected.keys():
        row.fail_call(name, ValueError(f"expected {[*case.expected]}, got {[*results]}"))
        return
    for what, dtype in case.dtypes.items():
        got = tuple(results[what].shape), results[what].dtype
        expected = tuple(case.expected[what].shape), dtype
        if got != expected:
            wrong = ValueError(f"expected shape and dtype {expected}, got {got}")
            row.fail_call(f"{name}: {what}", wrong)
            return
    row.judge(name, results, case.expected, case)


def compare_forms(function: Callable[..., Any], name: str, case: Case, row: Row) -> None:
    """Calls in the other forms of a case."""
    for form, expected in case.forms:
        call = function, form.args, case.sample.kwargs, form.cotangent
        try:
            results = _call_filled(*call, positions=form.positions)
        except RAISED as error:
            row.fail_call(f"{name}, {form.name}", error)
            continue
        row.judge(f"{name}, {form.name}", results, expected, case)


def compare_changed(
    function: Callable[..., Any], name: str, case: Case, other: Case, row: Row
) -> None:
    """Calls, writes the values of another case into the arguments, and calls again."""
    args, values = _copies(case), other.sample.args
    if [_shape(a) for a in args] != [_shape(v) for v in values]:
        return  # the operator draws shapes, too
    changed = f"{name}, then other values in the same tensors"
    try:
        first = output_and_gradients(function, args, case.sample.kwargs, case.cotangent)
        kept = {what: t.clone() for what, t in first.items()}
        if any(isinstance(a, Tensor) and a.is_cuda for a in args):
            torch.cuda._sleep(_WAIT_CYCLES)  # another stream would read the values of before
        for a, v in zip(args, values, strict=True):
            if isinstance(a, Tensor):
                a.copy_(v)
        results = output_and_gradients(function, args, other.sample.kwargs, other.cotangent)
    except RAISED as error:
        row.fail_call(changed, error)
        return
    for what, result in results.items():
        row.judge_error(f"{changed}: {what}", result, other.expected[what])
        if not same_bits(first[what], kept[what]):
            row.fail(f"{changed}: {what}: the result of the first call changed")


def compare_without_gradients(
    function: Callable[..., Any], name: str, case: Case, row: Row
) -> None:
    """Calls where no gradient is wanted, and looks at the output as the tensor that it is."""
    for how, mode in (("no_grad", torch.no_grad), ("inference_mode", torch.inference_mode)):
        said, args = f"{name}, under torch.{how}", _copies(case)
        try:
            with mode():
                output = named(function(*args, **case.sample.kwargs))
        except RAISED as error:
            row.fail_call(said, error)
            continue
        for i, (a, before) in enumerate(zip(args, case.sample.args, strict=True)):
            if isinstance(a, Tensor) and not same_bits(a, before):
                row.fail(f"{said}: argument {i} was changed")
        if output.keys() != case.dtypes.keys():
            row.fail(f"{said}: expected {[*case.dtypes]}, got {[*output]}")
            continue
        memory = {address(a): i for i, a in enumerate(args) if isinstance(a, Tensor) and a.numel()}
        for what, t in output.items():
            if type(t) is not Tensor or t.layout is not torch.strided:
                row.fail(f"{said}: {what}: expected a dense torch.Tensor, got {type(t).__name__}")
                continue
            shared = memory.get(address(t)) if t.numel() else None
            if shared is not None and not case.shares_memory:
                row.fail(f"{said}: {what}: it is in the memory of argument {shared}")
            row.judge_error(f"{said}: {what}", t, case.expected[what], case.expected[what])


def compare_after_more_calls(
    function: Callable[..., Any], name: str, case: Case, other: Case, row: Row
) -> None:
    """Calls many times more, and looks whether the first results are what they were."""
    call = case.sample.kwargs, case.cotangent
    later = f"{name}, {_MORE_CALLS} calls later"
    try:
        first = output_and_gradients(function, case.sample.args, *call)
        kept = {what: t.clone() for what, t in first.items()}
        for _ in range(_MORE_CALLS):
            output_and_gradients(function, _copies(other), other.sample.kwargs, other.cotangent)
    except RAISED as error:
        row.fail_call(later, error)
        return
    for what, t in first.items():
        if not same_bits(t, kept[what]):
            row.fail(f"{later}: {what}: the first result changed")


def compare_in_threads(
    function: Callable[..., Any], name: str, case: Case, other: Case, row: Row
) -> None:
    """Calls from several threads of Python at once, every other one with other values."""
    cases = [(case, other)[i % 2] for i in range(_THREADS)]

    def run(called: Case) -> list[dict[str, Tensor]]:
        call = called.sample.kwargs, called.cotangent
        return [output_and_gradients(function, _copies(called), *call) for _ in range(_EACH)]

    said = f"{name}, in {_THREADS} threads at once"
    try:
        all_results = at_once([functools.partial(run, called) for called in cases])
    except RAISED as error:
        row.fail_call(said, error)
        return
    for called, made in zip(cases, all_results, strict=True):
        for results in made:
            wrong = [
                row.judge_error(f"{said}: {what}", t, called.expected[what], called.expected[what])
                for what, t in results.items()
            ]
            if any(wrong):
                return


def look_at_memory(
    function: Callable[..., Any], name: str, case: Case, row: Row, calls: int
) -> None:
    """Calls many times, and looks whether memory grows without end."""

    def held() -> int:
        gpu = torch.cuda.memory_allocated() if row.device == "cuda" else 0
        return gpu + private_memory(os.getpid())

    def call(batch: int) -> bool:
        for _ in range(batch):
            output_and_gradients(function, case.sample.args, case.sample.kwargs, case.cotangent)
        return True

    try:
        grown, made = growth(call, held, calls, _SECONDS)
    except RAISED as error:
        row.fail_call(f"{name}, many calls later", error)
        return
    if grown:
        row.fail(f"{name}: memory grows: {grown >> 10} KiB more after the second half of {made} "
                 f"calls")  # fmt: skip


def compare_scales(operator: Operator, case: Case, row: Row) -> None:
    """Calls with values of very different sizes, where the dtype has the range for it."""
    if any(a.dtype == torch.float16 for a in case.sample.args if isinstance(a, Tensor)):
        return
    for sample in of_other_scales(case.sample):
        scaled = make_case(operator, row.device, sample, with_forms=False)
        _note(operator, row, functools.partial(_compare_parts, case=scaled))


def _compare_parts(function: Callable[..., Any], case: Case, row: Row) -> None:
    sample = case.sample
    try:
        results = output_and_gradients(function, sample.args, sample.kwargs, case.cotangent)
    except RAISED as error:
        row.fail_call(sample.name, error)
        return
    for what, t in results.items():
        row.judge_parts(f"{sample.name}: {what}", t, case.expected[what])


def compare_special_values(operator: Operator, case: Case, row: Row) -> None:
    """Calls with values that random ones never are; compares outputs alone, since what a gradient
    is there is a matter of taste."""
    reference = functools.partial(operator.function, impl="reference")
    for sample in of_special_values(case.sample):
        args, kwargs = on_cpu((sample.args, dict(sample.kwargs)), not operator.bitwise)
        try:
            with torch.no_grad():
                expected = named(reference(*args, **kwargs))
        except RAISED:  # the definition refuses such values
            continue
        _note(operator, row, functools.partial(_compare_special, sample=sample, expected=expected))


def _compare_special(
    function: Callable[..., Any], sample: Sample, expected: Mapping[str, Tensor], row: Row
) -> None:
    try:
        with torch.no_grad():
            results = named(function(*sample.args, **sample.kwargs))
    except RAISED as error:
        row.fail_call(sample.name, error)
        return
    for what, exact in expected.items():
        row.judge_special(f"{sample.name}: {what}", results[what], exact)


def _note(operator: Operator, row: Row, trial: Callable[..., None]) -> None:
    """Notes what a trial finds wrong with an implementation, unless it finds the reference wrong,
    too: its author vouches for the samples alone, and other calls may enlarge any rounding."""

    def failures(impl: str) -> list[str]:
        found = Row(row.operator, impl, row.device, row.dtype, row.tolerance)
        trial(functools.partial(operator.function, impl=impl), row=found)
        return found.failures

    if (found := failures(row.impl)) and not failures("reference"):
        row.failures += found


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


def _copies(case: Case) -> list[Any]:
    return [a.clone() if isinstance(a, Tensor) else a for a in case.sample.args]


def _shape(value: Any) -> Any:
    return (value.shape, value.dtype) if isinstance(value, Tensor) else None
