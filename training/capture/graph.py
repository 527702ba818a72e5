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
from torch.utils._pytree import tree_leaves

from training.callbacks.values import SINGLE, holds_both, holds_packed, map_values, tensors_of
from training.capture.fit import Fit, foreach_copy_, set_gradients
from training.capture.frozen import (
    FrozenError,
    Logged,
    Refusals,
    Unread,
    recorded_reads,
    watched,
)
from training.capture.host_state import HostState
from training.capture.randomness import HostRandomness
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
        parameters: the fit's when it was captured.
        gradients_before: of every parameter, to which the step adds; None for those of which it
            begins with none.
        graph: what the GPU runs.
        result: what Lightning gets of the step; the tensors are written by the graph.
        logged: the values are written by the graph.
        gradients: of every parameter, after the step.
        reads: what the step has read on the host.
    """

    fit: Fit
    inputs: list[Tensor]
    parameters: list[Tensor]
    gradients_before: list[Tensor | None]
    graph: Any
    result: dict[str, Any]
    logged: list[Logged]
    gradients: list[Tensor | None]
    reads: Reads

    def __post_init__(self) -> None:
        self._adds = any(gradient is not None for gradient in self.gradients_before)

    def launch(self, batch: Any) -> dict[str, Any]:
        """Runs the step; returns `result`, which the next one overwrites."""
        self.fit.optimizer.write_rates()
        if self.inputs:
            foreach_copy_(self.inputs, tensors_of(batch))
        if self._adds:
            for parameter, gradient in zip(self.parameters, self.gradients_before, strict=True):
                added: Any = parameter.grad  # present where it was in the capture: part of the key
                if gradient is not None and gradient is not added:
                    gradient.copy_(added)
        self.graph.replay()
        set_gradients(self.parameters, self.gradients)
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
    gradients = fit.gradients()
    kept = {id(p) for p in fit.kept}
    # A step that sets gradients to None begins without them, also if it reads them before.
    before = [p.grad if not call.first or id(p) in kept else None for p in fit.parameters]
    attributes, randomness = fit.attributes(), HostRandomness(fit.device)
    host = HostState(attributes.owners(), attributes.tensors())
    why = None
    try:
        set_gradients(fit.parameters, before)
        with (
            fit.optimizer.rates_on_gpu(fit.model),
            watched(fit.model, refusals) as (logged, of_trainer),
            recorded_reads(attributes.unseen_of_modules(), refusals) as reads,
            fit.gpu.capture() as graph,
        ):
            result = fit.run_step(call.optimizer, call.batch_idx, kwargs)
        found = _find_frozen(fit, call, progress, result)
        if refusals.found:  # the step may have caught the error
            found = refusals.found[0]
        elif (changed := attributes.changed()) is not None:
            found = f"training_step changes {changed}"
        elif (used := randomness.used()) is not None:
            found = f"training_step draws from {used}"
        if found is not None:
            raise FrozenError(found)
        return StepGraph(
            fit, own, fit.parameters, before, graph, result, logged, fit.gradients(),
            Reads(reads, of_trainer),
        )  # fmt: skip
    except Exception as error:
        why = _explain(error)
        host.restore()
        randomness.restore()
        scaler = getattr(fit.trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            scaler._per_optimizer_states.clear()
    finally:
        fit.loop.optim_progress.load_state_dict(progress)
        set_gradients(fit.parameters, gradients)
    gc.collect()  # what is left of the step would run the next one on the capture's stream
    raise CaptureError(why)


def _find_frozen(
    fit: Fit, call: Call, progress: dict[str, Any], result: dict[str, Any]
) -> str | None:
    """Returns what a captured step did that its graph would not do again, or None.

    Args:
        progress: the loop's before the step.
    """
    if fit.optimizer.changes_rates:
        return "the step changes the learning rate"
    begun = fit.loop.optim_progress.optimizer.zero_grad.total.ready
    if begun - progress["optimizer"]["zero_grad"]["total"]["ready"] > 1:
        return "the optimizer runs the step more than once"
    if any(isinstance(each, Tensor) and each.retains_grad for each in tree_leaves(result)):
        return "training_step returns a tensor that retains its gradient"
    if any(g is not None and g.layout is not torch.strided for g in fit.gradients()):
        return "a gradient is sparse"
    return None


def _find_unfit(batch: Any, device: torch.device) -> str | None:
    """Returns what a graph cannot have in its batch, or None."""
    for tensor in tensors_of(batch):
        if tensor.device != device:
            return "a tensor of the batch is not on the GPU"
        if type(tensor) is not Tensor:
            return f"a tensor of the batch is a {type(tensor).__name__}"
        if tensor.requires_grad:
            return "a tensor of the batch requires a gradient"
        if tensor.layout is not torch.strided or tensor.is_nested:
            return "a tensor of the batch is sparse or nested"
        if vars(tensor):
            return "a tensor of the batch has attributes of its own"
    if len(set(map(id, tensors_of(batch)))) < len(tensors_of(batch)):
        return "the batch has a tensor twice"
    if holds_packed(batch):
        return "the batch has a PackedSequence"
    if holds_both(batch):
        return "the batch has a dataclass that is a container, too"
    return None


def _hide(refusals: Refusals, value: Any) -> Any:
    if isinstance(value, SINGLE):  # the graph is for this one
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
