"""One training step as a CUDA graph: capturing it, and running it again with another batch."""

from __future__ import annotations

import copy
import dataclasses
import gc
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from training.capture.fit import Fit, copy_all, set_gradients
from training.capture.obstacles import find_unfit
from training.lightning_loop import Logged, LoggedKindError, log_of_training_step, recorded
from training.tensors import map_tensors, tensors_of


class CaptureError(RuntimeError):
    """A step cannot be captured, or its graph is wrong; says why."""


class Call(NamedTuple):
    """The arguments of a training step, and what Lightning does with its gradients.

    Attributes:
        first: whether the gradients of the batch are the first that are accumulated.
        last: whether the optimizer steps after it.
    """

    optimizer: Any
    batch_idx: int
    kwargs: dict[str, Any]
    first: bool
    last: bool


@dataclasses.dataclass
class StepGraph:
    """A captured step.

    Attributes:
        fit: whose step it is.
        inputs: the tensors of the batch that it reads.
        gradients_before: of every parameter, to which the step adds; None for those of which it
            begins with none.
        graph: what the GPU runs.
        result: what Lightning gets of the step; the tensors are written by the graph.
        logged: the tensors among the values are written by the graph.
        gradients: of every parameter, after the step.
        replays: how many there were since the graph was compared with an eager step.
        compared: after which step of the optimizer that was, and when.
    """

    fit: Fit
    inputs: list[Tensor]
    gradients_before: list[Tensor | None]
    graph: Any
    result: dict[str, Any]
    logged: list[Logged]
    gradients: list[Tensor | None]
    replays: int = 0
    compared: tuple[int, float] = (0, 0.0)

    def launch(self, tensors: list[Tensor]) -> None:
        """Runs the step with the tensors of a batch."""
        self.fit.optimizer.write_rates()
        if self.inputs:
            copy_all(self.inputs, tensors)
        for parameter, gradient in zip(self.fit.parameters, self.gradients_before):
            # A gradient is there where it was in the capture: that is part of the key.
            if gradient is not None and gradient is not parameter.grad:
                gradient.copy_(parameter.grad)  # pyright: ignore[reportArgumentType]
        self.graph.replay()
        set_gradients(self.fit.parameters, self.gradients)

    def run(self, call: Call, tensors: list[Tensor]) -> dict[str, Any]:
        """Runs the step as Lightning's loop would: counts, and logs what the step logs."""
        progress = self.fit.progress.optimizer
        if call.last:
            progress.step.increment_ready()
        if call.first:
            progress.zero_grad.increment_ready()
            progress.zero_grad.increment_started()
            progress.zero_grad.increment_completed()
        self.launch(tensors)
        if call.last:
            progress.step.increment_completed()
        if self.logged:
            log_of_training_step(self.fit.model, self.logged)  # which copies the values
        # Copies, since the next step writes there again.
        return {
            name: value.clone() if isinstance(value, Tensor) else map_tensors(Tensor.clone, value)
            for name, value in self.result.items()
        }


def capture(fit: Fit, call: Call) -> StepGraph:
    """Captures a step without running it.

    Raises:
        CaptureError: says why it cannot be captured.
    """
    batch = call.kwargs["batch"]
    if (unfit := find_unfit(tensors_of(batch), fit.device)) is not None:
        raise CaptureError(unfit)
    inputs = [tensor.clone() for tensor in tensors_of(batch)]
    left = iter(inputs)
    kwargs = {**call.kwargs, "batch": map_tensors(lambda _: next(left), batch)}
    progress = copy.deepcopy(fit.progress.state_dict())
    gradients = [p.grad for p in fit.parameters]
    before = [*[None] * fit.zeroed, *gradients[fit.zeroed :]]
    try:
        set_gradients(fit.parameters, before)
        with fit.optimizer.on_gpu(), recorded(fit.model) as logged, fit.gpu.capture() as graph:
            result = fit.run_eagerly(call.optimizer, call.batch_idx, kwargs)
        after = [p.grad for p in fit.parameters]
        _check(fit, progress, result, after)
        return StepGraph(fit, inputs, before, graph, result, logged, after)
    except Exception as error:
        why = _explain(error)
        scaler = getattr(fit.trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            scaler._per_optimizer_states.clear()
    finally:
        fit.progress.load_state_dict(progress)
        set_gradients(fit.parameters, gradients)
    gc.collect()  # what is left of the step would run the next one on the capture's stream
    raise CaptureError(why)


def _check(
    fit: Fit, progress: dict[str, Any], result: dict[str, Any], gradients: list[Tensor | None]
) -> None:
    """Raises CaptureError where a captured step did what its graph would not do again.

    Args:
        progress: of Lightning's loop before the step.
    """
    if not result:
        raise CaptureError("training_step returns no loss")
    if not all(isinstance(value, Tensor) for value in tree_leaves(result)):
        raise CaptureError("training_step returns values that are no tensors")
    begun = fit.progress.optimizer.zero_grad.total.ready
    if begun - progress["optimizer"]["zero_grad"]["total"]["ready"] > 1:
        raise CaptureError("the optimizer runs the step more than once")
    if any(g is not None and g.layout is not torch.strided for g in gradients):
        raise CaptureError("a gradient is sparse")


def _explain(error: BaseException) -> str:
    """Returns why a capture failed, and the line of code that was the cause."""
    while error.__context__ is not None:  # ending the capture fails, too
        error = error.__context__
    if isinstance(error, CaptureError | LoggedKindError):
        return str(error)
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    if "captur" in reason:
        reason = "it waits for the GPU or copies from the host"
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if not {"torch", "pytorch_lightning"} & {*Path(f.filename).parts}]
    return f"{reason} ({ours[-1].filename}:{ours[-1].lineno})" if ours else reason
