"""Trains a network to classify every pixel. B batch, H height, W width, K classes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from lightning_fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import MetricCollection

from datamodules.coco.annotations.objects import IGNORE
from datamodules.prediction import PredictionBatch
from models.arguments import require_share
from models.metrics.mean import Mean
from models.metrics.pixels import MeanIoU, PixelAccuracy
from models.networks.backbone import load_backbones
from models.tasks.optimizer import Optimized, make, warmup_cosine


class Segmenter(Optimized):
    """Minimises the cross-entropy of the labelled pixels with an optimizer and a schedule of its
    learning rate.

    A batch is ``(images, labels)``; labels are (B, H, W), each 0 ... K - 1, or 255 for a pixel that
    counts in no loss and no metric. Logs under ``val/`` and ``test/``: ``loss``, ``pixel_accuracy``
    and ``mean_iou``, which is the intersection over union of each class over all images, averaged
    over the classes that occur. The last two are NaN where no label is of an object, and the loss
    where no pixel counts.

    Args:
        network: called with ``weights=``, makes the network from images (B, 3, H, W) to logits
            (B, K, H, W).
        num_classes: K, the background included.
        weights: the published weights that its backbone starts from, or None for no backbone.
        learning_rate: the highest of the schedule.
        weight_decay: of the optimizer.
        optimizer, scheduler: see :func:`models.tasks.optimizer.configure`; or their descriptions.
        label_smoothing: the part of each target, in training, that is spread over all classes.
    """

    def __init__(
        self,
        network: Callable[..., nn.Module],
        num_classes: int,
        learning_rate: float,
        weight_decay: float,
        weights: str | None = None,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        scheduler: Callable[..., LRScheduler] = warmup_cosine,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(learning_rate, weight_decay, optimizer, scheduler)
        self.network = make(network)(weights=weights)
        require_share("label_smoothing", label_smoothing)
        self.label_smoothing = label_smoothing
        metrics = MetricCollection(
            {
                "mean_iou": MeanIoU(num_classes, IGNORE),
                "pixel_accuracy": PixelAccuracy(num_classes, IGNORE),
            },
            compute_groups=False,
        )
        self.val_metrics = metrics.clone(prefix="val/")
        self.test_metrics = metrics.clone(prefix="test/")

    def setup(self, stage: str) -> None:
        if stage == "fit":  # in a test or a prediction they come from the checkpoint
            load_backbones(self)

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images.to(self.dtype))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = _check_batch(batch)
        return pixel_cross_entropy(self(images), labels, self.label_smoothing).share()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self._evaluate("val", batch, self.val_metrics)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate("test", batch, self.test_metrics)

    def predict_step(self, batch: PredictionBatch, batch_idx: int) -> list[Tensor]:
        """Returns the class of every pixel of each image, in its original size, (H, W) uint8."""
        if not batch.names:
            return []
        logits = self(batch.images).float()
        return [
            upsample_classes(image, size) for image, size in zip(logits, batch.sizes, strict=True)
        ]

    def _evaluate(
        self, stage: str, batch: tuple[Tensor, Tensor], metrics: MetricCollection
    ) -> Tensor:
        """Updates and logs the metrics; returns the predicted classes, (B, H, W)."""
        images, labels = _check_batch(batch)
        logits = self(images)
        predicted = logits.argmax(1)
        metrics(predicted, labels)
        self.log_mean(f"{stage}/loss", pixel_cross_entropy(logits, labels))
        self.log_dict(metrics, prog_bar=True, batch_size=len(labels))
        return predicted


def pixel_cross_entropy(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Mean:
    """Returns the cross-entropy of the pixels whose label is not 255.

    Args:
        logits: (B, K, H, W).
        labels: (B, H, W) int64.
        label_smoothing: as ``torch.nn.functional.cross_entropy`` has it.
    """
    # Pixels as rows: on images PyTorch's loss has no deterministic implementation for a GPU.
    rows = logits.movedim(1, -1).flatten(0, -2)
    total = F.cross_entropy(
        rows, labels.flatten(), ignore_index=IGNORE, reduction="sum",
        label_smoothing=label_smoothing,
    )  # fmt: skip
    return Mean(total, (labels != IGNORE).sum())


def upsample_classes(logits: Tensor, size: tuple[int, int]) -> Tensor:
    """Interpolates logits (K, h, w) to `size`, and returns the class of the highest, (H, W) uint8.

    One class at a time: K maps of a photograph's size may not fit into memory.
    """
    best = torch.full(size, -torch.inf, device=logits.device)
    found = torch.zeros(size, dtype=torch.uint8, device=logits.device)
    for label, plane in enumerate(logits):
        plane = F.interpolate(plane[None, None], size, mode="bilinear")[0, 0]
        found[plane > best] = label
        best = torch.maximum(best, plane)
    return found


def _check_batch(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the images and their labels, int64; raises where the labels are not of pixels."""
    images, labels = batch
    if labels.dim() != 3:
        raise MisconfigurationException(
            f"data: expected a class for every pixel, labels (B, H, W); got {tuple(labels.shape)}. "
            "Use data=coco or data=coco_tiny with model=segmentation"
        )
    return images, labels.to(torch.int64)
