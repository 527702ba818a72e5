"""Trains a network to find objects. B batch, H height, W width, K categories, S image size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from lightning_fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from datamodules.coco.annotations.boxes import ImageBoxes
from datamodules.coco.detection import DetectionBatch
from datamodules.prediction import PredictionBatch
from models.metrics.boxes import ScoredBoxes, average_precision
from models.metrics.mean import Mean
from models.networks.backbone import load_backbones
from models.tasks.centres import Found, find, loss, make_targets
from models.tasks.optimizer import Optimized, make, warmup_cosine


class Detector(Optimized):
    """Finds the centres of objects and a box around each; see :mod:`models.tasks.centres`.

    Logs under ``val/`` and ``test/``: ``loss``,
    of an object, and COCO's average precision ``ap``, ``ap50``, ``ap75``, ``ap_small``,
    ``ap_medium`` and ``ap_large`` of all images together; each is NaN where no object counts in it.

    The ids of the categories come from the data module and are part of the checkpoint.

    Args:
        network: called with ``weights=``, makes the network from images (B, 3, S, S) to logits
            (B, K, h, w) and boxes (B, 4, h, w), as those of a
            :class:`~models.networks.box_detector.BoxDetector`.
        num_categories: K.
        weights: the published weights that its backbone starts from, or None for no backbone.
        learning_rate: the highest of the schedule.
        weight_decay: of the optimizer.
        optimizer, scheduler: see :func:`models.tasks.optimizer.configure`; or their descriptions.
    """

    def __init__(
        self,
        network: Callable[..., nn.Module],
        num_categories: int,
        learning_rate: float,
        weight_decay: float,
        weights: str | None = None,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        scheduler: Callable[..., LRScheduler] = warmup_cosine,
    ) -> None:
        super().__init__(learning_rate, weight_decay, optimizer, scheduler)
        self.network = make(network)(weights=weights)
        self.category_ids = list(range(num_categories))
        # What the annotations say and what was found since the epoch began, image by image.
        self._images: list[tuple[ImageBoxes, ScoredBoxes]] = []

    def setup(self, stage: str) -> None:
        if stage == "fit":  # in a test or a prediction both come from the checkpoint
            load_backbones(self)
            datamodule: Any = self.trainer.datamodule  # pyright: ignore
            if getattr(datamodule, "task", None) != "detection":
                raise MisconfigurationException(
                    f"data: expected images with boxes, got a {type(datamodule).__name__}; use "
                    "data=coco or data=coco_tiny with model=detection"
                )
            self.category_ids = datamodule.category_ids

    def get_extra_state(self) -> list[int]:
        return self.category_ids

    def set_extra_state(self, state: list[int]) -> None:
        self.category_ids = state

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        return self.network(images.to(self.dtype))

    def training_step(self, batch: DetectionBatch, batch_idx: int) -> Tensor:
        logits, boxes = self(batch.images)
        return self._loss(batch, logits, boxes).share()

    def validation_step(self, batch: DetectionBatch, batch_idx: int) -> list[Found]:
        return self._evaluate("val", batch)

    def test_step(self, batch: DetectionBatch, batch_idx: int) -> None:
        self._evaluate("test", batch)

    def on_validation_epoch_end(self) -> None:
        self._score("val")

    def on_test_epoch_end(self) -> None:
        self._score("test")

    def predict_step(self, batch: PredictionBatch, batch_idx: int) -> list[ScoredBoxes]:
        """Returns the objects in each image, in pixels of its file."""
        if not batch.names:
            return []
        image_size = batch.images.shape[-1]
        logits, boxes = self(batch.images)
        found = find(logits, boxes, image_size)
        return [scale(each, image_size, size) for each, size in zip(found, batch.sizes)]

    def _loss(self, batch: DetectionBatch, logits: Tensor, boxes: Tensor) -> Mean:
        image_size = batch.images.shape[-1]
        grid = (logits.shape[-2], logits.shape[-1])
        targets = make_targets(batch.boxes, batch.classes, logits.shape[1], grid, image_size)
        return loss(logits, boxes, targets, image_size)

    def _evaluate(self, stage: str, batch: DetectionBatch) -> list[Found]:
        """Logs the loss; returns the objects found."""
        logits, boxes = self(batch.images)
        self.log_mean(f"{stage}/loss", self._loss(batch, logits, boxes))
        image_size = batch.images.shape[-1]
        found = find(logits, boxes, image_size)
        for said, each in zip(batch.truth.of_images(), found, strict=True):
            self._images.append((said, scale(each, image_size, said.size)))
        return found

    def _score(self, stage: str) -> None:
        """Logs the precision of all images together: it is not the mean of that of batches."""
        images: Sequence[Any] = self._images
        self._images = []
        if self.trainer.world_size > 1:
            parts: list[Any] = [None] * self.trainer.world_size
            torch.distributed.all_gather_object(parts, images)
            images = [each for part in parts for each in part]
        scores = average_precision([said for said, _ in images], [found for _, found in images])
        self.log_dict({f"{stage}/{name}": score for name, score in scores.items()}, prog_bar=True)


def scale(found: Found, image_size: int, size: tuple[int, int]) -> ScoredBoxes:
    """Returns what was found in an image (S, S) in pixels of its file; `size` is its H and W."""
    height, width = size
    left, top, right, bottom = found.boxes.double().cpu().numpy().T / image_size
    columns = (left * width, top * height, (right - left) * width, (bottom - top) * height)
    return ScoredBoxes(
        np.stack(columns, axis=1), found.scores.cpu().numpy(), found.classes.cpu().numpy()
    )
