"""An optimizer whose steps are captured: a graph reads its learning rates from the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


class CapturedOptimizer:
    """Lets an optimizer run in a graph.

    While a step runs within :meth:`on_gpu`, the optimizer is ``capturable`` if it can be, and reads
    its learning rates from the GPU, where they are float32. Otherwise it is as the user made it.

    Args:
        optimizer: of any kind.
        device: that trains.

    Attributes:
        changes_rates: whether a step has changed a learning rate by itself. Then the optimizer
            reads its own numbers.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.optimizer = optimizer
        self.changes_rates = False
        self._device = device
        self._rates: list[Tensor] = []  # of the parameter groups, in order
        self._written: list[Any] = []  # the numbers that are in them

    def prepare(self) -> None:
        """Writes the learning rates to the GPU, and moves the numbers of steps that a resumed run
        has on the CPU."""
        self.write_rates()
        for group in self.optimizer.param_groups:
            for parameter in group["params"] if "capturable" in group else ():
                state = self.optimizer.state.get(parameter, {})
                if isinstance(state.get("step"), Tensor):
                    state["step"] = state["step"].to(self._device)

    @contextmanager
    def on_gpu(self) -> Iterator[None]:
        """Lets a step be captured, or give the same bits as a captured one."""
        self.prepare()
        before = []
        for group, rate in zip(self.optimizer.param_groups, self._rates):
            options: dict[str, Any] = {"capturable": True} if "capturable" in group else {}
            if self._reads_rate(group):
                options["lr"] = rate
            before.append((group, {name: group[name] for name in options}))
            group |= options
        try:
            yield
        finally:
            for (group, options), rate in zip(before, self._rates):
                if "lr" in options and group["lr"] is not rate:
                    self.changes_rates = True
                    del options["lr"]
                group |= options

    def find_changed_rates(self) -> None:
        """Finds the rates that a step has changed in place, and puts them into their groups."""
        for group, rate, value in zip(self.optimizer.param_groups, self._rates, self._written):
            if self._reads_rate(group) and float(rate) != float(np.float32(float(value))):
                group["lr"], self.changes_rates = float(rate), True

    def write_rates(self) -> None:
        """Writes the learning rates, which a schedule may have changed, to the GPU."""
        for number, group in enumerate(self.optimizer.param_groups):
            if number == len(self._rates):
                rate = torch.empty((), dtype=torch.float32, device=self._device)
                self._rates.append(rate)
                self._written.append(None)
            if isinstance(value := group.get("lr"), Tensor):
                self._rates[number].copy_(value)
            elif value is not None and value != self._written[number]:
                self._rates[number].fill_(value)
            self._written[number] = value

    def options(self) -> tuple[Any, ...]:
        """Returns what a graph keeps of the parameter groups: all but the rates on the GPU."""
        return tuple(
            [
                (name, id(value) if isinstance(value, Tensor | list) else value)
                for group in self.optimizer.param_groups
                for name, value in group.items()
                if name != "params" and not (name == "lr" and self._reads_rate(group))
            ]
        )

    def state(self) -> dict[str, Tensor]:
        """Returns the tensors of the optimizer's state by name."""
        return {
            f"optimizer.state[{number}].{name}": value
            for number, state in enumerate(self.optimizer.state.values())
            for name, value in state.items()
            if isinstance(value, Tensor)
        }

    def _reads_rate(self, group: dict[str, Any]) -> bool:
        """Returns whether the optimizer reads the learning rate of a group from the GPU."""
        able = "capturable" in group or group.get("fused")
        return "lr" in group and bool(able) and not self.changes_rates
