"""Sizes in generated C++: constants of code for one layer, arguments of code for all layers.

The text is written once, with a mark before every size. Code for one layer has the numbers, which
its compiler knows. Code for all sizes reads them from arrays, and so do layers whose statements
differ in nothing but numbers have the same code. Numbers of the arithmetic are read as well: a mean
divides by a size.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

NAME = "@name"  # stands for the name of the function
_SIZE = re.compile(r"@(\d+)")
# As hoconv.recurrent.codegen.expressions.literal writes it.
_NUMBER = re.compile(r"\b(float|double|BFloat16|Half)\((-?\d[\d.e+-]*)\)")


def size(n: int) -> str:
    """Marks a size in a text."""
    return f"@{n}"


def as_constants(text: str) -> str:
    """Returns a text with its sizes as constants."""
    return _SIZE.sub(r"\1", text)


@dataclass(frozen=True)
class Lifted:
    """A text for all sizes.

    Attributes:
        marked: reads the arrays ``sizes`` (int64_t) and ``numbers`` (double); its function's name
            is :data:`NAME`.
        sizes, numbers: what is in them for one layer.
    """

    marked: str
    sizes: tuple[int, ...]
    numbers: tuple[float, ...]

    @property
    def name(self) -> str:
        """A name of the function that tells it from every other."""
        return f"loop_{hashlib.sha256(self.marked.encode()).hexdigest()[:16]}"

    @property
    def text(self) -> str:
        """The text of the function of that name."""
        return self.marked.replace(NAME, self.name)


def lift(text: str) -> Lifted:
    """Takes the sizes and numbers out of a text.

    Each occurrence has an element of its own: sizes that are equal by chance make no other text.
    """
    sizes: list[int] = []
    numbers: list[float] = []

    def take_size(found: re.Match[str]) -> str:
        sizes.append(int(found[1]))
        return f"sizes[{len(sizes) - 1}]"

    def take_number(found: re.Match[str]) -> str:
        numbers.append(float(found[2]))
        return f"{found[1]}(numbers[{len(numbers) - 1}])"

    lifted = _NUMBER.sub(take_number, _SIZE.sub(take_size, text))
    return Lifted(lifted, tuple(sizes), tuple(numbers))
