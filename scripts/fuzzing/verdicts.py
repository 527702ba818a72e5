"""What comes of a case: the definition's numbers, a refusal, or something wrong."""

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
# PyTorch's own, which say best that a saved tensor was overwritten, or that an op has no answer.
_PYTORCHS = ("modified by an inplace operation", "does not support vmap over dims of size 0")

Results = dict[str, Tensor]


class Undefined(Exception):
    """Raised by a definition where there is nothing to compute."""


@dataclass(frozen=True)
class Verdict:
    """Of one case; `why` is for the reader, one line and more."""

    kind: Kind
    why: str = ""


def is_refusal(error: BaseException) -> bool:
    """Whether the library said no on purpose: a ``raise`` of its own is what raised.

    An error of PyTorch's that comes through the library is none.
    """
    if any(said in str(error) for said in _PYTORCHS):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    if not isinstance(error, _ERRORS) or not frames:
        return False
    last = frames[-1]
    line = linecache.getline(last.filename, last.lineno or 0).strip()
    return last.filename.startswith(_LIBRARY) and line.startswith("raise ")


def told(error: BaseException) -> str:
    """An error in a few lines: what it says, and where in the library it comes from."""
    inside = [f"{Path(f.filename).relative_to(_LIBRARY)}:{f.lineno}"
              for f in traceback.extract_tb(error.__traceback__)
              if f.filename.startswith(_LIBRARY)]  # fmt: skip
    said = str(error).strip().split("\n")[0][:300]
    return (
        f"{type(error).__name__}: {said} (at {' < '.join(reversed(inside)) or 'no line of ours'})"
    )


def compare(
    results: Results, expected: Results, dtypes: Mapping[str, torch.dtype],
    tolerances: Mapping[str, float], disturbed: Callable[[], Results], jitter: float,
    rounded: Callable[[], Results], floor: float = 0.0,
) -> Verdict:  # fmt: skip
    """Compares every tensor with what the definition makes of it.

    Args:
        results: of an implementation.
        expected: of the definition, float64; or float32 where the bits are compared.
        dtypes: that the results have, by name.
        tolerances: of the results: largest error in Euclidean norms; 0 compares bits.
        disturbed: the definition's results where all numbers are disturbed by `jitter`, relatively:
            where they differ much, rounding does, and that much error is allowed.
        rounded: the definition's where every step rounds: ten times their error is, where all that
            is left of large numbers that cancel is rounding.
        floor: an error of any result that is rounding: of numbers around 1 that cancel exactly.
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
            if why := _other_bits(result, exact):
                return Verdict("wrong", f"{name}: {why}")
            continue
        nearest = exact.to(dtype)
        if why := _other_classes(result, nearest):
            return Verdict("wrong", f"{name}: {why}")
        finite = nearest.isfinite()
        result, exact = result.double()[finite], exact[finite]
        error, norm = (result - exact).norm().item(), exact.norm().item()
        # Results of half precision may be subnormal, or sums of such.
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


def _other_bits(result: Tensor, exact: Tensor) -> str | None:
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


def _other_classes(result: Tensor, exact: Tensor) -> str | None:
    """Where one is infinite or NaN and the other is not."""
    same = (result.isnan() == exact.isnan()) & (result.isinf() == exact.isinf())
    same &= ~result.isinf() | (result == exact)
    if same.all():
        return None
    where = tuple(torch.nonzero(~same)[0].tolist())
    return (
        f"{int((~same).sum())} of {same.numel()} differ in being infinite or NaN; at {where} "
        f"{result[where].item()!r}, expected {exact[where].item()!r}"
    )
