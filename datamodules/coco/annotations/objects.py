"""Annotation files of objects: the categories, and the category of an object."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datamodules.coco.annotations.file import MAX_NAME, Annotations, encode_text, get_id, get_list
from datamodules.reading.cache import Entry
from datamodules.reading.skipped import DamagedError

IGNORE = 255  # the label of pixels that count in no loss and no metric
MAX_CATEGORIES = IGNORE - 1  # labels are bytes, and 0 is the background


class Objects(Annotations):
    """An annotation file of objects.

    Attributes:
        category_ids: those of the file, ascending.
        categories: the names in the same order.
    """

    def __init__(self, path: Path, packed: Entry) -> None:
        super().__init__(path, packed)
        self.category_ids: list[int] = packed["category_ids"].tolist()
        self.categories: list[str] = packed["categories"].tolist()


def read_categories(file: dict[str, Any]) -> dict[int, str]:
    """Returns the names of the categories by id.

    A damaged category is an error: to leave it out would change the classes of others.
    """
    categories: dict[int, str] = {}
    for index, category in enumerate(get_list(file, "categories")):
        number = get_id(category)
        if number is None or number in categories:
            raise DamagedError(
                f"the id of categories[{index}] is not a 64-bit integer or not unique"
            )
        name = encode_text(category.get("name"))
        if not name or len(name) > MAX_NAME:
            raise DamagedError(
                f"the name of categories[{index}] is not a text of 1 to {MAX_NAME} bytes"
            )
        categories[number] = category["name"]
    if len(categories) > MAX_CATEGORIES:
        raise DamagedError(f"{len(categories)} categories, more than {MAX_CATEGORIES}")
    return dict(sorted(categories.items()))


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
