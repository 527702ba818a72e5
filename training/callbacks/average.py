"""The exponential moving average of the weights."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import EMAWeightAveraging


class MovingAverage(EMAWeightAveraging):
    """As Lightning's, but a test after a fit gets the average, which was validated, too.

    Lightning loads the weights that were averaged instead, if the trainer is that of the fit.
    """

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn == "fit":
            super().on_load_checkpoint(trainer, pl_module, checkpoint)
