"""The optimizer and the learning-rate schedule of all models."""

from __future__ import annotations

import math
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins import MixedPrecision

WARMUP_FRACTION = 0.1  # of the steps


def adamw(model: pl.LightningModule, learning_rate: float, weight_decay: float) -> Any:
    """Returns what ``configure_optimizers`` returns: AdamW and the schedule of its learning rate.

    The learning rate rises linearly to its peak for a tenth of the trainer's steps, then falls to
    zero as a cosine. On a GPU one kernel updates all parameters.
    """
    trainer: Any = model.trainer
    # Lightning does not clip the gradients of fused optimizers in mixed precision.
    clips = isinstance(trainer.precision_plugin, MixedPrecision) and trainer.gradient_clip_val
    fused = trainer.strategy.root_device.type == "cuda" and not clips
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, weight_decay=weight_decay, fused=fused
    )
    total = int(trainer.estimated_stepping_batches)
    warmup = max(1, round(WARMUP_FRACTION * total))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
