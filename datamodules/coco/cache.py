"""A cache on disk: folders named by what they were made from, complete or absent."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.images import CacheError

SPARE_BYTES = 2**28  # left free on the disk


class Entry:
    """The ``.npy`` files of a folder by name, mapped into memory where they are first read.

    A copy in another process maps them anew: workers share one copy in the system's page cache.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._arrays: dict[str, np.ndarray] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._arrays:
            mapped = np.load(self.folder / f"{name}.npy", mmap_mode="r")
            self._arrays[name] = np.asarray(mapped)  # a memmap's own indexing is slow
        return self._arrays[name]

    def json(self, name: str) -> Any:
        return json.loads((self.folder / f"{name}.json").read_text())

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "_arrays": {}}


def entry(
    cache_dir: Path,
    kind: str,
    source: Mapping[str, Any],
    make: Callable[[Path], None],
    size: int = 0,
) -> Entry:
    """The entry that was made from `source`, made now where there is none.

    Args:
        cache_dir: holds one folder an entry, ``<kind>-<hash of source>``.
        kind: what it is, in a word.
        source: everything the contents depend on, as JSON can write it.
        make: writes the contents into the empty folder that it is given. A process that wants the
            same entry waits meanwhile; what an interrupted one left is removed.
        size: bytes that `make` will write, where they are many.

    Raises:
        CacheError: `cache_dir` cannot be written, or its disk holds less than `size`.
    """
    text = json.dumps(source, sort_keys=True)
    folder = cache_dir / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if folder.exists():
        return Entry(folder)
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        lock = folder.with_suffix(".lock").open("w")
    except OSError as error:
        raise CacheError(
            f"cannot write the cache {cache_dir} ({error.strerror}); set data.cache_dir to a "
            "folder that can be written"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
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
