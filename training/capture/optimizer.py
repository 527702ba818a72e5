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
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.optimizer = optimizer
        self._device = device
        self._rates: list[Tensor] = []  # of the parameter groups, in order
        self._written: list[Any] = []  # the numbers that are in them
        self._changed = False

    @contextmanager
    def on_gpu(self) -> Iterator[None]:
        """Prepares the optimizer for a step that is captured, or that gives the same bits."""
        self.write_rates()
        before = []
        for group, rate in zip(self.optimizer.param_groups, self._rates):
            options: dict[str, Any] = {"capturable": True} if "capturable" in group else {}
            if _reads_rate(group):
                options["lr"] = rate
            before.append((group, {name: group[name] for name in options}))
            group |= options
            for parameter in group["params"] if "capturable" in group else ():
                state = self.optimizer.state.get(parameter, {})
                if isinstance(state.get("step"), Tensor):  # a resumed run has it on the CPU
                    state["step"] = state["step"].to(self._device)
        try:
            yield
        finally:
            for (group, options), rate in zip(before, self._rates):
                if options.get("lr") is not None and group["lr"] is not rate:
                    self._changed = True
                    del options["lr"]
                group |= options

    def changes_rates(self) -> bool:
        """Returns whether a step has changed a learning rate by itself, within :meth:`on_gpu`; the
        groups have the new one then."""
        for group, rate, value in zip(self.optimizer.param_groups, self._rates, self._written):
            if _reads_rate(group) and float(rate) != float(np.float32(float(value))):
                group["lr"], self._changed = float(rate), True
        return self._changed

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
                if name != "params" and not (name == "lr" and _reads_rate(group))
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


def _reads_rate(group: dict[str, Any]) -> bool:
    """Returns whether the optimizer can read the learning rate of a group from the GPU."""
    return "lr" in group and ("capturable" in group or bool(group.get("fused")))
