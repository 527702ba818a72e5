"""Optimizers of users, captured."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import BaseFinetuning
from torch import Tensor

from tests.training.capture.support import (
    BATCH,
    Plain,
    Ran,
    batches,
    check_captured,
    check_eager,
    same,
)


class Own(torch.optim.SGD):
    """Steps by what it has beside its rate."""

    scale = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad * (group["lr"] * self.factor(group)))
        return loss

    def factor(self, group: dict[str, Any]) -> float:
        return self.scale * group.get("scale", 1.0)


def trained_by(optimizer: Callable[..., torch.optim.Optimizer]) -> type[Plain]:
    def configure_optimizers(self: Plain) -> Any:
        return optimizer(self.parameters(), lr=2**-4)

    return type("Trained", (Plain,), {"configure_optimizers": configure_optimizers})


class Twice(Own):
    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


def test_step_that_runs_twice(fit: Callable[..., Ran]) -> None:
    check_eager(fit, trained_by(Twice), "the optimizer runs the step more than once")


def rate(ran: Ran) -> float:
    return float(ran.trainer.optimizers[0].param_groups[0]["lr"])


def test_step_that_sets_the_rate(fit: Callable[..., Ran]) -> None:
    class Setting(trained_by(functools.partial(torch.optim.SGD, fused=True))):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            optimizer: Any = self.optimizers()
            optimizer.param_groups[0]["lr"] = 2.0 ** -(4 + batch_idx // 4)
            return self.loss(batch)

    captured = check_eager(fit, Setting, "the step changes the learning rate")
    assert rate(captured) == rate(fit(Setting, "off")) == 2**-7


def test_optimizer_that_changes_its_rate(fit: Callable[..., Ran]) -> None:
    class Halving(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            for group in self.param_groups:
                group["lr"] *= 0.5
            return loss

    model = trained_by(functools.partial(Halving, fused=True))
    captured = check_eager(fit, model, "the step changes the learning rate")
    assert rate(captured) == rate(fit(model, "off"))


def test_rate_that_becomes_a_tensor_before_the_first_step(
    fit: Callable[..., Ran], device: str
) -> None:
    class Written(Plain):
        def on_train_start(self) -> None:
            group = self.trainer.optimizers[0].param_groups[0]
            group["lr"] = torch.tensor(2**-7, device=device)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.trainer.optimizers[0].param_groups[0]["lr"].mul_(0.5)

    check_captured(fit, Written)


def test_group_that_goes_and_comes_back(fit: Callable[..., Ran]) -> None:
    class Moving(Plain):
        def configure_optimizers(self) -> Any:
            groups = [{"params": [p]} for p in self.parameters()]
            return torch.optim.AdamW(groups, lr=2**-7, fused=True)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            groups = self.trainer.optimizers[0].param_groups
            if batch_idx == 7:
                self.taken = groups.pop(0)
            elif batch_idx == 11:
                groups.append(self.taken)

    captured, eager = (fit(Moving, mode) for mode in ("auto", "off"))
    assert captured.capture.replays
    assert same(captured, eager)


@pytest.mark.parametrize("at", [1, 11])
@pytest.mark.parametrize("capturable", [False, None], ids=["of elsewhere", "its own"])
def test_state_that_is_loaded_again(
    fit: Callable[..., Ran], at: int, capturable: bool | None
) -> None:
    class Loading(Plain):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == at:
                state = copy.deepcopy(self.trainer.optimizers[0].state_dict())
                for group in state["param_groups"] if capturable is not None else ():
                    group["capturable"] = capturable
                self.trainer.optimizers[0].load_state_dict(state)

    captured, eager = (fit(Loading, mode) for mode in ("auto", "off"))
    assert captured.capture.replays
    assert same(captured, eager)
    checkpoint = captured.trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    assert not checkpoint["optimizer_states"][0]["param_groups"][0]["capturable"]


class Finetuning(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.network[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.network[0], optimizer)


def test_group_that_comes_before_the_capture(fit: Callable[..., Ran]) -> None:
    class Tuned(Plain):
        def configure_optimizers(self) -> Any:
            trained = [p for p in self.parameters() if p.requires_grad]
            return torch.optim.SGD(trained, lr=2**-4)

    data = batches([BATCH] * 2)
    captured, eager = (
        fit(Tuned, mode, data=data, max_epochs=6, callbacks=[Finetuning()])
        for mode in ("auto", "off")
    )
    assert captured.capture.replays
    assert same(captured, eager)


@pytest.mark.slow
def test_many_parameters(fit: Callable[..., Ran]) -> None:
    class Large(Plain):
        def __init__(self) -> None:
            super().__init__()
            rows = [[torch.nn.Linear(1, 1) for _ in range(50)] for _ in range(30)]
            self.more = torch.nn.ModuleList(torch.nn.ModuleList(row) for row in rows)

        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch) + 2**-9 * sum(p.sum() for p in self.more.parameters())

    check_captured(fit, Large)
