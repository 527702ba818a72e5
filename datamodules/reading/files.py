"""Finds the image files of a folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

from datamodules.images import DataNotFoundError

# Those that `decode` reads, and others, which it refuses: so these are named, not passed over.
SUFFIXES = (
    ".gif", ".jfif", ".jpeg", ".jpg", ".png", ".webp",
    ".avif", ".bmp", ".heic", ".heif", ".jxl", ".pgm", ".ppm", ".tif", ".tiff",
)  # fmt: skip


# Folders of systems and programs, in lower case. Copies and thumbnails are in them.
NOT_A_USER_S = {
    "#recycle", "#snapshot", "$recycle.bin", "@eadir", "@recycle", "@tmp", "__macosx",
    "__pycache__", "lost+found", "system volume information",
}  # fmt: skip


def is_a_user_s(name: str) -> bool:
    """Returns whether a user made a file or folder: it is not hidden, nor of `NOT_A_USER_S`."""
    return not name.startswith(".") and name.lower() not in NOT_A_USER_S


def find_images(folder: Path, *, subfolders: bool = True) -> list[Path]:
    """Returns the files in a folder, and in its subfolders, whose names say that they are images,
    in the order of their names.

    What no user made is left out, files and folders: see `is_a_user_s`. A link to a file is one, a
    link to a folder is not followed.

    Raises:
        DataNotFoundError: a folder cannot be read.
    """
    found: list[Path] = []
    for inside, folders, files in os.walk(folder, onerror=_explain):
        folders[:] = filter(is_a_user_s, folders) if subfolders else ()
        named = (Path(inside, name) for name in files if is_a_user_s(name))
        found += (path for path in named if path.suffix.lower() in SUFFIXES)
    return sorted(found)


def list_folders(folder: Path) -> list[str]:
    """Returns the names of the folders in a folder, and of links to such, in their order; what no
    user made is left out.

    Raises:
        DataNotFoundError: the folder cannot be read.
    """
    if not os.path.isdir(folder):  # Path.is_dir raises where it may not look
        return []
    try:
        names = filter(is_a_user_s, os.listdir(folder))
        return sorted(name for name in names if os.path.isdir(folder / name))
    except OSError as error:
        _explain(error)


def _explain(error: OSError) -> NoReturn:
    raise DataNotFoundError(
        f"{error.filename} cannot be read ({error.strerror}); make it readable or move it away"
    ) from error
