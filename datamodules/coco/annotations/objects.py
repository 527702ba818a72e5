"""Annotation files of objects: the categories, and the category of an object."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datamodules.coco.annotations.file import Annotations, get_id, get_list
from datamodules.coco.annotations.names import MAX_NAME, encode_text, show
from datamodules.reading.cache import Entry
from datamodules.reading.skipped import DamagedError

IGNORE = 255  # the label of pixels that count in no loss and no metric
MAX_CATEGORIES = IGNORE - 1  # labels are bytes, and 0 is the background
TOP = "none"  # the supercategory that Roboflow gives its group


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
