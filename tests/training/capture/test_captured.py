"""Steps that are captured give the same bits as eager steps do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from pytorch_lightning.callbacks import GradientAccumulationScheduler
from pytorch_lightning.plugins import MixedPrecision
from torch import Tensor, nn

import train
from models.tasks.optimizer import configure
from tests.training.capture.support import (
    BATCH,
    STEPS,
    Plain,
    Ran,
    Scheduled,
    batches,
    check_captured,
    check_eager,
    same,
)
from training.callbacks.profile import Profile
from training.capture import steps as capture
from training.capture.steps import CapturedSteps

CONF = Path(train.__file__).parent / "conf"


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


def test_logged_tensors_may_change_after_it(fit: Callable[..., Ran]) -> None:
    class Logs(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.ones(()))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("temperature", self.temperature)  # which the optimizer changes
            loss = self.loss(batch) * self.temperature
            self.log("loss", loss.detach())
            loss *= 2
            return loss

    check_captured(fit, Logs)


def test_rate_that_is_a_tensor_may_be_replaced(fit: Callable[..., Ran]) -> None:
    class Stopping(Plain):
        def configure_optimizers(self) -> Any:
            rate = torch.tensor(2**-4)
            return torch.optim.AdamW(self.parameters(), lr=rate, fused=True)

        def on_train_epoch_end(self) -> None:
            for group in self.trainer.optimizers[0].param_groups:
                group["lr"] = group["lr"] * 0

    captured, eager = (fit(Stopping, mode, max_epochs=2) for mode in ("auto", "off"))
    assert captured.capture.replays > 0
    assert same(captured, eager)


def test_rate_is_a_float32_whatever_the_default_is(fit: Callable[..., Ran]) -> None:
    class Slow(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.float()

        def loss(self, batch: Any) -> Tensor:
            return super().loss((batch[0].float(), batch[1])) * 2**20

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=2**-26, fused=True)  # 0 in float16

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        check_captured(fit, Slow)
    finally:
        torch.set_default_dtype(before)


class Wrapping(torch.optim.Optimizer):
    def __init__(self, base: torch.optim.Optimizer) -> None:
        # Without the initialisation of its base class.
        self.base, self.defaults = base, base.defaults
        self.param_groups, self.state = base.param_groups, base.state

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)


def test_optimizer_that_wraps_another(fit: Callable[..., Ran]) -> None:
    class Wrapped(Plain):
        def configure_optimizers(self) -> Any:
            return Wrapping(super().configure_optimizers())

    check_captured(fit, Wrapped)


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


def test_callback_serves_two_fits(fit: Callable[..., Ran]) -> None:
    captured = CapturedSteps()
    for fits in (1, 2):
        ran = fit(Plain, captured=captured)
        assert captured.captures == fits
        assert "log" not in vars(ran.trainer.lightning_module)
    assert captured.replays == 2 * (STEPS - capture.WARMUP_STEPS - capture.TRIALS)


class Freezing(Plain):
    def on_train_epoch_start(self) -> None:
        self.network[0].requires_grad_(self.current_epoch % 2 == 0)
        self.network[1].train(self.current_epoch % 2 == 0)


class Moved(Plain):
    def on_train_epoch_start(self) -> None:
        for parameter in self.parameters():
            parameter.data = parameter.data * 0.5


class Reset(Plain):
    def on_train_epoch_start(self) -> None:
        optimizer: Any = self.trainer.optimizers[0]
        optimizer.load_state_dict(optimizer.state_dict())
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.5


@pytest.mark.parametrize(("model", "epochs"), [(Freezing, 4), (Moved, 2), (Reset, 2)])
def test_another_key_is_another_graph(
    fit: Callable[..., Ran], model: type[Plain], epochs: int
) -> None:
    assert check_captured(fit, model, max_epochs=epochs).capture.captures == 2


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

    resumed = fit(Scheduled, max_epochs=4, resumed=tmp_path / "half.ckpt")
    assert resumed.losses == whole.losses[2 * STEPS :]


def test_scaler_of_lightning_is_where_it_is_looked_for() -> None:
    assert hasattr(MixedPrecision("bf16-mixed", "cpu"), "scaler")
