"""COCO's annotation files, checked and packed into flat arrays.

Objects by the hundred thousand would be copied into every worker, one reference count after the
other; arrays that are mapped from a file are shared. What is damaged is left out here, by name,
before training begins: any value may stand in any place of the file.

N images, A annotations, H height, W width. Format: https://cocodataset.org/#format-data
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.coco import masks
from datamodules.coco.cache import Entry, entry
from datamodules.coco.decoding import MAX_PIXELS
from datamodules.coco.skipped import DamagedError, Skipped
from datamodules.images import DataNotFoundError

FORMAT = 2  # of the packed arrays; part of the key under which they are kept
IGNORE = 255  # the label of pixels that count in no loss and no metric
MAX_CATEGORIES = IGNORE - 1  # labels are bytes, and 0 is the background
MAX_NAME = 255  # characters: no file system has longer names of files


class Annotations:
    """The images of an annotation file, ordered by id, and what is said about each.

    Attributes:
        path: the file.
        file_names: (N,) str.
        sizes: (N, 2) int32, H and W.
        skipped: annotations that were left out, by reason.
    """

    def __init__(self, path: Path, packed: Entry) -> None:
        self.path = path
        self.packed = packed
        self.skipped: Skipped = packed.json("skipped")

    def __len__(self) -> int:
        return len(self.packed["file_names"])

    @property
    def file_names(self) -> np.ndarray:
        return self.packed["file_names"]

    @property
    def sizes(self) -> np.ndarray:
        return self.packed["sizes"]

    def _of_image(self, index: int) -> range:
        """The annotations of an image."""
        first, end = self.packed["image_offsets"][index : index + 2]
        return range(int(first), int(end))


class Instances(Annotations):
    """Instance masks: `label_map` draws those of an image.

    Attributes:
        category_ids, categories: COCO's ids and the names, in the order of the ids. The class of
            the i-th is i + 1; 0 is the background.
    """

    def __init__(self, path: Path, cache_dir: Path) -> None:
        super().__init__(path, _packed(path, "instances", cache_dir, _pack_instances))
        self.category_ids = self.packed["category_ids"].tolist()
        self.categories = self.packed["categories"].tolist()

    def label_map(self, index: int) -> np.ndarray:
        """The classes of the pixels of an image, (H, W) uint8.

        Where instances overlap, the smaller is in front. The pixels of a crowd region that belong
        to no instance are IGNORE: some of them show objects of its category, and some do not.
        """
        labels = np.zeros(self.sizes[index], np.uint8)
        for annotation in self._of_image(index):
            first, end = self.packed["mask_offsets"][annotation : annotation + 2]
            text = self.packed["masks"][first:end].tobytes()
            labels[masks.drawn(text, labels.shape)] = self.packed["labels"][annotation]
        return labels


class Captions(Annotations):
    """The sentences that describe each image."""

    def __init__(self, path: Path, cache_dir: Path) -> None:
        super().__init__(path, _packed(path, "captions", cache_dir, _pack_captions))

    def of_image(self, index: int) -> list[str]:
        return [self.text(annotation) for annotation in self._of_image(index)]

    def text(self, annotation: int) -> str:
        first, end = self.packed["text_offsets"][annotation : annotation + 2]
        return self.packed["text"][first:end].tobytes().decode()

    def texts(self) -> Iterator[str]:
        """All captions, image by image."""
        return (self.text(annotation) for annotation in range(len(self.images_of_annotations())))

    def images_without(self) -> list[str]:
        """The file names of the images that no caption describes."""
        return self.file_names[np.diff(self.packed["image_offsets"]) == 0].tolist()

    def images_of_annotations(self) -> np.ndarray:
        """(A,) int64: the image that each caption describes."""
        return np.repeat(np.arange(len(self)), np.diff(self.packed["image_offsets"]))


class _Skips(defaultdict[str, list[str]]):
    def __init__(self) -> None:
        super().__init__(list)


Images = dict[int, dict[str, Any]]  # by id, in its order
Pack = Callable[[dict[str, Any], Images, dict[int, list[Any]], _Skips], dict[str, Any]]


def _packed(path: Path, kind: str, cache_dir: Path, pack: Pack) -> Entry:
    try:
        stat = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from error
    source = {
        "format": FORMAT,
        "file": path.name,
        "size": stat.st_size,
        "modified_ns": stat.st_mtime_ns,
    }

    def make(folder: Path) -> None:
        file = _read(path)
        skips = _Skips()
        images = _images(file, skips)
        arrays = {
            "file_names": [image["file_name"] for image in images.values()],
            "sizes": np.array([(i["height"], i["width"]) for i in images.values()], np.int32),
            **pack(file, images, _annotations(file, images, skips), skips),
        }
        for name, array in arrays.items():
            np.save(folder / name, array)
        (folder / "skipped.json").write_text(json.dumps(skips, indent=1))

    def make_or_say_why(folder: Path) -> None:
        try:
            make(folder)
        except DamagedError as error:
            raise DataNotFoundError(
                f"{path} is damaged ({error}); mend it or put a whole file in its place, such as "
                "one of https://cocodataset.org/#download"
            ) from error

    return entry(cache_dir, kind, source, make_or_say_why)


def _unreadable(path: Path, error: OSError) -> DataNotFoundError:
    return DataNotFoundError(
        f"{path} cannot be read ({error.strerror}); `python scripts/prepare_data.py coco` "
        "downloads COCO, and HOCONV_DATA_DIR names the folder whose sub-folder coco holds it"
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        file = json.loads(path.read_bytes())
    except OSError as error:
        raise _unreadable(path, error) from error
    except RecursionError as error:
        raise DamagedError("its values are nested too deeply") from error
    except ValueError as error:
        raise DamagedError(f"no JSON: {error}") from error
    if not isinstance(file, dict):
        raise DamagedError("no JSON object")
    return file


def _listed(file: dict[str, Any], name: str) -> list[Any]:
    if not isinstance(part := file.get(name), list) or not part:
        raise DamagedError(f"{name}: missing, empty or no list")
    return part


def _images(file: dict[str, Any], skips: _Skips) -> Images:
    listed = _listed(file, "images")
    ids = Counter(map(_id, listed))
    images = {}
    for place, image in enumerate(listed):
        if reason := _wrong_with_image(image, ids):
            skips[reason].append(f"images[{place}]")
        else:
            images[image["id"]] = image
    _require_some("images", images, skips)
    return dict(sorted(images.items()))


def _wrong_with_image(image: Any, ids: Counter[int | None]) -> str | None:
    if (number := _id(image)) is None:
        return "the image has no integer as its id"
    if ids[number] > 1:
        return "several images have one id"
    name = _encoded(image.get("file_name"))
    if not name or len(name) > MAX_NAME or b"/" in name:
        return "the file name is no name of a file"
    height, width = image.get("height"), image.get("width")
    if type(height) is not int or type(width) is not int or height < 1 or width < 1:
        return "the height or width is no positive integer"
    if height * width > MAX_PIXELS:
        return f"the image has more than {MAX_PIXELS:,} pixels"
    return None


def _annotations(file: dict[str, Any], images: Images, skips: _Skips) -> dict[int, list[Any]]:
    """The annotations of each image by its id."""
    annotations: dict[int, list[Any]] = {number: [] for number in images}
    for place, annotation in enumerate(_listed(file, "annotations")):
        if _id(annotation) is None:
            skips["the annotation has no integer as its id"].append(f"annotations[{place}]")
        elif type(image := annotation.get("image_id")) is not int or image not in images:
            skips["its image is not in the file or was skipped"].append(_name(annotation))
        else:
            annotations[image].append(annotation)
    return annotations


def _categories(file: dict[str, Any]) -> dict[int, str]:
    """The names by id. One that is damaged would change the classes of others."""
    categories: dict[int, str] = {}
    for place, category in enumerate(_listed(file, "categories")):
        number = _id(category)
        if number is None or number in categories:
            raise DamagedError(f"categories[{place}] has no integer of its own as its id")
        name = _encoded(category.get("name"))
        if not name or len(name) > MAX_NAME:
            raise DamagedError(f"categories[{place}] has no text of 1 to {MAX_NAME} bytes as name")
        categories[number] = category["name"]
    if len(categories) > MAX_CATEGORIES:
        raise DamagedError(f"{len(categories)} categories, more than {MAX_CATEGORIES}")
    return dict(sorted(categories.items()))


def _pack_instances(
    file: dict[str, Any], images: Images, annotations: dict[int, list[Any]], skips: _Skips
) -> dict[str, Any]:
    categories = _categories(file)
    classes = {category: i for i, category in enumerate(categories, start=1)}
    texts: list[bytes] = []
    labels: list[int] = []
    counts: list[int] = []
    for number, image in images.items():
        drawn = []
        for annotation in annotations[number]:
            try:
                drawn.append(_instance(annotation, image, classes))
            except DamagedError as error:
                skips[str(error)].append(_name(annotation, image))
        drawn.sort(key=lambda row: row[:3])  # crowds, then from the largest to the smallest
        labels += [row[3] for row in drawn]
        texts += [row[4] for row in drawn]
        counts.append(len(drawn))
    _require_some("annotations", texts, skips)
    return {
        "category_ids": list(categories),
        "categories": list(categories.values()),
        "image_offsets": _offsets(counts),
        "labels": np.array(labels, np.uint8),
        "mask_offsets": _offsets(map(len, texts)),
        "masks": np.frombuffer(b"".join(texts), np.uint8),
    }


def _instance(
    annotation: dict[str, Any], image: dict[str, Any], classes: dict[int, int]
) -> tuple[bool, int, int, int, bytes]:
    """What instances are ordered by, then the label and the mask."""
    category, crowd = annotation.get("category_id"), annotation.get("iscrowd", 0)
    if type(category) is not int or category not in classes:
        raise DamagedError("the category is not one of the file's")
    if crowd not in (0, 1):
        raise DamagedError("iscrowd is neither 0 nor 1")
    size = image["height"], image["width"]
    mask = masks.compressed(annotation.get("segmentation"), *size)
    label = IGNORE if crowd else classes[category]
    return not crowd, -masks.area(mask, size), annotation["id"], label, mask


def _pack_captions(
    file: dict[str, Any], images: Images, annotations: dict[int, list[Any]], skips: _Skips
) -> dict[str, Any]:
    texts: list[bytes] = []
    counts: list[int] = []
    for number, image in images.items():
        described = []
        for annotation in sorted(annotations[number], key=lambda a: a["id"]):
            text = annotation.get("caption")
            if _encoded(text) is None:
                skips["the caption is no text"].append(_name(annotation, image))
            elif text := text.strip():
                described.append(text.encode())
            else:
                skips["the caption is empty"].append(_name(annotation, image))
        texts += described
        counts.append(len(described))
    _require_some("annotations", texts, skips)
    return {
        "image_offsets": _offsets(counts),
        "text_offsets": _offsets(map(len, texts)),
        "text": np.frombuffer(b"".join(texts), np.uint8),
    }


def _require_some(what: str, kept: Collection[Any], skips: _Skips) -> None:
    if not kept:
        reason, names = max(skips.items(), key=lambda item: len(item[1]))
        raise DamagedError(f"none of its {what} can be used; {names[0]}: {reason}")


def _id(entry: Any) -> int | None:
    number = entry.get("id") if isinstance(entry, dict) else None
    return number if type(number) is int and abs(number) < 2**63 else None


def _encoded(text: Any) -> bytes | None:
    """What can be kept in an array: half of a surrogate pair and a zero byte cannot."""
    try:
        return text.encode() if isinstance(text, str) and "\0" not in text else None
    except UnicodeEncodeError:
        return None


def _name(annotation: dict[str, Any], image: dict[str, Any] | None = None) -> str:
    return f"annotation {annotation['id']}" + (f" of {image['file_name']}" if image else "")


def _offsets(lengths: Iterable[int]) -> np.ndarray:
    """(N + 1,): part i is from offset i to offset i + 1."""
    return np.cumsum([0, *lengths], dtype=np.int64)
