"""Writes the same pictures in COCO's format as ten tools and people write it, each with its habits.

`PICTURES` is what every one of them says.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from PIL import Image

Box = tuple[int, int, int, int]  # x, y, width and height
CLASSES = ("bolt", "washer, small")


class Picture(NamedTuple):
    split: str
    name: str
    width: int
    height: int
    colour: tuple[int, int, int]  # of all its pixels: tells which file was read
    objects: tuple[tuple[str, Box], ...]
    captions: tuple[str, ...]


def _picture(number: int, split: str, *objects: tuple[str, Box]) -> Picture:
    colour = (40 * number, 255 - 30 * number, 25 * number)
    captions = tuple(f"picture {number}, said {time}" for time in range(1 + number % 2))
    return Picture(split, f"part {number}.png", 20 + number, 16, colour, objects, captions)


PICTURES = (
    _picture(1, "train", ("bolt", (1, 2, 4, 5)), ("washer, small", (10, 3, 6, 6))),
    _picture(2, "train", ("washer, small", (0, 0, 22, 8))),
    _picture(3, "train", ("bolt", (5, 5, 3, 3))),
    _picture(4, "val", ("bolt", (2, 1, 7, 9)), ("washer, small", (12, 12, 4, 4))),
    _picture(5, "val", ("washer, small", (3, 3, 10, 5))),
)


def polygon(box: Box) -> list[int]:
    x, y, width, height = box
    return [x, y, x + width, y, x + width, y + height, x, y + height]


def run_lengths(box: Box, picture: Picture) -> dict[str, Any]:
    """COCO's run lengths as numbers: column by column, zeros first."""
    inside = [
        box[0] <= x < box[0] + box[2] and box[1] <= y < box[1] + box[3]
        for x in range(picture.width)
        for y in range(picture.height)
    ]
    counts, last = [0], False
    for value in inside:
        if value != last:
            counts.append(0)
            last = value
        counts[-1] += 1
    return {"counts": counts, "size": [picture.height, picture.width]}


def save(pictures: Sequence[Picture], folder: Path, rename: Callable[[str], str] = str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for picture in pictures:
        size = picture.width, picture.height
        Image.new("RGB", size, picture.colour).save(folder / rename(picture.name))


def describe(pictures: Sequence[Picture], first_id: int = 1, first_category: int = 1) -> Any:
    """COCO's own way of saying it; each tool changes it to its own."""
    images, objects, captions = [], [], []
    for number, picture in enumerate(pictures, start=first_id):
        images.append(
            {"id": number, "file_name": picture.name, "width": picture.width,
             "height": picture.height, "license": 0, "flickr_url": "", "coco_url": ""}
        )  # fmt: skip
        for name, box in picture.objects:
            objects.append(
                {"id": first_id + len(objects), "image_id": number, "iscrowd": 0, "bbox": [*box],
                 "category_id": first_category + CLASSES.index(name), "area": box[2] * box[3],
                 "segmentation": [polygon(box)]}
            )  # fmt: skip
        for text in picture.captions:
            captions.append(
                {"id": first_id + len(captions), "image_id": number, "caption": text}
            )  # fmt: skip
    categories = [
        {"id": number, "name": name, "supercategory": ""}
        for number, name in enumerate(CLASSES, start=first_category)
    ]
    instances = {"images": images, "categories": categories, "annotations": objects}
    return instances, {"images": images, "annotations": captions}


def write(contents: Any, path: Path, encoding: str = "utf-8") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(contents, ensure_ascii=False), encoding=encoding)


def of_split(split: str) -> list[Picture]:
    return [picture for picture in PICTURES if picture.split == split]


def cvat_polygons(folder: Path) -> None:
    """Subsets whose names begin with a capital; pictures in folders by subset."""
    for split, subset in (("train", "Train"), ("val", "Validation")):
        file, _ = describe(of_split(split))
        for annotation in file["annotations"]:
            annotation["attributes"] = {"occluded": False}
        write({"licenses": [], **file}, folder / f"annotations/instances_{subset}.json")
        save(of_split(split), folder / "images" / subset)


def cvat_masks(folder: Path) -> None:
    """No subsets; brush masks as run lengths, which it calls crowds."""
    file, _ = describe(PICTURES)
    boxes = [(picture, box) for picture in PICTURES for _, box in picture.objects]
    for annotation, (picture, box) in zip(file["annotations"], boxes, strict=True):
        annotation |= {"segmentation": run_lengths(box, picture), "iscrowd": 1}
    write(file, folder / "annotations/instances_default.json")
    save(PICTURES, folder / "images/default")


def label_studio(folder: Path) -> None:
    """On Windows: ids and categories from 0, and a prefix before the names of files."""
    file, _ = describe(PICTURES, first_id=0, first_category=0)

    def rename(name: str) -> str:
        return f"{random.Random(name).getrandbits(32):08x}-{name}"

    for image in file["images"]:
        image["file_name"] = f"images\\{rename(image['file_name'])}"
    for annotation in file["annotations"]:
        annotation["ignore"] = 0
    write(file, folder / "result.json")
    save(PICTURES, folder / "images", rename)


def label_studio_uploads(folder: Path) -> None:
    """Without its files: the pictures have the names that they had before they were uploaded."""
    file, _ = describe(PICTURES, first_id=0, first_category=0)
    for image in file["images"]:
        image["file_name"] = f"/data/upload/3/0a1b2c3{image['id']}-{image['file_name']}"
    write(file, folder / "result.json")
    save(PICTURES, folder / "images")


def roboflow(folder: Path) -> None:
    """A folder a split with all its files, and a group of the categories, of the name of one."""
    for split, called in (("train", "train"), ("val", "valid")):
        file, _ = describe(of_split(split), first_id=0)
        group = {"id": 0, "name": CLASSES[0], "supercategory": "none"}
        for category in file["categories"]:
            category["supercategory"] = CLASSES[0]
        file["categories"].insert(0, group)

        def rename(name: str) -> str:
            return f"{name.replace('.', '_')}.rf.{random.Random(name).getrandbits(128):032x}.png"

        for image in file["images"]:
            image["extra"] = {"name": image["file_name"]}
            image["file_name"] = rename(image["file_name"])
        write({"info": {"year": "2026"}, **file}, folder / called / "_annotations.coco.json")
        save(of_split(split), folder / called, rename)


def labelme(folder: Path) -> None:
    """As a script converts it on Windows: paths with the folder, numbers as floats."""
    file, _ = describe(PICTURES, first_id=0, first_category=0)
    for image in file["images"]:
        image |= {"file_name": f"JPEGImages\\{image['file_name']}", "url": None}
    for annotation in file["annotations"]:
        annotation["bbox"] = [float(value) for value in annotation["bbox"]]
        annotation["segmentation"] = [[float(v) for v in annotation["segmentation"][0]]]
        annotation["category_id"] = float(annotation["category_id"])
    write({"type": "instances", **file}, folder / "annotations.json")
    save(PICTURES, folder / "JPEGImages")


def via(folder: Path) -> None:
    """Ids of images as text, one polygon alone, no sizes; the file lies among the pictures."""
    file, _ = describe(PICTURES)
    for image in file["images"]:
        image |= {"width": 0, "height": 0}
    for annotation in file["annotations"]:
        annotation["image_id"] = str(annotation["image_id"])
        annotation["segmentation"] = annotation["segmentation"][0]
    write(file, folder / "via_export_coco.json")
    save(PICTURES, folder)


def datumaro(folder: Path) -> None:
    for split in ("train", "val"):
        instances, captions = describe(of_split(split))
        write(instances, folder / f"annotations/instances_{split}.json")
        write(captions, folder / f"annotations/captions_{split}.json")
        save(of_split(split), folder / "images" / split)


def supervisely(folder: Path) -> None:
    """A project of a folder a data set, each with annotations and pictures; addresses of the
    pictures on a server, and points as pairs."""
    for split in ("train", "val"):
        instances, captions = describe(of_split(split))
        for image in instances["images"]:
            address = f"https://files.example.com/h5un6l2/{split}/{quote(image['file_name'])}?v=2"
            image |= {"file_name": None, "coco_url": address}
        for annotation in instances["annotations"]:
            (corners,) = annotation["segmentation"]
            annotation["segmentation"] = [[*zip(corners[::2], corners[1::2])]]
        write(instances, folder / split / "annotations/instances.json")
        write(captions, folder / split / "annotations/captions.json")
        save(of_split(split), folder / split / "images")


def fiftyone(folder: Path) -> None:
    """Run lengths that are no crowds; values that it does not know are null."""
    file, _ = describe(PICTURES)
    boxes = [(picture, box) for picture in PICTURES for _, box in picture.objects]
    for annotation, (picture, box) in zip(file["annotations"], boxes, strict=True):
        annotation |= {"segmentation": run_lengths(box, picture), "score": None}
    for category in file["categories"]:
        category["supercategory"] = None
    write(file, folder / "labels.json")
    save(PICTURES, folder / "data")


def rectlabel(folder: Path) -> None:
    """Paths of the machine where the boxes were drawn, with a byte order mark, no crowds."""
    for split in ("train", "val"):
        file, _ = describe(of_split(split))
        for image in file["images"]:
            image["file_name"] = f"/Users/ada/Pictures/parts/{split}/{image['file_name']}"
        for annotation in file["annotations"]:
            del annotation["iscrowd"]
        write(file, folder / f"{split}.json", encoding="utf-8-sig")
        save(of_split(split), folder / split)


def by_hand(folder: Path) -> None:
    """From a table on Windows: numbers as text, nothing that can be left out, UTF-16."""
    for split in ("train", "val"):
        instances, captions = describe(of_split(split))
        for file in (instances, captions):
            file["images"] = [
                {"id": f"{image['id']}.0", "file_name": f"./{split}/{quote(image['file_name'])}",
                 "date": float("nan")}
                for image in describe(of_split(split))[0]["images"]
            ]  # fmt: skip
            for annotation in file["annotations"]:
                del annotation["id"]
                for key in annotation.keys() & {"image_id", "category_id", "iscrowd"}:
                    annotation[key] = str(annotation[key])
        for category in instances["categories"]:
            category["id"] = str(category["id"])
            del category["supercategory"]
        write(instances, folder / f"annotations/instances_{split}.json", encoding="utf-16")
        write(captions, folder / f"annotations/captions_{split}.json", encoding="utf-16")
        save(of_split(split), folder / split)


EXPORTERS = (
    cvat_polygons, cvat_masks, label_studio, label_studio_uploads, roboflow, labelme, via, datumaro,
    supervisely, fiftyone, rectlabel, by_hand,
)  # fmt: skip
WITH_CAPTIONS = (datumaro, supervisely, by_hand)
WITHOUT_SPLITS = (cvat_masks, label_studio, label_studio_uploads, labelme, via, fiftyone)
WITH_CROWDS = (cvat_masks,)
