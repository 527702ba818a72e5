"""The contents of the files of a data set in COCO's format, split by split."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from datamodules.coco.annotations.boxes import Boxes
from datamodules.coco.annotations.captions import Captions
from datamodules.coco.annotations.file import Annotations
from datamodules.coco.annotations.instances import Instances
from datamodules.coco.annotations.objects import Objects
from datamodules.coco.files import SPLITS, Files, SplitFiles
from datamodules.coco.pixels import Images, LabelMaps
from datamodules.images import DataNotFoundError

A = TypeVar("A", Boxes, Captions, Instances)
B = TypeVar("B", Boxes, Instances)


class Splits:
    """Reads annotations, images and label maps; what was read once is found in the cache.

    Args:
        files: where they are.
        task: ``segmentation``, ``detection``, ``captions`` or ``denoise``.
        image_size: S, pixels.
        cache_dir: the cache.
        keep: whether decoded images and label maps are kept there.
        divided: whether images of train validate, so that val has no files.
        crowds: as of :class:`Objects`.
        expected_categories: how many an annotation file must have; None for any number.

    Raises:
        DataNotFoundError: by the methods: a file is missing, damaged or empty, or has other
            categories than it should.
        CacheError: by the methods: the cache cannot be written.
    """

    def __init__(
        self,
        files: Files,
        task: str,
        image_size: int,
        cache_dir: Path,
        *,
        keep: bool,
        divided: bool,
        crowds: str,
        expected_categories: int | None,
    ) -> None:
        self.files = files
        self.task = task
        self.image_size = image_size
        self.cache_dir = cache_dir
        self.keep = keep
        self.crowds = crowds
        self.expected_categories = expected_categories
        self.names: tuple[str, ...] = ("train",) if divided else SPLITS
        self._annotations: dict[tuple[type[Annotations], SplitFiles], Any] = {}

    @property
    def num_categories(self) -> int:
        """Of the training annotations; reads the file where the number is not known beforehand."""
        return self.expected_categories or len(self.objects("train").categories)

    def objects(self, split: str) -> Objects:
        boxes = self.task in ("detection", "denoise")
        return self.boxes(split) if boxes else self.instances(split)

    def instances(self, split: str) -> Instances:
        read = self._read(Instances, split, crowds=self.crowds)
        return self._require_known_categories(split, read)

    def boxes(self, split: str) -> Boxes:
        read = self._read(Boxes, split, crowds=self.crowds)
        return self._require_known_categories(split, read)

    def captions(self, split: str) -> Captions:
        return self._read(Captions, split)

    def images(self, split: str) -> Images:
        annotations = self.captions(split) if self.task == "captions" else self.objects(split)
        files = self.files.find(self.task, split)
        try:
            return Images(files.images, annotations, self.image_size, self.cache_dir, self.keep)
        except DataNotFoundError as error:
            raise DataNotFoundError(f"{error}; {files.mend_images}") from error

    def label_maps(self, split: str) -> LabelMaps:
        return LabelMaps(self.instances(split), self.image_size, self.cache_dir, self.keep)

    def _read(self, kind: type[A], split: str, **options: Any) -> A:
        """Returns an annotation file; it is read once."""
        files = self.files.find(self.task, split)
        if (kind, files) not in self._annotations:
            try:
                read = kind(files.annotations, self.cache_dir, folder=files.images, **options)
            except DataNotFoundError as error:
                raise DataNotFoundError(f"{error}; {files.mend_annotations}") from error
            self._annotations[kind, files] = read
        return self._annotations[kind, files]

    def _require_known_categories(self, split: str, read: B) -> B:
        expected = self.expected_categories
        if expected is not None and len(read.categories) != expected:
            raise DataNotFoundError(
                f"{read.path} has {len(read.categories)} categories, expected {expected}: it is "
                "not the published file; for other data set data.folder"
            )
        if split != "train":
            _require_same_categories(self.objects("train"), read)
        return read


def _require_same_categories(train: Objects, other: Objects) -> None:
    expected, found = (
        dict(zip(file.category_ids, file.categories, strict=True)) for file in (train, other)
    )
    if found != expected:
        number = min(i for i in expected | found if found.get(i) != expected.get(i))
        raise DataNotFoundError(
            f"{other.path} and {train.path} have different categories: id {number} is "
            f"{found.get(number)!r} in the first, {expected.get(number)!r} in the second; give "
            "both files the same list"
        )


def divide(images: Images, share: float, seed: int) -> dict[str, np.ndarray]:
    """Returns for ``train`` and ``val`` the numbers of their images, of those that can be decoded.

    Args:
        images: of one split.
        share: of them that validate.
        seed: chooses these.
    """
    count = len(images.annotations)
    order = np.random.default_rng(seed).permutation(count)
    chosen = np.isin(images.usable, order[: round(share * count)])
    parts = {"train": images.usable[~chosen], "val": images.usable[chosen]}
    for name, numbers in parts.items():
        if len(numbers) == 0:
            raise DataNotFoundError(
                f"data.val_share: {share} of the {count} images in {images.annotations.path} "
                f"leaves none for {name}; set another"
            )
    return parts
