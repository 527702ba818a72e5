"""A callback that counts how often a training process waits for the word of another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch


class CountBroadcasts(pl.Callback):
    """Writes the number of broadcasts in the steps of a fit to a file."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.count = 0
        self.original: Any = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.original = torch.distributed.broadcast

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return self.original(*args, **kwargs)

        torch.distributed.broadcast = counted

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        torch.distributed.broadcast = self.original
        if trainer.is_global_zero:
            self.path.write_text(str(self.count))
