"""The statistics of batch normalisation where several processes train."""

from __future__ import annotations

import pytorch_lightning as pl
import torch.distributed as dist
from pytorch_lightning.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm


class FirstStatistics(pl.Callback):
    """Gives every process the first one's statistics of batch normalisation for a validation.

    DistributedDataParallel would do so in every step, in which nothing reads them: the results are
    the same.
    """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit" or not isinstance(trainer.strategy, DDPStrategy):
            return
        names = [
            f"{path}.{name}" if path else name
            for path, module in pl_module.named_modules()
            if isinstance(module, BATCH_NORMS)
            for name, _ in module.named_buffers(recurse=False)
        ]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(pl_module, names)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.world_size == 1 or not isinstance(trainer.strategy, DDPStrategy):
            return
        for module in pl_module.modules():
            if isinstance(module, BATCH_NORMS):
                for statistic in module.buffers(recurse=False):
                    dist.broadcast(statistic, src=0)
