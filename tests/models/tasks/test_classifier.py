import math
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from models.tasks.classifier import Classifier

STEPS = 30


@pytest.fixture
def batches() -> DataLoader:
    """Points of the plane, whose class says which coordinate is larger."""
    points = torch.randn(16 * STEPS, 2, generator=torch.Generator().manual_seed(0))
    samples = [(point, int(point[0] > point[1])) for point in points]
    return DataLoader(samples, batch_size=16)  # pyright: ignore[reportArgumentType]


class Recorder(pl.Callback):
    """The learning rate of every step."""

    def __init__(self) -> None:
        self.learning_rates: list[float] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.learning_rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def fit(batches: DataLoader, network: nn.Module, recorder: Recorder) -> pl.Trainer:
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=recorder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Classifier(network, num_classes=2, learning_rate=0.5, weight_decay=0.0)
    trainer.fit(model, batches, batches)
    trainer.test(model, batches, verbose=False)
    return trainer


def test_learning_rate_rises_to_its_peak_and_falls_to_nothing(batches):
    recorder = Recorder()
    fit(batches, nn.Linear(2, 2), recorder)
    rates = recorder.learning_rates
    assert len(rates) == STEPS
    assert max(rates) == rates[3] == 0.5
    assert rates[0] < rates[1] < rates[2] < rates[3]
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[-1] < 0.01


def test_learns_and_reports_the_accuracy_of_the_whole_set(batches):
    torch.manual_seed(0)
    network = nn.Linear(2, 2)
    trainer = fit(batches, network, Recorder())
    points = torch.stack([point for point, _ in batches.dataset])
    classes = torch.tensor([label for _, label in batches.dataset])
    accuracy = (network(points).argmax(1) == classes).float().mean()
    assert trainer.callback_metrics["test/accuracy"] == pytest.approx(accuracy.item())
    assert accuracy > 0.95


def test_scores_of_no_sample_are_no_numbers():
    """A batch may be empty; what counts is the mean over all samples."""
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    model = Classifier(nn.Linear(2, 2), num_classes=2, learning_rate=0.5, weight_decay=0.0)
    some, none = ((torch.randn(n, 2), torch.zeros(n, dtype=torch.int64)) for n in (3, 0))
    for batches, finite in (([none], False), ([some, none], True)):
        (found,) = pl.Trainer(accelerator="cpu", **quiet).test(
            model,
            DataLoader(batches, batch_size=None),  # pyright: ignore
            verbose=False,
        )
        assert set(found) == {"test/loss", "test/accuracy"}
        assert all(math.isfinite(value) == finite for value in found.values())
