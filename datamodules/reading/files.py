"""Finds the image files of a folder."""

from __future__ import annotations

from pathlib import Path

# Those that `decode` reads, and others, which it refuses: so these are named, not passed over.
SUFFIXES = (
    ".gif", ".jfif", ".jpeg", ".jpg", ".png", ".webp",
    ".avif", ".bmp", ".heic", ".heif", ".jxl", ".pgm", ".ppm", ".tif", ".tiff",
)  # fmt: skip


def find_images(folder: Path, *, subfolders: bool = True) -> list[Path]:
    """Returns the files in a folder, and in its subfolders, whose names say that they are images,
    in the order of their names.

    What is hidden is left out, files and folders: systems and editors keep copies there.
    """
    return sorted(
        path
        for path in (folder.rglob("*") if subfolders else folder.iterdir())
        if path.suffix.lower() in SUFFIXES
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and path.is_file()
    )
