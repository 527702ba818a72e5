"""Counts of what the sets of a data module hold for losses and scores.

A data module has a method ``census()``, which returns `Counts` by the name of the set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

SHOWN = 5  # names in a line


class Counts(NamedTuple):
    """The counts of a set.

    Attributes:
        images: how many.
        counted: how many things count.
        kind: what these are, in the singular.
        missing: the classes of which none counts.
        others: what counts in nothing, or might be overlooked -> how many. In a phrase ``{s}`` is
            the ending of the plural.
        fix: what to do where nothing counts.
    """

    images: int
    counted: int
    kind: str
    missing: Sequence[str] = ()
    others: Mapping[str, int] = {}
    fix: str = ""


def describe(name: str, counts: Counts) -> str:
    """Returns a line about a set."""
    said = {"image{s}": counts.images, f"{counts.kind}{{s}}": counts.counted}
    said |= {phrase: count for phrase, count in counts.others.items() if count}
    line = ", ".join(f"{n:,} {phrase.format(s='s' * (n != 1))}" for phrase, n in said.items())
    article = "an" if counts.kind[0] in "aeiou" else "a"
    missing = f"; classes without {article} {counts.kind}: " if counts.missing else ""
    return f"{name}: {line}{missing}{shorten(counts.missing)}"


def shorten(names: Sequence[str]) -> str:
    """Returns the first names of a list, and how many more there are."""
    more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
    return ", ".join(map(printable, names[:SHOWN])) + more


def printable(name: str) -> str:
    """Returns a name with escapes for what a line on a terminal cannot show."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in name)
