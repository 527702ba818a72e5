"""Annotation files of objects: the categories, and the category of an object."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.census import Counts
from datamodules.coco.annotations.file import (
    Annotations,
    ImageRecords,
    Pack,
    Skips,
    get_id,
    get_list,
    load_packed,
)
from datamodules.coco.annotations.names import MAX_NAME, encode_text, show
from datamodules.reading.skipped import DamagedError

IGNORE = 255  # the label of pixels that count in no loss and no metric
MAX_CATEGORIES = IGNORE - 1  # labels are bytes, and 0 is the background
TOP = "none"  # the supercategory that Roboflow gives its group
CROWDS = ("ignore", "objects")  # what becomes of annotations that say iscrowd: 1
ALL_CROWDS = (
    "where iscrowd: 1 says that a mask is of run lengths, as in files of CVAT, and not that it is "
    "of a crowd, use data.crowds=objects"
)


class Objects(Annotations, ABC):
    """An annotation file of objects.

    Args:
        path: of the file.
        kind: of the arrays that `pack` makes of it. Among them are, of each annotation that is
            used, its image in `image_offsets`, its category in `classes`, by its index, and
            `crowds`.
        cache_dir: keeps them.
        coordinates: of an annotation, any values.
        crowds: one of `CROWDS`: a crowd counts nowhere, as COCO defines; or as one object.
        folder: as of `load_packed`.

    Attributes:
        category_ids: those of the file, ascending.
        categories: the names in the same order.
    """

    def __init__(
        self,
        path: Path,
        kind: str,
        cache_dir: Path,
        pack: Pack,
        coordinates: Callable[[Any], Iterator[Any]],
        crowds: str,
        folder: Path | None,
    ) -> None:
        def pack_objects(
            file: dict[str, Any],
            images: ImageRecords,
            annotations: dict[int, list[Any]],
            skips: Skips,
        ) -> dict[str, Any]:
            every = list(chain.from_iterable(annotations.values()))
            _require_pixels(chain.from_iterable(map(coordinates, every)))
            for annotation in every if crowds == "objects" else ():
                if annotation.get("iscrowd") == 1:
                    annotation["iscrowd"] = 0
            return pack(file, images, annotations, skips)

        kind = kind if crowds == "ignore" else f"{kind}_of_crowds"
        super().__init__(path, load_packed(path, kind, cache_dir, pack_objects, folder))
        self.category_ids: list[int] = self.packed["category_ids"].tolist()
        self.categories: list[str] = self.packed["categories"].tolist()

    @abstractmethod
    def find_faint(self, image_size: int) -> dict[str, np.ndarray]:
        """Returns which annotations (A,) bool might be overlooked in images (S, S), and why: by a
        phrase of :class:`Counts`."""

    def census(self, numbers: np.ndarray, image_size: int) -> Counts:
        """Returns the counts of the images of `numbers`, resized to (S, S)."""
        images = self.images_of_annotations()
        used = np.isin(images, numbers)
        crowds = used & self.packed["crowds"]
        objects = used & ~self.packed["crowds"]
        of_class = np.bincount(self.packed["classes"][objects], minlength=len(self.categories))
        faint = self.find_faint(image_size).items()
        return Counts(
            len(numbers),
            int(objects.sum()),
            "object",
            [name for name, count in zip(self.categories, of_class) if not count],
            {
                "ignored crowd{s}": int(crowds.sum()),
                "image{s} without an object": len(numbers) - len(np.unique(images[objects])),
                **{phrase: int((objects & which).sum()) for phrase, which in faint},
            },
            ALL_CROWDS if crowds.any() else "use images that are annotated",
        )


def _require_pixels(coordinates: Iterator[Any]) -> None:
    """Raises where all coordinates of a file are fractions of the image: those of a box may be its
    corner or its centre, which nobody can tell."""
    numbers = (value for value in coordinates if type(value) in (int, float))
    first = next(numbers, None)
    if first is not None and all(abs(value) <= 1 for value in chain([first], numbers)):
        raise DamagedError(
            "all coordinates are from 0 to 1, as fractions of the image; they must be in pixels: "
            "multiply x by its width and y by its height"
        )


def read_categories(file: dict[str, Any]) -> dict[int, str]:
    """Returns the names of the categories by id.

    A damaged category is an error: to leave it out would change the classes of others. So are two
    of one name, which are one class or two. Roboflow's group of the categories is none of them.
    """
    categories: dict[int, dict[str, Any]] = {}
    for index, category in enumerate(get_list(file, "categories")):
        if not isinstance(category, dict):
            raise DamagedError(f"categories[{index}] is {show(category)}, not an object")
        number, said = get_id(category), show(category.get("id"))
        if number is None:
            raise DamagedError(
                f"the id of categories[{index}] is {said}, not a whole number of 64 bits"
            )
        if number in categories:
            raise DamagedError(f"the id of categories[{index}], {number}, is not unique")
        name = encode_text(category.get("name"))
        if not name or len(name) > MAX_NAME:
            raise DamagedError(
                f"the name of categories[{index}] is not a text of 1 to {MAX_NAME} bytes: "
                f"{show(category.get('name'))}"
            )
        categories[number] = category
    _drop_group(categories, file)
    if len(categories) > MAX_CATEGORIES:
        raise DamagedError(f"{len(categories)} categories, more than {MAX_CATEGORIES}")
    numbers: dict[str, int] = {}
    for number, category in categories.items():
        if (first := numbers.setdefault(category["name"], number)) != number:
            raise DamagedError(
                f"the categories {first} and {number} are both named {show(category['name'])}, and "
                "can be one class or two: give them one id or two names"
            )
    return {number: category["name"] for number, category in sorted(categories.items())}


def _drop_group(categories: dict[int, dict[str, Any]], file: dict[str, Any]) -> None:
    """Drops a category that is in no other, of which others are, and of which no object is."""
    groups = {
        number: category["name"]
        for number, category in categories.items()
        if category.get("supercategory") == TOP and category["name"] != TOP
    }
    parents = [category.get("supercategory") for category in categories.values()]
    if groups := {number for number, name in groups.items() if name in parents}:
        annotations = [a for a in get_list(file, "annotations") if isinstance(a, dict)]
        for number in groups.difference(
            a["category_id"] for a in annotations if type(a.get("category_id")) is int
        ):
            del categories[number]


def read_category(annotation: dict[str, Any], classes: dict[int, int]) -> tuple[int, bool]:
    """Returns the category of an object, one that has a class, and whether it is a crowd.

    Raises:
        DamagedError: it has no class, or nobody can say whether it is a crowd.
    """
    category, crowd = annotation.get("category_id"), annotation.get("iscrowd")
    if type(category) is not int or category not in classes:
        raise DamagedError("the category is not one of the file's")
    if crowd not in (None, 0, 1):  # some programs write null for what they do not know
        raise DamagedError("iscrowd is neither 0 nor 1")
    return category, bool(crowd)
