"""A cache on disk: a folder for each entry, named by what it was made from, complete or absent."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from datamodules.images import CacheError

# Stays free on the disk: small entries, whose size nobody states, and the runs need room too.
SPARE_BYTES = 2**28


class Entry:
    """The ``.npy`` files of a folder by name, mapped into memory.

    All are mapped here and not when they are first read, which many threads may do at once: numpy
    parses their headers with `ast`, which fails in Python 3.11 where threads parse side by side.
    Pickling keeps the folder only, and another process maps the files again: all workers share one
    copy, in the system's page cache.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._arrays = {
            # As plain arrays: a memmap's own indexing is slow.
            path.stem: np.asarray(np.load(path, mmap_mode="r"))
            for path in folder.glob("*.npy")
        }

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def json(self, name: str) -> Any:
        return json.loads((self.folder / f"{name}.json").read_text())

    def __reduce__(self) -> tuple[type[Entry], tuple[Path]]:
        return Entry, (self.folder,)


def find_or_make(
    cache_dir: Path,
    kind: str,
    source: Mapping[str, Any],
    make: Callable[[Path], None],
    size: int = 0,
) -> Entry:
    """Returns the entry that was made from `source`; makes it first where there is none.

    While one process makes an entry, others that want it wait. What an interrupted process left is
    removed.

    Args:
        cache_dir: holds the folders of the entries, ``<kind>-<hash of source>``.
        kind: what the entry is, in a word.
        source: everything the contents depend on; JSON can write it.
        make: writes the contents into the empty folder that it is given.
        size: how many bytes `make` will write; 0 where they are few.

    Raises:
        CacheError: `cache_dir` cannot be written, or its disk has no room for `size`.
    """
    text = json.dumps(source, sort_keys=True)
    folder = cache_dir / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if folder.exists():
        return Entry(folder)
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.with_suffix(".lock"), fallback_to_soft=False).acquire()
    except OSError as error:
        raise CacheError(
            f"cannot write the cache {cache_dir} ({error.strerror}); set data.cache_dir to a "
            "folder that can be written"
        ) from error
    with lock:
        if not folder.exists():  # another process may have made it while this one waited
            _make(folder, make, text, size)
    return Entry(folder)


def _make(folder: Path, make: Callable[[Path], None], source: str, size: int) -> None:
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    free = shutil.disk_usage(folder.parent).free
    if size + SPARE_BYTES > free:
        raise CacheError(
            f"the cache {folder.parent} needs {size / 2**30:.1f} GiB and its disk has "
            f"{free / 2**30:.1f} GiB free; set data.cache_dir to a folder on a larger disk, or "
            "data.cache_images=false"
        )
    partial.mkdir()
    try:
        (partial / "source.json").write_text(source + "\n")
        make(partial)
        os.rename(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
