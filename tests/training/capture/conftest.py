"""On a GPU steps are CUDA graphs; elsewhere a stand-in records the operators of the CPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch

from tests.training.capture.recorded_graph import RecordingCPU
from tests.training.capture.support import BATCH, STEPS, Losses, Ran, batches
from training.capture import steps as capture
from training.capture.steps import CapturedSteps

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES, autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "cpu":
        monkeypatch.setattr(capture, "Gpu", RecordingCPU)
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        yield request.param


@pytest.fixture
def fit(device: str) -> Callable[..., Ran]:
    def run(
        model: type[pl.LightningModule], mode: str = "auto", verify: int = 1000, **options: Any
    ) -> Ran:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        data: Any = options.pop("data", None) or batches([BATCH] * STEPS)
        callbacks, validation = options.pop("callbacks", []), options.pop("validation", None)
        captured = options.pop("captured", None) or CapturedSteps(mode, verify)
        losses, made, resumed = Losses(), model(), options.pop("resumed", None)
        trainer = pl.Trainer(
            accelerator="gpu" if device == "cuda" else "cpu", devices=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[captured, losses, *callbacks], **{"max_epochs": 1, **options},
        )  # fmt: skip
        loader: Any = data
        if not isinstance(data, Iterator):
            loader = torch.utils.data.DataLoader(data, batch_size=None)  # pyright: ignore
        trainer.fit(made, loader, validation, ckpt_path=resumed, weights_only=True)
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        values = [float(loss) for loss in losses.losses]
        parameters = [parameter.detach().cpu() for parameter in made.parameters()]
        return Ran(values, parameters, captured, trainer, logged)

    return run
