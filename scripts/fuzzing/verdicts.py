"""The verdict on a case: its results equal the definition's, it was refused, or it is wrong."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

import hoconv

Kind = Literal["equal", "refused", "wrong", "crashed", "hung", "exported"]
BAD = ("wrong", "crashed", "hung")
_LIBRARY = str(Path(hoconv.__file__).parent)
_ERRORS = (TypeError, ValueError, NotImplementedError, RuntimeError)
# Errors of PyTorch that count as refusals: a saved tensor was overwritten, or an op has no answer.
_REFUSALS_OF_PYTORCH = (
    "modified by an inplace operation",
    "does not support vmap over dims of size 0",
)

Results = dict[str, Tensor]


class Undefined(Exception):
    """A definition has no result for these arguments."""


@dataclass(frozen=True)
class Verdict:
    """The verdict on one case; `why` explains it to the reader, in one line or more."""

    kind: Kind
    why: str = ""


def is_refusal(error: BaseException) -> bool:
    """Returns whether the library refused on purpose: a ``raise`` statement of its own raised the
    error.

    An error that PyTorch raised inside a call of the library is no refusal.
    """
    if any(message in str(error) for message in _REFUSALS_OF_PYTORCH):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    if not isinstance(error, _ERRORS) or not frames:
        return False
    last = frames[-1]
    line = linecache.getline(last.filename, last.lineno or 0).strip()
    return last.filename.startswith(_LIBRARY) and line.startswith("raise ")


def describe_error(error: BaseException) -> str:
    """Returns the first line of an error, and the lines of the library that it passed through."""
    inside = [f"{Path(f.filename).relative_to(_LIBRARY)}:{f.lineno}"
              for f in traceback.extract_tb(error.__traceback__)
              if f.filename.startswith(_LIBRARY)]  # fmt: skip
    message = str(error).strip().split("\n")[0][:300]
    where = " < ".join(reversed(inside)) or "no line of the library"
    return f"{type(error).__name__}: {message} (at {where})"


def compare(
    results: Results, expected: Results, dtypes: Mapping[str, torch.dtype],
    tolerances: Mapping[str, float], disturbed: Callable[[], Results], jitter: float,
    rounded: Callable[[], Results], floor: float = 0.0,
) -> Verdict:  # fmt: skip
    """Compares every result with the definition's.

    Args:
        results: of an implementation, by name.
        expected: of the definition, in float64; in float32 where bits are compared.
        dtypes: the expected dtypes, by name.
        tolerances: the largest relative errors in Euclidean norms, by name; 0 compares bits.
        disturbed: returns the definition's results for arguments with a relative disturbance of
            `jitter`. They show how sensitive the results are to rounding; the allowed error grows
            accordingly.
        rounded: returns the definition's results with every step rounded. Ten times their error is
            allowed, since only rounding is left where large numbers cancel.
        floor: an absolute error that is allowed everywhere, for numbers around 1 that cancel
            exactly.
    """
    if results.keys() != expected.keys():
        return Verdict("wrong", f"expected {sorted(expected)}, got {sorted(results)}")
    for name, exact in expected.items():
        dtype = dtypes[name]
        result = results[name].detach().cpu().resolve_neg()
        if result.shape != exact.shape or result.dtype != dtype:
            got, wanted = (tuple(result.shape), result.dtype), (tuple(exact.shape), dtype)
            return Verdict("wrong", f"{name}: expected shape and dtype {wanted}, got {got}")
        if not (allowed := tolerances[name]):
            if why := _different_bits(result, exact):
                return Verdict("wrong", f"{name}: {why}")
            continue
        nearest = exact.to(dtype)
        if why := _different_classes(result, nearest):
            return Verdict("wrong", f"{name}: {why}")
        finite = nearest.isfinite()
        result, exact = result.double()[finite], exact[finite]
        error, norm = (result - exact).norm().item(), exact.norm().item()
        # Results in half precision may be subnormal, or sums of subnormal numbers.
        least = (torch.finfo(dtype).tiny + floor) * (1 + exact.numel() ** 0.5)
        if error <= allowed * norm + least:
            continue
        matters = (disturbed()[name][finite] - exact).nan_to_num().norm().item() / jitter
        noise = 10 * (rounded()[name].double()[finite] - exact).nan_to_num().norm().item()
        if not error <= allowed * (norm + matters) + least + noise:
            return Verdict(
                "wrong", f"{name}: error {error:.2e}, norm {norm:.2e}, tolerance {allowed:.1e}, "
                f"for rounding {allowed * matters + noise:.1e}"
            )  # fmt: skip
    return Verdict("equal")


def _different_bits(result: Tensor, exact: Tensor) -> str | None:
    """Describes where the bits differ; None if nowhere."""
    same = (result == exact) & (result.signbit() == exact.signbit())
    if result.is_floating_point():
        same |= result.isnan() & exact.isnan()
    if same.all():
        return None
    where = tuple(torch.nonzero(~same)[0].tolist())
    return (
        f"{int((~same).sum())} of {same.numel()} have other bits; at {where} "
        f"{result[where].item()!r}, expected {exact[where].item()!r}"
    )


def _different_classes(result: Tensor, exact: Tensor) -> str | None:
    """Describes where one is infinite or NaN and the other is not; None if nowhere."""
    same = (result.isnan() == exact.isnan()) & (result.isinf() == exact.isinf())
    same &= ~result.isinf() | (result == exact)
    if same.all():
        return None
    where = tuple(torch.nonzero(~same)[0].tolist())
    return (
        f"{int((~same).sum())} of {same.numel()} differ in being infinite or NaN; at {where} "
        f"{result[where].item()!r}, expected {exact[where].item()!r}"
    )
