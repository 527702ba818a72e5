"""Marks in the work of a device, and what the layers of a model take between them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hoconv.dispatch.declaration import layers


def mark(device: torch.device) -> float | torch.cuda.Event:
    """Marks a point in the work of a device: the time, or an event queued behind its work."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds_between(begin: Any, end: Any) -> float:
    """Waits for the second of two marks; returns the time between them."""
    if isinstance(begin, float):
        return 1e3 * (end - begin)
    end.synchronize()
    return begin.elapsed_time(end)


class LayerMarks:
    """Marks where the device enters and leaves the layers of a model, forward and backward.

    The device enters a layer before its forward, and when the gradient of its output is ready. It
    leaves after the forward, and when the last gradient of its inputs and parameters is ready.
    Autograd runs in the reverse order of the forward, so nothing else runs in between.

    Args:
        set_mark: marks the point at which it is called, and returns the mark.
    """

    def __init__(self, model: nn.Module, set_mark: Callable[[], Any]) -> None:
        self._set_mark = set_mark
        self._spans: list[tuple[str, list[Any]]] = []  # operator; the device entered, it left
        self._handles: list[Any] = []
        watched: list[str] = []
        for name, layer in layers(model):
            if not any(name.startswith(f"{outer}.") for outer in watched):  # it counts as that
                watched.append(name)
                self._watch(layer)

    def clear(self) -> None:
        """Forgets the marks that were set."""
        self._spans.clear()

    def remove(self) -> None:
        """Sets no more marks."""
        for handle in self._handles:
            handle.remove()

    def spans(self) -> dict[str, list[tuple[Any, Any]]]:
        """Returns the marks around the layers of each operator that were set since `clear`.

        An operator is left out where the end of one of its calls was not seen: that of a layer
        which is called twice in a step, with an input that needs no gradient.
        """
        found: dict[str, list[tuple[Any, Any]]] = {}
        unseen = {operator for operator, (_, end) in self._spans if end is None}
        for operator, (begin, end) in self._spans:
            if operator not in unseen:
                found.setdefault(operator, []).append((begin, end))
        return found

    def milliseconds(self) -> dict[str, float]:
        """Returns the time in the layers of each operator of `spans`, whose marks are of `mark`."""
        return {
            operator: sum(milliseconds_between(*span) for span in spans)
            for operator, spans in self.spans().items()
        }

    def _watch(self, layer: Any) -> None:
        def enter() -> list[Any]:
            span = [self._set_mark(), None]
            self._spans.append((layer.operator.name, span))
            return span

        def leave(span: list[Any]) -> None:
            span[1] = self._set_mark()  # each gradient replaces it; the last one stays

        current: list[Any] = [None, None]  # the span in which the layer is, or was last

        def before(_: nn.Module, inputs: Any) -> None:
            nonlocal current
            for each in tree_leaves(inputs):
                if isinstance(each, Tensor) and each.requires_grad:
                    each.register_hook(lambda _: leave(current))
            current = enter()

        def after(_: nn.Module, inputs: Any, output: Any) -> None:
            def begin_backward(_: Tensor) -> None:
                nonlocal current
                current = enter()

            leave(current)
            differentiable = [t for t in tree_leaves(output)
                              if isinstance(t, Tensor) and t.requires_grad]  # fmt: skip
            if differentiable:
                differentiable[0].register_hook(begin_backward)

        self._handles += [
            layer.register_forward_pre_hook(before),
            layer.register_forward_hook(after),
            *(
                parameter.register_post_accumulate_grad_hook(lambda _: leave(current))
                for parameter in layer.parameters()
            ),
        ]
