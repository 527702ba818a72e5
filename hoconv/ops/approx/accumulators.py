"""The registers in which sums of products of integers are kept.

A sum starts at 0, and products are added in ascending order of what is summed over. By default it
is exact. A register of few bits either wraps, or saturates: then each addition ends at the limit
that it would pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hoconv.ops.approx.sources.names import value_of

KINDS = ("saturate", "wrap")
# An unsigned register of 32 bits would not fit the results, which are int32.
LEAST_BITS, MOST_BITS = 2, {True: 32, False: 31}


@dataclass(frozen=True)
class Accumulator:
    """A register.

    Attributes:
        saturates: whether it stays at its limit where it would pass it; else it wraps.
        least, most: what it holds.
    """

    saturates: bool
    least: int
    most: int

    def keep(self, sums: Tensor) -> Tensor:
        """Changes sums, int64, to what the register has of them, after an addition; returns them.
        Of one that wraps also after all."""
        if self.saturates:
            return sums.clamp_(self.least, self.most)
        return sums.sub_(self.least).bitwise_and_(self.most - self.least).add_(self.least)


def parse(text: str | None, signed: bool) -> Accumulator | None:
    """Returns the register that a text names: ``"saturate:bits=16"``, ``"wrap:bits=20"``.

    Args:
        signed: whether it is; as the products that it sums.

    Raises:
        ValueError: the text names none.
    """
    if text is None:
        return None
    most = MOST_BITS[signed]
    kind = text.partition(":")[0] if isinstance(text, str) else None
    bits = value_of(text, "bits", range(LEAST_BITS, most + 1), 0) if kind in KINDS else None
    if not bits:
        sign = "signed" if signed else "unsigned"
        raise ValueError(
            f"accumulator: expected None, 'saturate:bits=n' or 'wrap:bits=n', n from {LEAST_BITS} "
            f"to {most} of {sign} products; got {text!r}"
        )
    least = -(1 << bits - 1) if signed else 0
    return Accumulator(kind == "saturate", least, least + (1 << bits) - 1)
