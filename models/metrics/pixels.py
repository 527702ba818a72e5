"""Scores the classes of pixels. K classes, of which 0 is the background."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torchmetrics.classification import MulticlassConfusionMatrix


class PixelMetric(MulticlassConfusionMatrix, ABC):
    """A score of all images of an epoch together, from predicted classes and labels (B, H, W).

    It is NaN where no label is of an object: nothing but background would be scored, and a model
    that finds nothing would be perfect.

    Args:
        num_classes: K.
        ignore_index: the label of pixels that do not count.
    """

    def __init__(self, num_classes: int, ignore_index: int) -> None:
        super().__init__(num_classes, ignore_index=ignore_index, validate_args=False)

    def compute(self) -> Tensor:
        confusion = super().compute().float()
        score = self.score(confusion)
        return torch.where(confusion[1:].sum() > 0, score, torch.nan)

    @abstractmethod
    def score(self, confusion: Tensor) -> Tensor:
        """Returns the score; entry (i, j) counts the pixels of class i that were found to be j."""


class MeanIoU(PixelMetric):
    """The intersection over union of each class, averaged over the classes that occur."""

    def score(self, confusion: Tensor) -> Tensor:
        both = confusion.diagonal()
        either = confusion.sum(0) + confusion.sum(1) - both
        occurs = either > 0
        return (both / either.clamp(min=1)).sum() / occurs.sum()


class PixelAccuracy(PixelMetric):
    """The share of pixels whose class is right."""

    def score(self, confusion: Tensor) -> Tensor:
        return confusion.diagonal().sum() / confusion.sum()
