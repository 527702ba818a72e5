"""Trains a network to classify."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from datamodules.prediction import PredictionBatch
from models.arguments import require_share
from models.metrics.mean import EpochMean, Mean
from models.tasks.optimizer import Optimized, make, warmup_cosine


class Classifier(Optimized):
    """Minimises the cross-entropy with an optimizer and a schedule of its learning rate.

    A batch is ``(inputs, labels)``. Logs ``loss`` and ``accuracy`` under ``val/`` and ``test/``.

    Args:
        network: maps inputs (B, ...) to logits (B, num_classes); or its description.
        num_classes: the labels are 0 ... num_classes - 1.
        learning_rate: the highest of the schedule.
        weight_decay: of the optimizer.
        optimizer, scheduler: see :func:`models.tasks.optimizer.configure`; or their descriptions.
        label_smoothing: the part of each target, in training, that is spread over all classes.
    """

    def __init__(
        self,
        network: nn.Module,
        num_classes: int,
        learning_rate: float,
        weight_decay: float,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        scheduler: Callable[..., LRScheduler] = warmup_cosine,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(learning_rate, weight_decay, optimizer, scheduler)
        self.network = make(network)
        require_share("label_smoothing", label_smoothing)
        self.label_smoothing = label_smoothing
        self.means.update({f"{stage}/accuracy": EpochMean() for stage in ("val", "test")})

    def forward(self, inputs: Tensor) -> Tensor:
        return self.network(inputs.to(self.dtype))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Returns the loss and the accuracy, scalars."""
        inputs, labels = batch
        logits = self(inputs)
        loss = F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)
        return {"loss": loss, "accuracy": (logits.argmax(1) == labels).to(loss.dtype).mean()}

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate("test", batch)

    def predict_step(self, batch: PredictionBatch, batch_idx: int) -> Tensor:
        """Returns the probability of every class for each image, (B, num_classes) float32."""
        if not batch.names:
            return batch.images.new_empty(0)
        return self(batch.images).float().softmax(-1)

    def _evaluate(self, stage: str, batch: tuple[Tensor, Tensor]) -> None:
        inputs, labels = batch
        logits = self(inputs)
        count = torch.tensor(len(labels), device=labels.device)
        total = F.cross_entropy(logits, labels, reduction="sum")
        self.log_mean(f"{stage}/loss", Mean(total, count))
        correct = (logits.argmax(1) == labels).sum()
        self.log_mean(f"{stage}/accuracy", Mean(correct, count), prog_bar=True)
