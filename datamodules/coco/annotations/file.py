"""An annotation file of any kind: its images, and what all kinds have in common.

N images.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.coco.annotations.exporters import normalise
from datamodules.coco.annotations.names import Found, find_all, one_line, show
from datamodules.images import DataNotFoundError
from datamodules.reading.cache import Entry, find_or_make
from datamodules.reading.decoding import MAX_PIXELS, UnreadableImageError, read_size
from datamodules.reading.skipped import DamagedError, Skipped
from datamodules.reading.threads import in_threads

FORMAT = 7  # version of the packed arrays; part of their key in the cache
SHOWN_KEYS = 5  # of a file in another format


class Annotations:
    """An annotation file: its images, ordered by id, and the annotations of each.

    Its kinds take the path of the file, the folder of the cache, and that of the images: see
    `load_packed`.

    Attributes:
        path: the file.
        ids: (N,) int64.
        file_names: (N,) str, relative to the folder of the images.
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

    def images_of_annotations(self) -> np.ndarray:
        """Returns the index of the image of each annotation, (A,) int64."""
        return np.repeat(np.arange(len(self)), np.diff(self.packed["image_offsets"]))


class Skips(defaultdict[str, list[str]]):
    """reason -> names of what is left out."""

    def __init__(self) -> None:
        super().__init__(list)


ImageRecords = dict[int, dict[str, Any]]  # by id, ascending
# The file, its images, the annotations of each image by its id -> the arrays to keep, by name.
Pack = Callable[[dict[str, Any], ImageRecords, dict[int, list[Any]], Skips], dict[str, Any]]


def load_packed(
    path: Path, kind: str, cache_dir: Path, pack: Pack, folder: Path | None = None
) -> Entry:
    """Returns the packed arrays of an annotation file; reads the file where the cache has none.

    The files that its images are depend on what is in their folder too. So their names are kept
    first, by themselves, and the rest for the files that these names mean now.

    Args:
        folder: of the images; None where every size is in the annotation file, and names are taken
            as they are.

    Raises:
        DataNotFoundError: the file cannot be read, or nothing in it can be used.
    """
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
    read = functools.cache(lambda: _read_json(path))  # at most once, and not kept

    def write_names(entry: Path) -> None:
        names = [_get_name_and_sized(image) for image in get_list(read(), "images")]
        (entry / "names.json").write_text(json.dumps(names))

    def write(entry: Path) -> None:
        file, skips = read(), Skips()
        images = _check_images(file, found, folder, skips)
        arrays = {
            "ids": np.array(list(images), np.int64),
            "file_names": [image["file_name"] for image in images.values()],
            "sizes": np.array([(i["height"], i["width"]) for i in images.values()], np.int32),
            **pack(file, images, _group_annotations(file, images, skips), skips),
        }
        for name, array in arrays.items():
            np.save(entry / name, array)
        (entry / "skipped.json").write_text(json.dumps(skips, indent=1))

    try:
        names = find_or_make(cache_dir, "names", source, write_names).json("names")
        found = find_all([name for name, _ in names], folder)
        files = _hash_files(found, [sized for _, sized in names], folder)
        return find_or_make(cache_dir, kind, source | {"files": files}, write)
    except DamagedError as error:
        raise DataNotFoundError(f"{path}: {one_line(str(error))}") from error


def _get_name_and_sized(image: Any) -> tuple[Any, bool]:
    """Returns the file name of an image, any value, and whether its size need not be looked up."""
    if not isinstance(image, dict):
        return None, True
    return image.get("file_name"), image.get("height") is not None is not image.get("width")


def _hash_files(found: Sequence[Found], sized: Sequence[bool], folder: Path | None) -> str:
    """Returns a hash of what decides about the images: their files, and what these are like where
    their sizes are looked up."""
    digest = hashlib.sha256()
    for of_image, known in zip(found, sized, strict=True):
        looked_up = None
        if not known and folder is not None and of_image.problem is None:
            try:
                stat = (folder / of_image.name).stat()
                looked_up = stat.st_size, stat.st_mtime_ns
            except OSError:  # it is missing
                looked_up = ()
        digest.update(repr((*of_image, looked_up)).encode())
    return digest.hexdigest()


def _unreadable_file_error(path: Path, error: OSError) -> DataNotFoundError:
    return DataNotFoundError(f"{path} cannot be read ({error.strerror})")


def _read_json(path: Path) -> dict[str, Any]:
    """Returns a file in UTF-8, UTF-16 or UTF-32, with or without a byte order mark."""
    try:
        file = json.loads(path.read_bytes())
    except OSError as error:
        raise _unreadable_file_error(path, error) from error
    except RecursionError as error:
        raise DamagedError("its values are nested too deeply") from error
    except UnicodeDecodeError as error:
        raise DamagedError(f"not text in UTF-8 or UTF-16 (byte {error.start})") from error
    except ValueError as error:
        raise DamagedError(f"not JSON: {error}") from error
    if not isinstance(file, dict):
        raise DamagedError(
            f"it holds {'a list' if isinstance(file, list) else show(file)}, and COCO's format an "
            'object with "images" and "annotations"'
        )
    normalise(file)
    return file


def get_list(file: dict[str, Any], name: str) -> list[Any]:
    if name not in file:
        keys = ", ".join(map(json.dumps, list(file)[:SHOWN_KEYS])) or "nothing"
        raise DamagedError(f'it has no "{name}" but {keys}, so it is not in COCO\'s format')
    if not isinstance(part := file[name], list):
        raise DamagedError(f'"{name}" is {show(part)}, not a list')
    if not part:
        raise DamagedError(f'"{name}" is an empty list')
    return part


def _check_images(
    file: dict[str, Any], found: Sequence[Found], folder: Path | None, skips: Skips
) -> ImageRecords:
    """Returns the images of a file that can be used, by id."""
    entries = get_list(file, "images")
    ids = Counter(map(get_id, entries))
    unsized = _look_up_sizes(entries, found, folder)
    images = {}
    for index, (image, of_image) in enumerate(zip(entries, found, strict=True)):
        if problem := _find_problem(image, of_image, ids) or unsized.get(index):
            reason, detail = problem
            skips[reason].append(f"images[{index}] ({detail})")
        else:
            images[image["id"]] = image | {"file_name": of_image.name}
    require_some("images", len(images), skips)
    return dict(sorted(images.items()))


def _look_up_sizes(
    entries: Sequence[Any], found: Sequence[Found], folder: Path | None
) -> dict[int, tuple[str, str]]:
    """Fills in sizes from the files of images; returns why not, by index."""
    unsized = [
        index
        for index, (image, of_image) in enumerate(zip(entries, found, strict=True))
        if not _get_name_and_sized(image)[1] and of_image.problem is None
    ]
    if folder is None:
        return {index: ("the height or width is missing", found[index].name) for index in unsized}

    def look_up(row: int) -> tuple[str, str] | None:
        path, image = folder / found[unsized[row]].name, entries[unsized[row]]
        try:
            size = read_size(path)
        except UnreadableImageError as error:
            return f"the annotation file lacks its height or width, and {error}", str(path)
        for key, length in zip(("height", "width"), size, strict=True):
            if image.get(key) is None:
                image[key] = length
        return None

    problems = in_threads(look_up, len(unsized), "Looking up sizes") if unsized else ()
    return {index: problem for index, problem in zip(unsized, problems) if problem is not None}


def _find_problem(image: Any, of_image: Found, ids: Counter[int | None]) -> tuple[str, str] | None:
    """Returns why an image cannot be used, and what the file says; None where it can."""
    if not isinstance(image, dict):
        return "the image is not an object", show(image)
    number = get_id(image)
    if number is None:
        return "the id of the image is not a whole number of 64 bits", f"id {show(image.get('id'))}"
    if ids[number] > 1:
        return "several images have the same id", f"id {number}"
    if of_image.problem is not None:
        return of_image.problem, of_image.detail
    height, width = image.get("height"), image.get("width")
    if height is None or width is None:
        return None  # it was looked up in vain
    size = f"{show(width)} x {show(height)}"
    if type(height) is not int or type(width) is not int or height < 1 or width < 1:
        return "the height or width is not a positive whole number", size
    if height * width > MAX_PIXELS:
        return f"the image has more than {MAX_PIXELS:,} pixels", size
    return None


def _group_annotations(
    file: dict[str, Any], images: ImageRecords, skips: Skips
) -> dict[int, list[Any]]:
    """Returns the annotations of each image, by the id of the image."""
    annotations: dict[int, list[Any]] = {number: [] for number in images}
    for index, annotation in enumerate(get_list(file, "annotations")):
        if not isinstance(annotation, dict):
            skips["the annotation is not an object"].append(f"annotations[{index}]")
            continue
        image = annotation.get("image_id")
        if type(image) is int and image in images:
            annotations[image].append(annotation)
        else:
            skips["its image is not in the file or was skipped"].append(
                f"{describe(annotation)} (image_id {show(image)})"
            )
    return annotations


def require_some(what: str, kept: int, skips: Skips) -> None:
    if not kept:
        reason, names = max(skips.items(), key=lambda item: len(item[1]))
        raise DamagedError(f"none of its {what} can be used; {names[0]}: {reason}")


def get_id(entry: Any) -> int | None:
    number = entry.get("id") if isinstance(entry, dict) else None
    return number if type(number) is int and abs(number) < 2**63 else None


def describe(annotation: dict[str, Any], image: dict[str, Any] | None = None) -> str:
    return f"annotation {annotation['id']}" + (f" of {image['file_name']}" if image else "")


def offsets(lengths: Iterable[int]) -> np.ndarray:
    """Returns (N + 1,) int64: part i begins at offset i and ends before offset i + 1."""
    return np.cumsum([0, *lengths], dtype=np.int64)
