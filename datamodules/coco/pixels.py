"""Images and label maps of a split at training resolution, decoded on demand or kept on disk.

Every image is decoded once before the first training on it, so that a damaged one is named then
instead of stopping a worker hours later. The cache keeps the names, and with `keep` the pixels too.

N images, S image size.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from datamodules.coco.annotations.file import Annotations
from datamodules.coco.annotations.instances import Instances
from datamodules.coco.annotations.names import one_line
from datamodules.images import DataNotFoundError
from datamodules.memory import send
from datamodules.prediction import PredictionBatch, PredictionSet
from datamodules.reading.cache import Entry, find_or_make
from datamodules.reading.decoding import UnreadableImageError, decode, decode_on
from datamodules.reading.pixels import find_nearest, resize, resize_all
from datamodules.reading.skipped import Skipped
from datamodules.reading.threads import in_threads

FORMAT = 2  # version of the entries; part of their keys in the cache


class Images:
    """The images of a split, (3, S, S) uint8 by their index in the annotation file.

    Args:
        folder: of the image files.
        annotations: the names of the images, and the size of each.
        image_size: S.
        cache_dir: where the names of damaged files are kept.
        keep: whether the decoded images are kept there too.

    Attributes:
        usable: indices of the images that can be decoded.
        skipped: reason -> names of the others.

    Raises:
        DataNotFoundError: none can be decoded.
    """

    def __init__(
        self, folder: Path, annotations: Annotations, image_size: int, cache_dir: Path, keep: bool
    ) -> None:
        self.folder = folder
        self.annotations = annotations
        self.image_size = image_size
        source = {"format": FORMAT, "files": self._hash_files()}
        if keep:
            source["image_size"] = image_size
            size = len(annotations) * 3 * image_size**2
            entry = find_or_make(cache_dir, "images", source, self._decode_all, size)
        else:
            entry = find_or_make(cache_dir, "checked", source, self._check_all)
        self._kept = entry if keep else None
        self.skipped: Skipped = entry.json("skipped")
        skipped = {name for names in self.skipped.values() for name in names}
        self.usable = np.flatnonzero([str(n) not in skipped for n in annotations.file_names])
        if len(self.usable) == 0:
            raise self._no_image_error("can be decoded")

    @property
    def kept(self) -> np.ndarray:
        """The images on disk, (N, 3, S, S) uint8; only with `keep`."""
        assert self._kept is not None
        return self._kept["images"]

    def __getitem__(self, index: int) -> Tensor:
        if self._kept is not None:
            return torch.from_numpy(self.kept[index].copy())
        return resize(self._decode(index), self.image_size)

    def read_on(self, device: torch.device, indices: Sequence[int]) -> Tensor:
        """Reads images to a device, which decodes and resizes them, (B, 3, S, S) uint8."""
        paths = [self.folder / str(self.annotations.file_names[index]) for index in indices]
        images = (
            self._require_size(image, index)
            for index, image in zip(indices, decode_on(device, paths), strict=True)
        )
        return resize_all(images, self.image_size)

    def _hash_files(self) -> str:
        """Returns a hash of the files' names, sizes and modification times."""
        names, sizes = self.annotations.file_names.tolist(), self.annotations.sizes.tolist()
        found: dict[str, os.stat_result] = {}
        for inside in sorted({os.path.dirname(name) for name in names}):
            folder = self.folder / inside
            try:
                for file in os.scandir(folder) if folder.is_dir() else ():
                    if file.is_file():  # no broken links
                        found[os.path.join(inside, file.name)] = file.stat()
            except PermissionError as error:
                raise DataNotFoundError(f"{folder} cannot be read ({error.strerror})") from error
        digest = hashlib.sha256()
        if found.keys().isdisjoint(names):
            raise self._no_image_error("is there")
        for name, size in zip(names, sizes, strict=True):
            stat = found.get(name)
            identity = (name, size, stat and (stat.st_size, stat.st_mtime_ns))
            digest.update(repr(identity).encode())
        return digest.hexdigest()

    def _no_image_error(self, what: str) -> DataNotFoundError:
        first = one_line(str(self.folder / str(self.annotations.file_names[0])))
        return DataNotFoundError(
            f"none of the {len(self.annotations):,} images that {self.annotations.path} names "
            f"{what}; the first that was tried is {first}"
        )

    def _decode(self, index: int) -> Tensor:
        path = self.folder / str(self.annotations.file_names[index])
        return self._require_size(decode(path), index)

    def _require_size(self, image: Tensor | UnreadableImageError, index: int) -> Tensor:
        if isinstance(image, UnreadableImageError):  # though it could be decoded before
            raise image
        if image.shape[1:] != (size := tuple(self.annotations.sizes[index].tolist())):
            height, width = image.shape[1:]
            raise UnreadableImageError(
                f"the image is {width} x {height}, annotated as {size[1]} x {size[0]}"
            )
        return image

    def _check_all(self, folder: Path) -> None:
        self._write_skipped(folder, self._decode, f"Checking {self.folder.name}")

    def _decode_all(self, folder: Path) -> None:
        shape = (len(self.annotations), 3, self.image_size, self.image_size)
        images = np.lib.format.open_memmap(folder / "images.npy", "w+", np.uint8, shape)

        def decode_into(index: int) -> None:
            images[index] = resize(self._decode(index), self.image_size).numpy()

        self._write_skipped(folder, decode_into, f"Decoding {self.folder.name}")
        images.flush()

    def _write_skipped(self, folder: Path, visit: Callable[[int], object], title: str) -> None:
        """Calls `visit` for every image, and writes skipped.json: those that cannot be decoded."""

        def find_problem(index: int) -> str | None:
            try:
                visit(index)
            except UnreadableImageError as error:
                return str(error)
            return None

        skipped: dict[str, list[str]] = {}
        for index, reason in enumerate(in_threads(find_problem, len(self.annotations), title)):
            if reason is not None:
                name = str(self.annotations.file_names[index])
                skipped.setdefault(reason, []).append(name)
        (folder / "skipped.json").write_text(json.dumps(skipped, indent=1))


class LabelMaps:
    """The classes of the pixels of a split, (S, S) uint8 by their index in the annotation file.

    Args:
        instances: the masks.
        image_size: S.
        cache_dir: the cache.
        keep: whether the label maps are kept there.
    """

    def __init__(self, instances: Instances, image_size: int, cache_dir: Path, keep: bool) -> None:
        self.instances = instances
        self.image_size = image_size
        self._kept: Entry | None = None
        if keep:
            source = {
                "format": FORMAT,
                "annotations": instances.packed.folder.name,
                "image_size": image_size,
            }
            size = len(instances) * image_size**2
            self._kept = find_or_make(cache_dir, "labels", source, self._draw_all, size)

    @property
    def kept(self) -> np.ndarray:
        """The label maps on disk, (N, S, S) uint8; only with `keep`."""
        assert self._kept is not None
        return self._kept["labels"]

    def __getitem__(self, index: int) -> Tensor:
        if self._kept is not None:
            return torch.from_numpy(self.kept[index].copy())
        labels = torch.from_numpy(self.instances.label_map(index))
        nearest = InterpolationMode.NEAREST_EXACT
        return F.resize(labels[None], [self.image_size] * 2, interpolation=nearest)[0]

    def draw_on(self, device: torch.device, indices: Sequence[int]) -> Tensor:
        """Draws label maps on a device, (B, S, S) uint8."""
        runs = [self.instances.label_runs(index) for index in indices]
        shape = len(runs), max(len(ends) for ends, _ in runs)
        all_ends = np.full(shape, np.iinfo(np.int32).max, np.int32)
        all_labels = np.zeros(shape, np.uint8)
        for row, (ends, labels) in enumerate(runs):
            all_ends[row, : len(ends)], all_labels[row, : len(ends)] = ends, labels
        sizes = self.instances.sizes[list(indices)].tolist()
        y, x = (
            torch.stack([find_nearest(length, self.image_size) for length in lengths])
            for lengths in zip(*sizes)
        )
        heights = torch.tensor([height for height, _ in sizes])
        columns = (x * heights[:, None]).int()  # where they begin: runs go column by column
        y, columns, all_ends, all_labels = (
            send(values, device)
            for values in (y.int(), columns, *map(torch.from_numpy, (all_ends, all_labels)))
        )
        pixels = (y[:, :, None] + columns[:, None, :]).flatten(1)
        run = torch.searchsorted(all_ends, pixels, right=True)
        return all_labels.gather(1, run).view(len(runs), self.image_size, self.image_size)

    def _draw_all(self, folder: Path) -> None:
        shape = (len(self.instances), self.image_size, self.image_size)
        labels = np.lib.format.open_memmap(folder / "labels.npy", "w+", np.uint8, shape)

        def draw_into(index: int) -> None:
            labels[index] = self[index].numpy()

        for _ in in_threads(draw_into, len(self.instances), f"Drawing {self.instances.path.stem}"):
            pass
        labels.flush()


class SplitSet(PredictionSet):
    """The images of a split that can be decoded, to predict from."""

    def __init__(self, images: Images, numbers: np.ndarray) -> None:
        self.images = images
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> PredictionBatch:
        number = int(self.numbers[index])
        return self._make_batch([number], self.images[number][None])

    def read_on(self, device: torch.device, indices: Sequence[int]) -> PredictionBatch:
        numbers = self.numbers[list(indices)].tolist()
        return self._make_batch(numbers, self.images.read_on(device, numbers))

    def _make_batch(self, numbers: Sequence[int], images: Tensor) -> PredictionBatch:
        annotations = self.images.annotations
        return PredictionBatch(
            images=images,
            sizes=[tuple(annotations.sizes[number].tolist()) for number in numbers],
            names=[str(annotations.file_names[number]) for number in numbers],
            ids=[int(annotations.ids[number]) for number in numbers],
            skipped=[],
        )
