"""Finds the headers that C++ and CUDA sources include, so that what is compiled has a key.

Folders are those that the compiler is given too. Headers of the system and of PyTorch are in none
of them, and are not part of a key: the stable ABI is the same for every version of PyTorch.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from hoconv.jit.cache import BuildError

CSRC = Path(__file__).parents[1] / "csrc"
PUBLIC = CSRC / "include"  # of the headers hoconv/*, which other packages include too
_INCLUDE = re.compile(
    rb'^[ \t]*#[ \t]*include[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>|(\w+))', re.MULTILINE
)


def digest(text: bytes, folder: Path | None, include: Sequence[Path]) -> str:
    """Returns a digest of a source and of every header that it includes, directly or not.

    It does not depend on where the folders are.

    Args:
        text: the source.
        folder: of the source, where the compiler looks first for ``#include "..."``.
        include: the folders of headers, in the order in which the compiler looks.

    Raises:
        BuildError: a macro names a header, so that its file is not known.
    """
    found = _headers(text, folder, include, set())
    parts = [("", text), *((name, contents) for name, _, contents in found)]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def find(source: Path, include: Sequence[Path]) -> list[Path]:
    """Returns the headers that a source includes, directly or not; `include` and errors are as of
    :func:`digest`."""
    found = _headers(source.read_bytes(), source.parent, include, set())
    return [Path(path) for _, path, _ in found]


def _headers(
    text: bytes, folder: Path | None, include: Sequence[Path], seen: set[str]
) -> Iterator[tuple[str, str, bytes]]:
    """Yields the headers that a text includes, as it names them, with path and contents: each once,
    whatever conditions they are under."""
    for quoted, bracketed, macro in _INCLUDE.findall(text):
        if macro:
            raise BuildError(
                f'#include {macro.decode()}: expected "a header" or <a header>, since a change of '
                "a file that a macro names would not be seen"
            )
        name = os.fsdecode(quoted or bracketed)
        folders = [folder, *include] if quoted and folder else include
        path = next((p for f in folders if (p := f / name).is_file()), None)
        if path and (plain := os.path.normpath(path)) not in seen:
            seen.add(plain)
            contents = path.read_bytes()
            yield name, plain, contents
            yield from _headers(contents, path.parent, include, seen)
