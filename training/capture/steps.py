"""Training steps as CUDA graphs: one launch runs zero_grad, forward, backward and the optimizer.

The host takes longer to launch the kernels of a small model's step, one by one, than the GPU takes
to run them. A CUDA graph is the list of a step's kernels, recorded once and launched as one.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import itertools
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hoconv.lightning import leave_out_step
from training import console
from training.callbacks.values import describe, holds_packed, map_values, tensors_of
from training.capture.attributes import Attributes, attributes_of
from training.capture.between import find_unknown
from training.capture.comparison import copies, difference, present
from training.capture.frozen import (
    FrozenError,
    HostRandomness,
    Logged,
    Refusals,
    Unread,
    heard,
    read_attributes,
    recorded_reads,
    watched,
)
from training.capture.gpu import Gpu
from training.capture.obstacles import find_obstacle
from training.capture.optimizer import CapturedOptimizer

# Steps that run before one is captured: the first make the optimizer's state, and libraries choose
# algorithms. DistributedDataParallel arranges its buckets and measures itself for ten.
WARMUP_STEPS, WARMUP_STEPS_DDP = 3, 11
# Steps of the first graph that run twice, eagerly and as the graph, to be compared. Later graphs
# differ from it in the shapes of the batch only: one step shows whether these are right.
TRIALS, LATER_TRIALS = 3, 1
MAX_GRAPHS = 32  # each keeps the memory of its batch and results
# What graphs froze may change: then others are captured. No more, where it changed so many times
# after at most so many steps.
MAX_STRIKES, MIN_REPLAYS = 4, 20
# Steps after which attributes are compared at the latest, since another thread may change them.
COMPARE_EVERY = 50
# Of the trainer, beside its callbacks: what Lightning reads in a step.
READ_OF_TRAINER = ("callbacks", "gradient_clip_val", "gradient_clip_algorithm")
# Why steps run eagerly in the end that could be captured.
WARMUP, TRIAL = "before a capture", "to compare"
# Where two captured steps differ, as with kernels that add in any order, the eager one may differ
# from them so many times as much.
NOISE_FACTOR = 16.0


foreach_copy_ = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
MODES = ("auto", "step", "off")


class CaptureError(RuntimeError):
    """A step was to be captured and could not; says why."""


class _Call(NamedTuple):
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
class _Step:
    """What is known of the steps with batches of the same shapes.

    Attributes:
        seen: how many ran eagerly.
        unsettled: whether one of them changed what the optimizer keeps.
        why_eager: why they cannot be captured.
        graph: of the step, once captured; the other attributes are its:
        trials: how many steps are still to run twice.
        inputs: the tensors of the batch that it reads.
        result: what Lightning gets of the step; the tensors are written by the graph.
        logged: the values are written by the graph.
        gradients_before: of every parameter, to which an accumulating step adds; None for a step
            that begins with none.
        gradients: of every parameter, after the step.
        frozen: the attributes that were read and the optimizer's state, as :class:`Attributes`.
        compared: the moment when they were last compared.
        options: of the optimizer, as :class:`Attributes`; a schedule may change them.
    """

    seen: int = 0
    unsettled: bool = False
    why_eager: str | None = None
    graph: Any = None
    trials: int = 0
    inputs: list[Tensor] = dataclasses.field(default_factory=list)
    result: dict[str, Any] = dataclasses.field(default_factory=dict)
    logged: list[Logged] = dataclasses.field(default_factory=list)
    gradients_before: list[Tensor | None] | None = None
    gradients: list[Tensor | None] = dataclasses.field(default_factory=list)
    frozen: Any = None
    compared: int = 0
    options: Any = None


class CapturedSteps(pl.Callback):
    """Runs the training steps of any LightningModule with automatic optimization as CUDA graphs.

    There is a graph for each shape of the batches. The first steps run eagerly. Then a step is
    captured, and the next ones run twice, eagerly and as the graph on copies: the graph is used
    where both give the same, to the last bit where two captured steps do.

    A graph repeats what the step did on the GPU. A step that does something else that matters runs
    eagerly, and one line says why: it waits for the GPU, changes the model, the batch or the
    optimizer, logs numbers of the host, reads ``batch_idx``, the epoch, the step or what the batch
    has beside tensors, draws random numbers on the host, or calls hooks. Attributes that it reads
    may change later: new graphs are captured then. What it reads from elsewhere, such as global
    variables, must stay the same; what it writes there is written in the first steps alone.

    Optimizers are made ``capturable``, and the learning rate of a step is read from the GPU, into
    which the value of the schedule is written before. Checkpoints hold neither.

    Args:
        mode: ``"auto"``; ``"step"``, where a step that cannot be captured is an error; or
            ``"off"``, where all run eagerly.

    Attributes:
        captures: how many graphs there were.
        replays: how many steps ran as graphs.
        eager_steps: why -> how many steps ran eagerly, those before a capture included.
        seconds: what capturing and comparing took, on the host's clock.

    Raises:
        MisconfigurationException: `mode` is none of these.
        CaptureError: while training, with ``"step"``: a step cannot be captured; says why.
    """

    def __init__(self, mode: str | bool = "auto") -> None:
        mode = "off" if mode is False else mode  # as YAML reads off
        if mode not in MODES:
            raise MisconfigurationException(
                f"capture: expected one of {', '.join(MODES)}; got {mode!r}"
            )
        self.mode = mode
        self.captures = 0
        self.replays = 0
        self.eager_steps: Counter[str] = Counter()
        self.seconds = 0.0
        self._said: set[str] = set()
        # Goes on where code may have run that `find_unknown` does not look at.
        self._moment = self._looked = 0
        self._unknown: str | None = None

    def summary(self) -> dict[str, Any]:
        """Returns the attributes, as numbers and text."""
        return {
            "captures": self.captures,
            "replays": self.replays,
            "eager_steps": dict(self.eager_steps),
            "capture_seconds": self.seconds,
        }

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._trainer, self._model = trainer, pl_module
        self._device = trainer.strategy.root_device
        self._steps: dict[Any, _Step] = {}
        self._strikes = self._replays_before = 0
        self._captured = False  # whether this fit has a graph
        self._optimizer: Any = None
        self._why_eager = (
            "capture=off"
            if self.mode == "off"
            else find_obstacle(trainer, pl_module, device_type=Gpu.type)
        )
        if self._why_eager is None:
            self._given = trainer.optimizers[0]
            self._optimizer = CapturedOptimizer(self._given, self._device)
            self._find_parameters()
            self._gpu = Gpu(self._device)
        self._loop: Any = trainer.fit_loop.epoch_loop.automatic_optimization
        self._run_step = self._loop.run
        self._loop.run = self._run

    def on_train_epoch_start(self, *_: Any) -> None:
        self._moment += 1

    def on_validation_end(self, *_: Any) -> None:
        self._moment += 1

    def on_train_end(self, *_: Any) -> None:
        self._steps = {}
        vars(self._loop).pop("run", None)

    def on_exception(self, *_: Any) -> None:
        if hasattr(self, "_loop"):
            self.on_train_end()

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._moment += 1
        for state in checkpoint.get("optimizer_states", ()):
            if getattr(self, "_optimizer", None) is not None:
                self._optimizer.restore_options(state)

    def _run(self, optimizer: Any, batch_idx: int, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Does what the loop's own `run` does, eagerly or by a graph."""
        call = _Call(optimizer, batch_idx, kwargs, *self._position(batch_idx))
        if self._why_eager is not None:
            return self._run_eagerly(call, self._why_eager)
        if optimizer is not self._given:
            self._why_eager = "another optimizer takes its place"
            return self._run_eagerly(call, self._why_eager)
        if batch_idx % COMPARE_EVERY == 0:
            self._moment += 1
        accumulated = self._trainer.accumulate_grad_batches
        key = describe(kwargs["batch"]), *call[3:], accumulated
        if not call.first:
            key += tuple(p.grad is None for p in self._parameters)
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = _Step()
            if len(self._steps) > MAX_GRAPHS:
                step.why_eager = f"there are more than {MAX_GRAPHS} shapes of batches"
        if step.why_eager is not None:
            return self._run_eagerly(call, step.why_eager)
        if step.graph is not None:
            if (changed := self._find_change(step)) is not None:
                self._renew(changed)
                return self._run(optimizer, batch_idx, kwargs)
            if not step.trials:
                return self._replay(step, call)
        leave_out_step()
        begun = time.perf_counter()
        result = self._prepare(step, call)
        self.seconds += time.perf_counter() - begun
        return result

    def _find_change(self, step: _Step) -> str | None:
        """Returns the name of something that a graph froze and that has changed since, or None."""
        if (changed := step.options.changed()) is not None:
            return changed
        if self._looked != self._moment:
            self._looked = self._moment
            self._unknown = find_unknown(self._trainer, self._model)
        if self._unknown is None and step.compared == self._moment:
            return None
        step.compared = self._moment
        return step.frozen.changed()

    def _position(self, batch_idx: int) -> tuple[bool, bool, bool]:
        """Returns whether a batch is the first whose gradients are accumulated, whether it is the
        last, after which the optimizer steps, and whether it has gradients."""
        first = batch_idx % self._trainer.accumulate_grad_batches == 0
        backward = not self._loop._skip_backward
        return first, not self._trainer.fit_loop._should_accumulate(), backward

    def _run_eagerly(self, call: _Call, why: str) -> dict[str, Any]:
        self._say(why)
        self.eager_steps[why] += 1
        self._moment += 1
        if self._optimizer is None:
            return self._run_step(call.optimizer, call.batch_idx, call.kwargs)
        with self._optimizer.rates_on_gpu():
            return self._run_step(call.optimizer, call.batch_idx, call.kwargs)

    def _prepare(self, step: _Step, call: _Call) -> dict[str, Any]:
        """Runs a step eagerly; first captures it, and afterwards compares, when it is time."""
        distributed = self._trainer.world_size > 1
        warmup = WARMUP_STEPS_DDP if distributed else WARMUP_STEPS
        ready = step.seen >= (1 if self._captured else warmup)
        if distributed and not self._captured:
            ready = self._all(ready)  # a step that runs twice must do so in all processes
        if not ready:
            return self._observe(step, call)
        if step.graph is None:
            step.trials = LATER_TRIALS if self._captured else TRIALS
            if distributed:
                step.trials = min(step.trials, 0 if self._captured else 1)
            self._capture(step, call)
            if distributed and not self._captured and not self._all(step.why_eager is None):
                step.why_eager = step.why_eager or "another process could not capture it"
            if step.why_eager is not None:
                return self._run_eagerly(call, step.why_eager)
            self.captures += 1
            self._captured = True
        if not step.trials:
            return self._replay(step, call)
        return self._compare(step, call)

    def _observe(self, step: _Step, call: _Call) -> dict[str, Any]:
        """Runs a step eagerly, and finds what it changes on the host."""
        step.seen += 1
        attributes, randomness = self._attributes(), HostRandomness(self._device)
        # Reads are recorded where it matters only: torch.compile, which may compile in this step,
        # would compile the recording.
        reads: set[tuple[int, str]] = set()
        unclear = attributes.going_on or attributes.unseen
        recording = recorded_reads() if unclear else nullcontext(reads)
        batch = call.kwargs["batch"]
        given, before = describe(batch), _identify(batch)
        with self._gpu.beside(), recording as reads:
            result = self._run_eagerly(call, WARMUP)
        if describe(batch) != given or _identify(batch) != before:
            step.why_eager = "training_step changes the batch"
            return result
        # The first steps fill caches, which are attributes too.
        if step.seen >= WARMUP_STEPS or self._captured:
            changed = attributes.changed()
            if changed is not None and changed.startswith("optimizer") and not step.unsettled:
                # It has made its state of new parameters, perhaps: another step shows.
                step.unsettled, step.seen = True, step.seen - 1
            elif changed is not None:
                step.why_eager = f"training_step changes {changed}"
            elif going_on := (read := read_attributes(self._model, reads)).going_on:
                step.why_eager = f"training_step reads {going_on[0]}, which goes on by itself"
            elif read.unseen:
                step.why_eager = f"training_step reads {read.unseen[0]}, which is very large"
            elif (used := randomness.used()) is not None:
                step.why_eager = f"training_step draws from {used}"
            elif not all(isinstance(v, Tensor) for v in tree_leaves(result)):
                step.why_eager = "training_step returns values of the host"
            elif not result:
                step.why_eager = "training_step returns no loss"
        return result

    def _capture(self, step: _Step, call: _Call) -> None:
        """Captures a step without running it; or sets `why_eager`."""
        self._optimizer.prepare()
        self._find_parameters()
        batch = call.kwargs["batch"]
        if (unfit := _find_unfit(batch, self._device)) is not None:
            step.why_eager = unfit
            return
        step.inputs = [tensor.clone() for tensor in tensors_of(batch)]
        inputs, refusals = iter(step.inputs), Refusals()
        kwargs = {name: Unread(name, v, refusals) for name, v in call.kwargs.items()}
        hide = functools.partial(_hide, refusals)
        kwargs["batch"] = map_values(lambda _: next(inputs), batch, hide)
        progress = copy.deepcopy(self._loop.optim_progress.state_dict())
        before = [p.grad for p in self._parameters]
        step.gradients_before = None if call.first else before
        attributes = self._attributes()
        try:
            with (
                self._optimizer.rates_on_gpu(),
                watched(self._model, refusals) as (step.logged, of_trainer),
                recorded_reads() as reads,
                self._gpu.capture() as graph,
            ):
                step.result = self._run_step(call.optimizer, call.batch_idx, kwargs)
            if refusals.found:  # the step may have caught the error
                raise FrozenError(refusals.found[0])
            if (changed := attributes.changed()) is not None:
                raise FrozenError(f"training_step changes {changed}")
            step.gradients = [p.grad for p in self._parameters]
            self._freeze(step, reads, of_trainer)
            step.graph = graph
        except Exception as error:
            step.why_eager = _explain(error)
            scaler = getattr(self._trainer.precision_plugin, "scaler", None)
            if scaler is not None:
                scaler._per_optimizer_states.clear()
        finally:
            self._loop.optim_progress.load_state_dict(progress)
            self._set_gradients(before)
        if step.why_eager is not None:
            gc.collect()  # what is left of the step would run the next one on the capture's stream

    def _freeze(self, step: _Step, reads: set[tuple[int, str]], of_trainer: set[str]) -> None:
        """Keeps what must stay as it is while the graph is used: what the step has read."""
        frozen = read_attributes(self._model, reads)
        self._optimizer.add_state(frozen)
        patched = {"training_step", "log"} - vars(self._model).keys()
        if self._trainer.world_size == 1:  # else Lightning itself sets it in each step
            patched |= {"forward"} - vars(self._model).keys()
        frozen.add_absent("self", vars(self._model), patched)
        frozen.add_attributes("trainer", self._trainer, sorted(of_trainer))
        frozen.add_places("trainer", vars(self._trainer), list(READ_OF_TRAINER))
        callbacks: Any = self._trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        frozen.add_places("trainer.callbacks", callbacks, list(range(len(callbacks))))
        step.frozen, step.options = frozen.finish(), Attributes()
        self._optimizer.add_options(step.options)
        step.options.finish()

    def _compare(self, step: _Step, call: _Call) -> dict[str, Any]:
        """Runs a step eagerly, which counts, and as its graph from the same state; compares."""
        step.trials -= 1
        gradients = [p.grad for p in self._parameters]
        written = self._state()
        # Of the gradients before the step only those count to which it adds: graphs share memory.
        state = [*written, *present({*gradients, *(step.gradients_before or ())})]
        before = copies(state), self._gpu.random_state()
        with self._gpu.beside(), heard(self._model) as logged:
            result = self._run_eagerly(call, TRIAL)
        after = copies(state), self._gpu.random_state()
        gradients_after = [p.grad for p in self._parameters]
        eager = copies([*written, *present(gradients_after), *tensors_of(result), *logged])

        def again(run: Callable[[], Any]) -> list[Tensor]:
            """Runs the step from the state before it; returns what is to be as in `eager`."""
            self._restore(state, *before, gradients)
            returned = run()
            left = present(p.grad for p in self._parameters)
            logged = (each.value for each in step.logged)
            return copies([*written, *left, *tensors_of(returned), *logged])

        def replay() -> Any:
            self._load(step, call.kwargs["batch"])
            step.graph.replay()
            self._set_gradients(step.gradients)
            return step.result

        error = difference(again(replay), eager)
        if not self._all(error == 0):
            # Kernels may add in any order: then two replays differ, too.
            noise = difference(again(replay), again(replay))
            if not self._all(error <= NOISE_FACTOR * noise):
                step.graph = None
                step.why_eager = (
                    f"a captured step differs from an eager one by {error:.1g}, and from another "
                    f"captured one by {noise:.1g}"
                )
        self._restore(state, *after, gradients_after)
        return result

    def _replay(self, step: _Step, call: _Call) -> dict[str, Any]:
        self._load(step, call.kwargs["batch"])
        progress = self._loop.optim_progress.optimizer
        if call.last:
            progress.step.increment_ready()
        if call.first and call.backward:
            progress.zero_grad.increment_ready()
            progress.zero_grad.increment_started()
            progress.zero_grad.increment_completed()
        step.graph.replay()
        if call.last:
            progress.step.increment_completed()
        self._set_gradients(step.gradients)
        if step.logged:
            model: Any = self._model
            hook, model._current_fx_name = model._current_fx_name, "training_step"
            for name, value, arguments in step.logged:
                model.log(name, value, **arguments)  # which copies it
            model._current_fx_name = hook
        self.replays += 1
        # Copies, since the next step writes there again.
        return {
            name: value.clone() if isinstance(value, Tensor) else map_values(Tensor.clone, value)
            for name, value in step.result.items()
        }

    def _load(self, step: _Step, batch: Any) -> None:
        """Writes what a graph reads."""
        self._optimizer.write_rates()
        foreach_copy_(step.inputs, tensors_of(batch))
        for parameter, gradient in zip(self._parameters, step.gradients_before or ()):
            added: Any = parameter.grad  # present where it was in the capture: part of the key
            if gradient is not None and gradient is not added:
                gradient.copy_(added)

    def _renew(self, changed: str) -> None:
        """Drops the graphs, since what they froze has changed."""
        self._steps.clear()
        self._strikes = (
            0 if self.replays - self._replays_before > MIN_REPLAYS else self._strikes + 1
        )
        self._replays_before = self.replays
        self._why_eager = find_obstacle(self._trainer, self._model, device_type=Gpu.type)
        if self._why_eager is not None:
            return
        if self._strikes <= MAX_STRIKES:
            self._optimizer.prepare()
            self._find_parameters()
            return
        self._why_eager = f"{changed} changes again and again"
        if changed.endswith(".lr"):
            self._why_eager += "; an optimizer with fused=True reads it on the GPU"

    def _find_parameters(self) -> None:
        """Finds those that may have gradients; an optimizer may have been given more."""
        parameters = [*self._optimizer.parameters, *self._model.parameters()]
        self._parameters = list(dict.fromkeys(parameters))

    def _attributes(self) -> Attributes:
        """Returns those of the model and of the optimizer."""
        attributes = attributes_of(self._model)
        self._optimizer.add_options(attributes)
        self._optimizer.add_state(attributes)
        return attributes.finish()

    def _state(self) -> list[Tensor]:
        """Returns all tensors that a step may write, but gradients."""
        scaler = vars(getattr(self._trainer.precision_plugin, "scaler", None) or object)
        found = [
            *self._attributes().tensors(),
            *(value for value in scaler.values() if isinstance(value, Tensor)),
        ]
        return list({id(tensor): tensor for tensor in found}.values())

    @torch.no_grad()
    def _restore(
        self,
        state: list[Tensor],
        values: list[Tensor],
        random_state: Tensor,
        gradients: list[Tensor | None],
    ) -> None:
        # Only what has changed: the rest may be memory that cannot be written to.
        changed = [not torch.equal(*pair) for pair in zip(state, values, strict=True)]
        if any(changed):
            written = list(itertools.compress(state, changed))
            foreach_copy_(written, list(itertools.compress(values, changed)))
        self._gpu.set_random_state(random_state)
        self._set_gradients(gradients)

    def _set_gradients(self, gradients: list[Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            if parameter.grad is not gradient:
                parameter.grad = gradient

    def _all(self, decision: bool) -> bool:
        """Whether the decision is true in all processes."""
        return self._trainer.strategy.reduce_boolean_decision(decision, all=True)

    def _say(self, why: str) -> None:
        if why in (WARMUP, TRIAL) or why in self._said:
            return
        self._said.add(why)
        if self.mode == "step":
            raise CaptureError(f"capture=step: a step cannot be captured: {why}; use capture=auto")
        if self.mode == "auto" and self._device.type == "cuda":
            console.stdout().print(f"Steps run uncaptured: {why}", soft_wrap=True, highlight=False)


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


def _identify(batch: Any) -> list[tuple[int, int]]:
    """Which tensors a batch has, and how often they were written to."""
    return [(id(tensor), tensor._version) for tensor in tensors_of(batch)]


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
