"""An optimizer whose steps are captured."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from training.capture.attributes import Attributes


@dataclasses.dataclass
class _Group:
    """A parameter group.

    Attributes:
        options: the group itself.
        capturable: what that option was; None where there is none.
        rate: the learning rate on the GPU; None where the optimizer reads the number.
        written: the number that was written there last.
    """

    options: dict[str, Any]
    capturable: bool | None
    rate: Tensor | None
    written: Any = None


class CapturedOptimizer:
    """Lets an optimizer run in a graph, and read its learning rate from the GPU.

    It is made ``capturable`` if it can be, by :meth:`prepare`, which comes before all else. The
    value of the schedule is written to the GPU before a step, and the optimizer keeps its own, a
    Python number, except while it steps.

    Args:
        optimizer: of any kind.
        device: that trains.

    Attributes:
        changes_rates: whether a step has changed a learning rate by itself. Then the optimizer
            reads its own numbers.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.optimizer = optimizer
        self._device = device
        self._known: dict[int, _Group] = {}  # by the id of the group
        self.changes_rates = False

    @property
    def parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def prepare(self) -> None:
        """Prepares the groups and the state that are there, new ones too."""
        for group in self.optimizer.param_groups:
            if id(group) not in self._known:
                self._known[id(group)] = self._describe(group)
            if "capturable" in group:
                group["capturable"] = True
            for parameter in group["params"]:
                state = self.optimizer.state.get(parameter, {})
                if isinstance(state.get("step"), Tensor):  # a resumed run has it on the CPU
                    state["step"] = state["step"].to(self._device)

    def _describe(self, group: dict[str, Any]) -> _Group:
        reads = "capturable" in group or group.get("fused")
        number = isinstance(group.get("lr"), float | int)  # else the schedule writes into it
        rate = None
        if reads and number and not self.changes_rates:
            rate = torch.empty((), dtype=torch.float32, device=self._device)
        # A group that is loaded from this optimizer's own state dict has what `prepare` set.
        same = (
            known for known in self._known.values()
            if [*map(id, known.options["params"])] == [*map(id, group["params"])]
        )  # fmt: skip
        earlier = next(same, None)
        capturable = group.get("capturable") if earlier is None else earlier.capturable
        return _Group(group, capturable, rate)

    def _groups(self) -> list[_Group]:
        """Those that are there and were prepared, in order."""
        known = (self._known.get(id(group)) for group in self.optimizer.param_groups)
        return [group for group in known if group is not None]

    def restore_options(self, state: dict[str, Any]) -> None:
        """Removes what `prepare` set from a state dict: a CPU, on which a run may go on, refuses
        it."""
        for saved, group in zip(state["param_groups"], self.optimizer.param_groups):
            known = self._known.get(id(group))
            if known is not None and known.capturable is not None:
                saved["capturable"] = known.capturable

    def write_rates(self) -> None:
        """Writes the learning rates to the GPU."""
        for group in self._groups():
            if group.rate is None:
                continue
            if isinstance(value := group.options["lr"], Tensor):  # in which others may write
                group.rate.copy_(value)
            elif value != group.written:
                group.written = value
                group.rate.fill_(value)

    @contextmanager
    def rates_on_gpu(self, model: pl.LightningModule) -> Iterator[None]:
        """Lets the optimizer read its learning rate from the GPU: eager steps then give the same
        bits as captured ones. ``training_step``, which runs within the optimizer's step, sees the
        numbers. What the step sets stays."""
        if any(id(group) not in self._known for group in self.optimizer.param_groups):
            self.prepare()
        step, own = model.training_step, vars(model).get("training_step")

        @functools.wraps(step)  # Lightning reads its signature
        def training_step(*args: Any, **kwargs: Any) -> Any:
            before = self._take_back(taken)
            try:
                return step(*args, **kwargs)
            finally:
                if any(each.options["lr"] is not value for each, value in before):
                    self.changes_rates = True
                    self.write_rates()
                taken[:] = self._put()

        self.write_rates()
        taken = self._put()
        model.training_step = training_step
        try:
            yield
        finally:
            self._take_back(taken)
            del model.training_step
            if own is not None:
                model.training_step = own
            if self.changes_rates:
                for group in self._known.values():
                    group.rate = None

    def _put(self) -> list[tuple[_Group, Any, int]]:
        """Puts the rates on the GPU into the groups; returns these, what was there, and how often
        the rate was written to."""
        found = []
        for group in self._groups():
            if group.rate is not None:
                found.append((group, group.options["lr"], group.rate._version))
                group.options["lr"] = group.rate
        return found

    def _take_back(self, taken: list[tuple[_Group, Any, int]]) -> list[tuple[_Group, Any]]:
        """Puts the numbers into the groups again, but where the optimizer has set others; returns
        the groups, and what is there."""
        for group, number, version in taken:
            if group.rate is not None and group.rate._version != version:
                group.options["lr"], self.changes_rates = float(group.rate), True
            elif group.options["lr"] is group.rate:
                group.options["lr"] = number
            else:
                self.changes_rates = True
        return [(group, group.options["lr"]) for group, *_ in taken]

    def add_options(self, attributes: Attributes) -> None:
        """Adds the options of the groups, but the learning rates that are read from the GPU."""
        for number, group in enumerate(self.optimizer.param_groups):
            known = self._known.get(id(group))
            on_gpu = known is not None and known.rate is not None
            left_out = ("params", "lr") if on_gpu else ("params",)
            name = f"optimizer.param_groups[{number}]"
            attributes.add_items(name, group, [key for key in group if key not in left_out])
            attributes.add_size(name, group)

    def add_state(self, attributes: Attributes) -> None:
        """Adds the parameters of the groups, their state, and what else the optimizer keeps."""
        for number, group in enumerate(self.optimizer.param_groups):
            name, parameters = f"optimizer.param_groups[{number}]", group["params"]
            attributes.add_places(name, group, ["params"])
            attributes.add_items(name, parameters, list(range(len(parameters))))
        for state in self.optimizer.state.values():
            attributes.add_items("optimizer.state", state, list(state))
        attributes.add_items("optimizer.state", self.optimizer.state, list(self.optimizer.state))
        attributes.add_items("optimizer", vars(self.optimizer), list(vars(self.optimizer)))
        attributes.add_inherited("optimizer", self.optimizer)
