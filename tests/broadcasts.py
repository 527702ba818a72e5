"""A callback that counts how often a training process waits for the word of another."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytorch_lightning as pl
import torch

WAITING = ("broadcast", "barrier")  # of torch.distributed


class CountBroadcasts(pl.Callback):
    """Writes how often a process waited for another in the steps of a fit to a file, without the
    checkpoint at the end of the last epoch."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.count = 0
        self.patched = ExitStack()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for name in WAITING:
            original = getattr(torch.distributed, name)

            def counted(*args: Any, original: Any = original, **kwargs: Any) -> Any:
                self.count += 1
                return original(*args, **kwargs)

            self.patched.enter_context(patch.object(torch.distributed, name, counted))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.patched.close()
        if trainer.is_global_zero:
            self.path.write_text(str(self.count))
