"""The 1,797 handwritten digits of 8 x 8 pixels that come with scikit-learn."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

from datamodules.images import ImageDataModule
from datamodules.memory import LabelledImages

VAL_SIZE = 180
TEST_SIZE = 360
SPLIT_SEED = 0  # not the seed of the run: every run is tested on the same images


class Digits(ImageDataModule):
    """1,257 images to train, 180 to validate, 360 to test: a fixed split, stratified by class."""

    image_shape = (1, 8, 8)
    num_classes = 10
    class_names = tuple("0123456789")
    pixel_max = 16
    pixel_mean = 4.878
    pixel_std = 6.013

    def load(self) -> dict[str, LabelledImages]:
        pixels, targets = load_digits(return_X_y=True)
        images = torch.as_tensor(pixels, dtype=torch.uint8).view(-1, *self.image_shape)
        labels = torch.as_tensor(targets)

        def split(indices: Tensor, size: int) -> tuple[Tensor, Tensor]:
            larger, smaller = train_test_split(
                indices, test_size=size, stratify=labels[indices], random_state=SPLIT_SEED
            )
            return torch.as_tensor(larger), torch.as_tensor(smaller)

        rest, test = split(torch.arange(len(labels)), TEST_SIZE)
        train, val = split(rest, VAL_SIZE)
        parts = {"train": train, "val": val, "test": test}
        return {name: LabelledImages(images[part], labels[part]) for name, part in parts.items()}
