"""Whose steps are captured, and what is said of those that are not."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import StochasticWeightAveraging
from torch import Tensor
from torchmetrics import SumMetric

from tests.training.capture.support import Plain, Ran, check_captured, check_eager, same
from training.capture import trial
from training.capture.steps import CapturedSteps, CaptureError
from training.configuration.errors import MisconfigurationException


class Unmarked(Plain):
    capturable = False


def test_module_that_does_not_promise_it_is_eager(fit: Callable[..., Ran]) -> None:
    check_eager(fit, Unmarked, "Unmarked does not say capturable = True")


def test_on_captures_any_module(fit: Callable[..., Ran]) -> None:
    captured, eager = fit(Unmarked, "on"), fit(Unmarked, "off")
    assert captured.capture.replays > 0
    assert same(captured, eager)


def test_on_is_an_error_where_a_step_cannot_be_captured(fit: Callable[..., Ran]) -> None:
    class Indexed(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch) * (1 + batch_idx)

    message = r"capture=on: a step cannot be captured: .* differs from an eager one by"
    with pytest.raises(CaptureError, match=message):
        fit(Indexed, "on")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("yes",), "capture: expected one of auto, on, off; got 'yes'"),
        (("on", 0), "capture.verify_every_n_steps: expected at least 1, got 0"),
    ],
)
def test_arguments_are_checked(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        CapturedSteps(*arguments)


class Averaged(Plain):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))


def test_buffer_that_is_written_into(fit: Callable[..., Ran]) -> None:
    class Updating(Averaged):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.mean.mul_(0.9).add_(loss.detach(), alpha=0.1)
            return loss * (1 + self.mean)

    check_captured(fit, Updating)


class Rebinding(Averaged):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss + self.mean


class Waiting(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss * 2 if loss.item() > 1 else loss


class Counting(Plain):
    steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        return self.loss(batch) / self.steps


class Progressing(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) / (1 + self.global_step)


class Drawing(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * random.random()


class LoggingNumbers(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("number", float(batch_idx))
        return self.loss(batch)


class ReadingGradients(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        gradients = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        norm = torch.stack(gradients).norm() if gradients else torch.zeros_like(batch[0][0, 0])
        self.log("norm", norm)
        return self.loss(batch)


class Measuring(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.total = SumMetric(nan_strategy="disable")  # any other waits for the GPU

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.total(loss.detach())
        self.log("total", self.total, on_epoch=True)
        return loss


class Hooked(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.network[0].register_forward_hook(lambda *_: None)


class Stepping(Plain):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass


class Returning(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "number": 1}


DIFFERS = "a captured step differs from an eager one by"


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Rebinding, "the step replaces mean; write into it"),
        (Waiting, "it waits for the GPU or copies from the host"),
        (Counting, DIFFERS),
        (Progressing, DIFFERS),
        (Drawing, DIFFERS),
        (LoggingNumbers, DIFFERS),
        (ReadingGradients, DIFFERS),
        (Measuring, "training_step logs 'total' as a SumMetric"),
        (Hooked, "network.0 has a hook"),
        (Stepping, "the model has on_before_optimizer_step"),
        (Returning, "training_step returns values that are no tensors"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_step_that_breaks_the_promise_is_eager(
    fit: Callable[..., Ran], model: type[Plain], why: str
) -> None:
    captured = fit(model)
    assert why in captured.why
    assert captured.capture.replays == 0
    assert "/tests/training/" in captured.why or model is not Waiting  # the line that waits


class Watching(pl.Callback):
    def on_after_backward(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"callbacks": [Watching()]}, "Watching has on_after_backward"),
        ({"detect_anomaly": True}, "PyTorch looks for anomalies"),
        ({"profiler": "simple"}, "a profiler is on"),
        (
            {"callbacks": [StochasticWeightAveraging(1e-3)]},
            "StochasticWeightAveraging trains without gradients at times",
        ),
    ],
    ids=["callback", "anomalies", "profiler", "averaging"],
)
def test_trainer_that_needs_every_step_on_the_host(
    fit: Callable[..., Ran], options: dict[str, Any], why: str
) -> None:
    assert fit(Plain, **options).why == why


def test_manual_optimization(fit: Callable[..., Ran]) -> None:
    class Manual(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            optimizer.step()
            return {"loss": loss.detach()}

    assert same(fit(Manual), fit(Manual, "off"))


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.")
def test_step_without_a_loss(fit: Callable[..., Ran]) -> None:
    class Nothing(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None

    assert fit(Nothing).why == "training_step returns no loss"


@pytest.mark.parametrize("copies_before", range(4))
def test_memory_that_does_not_suffice_to_compare(
    fit: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, copies_before: int
) -> None:
    made, copies = 0, trial._copies

    def fail(tensors: list[Tensor]) -> list[Tensor]:
        nonlocal made
        made += 1
        if made > copies_before:
            raise torch.OutOfMemoryError
        return copies(tensors)

    monkeypatch.setattr(trial, "_copies", fail)
    check_eager(fit, Plain, trial.NO_MEMORY)
