"""Trains in processes, the first of which may do in its steps what no graph repeats: it counts."""

from __future__ import annotations

import datetime
import sys
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor

from tests.training.capture.recorded_graph import RecordingCPU
from tests.training.capture.support import BATCH, Plain, batches
from training.capture import steps as capture
from training.capture.steps import CapturedSteps

STEPS = 20  # more than DistributedDataParallel takes to arrange itself


class Counting(Plain):
    """Counts in every step, `always`, or in the one that would be captured, `late`, or `never`."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.count, self.when = 0, when

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_rank == 0 and (self.when == "always" or self.late):
            self.count += 1
        return self.loss(batch)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.late = self.when == "late" and batch_idx == capture.WARMUP_STEPS_DDP

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=2**-4)


def main(when: str, mode: str, device: str, processes: str) -> None:
    torch.manual_seed(0)
    if device == "cpu":
        capture.Gpu = RecordingCPU  # pyright: ignore[reportAttributeAccessIssue]
    captured, model = CapturedSteps(mode), Counting(when)
    trainer = pl.Trainer(
        accelerator=device, devices=int(processes), max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[captured],
        strategy=DDPStrategy(timeout=datetime.timedelta(seconds=60)), use_distributed_sampler=False,
    )  # fmt: skip
    data: Any = batches([BATCH] * STEPS)
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=None))
    if trainer.is_global_zero:
        total = float(sum(p.double().sum() for p in model.parameters()))
        print(total.hex(), model.count, captured.replays)


if __name__ == "__main__":
    main(*sys.argv[1:])
