"""Counts what a sample costs a model with approximate layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hoconv.approx import ApproxConv2d, ApproxLinear, ApproxMatmul, ModelCost, cost
from hoconv.ops.approx.layers.cost import energy_by_multiplier
from training.configuration.errors import MisconfigurationException
from training.results.record import logged_costs

APPROXIMATE = ApproxConv2d, ApproxLinear, ApproxMatmul


class Cost(pl.Callback):
    """Counts the multiplications of a sample when a test begins, in a call of the model of its own,
    and logs them with the energy that they take.

    It does nothing for a model without approximate layers.

    Args:
        energies: as of :func:`hoconv.approx.cost`.

    Attributes:
        notes: why the multiplications were not counted.

    Raises:
        MisconfigurationException: an energy is no positive number, or of no multiplier.
    """

    def __init__(self, energies: Mapping[str, float] | None) -> None:
        try:
            energy_by_multiplier(energies or {})
        except ValueError as error:
            raise MisconfigurationException(f"approx.{error}") from error
        self._energies = energies
        self._found: ModelCost | None = None
        self.notes: list[str] = []

    def on_test_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        if batch_idx or dataloader_idx:
            return
        if not any(isinstance(module, APPROXIMATE) for module in pl_module.modules()):
            return
        try:
            sample = _input(pl_module, batch)[:1]
            with trainer.strategy.precision_plugin.forward_context():
                self._found = cost(pl_module, sample, energies=self._energies)
        except Exception as error:  # of any model, whose test goes on
            why = " ".join(str(error).split())
            self.notes = [f"multiplications were not counted: {why}"]
            return
        for logger in trainer.loggers:
            logger.log_metrics(logged_costs(self.summary()), step=trainer.global_step)

    def summary(self) -> dict[str, Any]:
        """Returns ``multiplications`` of a sample; ``energy_pj`` that all but ``unknown`` of them
        take, None where all are; and the same of ``layers``, with ``multiplier`` and ``area_um2``
        of one; nothing where they were not counted."""
        if self._found is None:
            return {}
        layers = [
            {
                "name": each.name,
                "multiplier": each.multiplier,
                "multiplications": each.multiplications,
                "energy_pj": each.energy,
                "area_um2": each.area,
            }
            for each in self._found.layers
        ]
        return {
            "multiplications": self._found.multiplications,
            "unknown": self._found.unknown,
            "energy_pj": self._found.energy,
            "layers": layers,
        }


def _input(model: pl.LightningModule, batch: Any) -> Tensor:
    """Returns an input of a model: its ``example_input_array``, or the first tensor of a batch."""
    if type(model).forward is pl.LightningModule.forward:
        raise ValueError(f"a {type(model).__name__} has no forward; define it")
    if isinstance(model.example_input_array, Tensor):
        return model.example_input_array
    return next(each for each in tree_leaves(batch) if isinstance(each, Tensor))
