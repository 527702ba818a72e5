"""An annotation file of any kind: its images, and what all kinds have in common.

N images.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.images import DataNotFoundError
from datamodules.reading.cache import Entry, find_or_make
from datamodules.reading.decoding import MAX_PIXELS
from datamodules.reading.skipped import DamagedError, Skipped

FORMAT = 5  # version of the packed arrays; part of their key in the cache
MAX_NAME, MAX_PATH = 255, 4095  # bytes: Linux has no longer names of files, and no longer paths


class Annotations:
    """An annotation file: its images, ordered by id, and the annotations of each.

    Attributes:
        path: the file.
        ids: (N,) int64.
        file_names: (N,) str.
        sizes: (N, 2) int32, H and W.
        skipped: reason -> names of the images and annotations that were left out.
    """

    def __init__(self, path: Path, packed: Entry) -> None:
        self.path = path
        self.packed = packed
        self.skipped: Skipped = packed.json("skipped")

    def __len__(self) -> int:
        return len(self.packed["file_names"])

    @property
    def ids(self) -> np.ndarray:
        return self.packed["ids"]

    @property
    def file_names(self) -> np.ndarray:
        return self.packed["file_names"]

    @property
    def sizes(self) -> np.ndarray:
        return self.packed["sizes"]

    def annotations_of(self, index: int) -> range:
        """Returns the indices of an image's annotations."""
        first, end = self.packed["image_offsets"][index : index + 2]
        return range(int(first), int(end))


class Skips(defaultdict[str, list[str]]):
    """reason -> names of what is left out."""

    def __init__(self) -> None:
        super().__init__(list)


ImageRecords = dict[int, dict[str, Any]]  # by id, ascending
# The file, its images, the annotations of each image by its id -> the arrays to keep, by name.
Pack = Callable[[dict[str, Any], ImageRecords, dict[int, list[Any]], Skips], dict[str, Any]]


def load_packed(path: Path, kind: str, cache_dir: Path, pack: Pack) -> Entry:
    """Returns the packed arrays of an annotation file; reads the file where the cache has none."""
    try:
        stat = path.stat()
    except OSError as error:
        raise _unreadable_file_error(path, error) from error
    source = {
        "format": FORMAT,
        "file": path.name,
        "size": stat.st_size,
        "modified_ns": stat.st_mtime_ns,
    }

    def write(folder: Path) -> None:
        file = _read_json(path)
        skips = Skips()
        images = _check_images(file, skips)
        arrays = {
            "ids": np.array(list(images), np.int64),
            "file_names": [image["file_name"] for image in images.values()],
            "sizes": np.array([(i["height"], i["width"]) for i in images.values()], np.int32),
            **pack(file, images, _group_annotations(file, images, skips), skips),
        }
        for name, array in arrays.items():
            np.save(folder / name, array)
        (folder / "skipped.json").write_text(json.dumps(skips, indent=1))

    def write_or_explain(folder: Path) -> None:
        try:
            write(folder)
        except DamagedError as error:
            raise DataNotFoundError(
                f"{path} is damaged ({error}); mend it or put a whole file in its place, such as "
                "one of https://cocodataset.org/#download"
            ) from error

    return find_or_make(cache_dir, kind, source, write_or_explain)


def _unreadable_file_error(path: Path, error: OSError) -> DataNotFoundError:
    return DataNotFoundError(
        f"{path} cannot be read ({error.strerror}); data.folder or data.train_annotations and "
        "data.val_annotations name data of your own; `python scripts/prepare_data.py coco` "
        "downloads COCO, and HOCONV_DATA_DIR names the folder whose sub-folder coco holds it"
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        file = json.loads(path.read_bytes())
    except OSError as error:
        raise _unreadable_file_error(path, error) from error
    except RecursionError as error:
        raise DamagedError("its values are nested too deeply") from error
    except ValueError as error:
        raise DamagedError(f"not JSON: {error}") from error
    if not isinstance(file, dict):
        raise DamagedError("not a JSON object")
    return file


def get_list(file: dict[str, Any], name: str) -> list[Any]:
    if not isinstance(part := file.get(name), list) or not part:
        raise DamagedError(f"{name}: missing, empty or not a list")
    return part


def _check_images(file: dict[str, Any], skips: Skips) -> ImageRecords:
    """Returns the images of a file that can be used, by id."""
    entries = get_list(file, "images")
    ids = Counter(map(get_id, entries))
    images = {}
    for index, image in enumerate(entries):
        if reason := _find_problem(image, ids):
            skips[reason].append(f"images[{index}]")
        else:
            images[image["id"]] = image
    require_some("images", len(images), skips)
    return dict(sorted(images.items()))


def _find_problem(image: Any, ids: Counter[int | None]) -> str | None:
    """Returns why an image cannot be used, or None."""
    if (number := get_id(image)) is None:
        return "the id of the image is not a 64-bit integer"
    if ids[number] > 1:
        return "several images have the same id"
    if not _is_file_name(image.get("file_name")):
        return "the image has no valid file name"
    height, width = image.get("height"), image.get("width")
    if type(height) is not int or type(width) is not int or height < 1 or width < 1:
        return "the height or width is not a positive integer"
    if height * width > MAX_PIXELS:
        return f"the image has more than {MAX_PIXELS:,} pixels"
    return None


def _is_file_name(text: Any) -> bool:
    """Whether it names a file in a folder or in folders inside that one, and no other file."""
    name = encode_text(text)
    if not name or len(name) > MAX_PATH or name.startswith(b"/"):
        return False
    parts = name.split(b"/")
    return parts[-1] not in (b"", b".") and all(
        part != b".." and len(part) <= MAX_NAME for part in parts
    )


def _group_annotations(
    file: dict[str, Any], images: ImageRecords, skips: Skips
) -> dict[int, list[Any]]:
    """Returns the annotations of each image, by the id of the image."""
    annotations: dict[int, list[Any]] = {number: [] for number in images}
    for index, annotation in enumerate(get_list(file, "annotations")):
        if get_id(annotation) is None:
            skips["the id of the annotation is not a 64-bit integer"].append(
                f"annotations[{index}]"
            )
        elif type(image := annotation.get("image_id")) is not int or image not in images:
            skips["its image is not in the file or was skipped"].append(describe(annotation))
        else:
            annotations[image].append(annotation)
    return annotations


def require_some(what: str, kept: int, skips: Skips) -> None:
    if not kept:
        reason, names = max(skips.items(), key=lambda item: len(item[1]))
        raise DamagedError(f"none of its {what} can be used; {names[0]}: {reason}")


def get_id(entry: Any) -> int | None:
    number = entry.get("id") if isinstance(entry, dict) else None
    return number if type(number) is int and abs(number) < 2**63 else None


def encode_text(text: Any) -> bytes | None:
    """Returns a text in UTF-8; None where it is not text, or holds a zero or half of a surrogate
    pair, which the arrays cannot hold."""
    try:
        return text.encode() if isinstance(text, str) and "\0" not in text else None
    except UnicodeEncodeError:
        return None


def describe(annotation: dict[str, Any], image: dict[str, Any] | None = None) -> str:
    return f"annotation {annotation['id']}" + (f" of {image['file_name']}" if image else "")


def offsets(lengths: Iterable[int]) -> np.ndarray:
    """Returns (N + 1,) int64: part i begins at offset i and ends before offset i + 1."""
    return np.cumsum([0, *lengths], dtype=np.int64)
