"""A stop where the first NaN or infinity is made."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


class NotFiniteError(ArithmeticError):
    """A loss, an output or a gradient is NaN or infinite; says where."""


class FiniteLayers(pl.Callback):
    """Looks at what every layer makes, forward and backward, and waits for the device each time:
    for finding a fault, not for training.

    Raises:
        NotFiniteError: while training: names the step and the layer whose output, or gradient of
            an input or a parameter, was the first that is not finite.
    """

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for name, module in pl_module.named_modules():
            if not next(module.children(), None):
                self._watch(trainer, name, module)
        for name, parameter in pl_module.named_parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name: _check(trainer, f"the gradient of {name}", p.grad)
            )

    def _watch(self, trainer: pl.Trainer, name: str, module: nn.Module) -> None:
        what = f"{name} ({type(module).__name__})"

        def before(_: nn.Module, inputs: Any) -> None:
            for value in tree_leaves(inputs):
                if isinstance(value, Tensor) and value.requires_grad:
                    value.register_hook(
                        lambda grad: _check(trainer, f"the gradient of the input of {what}", grad)
                    )

        def after(_: nn.Module, inputs: Any, output: Any) -> None:
            came = "its inputs were finite" if _finite(inputs) else "its inputs were not either"
            _check(trainer, f"the output of {what}", output, f"; {came}")

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)


def _check(trainer: pl.Trainer, what: str, values: Any, remark: str = "") -> None:
    if trainer.training and not _finite(values):
        raise NotFiniteError(f"step {trainer.global_step + 1}: {what} is not finite{remark}")


def _finite(values: Any) -> bool:
    return all(
        bool(torch.isfinite(value).all())
        for value in tree_leaves(values)
        if isinstance(value, Tensor) and value.is_floating_point()
    )
