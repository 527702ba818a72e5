"""One training step as a CUDA graph: capturing it, and running it again with another batch."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from training.callbacks.values import holds_packed, map_values, tensors_of
from training.capture.fit import Fit, foreach_copy_
from training.capture.frozen import (
    FrozenError,
    Logged,
    Refusals,
    Unread,
    recorded_reads,
    watched,
)
from training.capture.unchanged import Reads


class CaptureError(RuntimeError):
    """A step was to be captured and could not; says why."""


class Call(NamedTuple):
    """The arguments of the loop's `run`, and what it does with them.

    Attributes:
        first: whether the gradients of the batch are the first that are accumulated.
        last: whether the optimizer steps after it.
        backward: whether it has gradients.
    """

    optimizer: Any
    batch_idx: int
    kwargs: dict[str, Any]
    first: bool
    last: bool
    backward: bool


@dataclasses.dataclass
class StepGraph:
    """A captured step.

    Attributes:
        fit: whose step it is.
        inputs: the tensors of the batch that it reads.
        gradients_before: of every parameter, to which an accumulating step adds; None for a step
            that begins with none.
        graph: what the GPU runs.
        result: what Lightning gets of the step; the tensors are written by the graph.
        logged: the values are written by the graph.
        gradients: of every parameter, after the step.
        reads: what the step has read on the host.
    """

    fit: Fit
    inputs: list[Tensor]
    gradients_before: list[Tensor | None] | None
    graph: Any
    result: dict[str, Any]
    logged: list[Logged]
    gradients: list[Tensor | None]
    reads: Reads

    def launch(self, batch: Any) -> dict[str, Any]:
        """Runs the step; returns `result`, which the next one overwrites."""
        self.fit.optimizer.write_rates()
        foreach_copy_(self.inputs, tensors_of(batch))
        for parameter, gradient in zip(self.fit.parameters, self.gradients_before or ()):
            added: Any = parameter.grad  # present where it was in the capture: part of the key
            if gradient is not None and gradient is not added:
                gradient.copy_(added)
        self.graph.replay()
        self.fit.set_gradients(self.gradients)
        return self.result

    def run(self, call: Call) -> dict[str, Any]:
        """Runs the step as Lightning's loop would: counts, and logs what the step logs."""
        progress = self.fit.loop.optim_progress.optimizer
        if call.last:
            progress.step.increment_ready()
        if call.first and call.backward:
            progress.zero_grad.increment_ready()
            progress.zero_grad.increment_started()
            progress.zero_grad.increment_completed()
        self.launch(call.kwargs["batch"])
        if call.last:
            progress.step.increment_completed()
        if self.logged:
            model = self.fit.model
            hook, model._current_fx_name = model._current_fx_name, "training_step"
            for name, value, arguments in self.logged:
                model.log(name, value, **arguments)  # which copies it
            model._current_fx_name = hook
        # Copies, since the next step writes there again.
        return {
            name: value.clone() if isinstance(value, Tensor) else map_values(Tensor.clone, value)
            for name, value in self.result.items()
        }


def capture(fit: Fit, call: Call) -> StepGraph:
    """Captures a step without running it.

    Raises:
        CaptureError: says why it cannot be captured.
    """
    fit.prepare()
    batch = call.kwargs["batch"]
    if (unfit := _find_unfit(batch, fit.device)) is not None:
        raise CaptureError(unfit)
    own = [tensor.clone() for tensor in tensors_of(batch)]
    inputs, refusals = iter(own), Refusals()
    kwargs = {name: Unread(name, v, refusals) for name, v in call.kwargs.items()}
    hide = functools.partial(_hide, refusals)
    kwargs["batch"] = map_values(lambda _: next(inputs), batch, hide)
    progress = copy.deepcopy(fit.loop.optim_progress.state_dict())
    before, attributes = fit.gradients(), fit.attributes()
    why = None
    try:
        with (
            fit.optimizer.rates_on_gpu(),
            watched(fit.model, refusals) as (logged, of_trainer),
            recorded_reads() as reads,
            fit.gpu.capture() as graph,
        ):
            result = fit.run_step(call.optimizer, call.batch_idx, kwargs)
        if refusals.found:  # the step may have caught the error
            raise FrozenError(refusals.found[0])
        if (changed := attributes.changed()) is not None:
            raise FrozenError(f"training_step changes {changed}")
        return StepGraph(
            fit, own, None if call.first else before, graph, result, logged, fit.gradients(),
            Reads(reads, of_trainer),
        )  # fmt: skip
    except Exception as error:
        why = _explain(error)
        scaler = getattr(fit.trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            scaler._per_optimizer_states.clear()
    finally:
        fit.loop.optim_progress.load_state_dict(progress)
        fit.set_gradients(before)
    gc.collect()  # what is left of the step would run the next one on the capture's stream
    raise CaptureError(why)


def _find_unfit(batch: Any, device: torch.device) -> str | None:
    """Returns what a graph cannot have in its batch, or None."""
    for tensor in tensors_of(batch):
        if tensor.device != device:
            return "a tensor of the batch is not on the GPU"
        if type(tensor) is not Tensor:
            return f"a tensor of the batch is a {type(tensor).__name__}"
        if tensor.requires_grad:
            return "a tensor of the batch requires a gradient"
    if holds_packed(batch):
        return "the batch has a PackedSequence"
    return None


def _hide(refusals: Refusals, value: Any) -> Any:
    if value is None or isinstance(value, bool):  # which the graph depends on
        return value
    return Unread(f"a {type(value).__name__} of the batch", value, refusals)


def _explain(error: BaseException) -> str:
    """Returns why a capture failed, and the line of code that was the cause."""
    while error.__context__ is not None:  # ending the capture fails, too
        error = error.__context__
    if isinstance(error, FrozenError):
        return str(error)
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    if "capturing" in reason or "capture" in reason:
        reason = "it waits for the GPU or copies from the host"
    frames = [
        f"{frame.filename}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if not {"torch", "pytorch_lightning"} & set(Path(frame.filename).parts)
    ]
    return f"{reason} ({frames[-1]})" if frames else reason
