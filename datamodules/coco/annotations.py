"""COCO's annotation files, read with pycocotools and packed into flat arrays.

Objects by the hundred thousand would be copied into every worker, one reference count after the
other; arrays that are mapped from a file are shared. What is damaged is left out here, by name,
before training begins.

N images, A annotations, H height, W width. Format: https://cocodataset.org/#format-data
"""

from __future__ import annotations

import contextlib
import io
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from pycocotools import mask as rle_format
from pycocotools.coco import COCO as AnnotationFile

from datamodules.coco.cache import Entry, entry
from datamodules.coco.skipped import Skipped
from datamodules.images import DataNotFoundError

FORMAT = 1  # of the packed arrays; part of the key under which they are kept
IGNORE = 255  # the label of pixels that count in no loss and no metric


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
            mask: Any = {"size": labels.shape, "counts": self.packed["masks"][first:end].tobytes()}
            labels[rle_format.decode(mask).view(bool)] = self.packed["labels"][annotation]
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


Pack = Callable[[Any, list[Any], "_Skips"], dict[str, Any]]


class _Skips(defaultdict[str, list[str]]):
    def __init__(self) -> None:
        super().__init__(list)


def _packed(path: Path, kind: str, cache_dir: Path, pack: Pack) -> Entry:
    try:
        stat = path.stat()
    except OSError as error:
        raise DataNotFoundError(
            f"{path} cannot be read ({error.strerror}); `python scripts/prepare_data.py coco` "
            "downloads COCO, and HOCONV_DATA_DIR names the folder whose sub-folder coco holds it"
        ) from error
    source = {
        "format": FORMAT,
        "file": path.name,
        "size": stat.st_size,
        "modified_ns": stat.st_mtime_ns,
    }

    def make(folder: Path) -> None:
        file = _read(path)
        images = sorted(file.imgs.values(), key=lambda image: image["id"])
        skips = _Skips()
        arrays = {
            "file_names": [image["file_name"] for image in images],
            "sizes": np.array([(i["height"], i["width"]) for i in images], np.int32),
            **pack(file, images, skips),
        }
        for name, array in arrays.items():
            np.save(folder / name, array)
        (folder / "skipped.json").write_text(json.dumps(skips, indent=1))

    def make_or_say_why(folder: Path) -> None:
        try:
            make(folder)
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            raise DataNotFoundError(
                f"{path} is damaged ({type(error).__name__}: {error}); delete it and get it again"
            ) from error

    return entry(cache_dir, kind, source, make_or_say_why)


def _read(path: Path) -> Any:
    with contextlib.redirect_stdout(io.StringIO()):  # it reports its progress
        file = AnnotationFile(str(path))
    if not file.imgs or not file.anns:
        raise ValueError(f"{len(file.imgs)} images, {len(file.anns)} annotations")
    return file


def _pack_instances(file: Any, images: list[Any], skips: _Skips) -> dict[str, Any]:
    classes = {category: i for i, category in enumerate(sorted(file.cats), start=1)}
    masks: list[bytes] = []
    labels: list[int] = []
    counts: list[int] = []
    for image in images:
        drawn = []
        for annotation in file.imgToAnns[image["id"]]:
            mask = _mask(annotation.get("segmentation"), image["height"], image["width"])
            if annotation["category_id"] not in classes:
                skips["the category is not one of the file's"].append(_name(annotation, image))
            elif isinstance(mask, str):
                skips[mask].append(_name(annotation, image))
            else:
                crowd = bool(annotation.get("iscrowd", 0))
                area = int(rle_format.area(mask))
                label = IGNORE if crowd else classes[annotation["category_id"]]
                drawn.append((not crowd, -area, annotation["id"], label, mask["counts"]))
        drawn.sort(key=lambda row: row[:3])  # crowds, then from the largest to the smallest
        labels += [row[3] for row in drawn]
        masks += [row[4] for row in drawn]
        counts.append(len(drawn))
    _skip_annotations_without_image(file, skips)
    return {
        "category_ids": sorted(file.cats),
        "categories": [file.cats[category]["name"] for category in sorted(file.cats)],
        "image_offsets": _offsets(counts),
        "labels": np.array(labels, np.uint8),
        "mask_offsets": _offsets(map(len, masks)),
        "masks": np.frombuffer(b"".join(masks), np.uint8),
    }


def _pack_captions(file: Any, images: list[Any], skips: _Skips) -> dict[str, Any]:
    texts: list[bytes] = []
    counts: list[int] = []
    for image in images:
        described = []
        for annotation in sorted(file.imgToAnns[image["id"]], key=lambda a: a["id"]):
            if text := annotation["caption"].strip():
                described.append(text.encode())
            else:
                skips["the caption is empty"].append(_name(annotation, image))
        texts += described
        counts.append(len(described))
    _skip_annotations_without_image(file, skips)
    return {
        "image_offsets": _offsets(counts),
        "text_offsets": _offsets(map(len, texts)),
        "text": np.frombuffer(b"".join(texts), np.uint8),
    }


def _mask(segmentation: Any, height: int, width: int) -> Any:
    """The run lengths of a polygon or RLE mask as pycocotools compresses them, or what is wrong.

    pycocotools trusts its input: what it would read past its memory, or take for a box, is
    found here.
    """
    if not segmentation:
        return "there is no mask"
    if isinstance(segmentation, list):
        bounds = np.array((width, height))
        polygons = [p for p in segmentation if len(p) >= 6 and len(p) % 2 == 0]
        for polygon in polygons:
            points = np.array(polygon, float).reshape(-1, 2)
            if not ((points >= -bounds) & (points <= 2 * bounds)).all():  # nor are NaNs
                return "a polygon is far outside the image"
        if not polygons:
            return "no polygon has three points"
        return rle_format.merge(rle_format.frPyObjects(polygons, height, width))
    if list(segmentation["size"]) != [height, width]:
        return "the mask is not of the image's size"
    runs = segmentation["counts"]
    if isinstance(runs, list):
        if min(runs, default=-1) < 0 or sum(runs) != height * width:
            return "the mask's run lengths do not add up to the image"
        return rle_format.frPyObjects(segmentation, height, width)
    mask: Any = {
        "size": [height, width],
        "counts": runs.encode() if isinstance(runs, str) else runs,
    }
    try:
        rle_format.decode(mask)
    except ValueError:
        return "the mask's run lengths do not add up to the image"
    return mask


def _skip_annotations_without_image(file: Any, skips: _Skips) -> None:
    for annotation in file.anns.values():
        if annotation["image_id"] not in file.imgs:
            skips["the image is not one of the file's"].append(f"annotation {annotation['id']}")


def _name(annotation: dict, image: dict) -> str:
    return f"annotation {annotation['id']} of {image['file_name']}"


def _offsets(lengths: Iterable[int]) -> np.ndarray:
    """(N + 1,): part i is from offset i to offset i + 1."""
    return np.cumsum([0, *lengths], dtype=np.int64)
