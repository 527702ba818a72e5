"""An optimizer whose steps are captured."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from training.capture.attributes import Attributes


class CapturedOptimizer:
    """Lets an optimizer run in a graph, and read its learning rate from the GPU.

    It is made ``capturable`` if it can be, by :meth:`prepare`, which comes before all else. The
    value of the schedule is written to the GPU before a step, and the optimizer keeps its own, a
    Python number, between the steps.

    Args:
        optimizer: of any kind.
        device: that trains.

    Attributes:
        changes_rates: whether a step has changed a learning rate by itself. Then the optimizer
            reads its own numbers.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._device = device
        # Of each group: what `capturable` was, the learning rate on the GPU, and what was written.
        self._capturable: list[bool | None] = []
        self._rates: list[Tensor | None] = []
        self._written: list[Any] = []
        self.changes_rates = False

    @property
    def parameters(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def prepare(self) -> None:
        """Prepares the groups and the state that are there, new ones too."""
        groups = self._optimizer.param_groups
        for group in groups[len(self._rates) :]:
            self._capturable.append(group.get("capturable"))
            reads = "capturable" in group or group.get("fused")
            number = isinstance(group.get("lr"), float | int)  # else the schedule writes into it
            rate = None
            if reads and number and not self.changes_rates:
                rate = torch.empty((), dtype=torch.float32, device=self._device)
            self._rates.append(rate)
            self._written.append(None)
        for group in groups:
            if "capturable" in group:
                group["capturable"] = True
            for parameter in group["params"]:
                state = self._optimizer.state.get(parameter, {})
                if isinstance(state.get("step"), Tensor):  # a resumed run has it on the CPU
                    state["step"] = state["step"].to(self._device)

    def restore_options(self, state: dict[str, Any]) -> None:
        """Removes what `prepare` set from a state dict: a CPU, on which a run may go on, refuses
        it."""
        for group, capturable in zip(state["param_groups"], self._capturable):
            if capturable is not None:
                group["capturable"] = capturable

    def write_rates(self) -> None:
        """Writes the learning rates to the GPU."""
        for i, (group, rate) in enumerate(zip(self._optimizer.param_groups, self._rates)):
            if rate is None:
                continue
            if isinstance(value := group["lr"], Tensor):  # in which others may write
                rate.copy_(value)
            elif value != self._written[i]:
                self._written[i] = value
                rate.fill_(value)

    @contextmanager
    def rates_on_gpu(self) -> Iterator[None]:
        """Lets the optimizer read its learning rate from the GPU: eager steps then give the same
        bits as captured ones. What the step itself sets stays."""
        if len(self._rates) < len(self._optimizer.param_groups):
            self.prepare()
        self.write_rates()
        groups = [
            (group, group["lr"], rate, rate._version)
            for group, rate in zip(self._optimizer.param_groups, self._rates)
            if rate is not None
        ]
        for group, _, rate, _ in groups:
            group["lr"] = rate
        try:
            yield
        finally:
            for group, number, rate, version in groups:
                if rate._version != version:
                    group["lr"], self.changes_rates = float(rate), True
                elif group["lr"] is rate:
                    group["lr"] = number
                else:
                    self.changes_rates = True
            if self.changes_rates:
                self._rates = [None] * len(self._rates)

    def add_options(self, attributes: Attributes) -> None:
        """Adds the options of the groups, but the learning rates that are read from the GPU."""
        rates = itertools.zip_longest(self._optimizer.param_groups, self._rates)
        for number, (group, rate) in enumerate(rates):
            name = f"optimizer.param_groups[{number}]"
            keys = [
                key for key in group if key != "params" and not (key == "lr" and rate is not None)
            ]
            attributes.add_items(name, group, keys)
            attributes.add_size(name, group)

    def add_state(self, attributes: Attributes) -> None:
        """Adds the parameters of the groups, their state, and what else the optimizer keeps."""
        for number, group in enumerate(self._optimizer.param_groups):
            attributes.add_items(f"optimizer.param_groups[{number}]", group, ["params"])
        for state in self._optimizer.state.values():
            attributes.add_items("optimizer.state", state, list(state))
        attributes.add_items("optimizer", vars(self._optimizer), list(vars(self._optimizer)))
        attributes.add_inherited("optimizer", self._optimizer)
