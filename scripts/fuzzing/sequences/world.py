"""A layer in the middle of a sequence."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from fuzzing.draw import Draw
from fuzzing.sequences.layers import Made


@dataclass
class World:
    """A layer in the middle of a sequence, and what is to be undone around it.

    Attributes:
        made: the layer as it was made.
        layer: the layer now.
        undo: what can be taken back, with its description; all of it is at the end.
        mend: what is taken back after the next call.
        tensor_hooks: of parameters, which copies of the layer do not have.
        foreign: the number of changes in force that the definition in plain PyTorch does not know.
        still: whether the layer must stay in evaluation mode.
    """

    made: Made
    layer: Any
    undo: dict[str, Callable[[], object]] = field(default_factory=dict)
    mend: list[Callable[[], None]] = field(default_factory=list)
    tensor_hooks: list[tuple[Tensor, Any]] = field(default_factory=list)
    foreign: int = 0
    still: bool = False
    numbers: Any = field(default_factory=itertools.count)

    def later(self, text: str, undo: Callable[[], object]) -> str:
        self.undo[f"{text} #{next(self.numbers)}"] = undo
        return text

    def parameter(self, draw: Draw) -> tuple[nn.Module, str, nn.Parameter] | None:
        """Draws a parameter, with its owner and name there."""
        found = [(m, n, p) for m in self.layer.modules() for n, p in m._parameters.items()
                 if p is not None]  # fmt: skip
        return draw.choice(found) if found else None

    def module(self, draw: Draw) -> tuple[str, nn.Module]:
        found = [("layer", self.layer)]
        if isinstance(getattr(self.layer, "generator", None), nn.Module):
            found.append(("layer.generator", self.layer.generator))
        return draw.choice(found)

    def copy(self) -> Any:
        """Returns a copy of the layer that was never called."""
        memo: dict[int, Any] = {}
        for module in self.layer.modules():
            for value in vars(module).values():
                if isinstance(value, Tensor) and not value.is_leaf:
                    memo[id(value)] = value.detach().clone()
        layer = copy.deepcopy(self.layer, memo)
        for tensor, hook in self.tensor_hooks:
            if id(tensor) in memo and tensor.requires_grad:
                memo[id(tensor)].register_hook(hook)
        return layer

    def mend_all(self) -> None:
        while self.mend:
            self.mend.pop()()

    def end(self) -> None:
        self.mend_all()
        for undo in reversed(self.undo.values()):
            undo()


def scale(value: Any) -> Any:
    """Changes a result: scales its tensors; an int becomes zero."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value * 1.5
    if type(value) in (tuple, list):
        return type(value)(scale(v) for v in value)
    return 0 if type(value) is int else value
