"""A model as users write them, and how its captured steps are compared with eager ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.capture import steps as capture
from training.capture.steps import CapturedSteps

CLASSES, FEATURES, BATCH, STEPS = 3, 5, 8, 16


class Plain(pl.LightningModule):
    """Is as its class promises."""

    capturable = True

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES)
        )

    def loss(self, batch: Any) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(self.network(inputs), labels)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        # With this rate captured and eager steps round alike: it is a float32.
        return torch.optim.AdamW(self.parameters(), lr=2**-7, fused=True)


class Scheduled(Plain):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 2.0 ** -(step % 5))
        return {
            "optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }  # fmt: skip


class Ran(NamedTuple):
    losses: list[float]
    parameters: list[Tensor]
    capture: CapturedSteps
    trainer: pl.Trainer
    logged: dict[str, float]

    @property
    def why(self) -> str:
        """Returns why steps ran eagerly that were not to be captured in the end."""
        expected = (capture.WARMUP, capture.TRIAL)
        return "; ".join(why for why in self.capture.eager_steps if why not in expected)


class Losses(pl.Callback):
    def __init__(self) -> None:
        self.losses: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs.get("loss", torch.zeros(())))


def batches(sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(size, FEATURES, generator=generator),
            torch.randint(CLASSES, (size,), generator=generator),
        )
        for size in sizes
    ]


def same(captured: Ran, eager: Ran) -> bool:
    return captured.losses == eager.losses and all(
        map(torch.equal, captured.parameters, eager.parameters)
    )


def check_captured(fit: Callable[..., Ran], model: type[pl.LightningModule], **options: Any) -> Ran:
    """Asserts that steps are captured and give the same bits as eager ones."""
    captured, eager = fit(model, **options), fit(model, "off", **options)
    assert not captured.why
    assert captured.capture.replays > 0
    assert same(captured, eager)
    assert captured.logged == eager.logged
    assert captured.trainer.global_step == eager.trainer.global_step
    return captured


def check_eager(
    fit: Callable[..., Ran], model: type[pl.LightningModule], why: str, **options: Any
) -> Ran:
    """Asserts that no step is captured, for the reason given, and that the run is as without."""
    captured, eager = fit(model, **options), fit(model, "off", **options)
    assert why in captured.why
    assert captured.capture.replays == 0
    assert same(captured, eager)
    assert captured.logged == eager.logged
    return captured
