"""Trains in processes, the first of which may do in its steps what no graph can: it returns
a number."""

from __future__ import annotations

import datetime
import sys
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy

from tests.training.capture.recorded_graph import RecordingCPU
from tests.training.capture.support import BATCH, Plain, batches
from training.capture import steps as capture
from training.capture.steps import CapturedSteps

STEPS = 20  # more than DistributedDataParallel takes to arrange itself


class Numbering(Plain):
    """Returns a number from every step, `always`; from the one that would be captured, `late`; or
    `never`."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when = when

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        first = self.trainer.global_rank == 0
        numbers = {"number": 1} if first and (self.when == "always" or self.late) else {}
        return {"loss": self.loss(batch), **numbers}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.late = self.when == "late" and batch_idx == capture.WARMUP_STEPS_DDP

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=2**-4)


def main(when: str, mode: str, device: str, processes: str) -> None:
    torch.manual_seed(0)
    if device == "cpu":
        capture.Gpu = RecordingCPU  # pyright: ignore[reportAttributeAccessIssue]
    captured, model = CapturedSteps(mode), Numbering(when)
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
        print(total.hex(), captured.replays)


if __name__ == "__main__":
    main(*sys.argv[1:])
