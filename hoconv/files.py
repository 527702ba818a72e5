"""Writing a file whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

PARTIAL = ".partial"  # suffix of a file that is being written


@contextlib.contextmanager
def replaced(path: Path, *, flush: bool = True) -> Iterator[BinaryIO]:
    """Opens a file that replaces `path` when the block ends; makes its folder.

    A reader never sees half of it. After an error `path` is unchanged and no partial file is left.

    Args:
        flush: whether to wait until the contents are on the disk, which many small files cannot.
    """
    partial = path.with_name(path.name + PARTIAL)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            yield file
            if flush:
                file.flush()
                os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
