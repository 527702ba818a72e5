"""Where the files of a data set in COCO's format are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

SPLITS = ("train", "val")
KINDS = {"segmentation": "instances", "detection": "instances", "captions": "captions"}  # of a task


class Files:
    """The image folders and annotation files of the splits ``train`` and ``val``.

    Args:
        root: holds ``<split><suffix>`` and ``annotations/<kind>_<split><suffix>.json``.
        suffix: the year, in the published layout.
        given: ``<split>_images`` and ``<split>_annotations`` -> a path that takes the place of that
            one.
    """

    def __init__(
        self, root: Path, suffix: str = "", given: Mapping[str, str | Path] | None = None
    ) -> None:
        self.root = root
        self.suffix = suffix
        self.given = {name: Path(path).resolve() for name, path in (given or {}).items()}

    def images(self, split: str) -> Path:
        return self.given.get(f"{split}_images", self.root / f"{split}{self.suffix}")

    def annotations(self, task: str, split: str) -> Path:
        name = f"{KINDS[task]}_{split}{self.suffix}.json"
        return self.given.get(f"{split}_annotations", self.root / "annotations" / name)
