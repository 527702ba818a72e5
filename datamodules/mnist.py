"""MNIST: 70,000 handwritten digits of 28 x 28 pixels (LeCun, Cortes, Burges)."""

from __future__ import annotations

import contextlib
import gzip
import io
import shutil
import tempfile
from pathlib import Path

import torch
import torchvision
from torch import Tensor
from torchvision.datasets.mnist import read_image_file, read_label_file
from torchvision.datasets.utils import check_md5

from datamodules.images import DataNotFoundError, ImageDataModule
from datamodules.memory import LabelledImages

MD5 = dict(torchvision.datasets.MNIST.resources)  # name of a .gz file -> its MD5 hash
VAL_SIZE = 5_000
SPLIT_SEED = 0  # not the seed of the run: every run is validated on the same images


class MNIST(ImageDataModule):
    """55,000 images to train, 5,000 to validate, and the 10,000 of the official test set.

    Args:
        data_dir: holds the four files, compressed or not, in its folder ``mnist`` or ``MNIST/raw``;
            they are only read. Where there are none, torchvision downloads them to ``MNIST/raw``.
        batch_size, seed, device: as of :class:`ImageDataModule`.

    Raises:
        DataNotFoundError: in `prepare_data` and `setup`: a file is damaged; or the files are
            missing and cannot be downloaded.
    """

    image_shape = (1, 28, 28)
    num_classes = 10
    class_names = tuple("0123456789")
    pixel_mean = 33.32
    pixel_std = 78.57

    def __init__(
        self, data_dir: str | Path, batch_size: int, seed: int = 0, device: str = "auto"
    ) -> None:
        super().__init__(batch_size, seed, device)
        self.data_dir = Path(data_dir).resolve()

    def prepare_data(self) -> None:
        folder = self._find_folder() or self._download()
        for name, md5 in MD5.items():
            path = folder / name
            if path.exists() and not check_md5(path, md5):
                raise DataNotFoundError(f"{path} is damaged (wrong md5); delete it and try again")

    def load(self) -> dict[str, LabelledImages]:
        folder = self._find_folder()
        assert folder is not None, "prepare_data comes first"
        with tempfile.TemporaryDirectory() as scratch:
            train_images, train_labels, test_images, test_labels = (
                _read(folder / name, Path(scratch)) for name in MD5
            )
        for part, images, labels in (
            ("train", train_images, train_labels),
            ("t10k", test_images, test_labels),
        ):
            if len(images) != len(labels):
                raise DataNotFoundError(
                    f"{folder} is damaged ({len(images):,} images and {len(labels):,} labels of "
                    f"{part}); delete its files and try again"
                )
        generator = torch.Generator().manual_seed(SPLIT_SEED)
        train, val = torch.randperm(len(train_labels), generator=generator).split(
            [len(train_labels) - VAL_SIZE, VAL_SIZE]
        )
        return {
            "train": LabelledImages(train_images[train], train_labels[train]),
            "val": LabelledImages(train_images[val], train_labels[val]),
            "test": LabelledImages(test_images, test_labels),
        }

    def _find_folder(self) -> Path | None:
        """Returns the folder that holds the four files, compressed or not; None if neither does."""
        for folder in (self.data_dir / "mnist", self.data_dir / "MNIST" / "raw"):
            if all((folder / n).exists() or (folder / n).with_suffix("").exists() for n in MD5):
                return folder
        return None

    def _download(self) -> Path:
        print(f"Downloading MNIST to {self.data_dir}")
        try:
            with contextlib.redirect_stdout(
                io.StringIO()
            ):  # torchvision prints an error for each mirror
                torchvision.datasets.MNIST(self.data_dir, download=True)
        except (OSError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise DataNotFoundError(
                f"MNIST is not in {self.data_dir} and could not be downloaded ({reason}). Put "
                f"{', '.join(MD5)} into {self.data_dir / 'mnist'}, or set HOCONV_DATA_DIR to a "
                "folder whose sub-folder mnist holds them."
            ) from error
        return self.data_dir / "MNIST" / "raw"


def _read(compressed: Path, scratch: Path) -> Tensor:
    """Reads images (N, 1, 28, 28) uint8 or labels (N,) int64 from a .gz file, or from the same file
    decompressed."""
    path = compressed.with_suffix("")
    if compressed.exists():
        path = scratch / path.name
        with gzip.open(compressed) as source, path.open("wb") as target:
            shutil.copyfileobj(source, target)
    try:
        if "labels" in path.name:
            values = read_label_file(str(path))
            if int(values.max()) >= MNIST.num_classes:
                raise ValueError(f"a label is {int(values.max())}")
        else:
            values = read_image_file(str(path)).unsqueeze(1)
            if values.shape[1:] != MNIST.image_shape:
                raise ValueError(f"its images are of {tuple(values.shape[2:])}")
    except (AssertionError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise DataNotFoundError(f"{path} is damaged ({error}); delete it and try again") from error
    return values
