"""What a graph would freeze: such steps run eagerly, and a line says why."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook
from torchmetrics.classification import MulticlassAccuracy

from tests.training.capture.support import (
    BATCH,
    CLASSES,
    STEPS,
    Plain,
    Ran,
    Scheduled,
    batches,
    check_captured,
    check_eager,
    same,
)
from training.capture import comparison
from training.capture import steps as capture
from training.capture.steps import CapturedSteps


def test_reads_batch_idx(fit: Callable[..., Ran]) -> None:
    class Indexed(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch) * (2 if batch_idx % 2 else 1)

    check_eager(fit, Indexed, "training_step reads batch_idx")


@pytest.mark.parametrize("name", ["current_epoch", "global_step"])
def test_reads_progress(fit: Callable[..., Ran], name: str) -> None:
    class Progressing(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch) / (1 + getattr(self, name))

    check_eager(fit, Progressing, f"training_step reads trainer.{name}")


def test_reads_progress_and_catches_the_error(fit: Callable[..., Ran]) -> None:
    class Careful(Plain):
        def epoch(self) -> int:
            try:
                return self.current_epoch
            except Exception:
                return 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch) / (1 + self.epoch())

    check_eager(fit, Careful, "training_step reads trainer.current_epoch", max_epochs=2)


def test_asks_whether_there_is_a_trainer(fit: Callable[..., Ran]) -> None:
    class Asking(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch) * (1 if isinstance(self.trainer, pl.Trainer) else 0.5)

    check_captured(fit, Asking)


class OfTrainer:
    def __init__(self, trainer: pl.Trainer) -> None:
        self.trainer = trainer

    def get(self) -> int:
        return self.trainer.current_epoch


@pytest.mark.parametrize("kind", ["trainer", "schedule", "generator"])
def test_reads_what_training_changes(fit: Callable[..., Ran], kind: str) -> None:
    class Reading(Plain):
        def on_fit_start(self) -> None:
            self.held = OfTrainer(self.trainer)
            self.generator = torch.Generator().manual_seed(4)

        def configure_optimizers(self) -> Any:
            optimizer: Any = super().configure_optimizers()
            self.schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            return [optimizer], [self.schedule]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if kind == "trainer":
                factor = 1 + self.held.get()
            elif kind == "schedule":
                factor = self.schedule.get_last_lr()[0]
            else:
                factor = 2 if torch.rand(1, generator=self.generator).numpy()[0] < 0.1 else 1
            return self.loss(batch) * factor

    check_eager(fit, Reading, "which goes on by itself", max_epochs=2)


def test_gradients_of_the_step_before(fit: Callable[..., Ran]) -> None:
    class Norms(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            gradients = [p.grad.norm() for p in self.parameters() if p.grad is not None]
            norm = torch.stack(gradients).norm() if gradients else torch.zeros_like(batch[0][0, 0])
            self.log("norm", norm)
            return self.loss(batch)

    check_eager(fit, Norms, "a captured step differs from an eager one")


def test_logs_by_a_name_of_the_batch(fit: Callable[..., Ran]) -> None:
    class Named(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch[0])
            self.log(batch[1], loss)
            return loss

    data = [(batch, f"loss {i % 2}") for i, batch in enumerate(batches([BATCH] * STEPS))]
    check_eager(fit, Named, "training_step reads a str of the batch", data=data)


def test_logs_a_number(fit: Callable[..., Ran]) -> None:
    class Numbered(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("number", 3.0)
            return self.loss(batch)

    check_eager(fit, Numbered, "training_step logs 'number' as a float")


def test_metric_in_the_step(fit: Callable[..., Ran]) -> None:
    class Measured(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.accuracy = MulticlassAccuracy(CLASSES)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits = self.network(batch[0])
            self.accuracy(logits, batch[1])
            self.log("accuracy", self.accuracy, on_epoch=True)
            return F.cross_entropy(logits, batch[1])

    check_eager(fit, Measured, "training_step changes self.accuracy.")


def test_counts(fit: Callable[..., Ran]) -> None:
    class Counter(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.state = {"steps": 0}

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.state["steps"] += 1
            return self.loss(batch) / self.state["steps"]

    check_eager(fit, Counter, "training_step changes self.state")


def test_collects_outputs(fit: Callable[..., Ran]) -> None:
    class Collector(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[Tensor] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.losses.append(loss.detach())
            return loss

    check_eager(fit, Collector, "training_step changes self.losses")


class Averaged(Plain):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))


def test_rebinds_a_buffer(fit: Callable[..., Ran]) -> None:
    class Rebinding(Averaged):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.mean = 0.9 * self.mean + 0.1 * loss.detach()
            return loss + self.mean

    check_eager(fit, Rebinding, "training_step changes self._buffers")


def test_updates_a_buffer_in_place(fit: Callable[..., Ran]) -> None:
    class Updating(Averaged):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.mean.mul_(0.9).add_(loss.detach(), alpha=0.1)
            return loss * (1 + self.mean)

    check_captured(fit, Updating)


@pytest.mark.parametrize(
    ("draw", "generator"),
    [(random.random, "Python's random"), (np.random.rand, "NumPy's random")],
    ids=["python", "numpy"],
)
def test_draws_on_the_host(fit: Callable[..., Ran], draw: Any, generator: str) -> None:
    class Random(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch) * float(draw())

    check_eager(fit, Random, f"training_step draws from {generator}")


@pytest.mark.parametrize("kind", ["iterator", "generator"])
def test_reads_what_goes_on(fit: Callable[..., Ran], kind: str) -> None:
    class Going(Plain):
        def __init__(self) -> None:
            super().__init__()
            # The same for longer than steps are compared.
            self.factors = iter([1.0] * 12 + [0.5] * 12)
            self.generator = np.random.default_rng(0)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if kind == "iterator":
                return self.loss(batch) * next(self.factors)
            return self.loss(batch) * (0.5 if self.generator.random() > 0.99 else 1.0)

    check_eager(fit, Going, "which goes on by itself")


def test_attribute_that_a_class_reads_renews_the_graphs(fit: Callable[..., Ran]) -> None:
    class Tempered(Plain):
        weight = 1.0

        @property
        def factor(self) -> float:
            return Tempered.weight

        def on_train_epoch_start(self) -> None:
            Tempered.weight = 2.0**-self.current_epoch

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch) * self.factor

    assert check_captured(fit, Tempered, max_epochs=3).capture.captures == 3


def test_waits_for_the_device(fit: Callable[..., Ran]) -> None:
    class Waiting(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            return loss * 2 if loss.item() > 1 else loss

    why = check_eager(fit, Waiting, "it waits for the GPU or copies from the host").why
    assert "/tests/training/" in why  # the line that waits


def test_reads_the_hosts_part_of_a_batch(fit: Callable[..., Ran]) -> None:
    class Weighted(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch[:2]) * batch[2]

    data = [(*batch, float(i)) for i, batch in enumerate(batches([BATCH] * STEPS))]
    check_eager(fit, Weighted, "training_step reads a float of the batch", data=data)


def test_state_out_of_sight_is_found_by_comparing(fit: Callable[..., Ran]) -> None:
    steps: list[int] = []

    class Global(Plain):
        def __init__(self) -> None:
            super().__init__()
            steps.clear()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            steps.append(1)
            return self.loss(batch) / len(steps)

    captured = fit(Global)
    assert "a captured step differs from an eager one" in captured.why
    assert captured.capture.replays == 0


def test_hooks(fit: Callable[..., Ran]) -> None:
    class Hooked(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.network[0].register_forward_hook(lambda *_: None)

    class Halved(Plain):
        def __init__(self) -> None:
            super().__init__()
            layer: Any = self.network[0]
            layer.weight.register_hook(lambda gradient: gradient / 2)

    class Normed(Plain):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            pass

    class Watching(pl.Callback):
        def on_after_backward(self, *_: Any) -> None:
            pass

    check_eager(fit, Hooked, "network.0 has a hook")
    check_eager(fit, Halved, "network.0.weight has a hook")
    check_eager(fit, Normed, "the model has on_before_optimizer_step")
    check_eager(fit, Plain, "Watching has on_after_backward", callbacks=[Watching()])


def test_anomalies_are_looked_for_eagerly(fit: Callable[..., Ran]) -> None:
    check_eager(fit, Plain, "PyTorch looks for anomalies", detect_anomaly=True)


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


def test_rate_that_the_host_reads_may_change_now_and_then(fit: Callable[..., Ran]) -> None:
    class Stepped(Plain):
        interval = "epoch"

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "interval": self.interval},
            }

    class Always(Stepped):
        interval = "step"

    assert check_captured(fit, Stepped, max_epochs=2).capture.captures == 2
    captured, eager = fit(Always, max_epochs=4), fit(Always, "off", max_epochs=4)
    assert "optimizer.param_groups[0].lr changes again and again" in captured.why
    assert "fused=True" in captured.why
    assert same(captured, eager)


def test_other_shape_every_time(fit: Callable[..., Ran]) -> None:
    sizes = list(range(2, 2 + capture.MAX_GRAPHS + 8))
    captured = fit(Plain, data=batches(sizes), max_epochs=2)
    assert same(captured, fit(Plain, "off", data=batches(sizes), max_epochs=2))
    assert f"there are more than {capture.MAX_GRAPHS} shapes of batches" in captured.why


def test_optimizer_without_a_rate(fit: Callable[..., Ran]) -> None:
    class Signs(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            loss = torch.enable_grad()(closure)() if closure else None
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad.sign(), alpha=2**-9)
            return loss

    class Signed(Plain):
        def configure_optimizers(self) -> Any:
            return Signs(self.parameters(), {})

    check_captured(fit, Signed)


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.")
def test_returns_nothing(fit: Callable[..., Ran]) -> None:
    class Skipping(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None

    class Ends(pl.Callback):
        pass

    torch.manual_seed(0)
    captured = CapturedSteps()
    trainer = pl.Trainer(
        accelerator="auto", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[captured], max_epochs=1,
    )  # fmt: skip
    loader: Any = torch.utils.data.DataLoader(batches([BATCH] * 6), batch_size=None)  # pyright: ignore
    trainer.fit(Skipping(), loader)
    assert captured.replays == 0


@pytest.mark.parametrize("kind", ["of a parameter", "of all modules"])
def test_hook_that_comes_when_the_fit_begins(fit: Callable[..., Ran], kind: str) -> None:
    calls, handles = [], []

    class Hooked(Plain):
        def on_train_start(self) -> None:
            weight: Any = self.network[0].weight
            register = weight.register_hook
            if kind == "of all modules":
                register = register_module_forward_hook
            handles.append(register(lambda *_: calls.append(1)))

        def on_train_end(self) -> None:
            handles.pop().remove()

    check_eager(fit, Hooked, "hook")
    assert calls[len(calls) // 2 :] == calls[: len(calls) // 2]


def test_array_that_is_too_large_to_compare(fit: Callable[..., Ran]) -> None:
    class Reading(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.table = np.ones(2**20)

        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch) * float(self.table[-1])

    check_eager(fit, Reading, "training_step reads self.table, which is very large")


def test_reads_the_strategy(fit: Callable[..., Ran]) -> None:
    class Reading(Scheduled):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            (config,) = self.trainer.strategy.lr_scheduler_configs
            return self.loss(batch) / (1 + config.scheduler.last_epoch // 11)

    check_eager(fit, Reading, "training_step reads trainer.strategy")


def test_returns_a_tensor_that_retains_its_gradient(fit: Callable[..., Ran]) -> None:
    gradients: list[Tensor] = []

    class Retaining(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            inputs, labels = batch
            hidden = self.network[0](inputs)
            hidden.retain_grad()
            return {"loss": F.cross_entropy(self.network[1:](hidden), labels), "hidden": hidden}

        def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
            gradients.append(outputs["hidden"].grad.sum())

    check_eager(fit, Retaining, "training_step returns a tensor that retains its gradient")
    assert len(gradients) == 2 * STEPS


def test_module_that_torch_jit_compiled(fit: Callable[..., Ran]) -> None:
    class Scripted(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.network: Any = torch.jit.script(self.network)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is to be replaced
        check_eager(fit, Scripted, "a module is compiled by torch.jit")


@pytest.mark.parametrize("copies_before", range(5))
def test_memory_that_does_not_suffice_to_compare(
    fit: Callable[..., Ran], copies_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = copies_before
    copies = comparison.copies

    def fail(tensors: list[Tensor]) -> list[Tensor]:
        nonlocal left
        left -= 1
        if left == -1:
            raise torch.OutOfMemoryError
        return copies(tensors)

    eager = fit(Plain, "off")
    monkeypatch.setattr(comparison, "copies", fail)
    captured = fit(Plain)
    if copies_before < 4:
        assert captured.why == comparison.NO_MEMORY
    assert same(captured, eager)
