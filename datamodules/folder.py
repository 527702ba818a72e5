"""Pictures in a folder for each class, to train a classifier on.

N images, B batch, S image size.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from datamodules.augmented import AugmentedImages
from datamodules.census import printable, shorten
from datamodules.images import DataNotFoundError, ImageDataModule
from datamodules.memory import Batch, LabelledImages, TrainingBatches
from datamodules.reading.cache import Entry, find_or_make
from datamodules.reading.decoding import FORMATS, UnreadableImageError, decode
from datamodules.reading.files import find_images, list_folders
from datamodules.reading.pixels import normalise, resize
from datamodules.reading.skipped import report
from datamodules.reading.threads import in_threads
from datamodules.sampling import SeededShuffle, get_rank

FORMAT = 1  # version of the entries; part of their keys in the cache

LabelledFile = tuple[Path, int]


class ClassFolder(ImageDataModule):
    """The images of ``folder/train/<class>`` and ``folder/val/<class>``, resized to squares.

    With `val_share` they are those of ``folder/<class>``, of which a share validates. The test set
    is ``folder/test/<class>`` where there is one, else it is the images that validate. An image is
    any JPEG, PNG, GIF or WebP file in the folder of a class or in folders inside it; it is turned
    upright as its EXIF says. One that cannot be read is left out, counted and named in a warning.
    Files and folders that no user made, such as thumbnails, are passed over (`is_a_user_s`).

    Batches are ``(images, labels)``: (B, 3, S, S) float32, normalised with ImageNet's mean and
    standard deviation, and (B,) int64, numbers in the order of the names of the classes.

    Args:
        folder: holds the images.
        image_size: S, pixels. An image is resized as a whole, nothing is cut off.
        batch_size, seed, device: as of :class:`ImageDataModule`.
        cache_dir: keeps the decoded images: 3 S^2 bytes each.
        val_share: the share of the images of each class that validate; None where there are folders
            ``train`` and ``val``.
        split_seed: chooses them; not the seed of the run, so that every run has the same.
        augment: whether a training image is a random crop of at least half the area, mirrored half
            the time; the seed, the epoch and the image determine which.

    Raises:
        ValueError: an argument is out of range.
        DataNotFoundError: by `setup` and the properties: a folder is missing, holds no images, or
            has classes that the one of training has not; or there are fewer than two classes, or
            one without images to train on.
        CacheError: by `prepare_data` and `setup`: the cache cannot be written.
    """

    def __init__(
        self,
        folder: str | Path | None,
        image_size: int,
        batch_size: int,
        cache_dir: str | Path,
        val_share: float | None = None,
        split_seed: int = 0,
        augment: bool = True,
        seed: int = 0,
        device: str = "auto",
    ) -> None:
        super().__init__(batch_size, seed, device)
        if folder is None:
            raise ValueError(
                "folder: expected the folder that holds train/<class> and val/<class>, got None; "
                "set data.folder"
            )
        if image_size < 1:
            raise ValueError(f"image_size: expected at least 1, got {image_size}")
        if val_share is not None and not 0 < val_share < 1:
            raise ValueError(f"val_share: expected a number between 0 and 1, got {val_share}")
        self.folder = Path(folder).resolve()
        self.image_size = image_size
        self.cache_dir = Path(cache_dir).resolve()
        self.val_share = val_share
        self.split_seed = split_seed
        self.augment = augment

    @property
    def image_shape(self) -> tuple[int, int, int]:  # pyright: ignore
        return 3, self.image_size, self.image_size

    @property
    def class_names(self) -> tuple[str, ...]:  # pyright: ignore
        folder = self.folder / "train" if self.val_share is None else self.folder
        names = tuple(_find_classes(folder))
        if len(names) == 1:
            raise DataNotFoundError(
                f"{folder} has the folder of one class, {printable(names[0])}; a classifier needs "
                "two: data.folder is the folder that holds train/<class> and val/<class>, or with "
                "data.val_share=0.2 the one that holds <class>"
            )
        return names

    @property
    def num_classes(self) -> int:  # pyright: ignore
        return len(self.class_names)

    def prepare_data(self) -> None:
        """Fills the cache, in one process only; `setup` then finds the entries in every process."""
        self._entries()

    def load(self) -> dict[str, LabelledImages]:
        entries = self._entries()
        for name, entry in entries.items():
            report(f"{name} images of {self.folder}", entry.json("skipped"))
            folder = self.folder / name if self.val_share is None else self.folder
            if loose := [path.name for path in find_images(folder, subfolders=False)]:
                report(f"{name} images of {self.folder}", {"no folder of a class has them": loose})
        splits = {name: _labelled_images(entry) for name, entry in entries.items()}
        self._require_every_class(splits["train"])
        return {"test": splits["val"], **splits}

    def train_dataloader(self) -> TrainingBatches[Batch]:
        if not self.augment:
            return super().train_dataloader()
        data = self._place("train")
        sampler = SeededShuffle(len(data), self.seed, **get_rank(self.trainer))
        return TrainingBatches(AugmentedImages(data), sampler, self.batch_size)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Batch:
        images, labels = batch
        return normalise(images), labels

    def _require_every_class(self, train: LabelledImages) -> None:
        """Raises an error where a class has no image to train on."""
        found = set(train.labels.tolist())
        folder = self.folder / "train" if self.val_share is None else self.folder
        for label, name in enumerate(self.class_names):
            if label not in found:
                raise DataNotFoundError(
                    f"there are no images ({', '.join(FORMATS)}) to train on in "
                    f"{printable(str(folder / name))}, the folder of a class; put some there or "
                    "remove it"
                )

    def _entries(self) -> dict[str, Entry]:
        if self.val_share is not None:
            if {"train", "val"} <= set(self.class_names):
                raise DataNotFoundError(
                    f"data.val_share: expected null where there are folders {self.folder}/train "
                    f"and {self.folder}/val, got {self.val_share}; they would be two classes"
                )
            parts = self._divide(self._files(self.folder), self.val_share)
        else:
            tested = ("test",) if (self.folder / "test").is_dir() else ()
            parts = {name: self._files(self.folder / name) for name in ("train", "val", *tested)}
        return {name: self._decoded(name, files) for name, files in parts.items()}

    def _files(self, folder: Path) -> list[LabelledFile]:
        """Returns the images in the folders of the classes, with the label of each."""
        labels = {name: label for label, name in enumerate(self.class_names)}
        files: list[LabelledFile] = []
        for name in _find_classes(folder):
            if name not in labels:
                raise DataNotFoundError(
                    f"{printable(str(folder / name))} is a class that {self.folder / 'train'} has "
                    f"not; it has {shorten(list(labels))}"
                )
            files += [(path, labels[name]) for path in find_images(folder / name)]
        if not files:
            raise DataNotFoundError(
                f"there are no images ({', '.join(FORMATS)}) in folders of classes in {folder}"
            )
        return files

    def _divide(self, files: list[LabelledFile], share: float) -> dict[str, list[LabelledFile]]:
        """Returns the files that train and those that validate, `share` of each class."""
        generator = np.random.default_rng(self.split_seed)
        labels = np.array([label for _, label in files])
        validates = np.zeros(len(files), bool)
        for label in range(self.num_classes):
            members = generator.permutation(np.flatnonzero(labels == label))
            # At least one trains.
            count = min(round(share * len(members)), max(0, len(members) - 1))
            validates[members[:count]] = True
        if not validates.any():
            raise DataNotFoundError(
                f"data.val_share: {share} of the images of each class in {self.folder} leaves none "
                "to validate; set another, or add images"
            )
        return {
            name: [file for file, chosen in zip(files, part) if chosen]
            for name, part in (("train", ~validates), ("val", validates))
        }

    def _decoded(self, name: str, files: list[LabelledFile]) -> Entry:
        digest = hashlib.sha256()
        for path, label in files:
            identity = str(path.relative_to(self.folder)), label, _modified(path)
            digest.update(repr(identity).encode())
        source = {"format": FORMAT, "image_size": self.image_size, "files": digest.hexdigest()}
        size = len(files) * 3 * self.image_size**2

        def write(folder: Path) -> None:
            self._decode(name, files, folder)

        return find_or_make(self.cache_dir, "classes", source, write, size)

    def _decode(self, name: str, files: list[LabelledFile], folder: Path) -> None:
        """Writes the images that can be read, their labels, and the names of the others."""
        shape = (len(files), *self.image_shape)
        images = np.lib.format.open_memmap(folder / "images.npy", "w+", np.uint8, shape)

        def decode_into(row: int) -> str | None:
            try:
                images[row] = resize(decode(files[row][0], upright=True), self.image_size).numpy()
            except UnreadableImageError as error:
                return str(error)
            return None

        labels: list[int] = []
        skipped: dict[str, list[str]] = {}
        for row, reason in enumerate(in_threads(decode_into, len(files), f"Decoding {name}")):
            path, label = files[row]
            if reason is not None:
                skipped.setdefault(reason, []).append(str(path.relative_to(self.folder)))
                continue
            if len(labels) < row:  # the readable ones come first in the file
                images[len(labels)] = images[row]
            labels.append(label)
        if not labels:
            raise DataNotFoundError(
                f"none of the {len(files):,} {name} images in {self.folder} can be decoded; "
                f"{printable(str(files[0][0]))}: {next(iter(skipped))}"
            )
        images.flush()
        np.save(folder / "labels.npy", np.array(labels))
        (folder / "skipped.json").write_text(json.dumps(skipped, indent=1))


def _modified(path: Path) -> tuple[int, int] | None:
    """Returns a file's size and the time of its last change; None where it cannot be read."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_size, stat.st_mtime_ns


def _labelled_images(entry: Entry) -> LabelledImages:
    labels = np.load(entry.folder / "labels.npy")
    # Mapped: what is not used stays on disk. "c", since PyTorch warns of arrays that are read-only.
    images = np.load(entry.folder / "images.npy", mmap_mode="c")[: len(labels)]
    return LabelledImages(torch.from_numpy(images), torch.from_numpy(labels))


def _find_classes(folder: Path) -> list[str]:
    """Returns the names of the folders of classes, sorted."""
    if names := list_folders(folder):
        return names
    raise DataNotFoundError(
        f"there is no folder of a class in {folder}; put images into {folder}/<class>, or set "
        "data.folder; data.val_share=0.2 divides the images of data.folder/<class>"
    )
