"""The exponential moving average of the weights."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import WeightAveraging
from torch import Tensor


class MovingAverage(WeightAveraging):
    """Validates, tests and keeps the exponential moving average of the weights of all steps, and
    that of buffers.

    A new step counts 1 - decay; the first n steps count more, 9 / (10 + n), so that a short run
    does not end with its initial weights.

    Args:
        decay: between 0 and 1.

    Raises:
        ValueError: `decay` is not.
    """

    def __init__(self, decay: float = 0.999) -> None:
        if not 0 <= decay <= 1:
            raise ValueError(f"decay: expected a number from 0 to 1, got {decay}")

        def average(averaged: Tensor, new: Tensor, count: Any) -> Tensor:
            if not averaged.is_floating_point():
                return new
            share = torch.clamp(9 / (10 + count), min=1 - decay)
            return averaged + (new - averaged) * share.to(averaged.dtype)

        super().__init__(avg_fn=average)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        # A test after the fit gets the average that it asked for: Lightning would replace it by the
        # weights of the last step.
        if trainer.state.fn == "fit":
            super().on_load_checkpoint(trainer, pl_module, checkpoint)
