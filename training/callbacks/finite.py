"""Finding the module that makes the first NaN or infinity, forward or backward."""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from training.model import choose_implementations
from training.tensors import map_tensors


class NotFiniteError(ArithmeticError):
    """A loss, an output or a gradient is NaN or infinite; says where."""


class FiniteLayers(pl.Callback):
    """Checks the inputs and outputs of every module, and their gradients, in every training step.

    Each check waits for the device: use it to find a fault, not to train.

    The error names the module whose own code made the first value that is not finite: its inputs
    were finite, and what it returned, or passed to a module that it calls, was not. A module with
    children may be the one. Infinite inputs whose output is finite, such as those of a mask, are no
    fault. Tensors are found in tuples, lists, dicts, dataclasses and PackedSequences. The scaled
    gradients of ``precision=16-mixed`` may be infinite in a sound run; this callback stops it.

    Raises:
        NotFiniteError: while training: names the step, the module with the implementation that it
            uses, and what is not finite.
    """

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._trainer = trainer
        self._calls: list[_Call] = []  # those that have not returned, the innermost last
        self._called: dict[str, str] = {}  # name -> description, of the modules called in this step
        device = trainer.strategy.root_device.type
        chosen = choose_implementations(pl_module, device)
        # A layer whose generator has hooks is not fused: it is watched as a whole.
        parts = tuple(f"{name}." for name in chosen)
        for name, module in pl_module.named_modules():
            if name.startswith(parts):
                continue
            kind = type(module).__name__
            kind += f", impl={chosen[name].name}" if name in chosen else ""
            self._watch(name, f"{name or 'the model'} ({kind})", module)
        for name, parameter in pl_module.named_parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name: self._check_gradient_of(name, p.grad)
            )

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._batch = batch
        self._calls.clear()
        self._called.clear()

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        if not _is_finite(loss):
            self._stop("the loss is not finite; the output of every layer is")

    def _watch(self, name: str, what: str, module: nn.Module) -> None:
        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
            if not self._trainer.training:
                return None
            call = _Call(what, name, module, _is_finite((args, kwargs)))
            self._calls.append(call)
            self._called[name] = what
            return self._guarded((args, kwargs), f"the backward pass of {what} makes a gradient")

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            if not self._trainer.training:
                return None
            call = self._calls.pop()
            if not _is_finite(output):
                self._blame(call)
            caller = self._calls[-1].what if self._calls else "training_step"
            return self._guarded(output, f"the backward pass of {caller} gives {what} a gradient")

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after, with_kwargs=True)

    def _blame(self, call: _Call) -> NoReturn:
        """Raises the error for a module whose output is not finite."""
        what = f"the output of {call.what} is not finite; its inputs were"
        if not call.finite:  # a caller whose own inputs were finite made them
            maker = next((c for c in reversed(self._calls) if c.finite), None)
            if maker is None:
                made = "training_step made them" if _is_finite(self._batch) else "like the batch"
                self._stop(f"{what} not finite, {made}")
            what, call = f"{what} not finite, {maker.what} made them; its own inputs were", maker
        for name, parameter in call.module.named_parameters(call.name):
            if not _is_finite(parameter):
                self._stop(f"{what} finite, but not its parameter {name}")
        self._stop(f"{what} finite, and so are its parameters")

    def _guarded(self, values: Any, message: str) -> Any:
        """Returns the values; raises where the gradient from this use of them is not finite."""
        guarded: dict[int, Tensor] = {}  # by id: a tensor that occurs twice is guarded once

        def check(gradient: Tensor) -> None:
            if not _is_finite(gradient):
                self._stop(f"{message} that is not finite")

        def guard(value: Tensor) -> Tensor:
            if not (value.requires_grad and torch.is_grad_enabled()):
                return value
            if id(value) not in guarded:
                guarded[id(value)] = value.view_as(value)
                guarded[id(value)].register_hook(check)
            return guarded[id(value)]

        return map_tensors(guard, values)

    def _check_gradient_of(self, parameter: str, gradient: Any) -> None:
        if self._trainer.training and not _is_finite(gradient):
            around = [name for name in self._called if parameter.startswith(f"{name}.")]
            what = f" in {self._called[max(around, key=len)]}" if around else ""
            self._stop(f"the gradient of {parameter}{what} is not finite")

    def _stop(self, message: str) -> NoReturn:
        raise NotFiniteError(f"step {self._trainer.global_step + 1}: {message}")


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call of a module that has not returned."""

    what: str
    name: str
    module: nn.Module
    finite: bool  # whether its inputs are


def _is_finite(values: Any) -> bool:
    found = True

    def look(value: Tensor) -> Tensor:
        nonlocal found
        if value.is_floating_point() or value.is_complex():
            numbers = value.coalesce().values() if value.is_sparse else value
            found = found and bool(torch.isfinite(numbers).all())
        return value

    map_tensors(look, values)
    return found
