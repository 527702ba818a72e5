"""Captured steps against eager ones, for models as users write them.

On a GPU steps are CUDA graphs; elsewhere a stand-in records the operators of the CPU.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from hydra.utils import instantiate
from lightning_fabric.utilities.exceptions import MisconfigurationException
from omegaconf import OmegaConf
from pytorch_lightning.callbacks import (
    GradientAccumulationScheduler,
    LambdaCallback,
    WeightAveraging,
)
from pytorch_lightning.plugins import MixedPrecision
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

import train
from hoconv.lightning import Throughput
from models.tasks.optimizer import configure
from tests.training.recorded_graph import RecordingCPU
from training.callbacks.measuring.profile import Profile
from training.capture import steps as capture
from training.capture.between import find_unknown
from training.capture.steps import CapturedSteps, CaptureError

CLASSES, FEATURES, BATCH, STEPS = 3, 5, 8, 16
CONF = Path(train.__file__).parent / "conf"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES, autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "cpu":
        monkeypatch.setattr(capture, "Gpu", RecordingCPU)
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        yield request.param


class Plain(pl.LightningModule):
    """Knows nothing of captures."""

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


class Ran(NamedTuple):
    losses: list[float]
    parameters: list[Tensor]
    capture: CapturedSteps
    trainer: pl.Trainer
    logged: dict[str, float]

    @property
    def why(self) -> str:
        """Why steps ran eagerly that were not to be captured in the end."""
        expected = (capture.WARMUP, capture.TRIAL)
        return "; ".join(why for why in self.capture.eager_steps if why not in expected)


class Losses(pl.Callback):
    def __init__(self) -> None:
        self.losses: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"])


# As code of ours, which changes nothing.
Losses.__module__ = CapturedSteps.__module__


def batches(sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(size, FEATURES, generator=generator),
            torch.randint(CLASSES, (size,), generator=generator),
        )
        for size in sizes
    ]


@pytest.fixture
def fit(device: str) -> Callable[..., Ran]:
    def run(model: type[pl.LightningModule], mode: str = "auto", **options: Any) -> Ran:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        data: Any = options.pop("data", None) or batches([BATCH] * STEPS)
        callbacks, validation = options.pop("callbacks", []), options.pop("validation", None)
        captured, losses, made = CapturedSteps(mode), Losses(), model()
        trainer = pl.Trainer(
            accelerator="gpu" if device == "cuda" else "cpu", devices=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[captured, losses, *callbacks], **{"max_epochs": 1, **options},
        )  # fmt: skip
        loader: Any = torch.utils.data.DataLoader(data, batch_size=None)  # pyright: ignore
        trainer.fit(made, loader, validation)
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        values = [float(loss) for loss in losses.losses]
        parameters = [parameter.detach().cpu() for parameter in made.parameters()]
        return Ran(values, parameters, captured, trainer, logged)

    return run


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


# What is captured.


def test_steps_are_captured(fit: Callable[..., Ran]) -> None:
    ran = check_captured(fit, Plain)
    assert ran.capture.captures == 1
    assert ran.capture.replays == STEPS - capture.WARMUP_STEPS - capture.TRIALS
    assert ran.losses[-1] < ran.losses[0]


def test_dropout_draws_anew_in_every_step(fit: Callable[..., Ran]) -> None:
    class Dropout(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.network.append(nn.Dropout(0.5))

    check_captured(fit, Dropout)


class Scheduled(Plain):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 2.0 ** -(step % 5))
        return {
            "optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }  # fmt: skip


def test_learning_rate_follows_the_schedule(fit: Callable[..., Ran]) -> None:
    ran = check_captured(fit, Scheduled)
    assert all(type(group["lr"]) is float for group in ran.trainer.optimizers[0].param_groups)


@pytest.mark.parametrize(
    ("optimizer", "schedule"), [("adamw", "cosine"), ("sgd", "one_cycle"), ("sgd", "plateau")]
)
def test_optimizers_and_schedules_of_the_configuration(
    fit: Callable[..., Ran], optimizer: str, schedule: str
) -> None:
    def load(group: str, name: str, **options: Any) -> Any:
        return instantiate(OmegaConf.load(CONF / group / f"{name}.yaml"), **options)

    class Configured(Plain):
        def configure_optimizers(self) -> Any:
            peak = {"max_lr": 2**-7} if schedule == "one_cycle" else {}
            made = load("optimizer", optimizer, fused=True), load("scheduler", schedule, **peak)
            return configure(self, *made, 2**-7, 0.0)

        def on_train_epoch_end(self) -> None:
            self.log("val/loss", 1.0)

    captured, eager = fit(Configured), fit(Configured, "off")
    assert not captured.why
    assert captured.capture.replays > 0
    # The rates of a schedule are no float32, and so captured steps round in another way.
    assert captured.losses == pytest.approx(eager.losses, rel=1e-4)


def test_a_profile_lets_steps_be_captured(
    fit: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_captured(fit, Plain, callbacks=[Profile(first=10, steps=2)])
    assert (tmp_path / "profile" / "trace.json").exists()


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_gradients_are_clipped(fit: Callable[..., Ran], algorithm: str) -> None:
    clip: Any = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": algorithm}
    assert not same(check_captured(fit, Plain, **clip), fit(Plain))


def test_gradients_are_accumulated(fit: Callable[..., Ran]) -> None:
    ran = check_captured(fit, Scheduled, accumulate_grad_batches=3, max_epochs=3)
    assert ran.capture.captures >= 3  # the first, the middle and the last of three batches
    assert ran.trainer.global_step == 3 * -(-STEPS // 3)


def test_accumulation_may_change(fit: Callable[..., Ran]) -> None:
    schedule = GradientAccumulationScheduler({0: 1, 1: 2})
    check_captured(fit, Plain, callbacks=[schedule], max_epochs=3)


def test_short_last_batch_has_a_graph(fit: Callable[..., Ran]) -> None:
    data = batches([BATCH] * 7 + [3])
    ran = check_captured(fit, Plain, data=data, max_epochs=4)
    assert ran.capture.captures == 2


def test_bfloat16(fit: Callable[..., Ran]) -> None:
    check_captured(fit, Plain, precision="bf16-mixed")


@pytest.mark.gpu
def test_float16_with_a_scaler(fit: Callable[..., Ran], device: str) -> None:
    if device == "cpu":
        pytest.skip("Lightning has 16-mixed on GPUs only")
    check_captured(fit, Plain, precision="16-mixed")


@pytest.mark.gpu
def test_scaler_that_waits_is_eager(fit: Callable[..., Ran], device: str) -> None:
    if device == "cpu":
        pytest.skip("Lightning has 16-mixed on GPUs only")

    class Unfused(Plain):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=2**-7)

    check_eager(fit, Unfused, "16-mixed", precision="16-mixed")


def test_logged_tensors(fit: Callable[..., Ran]) -> None:
    class Logging(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("loss", loss, on_step=True, on_epoch=True)
            self.log_dict({"double": 2 * loss.detach()}, prog_bar=True, on_epoch=True)
            return {"loss": loss, "half": loss.detach() / 2}

    ran = check_captured(fit, Logging, max_epochs=2)
    assert {"loss_step", "loss_epoch", "double_epoch"} <= ran.logged.keys()
    assert ran.logged["loss_epoch"] == pytest.approx(np.mean(ran.losses[STEPS:]), rel=1e-5)


def test_values_of_the_batch_that_are_not_read(fit: Callable[..., Ran]) -> None:
    class Described(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch["data"])

    data = [
        {"data": batch, "text": [f"number {i}"] * i, "none": None}
        for i, batch in enumerate(batches([BATCH] * STEPS))
    ]
    assert check_captured(fit, Described, data=data).capture.captures == 1


def test_argument_that_is_passed_on_is_not_read(fit: Callable[..., Ran]) -> None:
    class Passing(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert not hasattr(batch_idx, "to")  # as DistributedDataParallel asks
            return self.shared_step(batch, batch_idx)

        def shared_step(self, batch: Any, number: int) -> Tensor:
            return self.loss(batch)

    check_captured(fit, Passing)


def test_changed_attribute_renews_the_graphs(fit: Callable[..., Ran]) -> None:
    class Tempered(Plain):
        weights = {"loss": 1.0}

        def __init__(self) -> None:
            super().__init__()
            self.weights = {"loss": 1.0}

        def on_train_epoch_start(self) -> None:
            self.weights["loss"] *= 0.5

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch) * self.weights["loss"]

    ran = check_captured(fit, Tempered, max_epochs=3)
    assert ran.capture.captures == 3


def test_attribute_that_is_set_to_an_equal_value_changes_nothing(fit: Callable[..., Ran]) -> None:
    class Limited(Plain):
        limit, weight, name = 1000, 0.5, "loss"

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            # New objects in every step, before and after the capture.
            self.limit, self.weight, self.name = int("1000"), float("0.5"), "".join(["lo", "ss"])

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {self.name: self.loss(batch).clamp(max=self.limit) * self.weight}

    ran = check_captured(fit, Limited, max_epochs=2)
    assert ran.capture.captures == 1
    assert ran.trainer.global_step == 2 * STEPS


def test_attribute_of_the_class_renews_the_graphs(fit: Callable[..., Ran]) -> None:
    class Tempered(Plain):
        weight = 1.0

        def on_train_epoch_start(self) -> None:
            if self.current_epoch:  # until then it is the class's
                self.weight = 0.5 * self.weight

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch) * self.weight

    assert check_captured(fit, Tempered, max_epochs=3).capture.captures == 3


@pytest.mark.parametrize("kind", ["dataclass", "slots", "class"])
def test_attribute_of_an_object_renews_the_graphs(fit: Callable[..., Ran], kind: str) -> None:
    @dataclasses.dataclass
    class Data:
        weight: float = 1.0

    class Slots:
        __slots__ = ("weight",)

        def __init__(self) -> None:
            self.weight = 1.0

    class Class:
        weight = 1.0

    class Tempered(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.options = {"dataclass": Data, "slots": Slots, "class": Class}[kind]()

        def on_train_epoch_start(self) -> None:
            if self.current_epoch:
                self.options.weight *= 0.5

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch) * self.options.weight

    assert check_captured(fit, Tempered, max_epochs=3).capture.captures == 3


def test_teacher_that_is_no_submodule(fit: Callable[..., Ran]) -> None:
    class Taught(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.teachers = [copy.deepcopy(self.network)]

        def on_fit_start(self) -> None:
            self.teachers[0].to(self.device)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            with torch.no_grad():
                pairs = zip(self.teachers[0].parameters(), self.network.parameters())
                for theirs, own in pairs:
                    theirs.mul_(0.9).add_(own, alpha=0.1)
                target = self.teachers[0](batch[0])
            return self.loss(batch) + F.mse_loss(self.network(batch[0]), target)

    check_captured(fit, Taught)


def test_parameter_group_is_added(fit: Callable[..., Ran]) -> None:
    class Growing(Plain):
        def configure_optimizers(self) -> Any:
            self.network[0].requires_grad_(False)
            return torch.optim.AdamW(self.network[1:].parameters(), lr=2**-7, fused=True)

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.network[0].requires_grad_(True)
                group = {"params": list(self.network[0].parameters()), "lr": 2**-9}
                self.trainer.optimizers[0].add_param_group(group)

    assert check_captured(fit, Growing, max_epochs=3).capture.captures == 2


def test_gradients_that_no_optimizer_zeroes(fit: Callable[..., Ran]) -> None:
    class Half(Plain):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.network[-1].parameters(), lr=2**-7, fused=True)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            layer: Any = self.network[0]
            outputs["loss"] = layer.weight.grad.abs().sum()  # grows from step to step

    check_captured(fit, Half)


def test_callback_serves_two_fits(fit: Callable[..., Ran], device: str) -> None:
    captured = CapturedSteps()
    options: Any = {
        "accelerator": "gpu" if device == "cuda" else "cpu", "devices": 1, "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "max_epochs": 1,
    }  # fmt: skip
    loader: Any = torch.utils.data.DataLoader(batches([BATCH] * STEPS), batch_size=None)  # pyright: ignore
    for fits in (1, 2):
        losses, model = Losses(), Plain()
        trainer = pl.Trainer(callbacks=[captured, losses], **options)
        trainer.fit(model, loader)
        assert captured.captures == fits
        assert not {"training_step", "log"} & vars(model).keys()
        assert "run" not in vars(trainer.fit_loop.epoch_loop.automatic_optimization)
    assert captured.replays == 2 * (STEPS - capture.WARMUP_STEPS - capture.TRIALS)


def test_frozen_layers_renew_the_graphs(fit: Callable[..., Ran]) -> None:
    class Freezing(Plain):
        def on_train_epoch_start(self) -> None:
            self.network[0].requires_grad_(self.current_epoch % 2 == 0)
            self.network[1].train(self.current_epoch % 2 == 0)

    assert check_captured(fit, Freezing, max_epochs=3).capture.captures == 3


def test_attribute_that_the_step_does_not_read_may_change(fit: Callable[..., Ran]) -> None:
    class Counting(Plain):
        batches = 0

        def __init__(self) -> None:
            super().__init__()
            self.batches, self.seen = 0, []

        def on_train_batch_end(self, *_: Any) -> None:
            self.batches += 1
            self.seen.append(self.batches)

    assert check_captured(fit, Counting).capture.captures == 1


def test_replaced_parameters_renew_the_graphs(fit: Callable[..., Ran]) -> None:
    class Moved(Plain):
        def on_train_epoch_start(self) -> None:
            for parameter in self.parameters():
                parameter.data = parameter.data * 0.5

    assert check_captured(fit, Moved, max_epochs=2).capture.captures == 2


def test_replaced_optimizer_state_renews_the_graphs(fit: Callable[..., Ran]) -> None:
    class Reset(Plain):
        def on_train_epoch_start(self) -> None:
            optimizer: Any = self.trainer.optimizers[0]
            optimizer.load_state_dict(optimizer.state_dict())
            for group in optimizer.param_groups:
                group["weight_decay"] = 0.5

    assert check_captured(fit, Reset, max_epochs=2).capture.captures == 2


def test_averaged_weights_follow(fit: Callable[..., Ran]) -> None:
    class Average(pl.Callback):
        """Reads the parameters and their gradients after every step."""

        def __init__(self) -> None:
            self.means: list[Tensor] = []

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            for parameter in pl_module.parameters():
                self.means.append(parameter.detach().clone().cpu())
                self.means.append(parameter.grad.clone().cpu())

    captured, eager = Average(), Average()
    fit(Plain, callbacks=[captured])
    fit(Plain, "off", callbacks=[eager])
    assert len(captured.means) == len(eager.means)
    assert all(map(torch.equal, captured.means, eager.means))


def test_resumed_run_gives_the_same_bits(fit: Callable[..., Ran], tmp_path: Any) -> None:
    whole = fit(Scheduled, max_epochs=4)
    first = fit(Scheduled, max_epochs=2)
    first.trainer.save_checkpoint(tmp_path / "half.ckpt")
    saved = torch.load(tmp_path / "half.ckpt", weights_only=True)
    assert not saved["optimizer_states"][0]["param_groups"][0]["capturable"]

    class Resumed(Scheduled):
        def configure_optimizers(self) -> Any:
            return super().configure_optimizers()

    torch.manual_seed(0)
    losses, model = Losses(), Resumed()
    trainer = pl.Trainer(
        accelerator="gpu" if model_on_gpu(first) else "cpu", devices=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[CapturedSteps(), losses], max_epochs=4,
    )  # fmt: skip
    loader: Any = torch.utils.data.DataLoader(batches([BATCH] * STEPS), batch_size=None)  # pyright: ignore
    trainer.fit(model, loader, ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert [float(loss) for loss in losses.losses] == whole.losses[2 * STEPS :]


def model_on_gpu(ran: Ran) -> bool:
    return ran.trainer.strategy.root_device.type == "cuda"


# What a graph would freeze.


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


def test_rebinds_a_buffer(fit: Callable[..., Ran]) -> None:
    class Averaging(Plain):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(()))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.mean = 0.9 * self.mean + 0.1 * loss.detach()
            return loss + self.mean

    check_eager(fit, Averaging, "training_step changes self._buffers")


def test_updates_a_buffer_in_place(fit: Callable[..., Ran]) -> None:
    class Averaging(Plain):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(()))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.mean.mul_(0.9).add_(loss.detach(), alpha=0.1)
            return loss * (1 + self.mean)

    check_captured(fit, Averaging)


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

    check_eager(fit, Going, "which goes on with each read")


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


# Whose code runs between two steps.

CHANGED_AT = 11  # a batch, long after the capture


class Scaled(Plain):
    scale = 1.0

    def loss(self, batch: Any) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(self.network(inputs) * self.scale, labels)


class Halves:
    """Halves the scale of a model, once, when it is called so many times."""

    def __init__(self) -> None:
        self.model: Any = None
        self.calls = 0

    def __call__(self, value: Any = None) -> Any:
        self.calls += 1
        if self.calls == CHANGED_AT:
            self.model.scale = 0.5
        return value


def _of_a_callback(halves: Halves, options: dict[str, Any]) -> type[pl.LightningModule]:
    class Changes(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            halves()

    options["callbacks"] = [Changes()]
    return Scaled


def _of_a_lambda_callback(halves: Halves, options: dict[str, Any]) -> type[pl.LightningModule]:
    options["callbacks"] = [LambdaCallback(on_train_batch_end=lambda *_: halves())]
    return Scaled


def _that_a_callback_is_given(halves: Halves, options: dict[str, Any]) -> type[pl.LightningModule]:
    def count(batch: Any) -> int:  # not called for steps that capture
        halves.calls = halves.model.trainer.global_step - 1
        return halves(BATCH)

    options["callbacks"] = [Throughput(warmup_steps=0, batch_size_fn=count)]
    return Scaled


def _of_a_derived_callback(halves: Halves, options: dict[str, Any]) -> type[pl.LightningModule]:
    class Changes(WeightAveraging):
        def should_update(self, *_: Any, **__: Any) -> bool:
            return bool(halves())

    options["callbacks"] = [Changes()]
    return Scaled


def _of_the_model(halves: Halves, options: dict[str, Any]) -> type[pl.LightningModule]:
    class Changes(Scaled):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return halves(batch)

    return Changes


def _of_a_data_set(halves: Halves, options: dict[str, Any]) -> type[pl.LightningModule]:
    class Changes(torch.utils.data.Dataset[Any]):
        items = batches([BATCH] * STEPS)

        def __len__(self) -> int:
            return len(self.items)

        def __getitem__(self, index: int) -> Any:
            return halves(self.items[index])

    options["data"] = torch.utils.data.Subset(Changes(), range(STEPS))
    return Scaled


def _of_a_schedule(halves: Halves, options: dict[str, Any]) -> type[pl.LightningModule]:
    class Changes(Scaled):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            first = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0, 1)
            second = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: halves(1.0))
            schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [first, second], [2])
            return {
                "optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"},
            }  # fmt: skip

    return Changes


def _of_a_validation(halves: Halves, options: dict[str, Any]) -> type[pl.LightningModule]:
    class Changes(Scaled):
        def validation_step(self, *_: Any) -> None:
            halves.calls = CHANGED_AT - 1
            halves()

    options |= {
        "val_check_interval": CHANGED_AT, "validation": batches([BATCH]), "num_sanity_val_steps": 0,
    }  # fmt: skip
    return Changes


OWNERS = (
    _of_a_callback, _of_a_lambda_callback, _that_a_callback_is_given, _of_a_derived_callback,
    _of_the_model, _of_a_data_set, _of_a_schedule, _of_a_validation,
)  # fmt: skip


@pytest.mark.parametrize("owner", OWNERS)
def test_what_any_code_changes_between_two_steps_counts(
    fit: Callable[..., Ran], owner: Callable[..., Any]
) -> None:
    def run(mode: str) -> Ran:
        halves, options = Halves(), {}
        kind = owner(halves, options)

        class Known(kind):  # type: ignore[misc, valid-type]
            def __init__(self) -> None:
                super().__init__()
                halves.model = self

        return fit(Known, mode, **options)

    captured, eager = run("auto"), run("off")
    assert captured.capture.captures == 2
    assert same(captured, eager)


def known(callback: pl.Callback) -> pl.Callback:
    """Lets a callback be as one of ours, whose code is not looked at."""
    type(callback).__module__ = CapturedSteps.__module__
    return callback


def test_what_a_checkpoint_changes_counts_from_the_next_step(
    fit: Callable[..., Ran], tmp_path: Path
) -> None:
    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == CHANGED_AT:
                trainer.save_checkpoint(tmp_path / "a.ckpt")

    class Changes(Scaled):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.scale = 0.5

    captured, eager = (fit(Changes, mode, callbacks=[known(Saves())]) for mode in ("auto", "off"))
    assert captured.capture.captures == 2
    assert same(captured, eager)


def test_attributes_are_compared_now_and_then_where_all_code_is_known(
    fit: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Changes(pl.Callback):  # as another thread does, at any time
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if trainer.global_step == CHANGED_AT:
                pl_module.scale = 0.5

    for every, captures in ((STEPS, 1), (CHANGED_AT + 1, 2)):
        monkeypatch.setattr(capture, "COMPARE_EVERY", every)
        assert fit(Scaled, callbacks=[known(Changes())]).capture.captures == captures


def test_code_that_is_not_known_has_a_name(
    fit: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str | None, None] = {}

    def find(*args: Any) -> str | None:
        unknown = find_unknown(*args)
        found[unknown] = None
        return unknown

    monkeypatch.setattr(capture, "find_unknown", find)
    check_captured(fit, Plain)
    check_captured(fit, Scheduled)
    assert [*found] == [None, "Scheduled.configure_optimizers.<locals>.<lambda>"]


# What changes long after the capture, of any kind.


class Reads(Plain):
    """Reads `holder` in every step, by `value`."""

    def __init__(self) -> None:
        super().__init__()
        self.holder: Any = self.make()

    def make(self) -> Any:
        return 1.0

    def value(self) -> float:
        return self.holder

    def loss(self, batch: Any) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(self.network(inputs) * self.value(), labels)


def reads(make: Callable[[], Any], value: Callable[[Any], float]) -> type[Reads]:
    members = {"make": lambda _: make(), "value": lambda self: value(self.holder)}
    return type("Reads", (Reads,), members)


def nested(depth: int) -> dict[str, Any]:
    return {"in": nested(depth - 1)} if depth else {"scale": 1.0}


def innermost(value: dict[str, Any]) -> dict[str, Any]:
    return innermost(value["in"]) if "in" in value else value


class Scale:
    def __init__(self) -> None:
        self.factor = 1.0

    def get(self) -> float:
        return self.factor


def closed_over() -> Callable[..., float]:
    factor = 1.0

    def get(new: float | None = None) -> float:
        nonlocal factor
        factor = factor if new is None else new
        return factor

    return get


class Absent(Reads):
    late: float

    def value(self) -> float:
        return self.late if hasattr(self, "late") else 1.0


class OfDictionary(Reads):
    def value(self) -> float:
        return vars(self)["holder"]


class OfTrainer(Reads):
    def value(self) -> float:
        return 1.0 / (self.trainer.max_epochs or 1)


class Gradients(pl.Callback):
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        for parameter in pl_module.parameters():
            parameter.grad.clamp_(min=0)


def patch_loss(_: Any, model: Any) -> None:
    original = model.loss
    model.loss = lambda batch: 0.5 * original(batch)


def patch_training_step(_: Any, model: Any) -> None:
    original = model.training_step
    model.training_step = lambda batch, batch_idx: 0.5 * original(batch, batch_idx)


def patch_optimizer(trainer: Any, model: Any) -> None:
    optimizer = trainer.optimizers[0]
    original = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        for parameter in model.parameters():
            parameter.detach().mul_(0.5)
        return result

    optimizer.step = step


def take_optimizer(trainer: Any, model: Any) -> None:
    trainer.strategy.optimizers = [torch.optim.SGD(model.parameters(), lr=0.5)]


LATE: dict[str, tuple[type[pl.LightningModule], Callable[[Any, Any], Any]]] = {
    "module of a Sequential": (Plain, lambda _, m: m.network.__setitem__(2, nn.Tanh())),
    "appended module": (Plain, lambda _, m: m.network.append(nn.Tanh())),
    "namespace": (
        reads(lambda: SimpleNamespace(scale=1.0), lambda h: h.scale),
        lambda _, m: setattr(m.holder, "scale", 0.5),
    ),
    "deque": (
        reads(lambda: deque([1.0]), lambda h: h[0]),
        lambda _, m: m.holder.__setitem__(0, 0.5),
    ),
    "array": (
        reads(lambda: np.ones(3), lambda h: float(h[1])),
        lambda _, m: m.holder.__setitem__(1, 0.5),
    ),
    "nested dictionaries": (
        reads(lambda: nested(6), lambda h: innermost(h)["scale"]),
        lambda _, m: innermost(m.holder).update(scale=0.5),
    ),
    "long list": (
        reads(lambda: [1.0] * 2000, lambda h: h[1999]),
        lambda _, m: m.holder.__setitem__(1999, 0.5),
    ),
    "bound method": (
        reads(lambda: Scale().get, lambda h: h()),
        lambda _, m: setattr(m.holder.__self__, "factor", 0.5),
    ),
    "partial": (
        reads(lambda: functools.partial(max, *([0.1, 1.0],)), lambda h: h()),
        lambda _, m: m.holder.args[0].__setitem__(1, 0.5),
    ),
    "closure": (reads(closed_over, lambda h: h()), lambda _, m: m.holder(0.5)),
    "minus zero": (
        reads(lambda: 0.0, lambda h: 1 + math.copysign(0.5, h)),
        lambda _, m: setattr(m, "holder", -0.0),
    ),
    "attribute that comes": (Absent, lambda _, m: setattr(m, "late", 0.5)),
    "item of the dictionary": (OfDictionary, lambda _, m: setattr(m, "holder", 0.5)),
    "attribute of the trainer": (OfTrainer, lambda t, _: setattr(t.fit_loop, "max_epochs", 2)),
    "method": (Plain, patch_loss),
    "training_step": (Plain, patch_training_step),
    "step of the optimizer": (Plain, patch_optimizer),
    "optimizer": (Plain, take_optimizer),
    "callback": (Plain, lambda t, _: t.callbacks.append(Gradients())),
    "clipping": (Plain, lambda t, _: setattr(t, "gradient_clip_val", 0.01)),
    "hook of a parameter": (
        Plain,
        lambda _, m: m.network[0].weight.register_hook(lambda gradient: 0.5 * gradient),
    ),
}


@pytest.mark.parametrize("what", LATE)
def test_what_changes_long_after_the_capture_counts(fit: Callable[..., Ran], what: str) -> None:
    model, change = LATE[what]

    class Changes(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if trainer.global_step == CHANGED_AT:
                change(trainer, pl_module)

    captured, eager, unchanged = (
        fit(model, mode, callbacks=[Changes()] if changes else [])
        for mode, changes in (("auto", True), ("off", True), ("off", False))
    )
    assert captured.capture.replays >= CHANGED_AT - capture.WARMUP_STEPS - capture.TRIALS
    assert same(captured, eager)
    assert not same(eager, unchanged)


def test_list_of_too_many_objects(fit: Callable[..., Ran]) -> None:
    model = reads(lambda: [Scale() for _ in range(1001)], lambda h: h[1000].get())
    check_eager(fit, model, "training_step reads self.holder, which is very large")


@pytest.mark.parametrize("kept", ["of itself", "of a group", "of a parameter"])
def test_numbers_that_an_optimizer_counts(fit: Callable[..., Ran], kept: str) -> None:
    class Counting(torch.optim.SGD):
        n = 0

        def step(self, closure: Any = None) -> Any:
            group, state = self.param_groups[0], self.state[self.param_groups[0]["params"][0]]
            if kept == "of itself":
                self.n = count = self.n + 1
            elif kept == "of a group":
                group["n"] = count = group.get("n", 0) + 1
            else:
                state["n"] = count = state.get("n", 0) + 1
            loss = closure()
            for parameter in group["params"]:
                parameter.grad /= count
            super().step()
            return loss

    class Counts(Plain):
        def configure_optimizers(self) -> Any:
            return Counting(self.parameters(), lr=0.5)

    check_eager(fit, Counts, "training_step changes optimizer")


# The setting.


def test_required(fit: Callable[..., Ran]) -> None:
    class Indexed(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch) * (1 + batch_idx)

    assert fit(Plain, "step").capture.replays > 0
    with pytest.raises(CaptureError, match=r"capture=step: .*reads batch_idx; use capture=auto"):
        fit(Indexed, "step")


def test_mode_is_checked() -> None:
    message = "capture: expected one of auto, step, off; got 'yes'"
    with pytest.raises(MisconfigurationException, match=message):
        CapturedSteps("yes")
    assert CapturedSteps(False).mode == "off"  # as YAML reads it


def test_scaler_of_lightning_is_where_it_is_looked_for() -> None:
    assert hasattr(MixedPrecision("bf16-mixed", "cpu"), "scaler")
