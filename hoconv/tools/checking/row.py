"""Notes what is wrong with one implementation on one device in one dtype, and judges results."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hoconv.tools.testing.cases import Case
from hoconv.tools.testing.comparison import relative_error

# Times the tolerance: what an element may be wrong by, relative to the largest element; and what
# the part of a result at one index of a dimension may be, relative to that part.
_ELEMENT = 8
_LEAST_PART = 16  # elements of such a part: of fewer, sums that cancel are nothing to compare with
_CURE = (
    "; the definition is another in this dtype than in float64: let it decide in float64, declare "
    "bitwise=True, or a larger tolerance"
)
# What differs from sample to sample where the same is wrong: errors, values, shapes and dtypes, not
# the position of an argument or an output.
_VARYING = re.compile(
    r"; most at [^;]*|(?<!argument )(?<!output\[)\b(\d[\d.]*(e[-+]\d+)?|nan|inf)\b(, \d+)*"
    r"|(?<=torch\.)\w+"
)


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
        samples: the names of those that were compared.
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
    samples: list[str] = field(default_factory=list)

    def fail(self, what: str) -> None:
        self.failures.append(what)

    def fail_call(self, what: str, error: BaseException) -> None:
        """Notes a call that raised an error."""
        self.output_error = self.gradient_error = math.inf
        said = f": {error}" if str(error) else ""
        self.fail(f"{what}: {type(error).__name__}{said}")

    def judge(
        self, name: str, results: Mapping[str, Tensor], expected: Mapping[str, Tensor], case: Case
    ) -> None:
        """Notes the errors of the results of a call."""
        for what, result in results.items():
            error = relative_error(result, expected[what], case.expected[what])
            if what in case.dtypes:
                self.output_error = _worse(self.output_error, error)
            else:
                self.gradient_error = _worse(self.gradient_error, error)
            self.judge_error(
                f"{name}: {what}", result, expected[what], case.expected[what], case.sample.args
            )

    def judge_error(
        self,
        what: str,
        result: Tensor,
        exact: Tensor,
        typical: Tensor | None = None,
        args: Sequence[Any] = (),
    ) -> bool:
        """Notes an error that is too large, of the whole result or of an element; returns whether
        there is one.

        Args:
            args: of the call, if the definition's own error is to name their values.
        """
        tolerance = self.tolerance or 0
        error = relative_error(result, exact, typical)
        if not error <= tolerance:
            # The definition is compared with itself in float64.
            own = self.impl == "reference" and math.isfinite(error)
            cure = f"{_largest(result, exact, args)}{_CURE}" if own else ""
            self.fail(f"{what}: error {error:.1e}{cure}")
            return True
        element = relative_error(result, exact, typical, order=math.inf)
        if not element <= _ELEMENT * tolerance:
            self.fail(
                f"{what}: an element is wrong by {element:.1e} of the largest; the error of all of "
                f"them, {error:.1e}, is small"
            )
            return True
        return False

    def judge_parts(self, what: str, result: Tensor, exact: Tensor) -> None:
        """Notes an error that is too large for the part of a result at one index of a dimension, a
        channel, say, whose numbers may be much smaller than those of others."""
        if self.judge_error(what, result, exact):
            return
        result, exact = result.cpu().double(), exact.cpu().double()
        for dim, size in enumerate(exact.shape):
            if exact.numel() // max(size, 1) < _LEAST_PART or size < 2:
                continue
            others = [d for d in range(exact.dim()) if d != dim]
            error, norm = (torch.linalg.vector_norm(t, dim=others) for t in (result - exact, exact))
            worst = torch.where(error == 0, 0, error / norm)
            if not bool((worst <= _ELEMENT * (self.tolerance or 0)).all()):
                index = int(worst.nan_to_num(math.inf).argmax())
                self.fail(
                    f"{what}: at index {index} of dimension {dim} alone, where the numbers are "
                    f"small, the error is {worst[index]:.1e}"
                )
                return

    def judge_special(self, what: str, result: Tensor, exact: Tensor) -> None:
        """Notes a missing NaN, and an error of what is finite, of a result for special values."""
        if not exact.is_floating_point():
            return
        result, exact = result.cpu().double(), exact.cpu().double()
        if (exact.isnan() & ~result.isnan()).any():
            self.fail(f"{what}: a NaN of the reference is missing")
            return
        finite = exact.isfinite()
        self.judge_error(what, result[finite], exact[finite])


def _largest(result: Tensor, exact: Tensor, args: Sequence[Any]) -> str:
    """Says which number of a result is wrong most, and what arguments of its shape are there."""
    result, exact = (t.cpu().to_dense().double() for t in (result, exact))
    index = torch.nonzero((result - exact).abs() == (result - exact).abs().max())[0].tolist()
    there = [
        f"argument {i} is {a[tuple(index)].item():.9g}"
        for i, a in enumerate(args)
        if isinstance(a, Tensor) and a.shape == exact.shape
    ]
    said = f"; most at {index}: {result[tuple(index)]:.6g}, not {exact[tuple(index)]:.6g}"
    return said + (f", where {' and '.join(there)}" if there else "")


def _worse(a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


def summary(rows: Sequence[Row]) -> list[str]:
    """Says what is wrong in these rows, with a line for failures of an implementation on a device
    that differ in the sample, the dtype and numbers alone: the first, and how many there are."""
    alike: dict[tuple[str, ...], list[tuple[Row, str]]] = {}
    for row in rows:
        for failure in row.failures:
            names = (name for name in row.samples if failure.startswith((f"{name}:", f"{name},")))
            what = failure.removeprefix(max(names, key=len, default=""))
            key = row.operator, row.impl, row.device, _VARYING.sub("#", what)
            alike.setdefault(key, []).append((row, failure))
    lines = []
    for found in alike.values():
        row, failure = found[0]
        first, *details = failure.split("\n")
        where = " ".join(filter(None, (row.operator, row.impl, row.device, row.dtype)))
        dtypes = ", ".join(dict.fromkeys(row.dtype for row, _ in found if row.dtype))
        more = f" (the first of {len(found)} samples with this: {dtypes})" if found[1:] else ""
        lines.append("\n".join([f"{where}: {first}{more}", *details]))
    return lines
