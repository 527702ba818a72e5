"""Training steps as CUDA graphs: one launch runs zero_grad, forward, backward and the optimizer.

The host takes longer to launch the kernels of a small model's step, one by one, than the GPU takes
to run them. A CUDA graph is the list of a step's kernels, recorded once and launched as one.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import Counter
from typing import Any

import pytorch_lightning as pl

from hoconv.lightning import leave_out_step
from training import console
from training.callbacks.values import describe, tensors_of
from training.capture.between import find_unknown
from training.capture.comparison import compare
from training.capture.fit import Fit
from training.capture.gpu import Gpu
from training.capture.graph import Call, CaptureError, StepGraph, capture
from training.capture.observed import ObservedStep
from training.capture.obstacles import find_obstacle
from training.capture.unchanged import Unchanged
from training.configuration.errors import MisconfigurationException

# Steps that run before one is captured: the first make the optimizer's state, and libraries choose
# algorithms. DistributedDataParallel arranges its buckets and measures itself for ten.
WARMUP_STEPS, WARMUP_STEPS_DDP = 3, 11
# Steps of the first graph that run twice, eagerly and as the graph, to be compared. Later graphs
# differ from it in the shapes of the batch only. The first of them is the step that was captured,
# whose values of the host are the graph's: another one shows whether these are right.
TRIALS, LATER_TRIALS = 3, 2
# Steps in which processes ask each other whether all are ready for the first capture.
MAX_ASKED = 100
MAX_GRAPHS = 32  # each keeps the memory of its batch and results
# What graphs froze may change: then others are captured. No more, where it changed so many times
# after at most so many steps.
MAX_STRIKES, MIN_REPLAYS = 4, 20
# Steps after which attributes are compared at the latest, since another thread may change them.
COMPARE_EVERY = 50
# Why steps run eagerly in the end that could be captured.
WARMUP, TRIAL = "before a capture", "to compare"
MODES = ("auto", "step", "off")


@dataclasses.dataclass
class _Step:
    """What is known of the steps with batches of the same shapes.

    Attributes:
        seen: how many ran eagerly.
        unsettled: whether one of them changed what the optimizer keeps.
        why_eager: why they cannot be captured.
        graph: of the step, once captured.
        trials: how many steps are still to run twice, eagerly and as the graph.
    """

    seen: int = 0
    unsettled: bool = False
    why_eager: str | None = None
    graph: StepGraph | None = None
    trials: int = 0


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
        self._moment = self._compared = 0
        self._unknown: str | None = None
        self._fit: Fit | None = None

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
        self._steps: dict[Any, _Step] = {}
        self._strikes = self._replays_before = 0
        self._captured = False  # whether this fit has had a graph
        self._unchanged: Unchanged | None = None  # while it has graphs
        self._why_eager = (
            "capture=off"
            if self.mode == "off"
            else find_obstacle(trainer, pl_module, device_type=Gpu.type)
        )
        # Whether processes still ask each other which step they capture first, and how often.
        self._undecided, self._asked = self.mode != "off" and trainer.world_size > 1, 0
        if self._undecided and not trainer.strategy.reduce_boolean_decision(
            self._why_eager is None, all=True
        ):
            self._why_eager = self._why_eager or "other processes do not capture their steps"
        self._loop: Any = trainer.fit_loop.epoch_loop.automatic_optimization
        self._run_step = self._loop.run
        self._fit = None
        if self._why_eager is None:
            gpu = Gpu(trainer.strategy.root_device)
            self._fit = Fit(trainer, pl_module, self._run_step, gpu)
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
        states = checkpoint.get("optimizer_states", ())
        for optimizer, state in zip(trainer.optimizers, states):
            if self._fit is not None and optimizer is self._fit.optimizer.optimizer:
                self._fit.optimizer.restore_options(state)

    def _run(self, optimizer: Any, batch_idx: int, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Does what the loop's own `run` does, eagerly or by a graph."""
        call = Call(optimizer, batch_idx, kwargs, *self._position(batch_idx))
        fit, step = self._fit, self._find_step(call)
        ready = fit is not None and step is not None and self._is_ready(fit, step)
        if self._undecided and fit is not None:
            ready = self._agree_to_capture(fit, ready)
        why_eager = self._why_eager or (step.why_eager if step is not None else None)
        if why_eager is not None:
            return self._run_eagerly(call, why_eager)
        assert fit is not None
        assert step is not None
        if self._unchanged is not None:
            if (changed := self._find_change(self._unchanged)) is not None:
                self._renew(fit, changed)
                return self._run(optimizer, batch_idx, kwargs)
            if step.graph is not None and not step.trials:
                return self._replay(step.graph, call)
        leave_out_step()
        begun = time.perf_counter()
        result = self._prepare(fit, step, call, ready)
        self.seconds += time.perf_counter() - begun
        return result

    def _find_step(self, call: Call) -> _Step | None:
        """Returns what is known of steps as this one; None where all steps run eagerly."""
        if self._fit is None or self._why_eager is not None:
            return None
        if call.optimizer is not self._fit.optimizer.optimizer:
            self._why_eager = "another optimizer takes its place"
        elif self._fit.optimizer.changes_rates:
            self._why_eager = "the step changes the learning rate"
        if self._why_eager is not None:
            return None
        if call.batch_idx % COMPARE_EVERY == 0:
            self._moment += 1
        step = self._steps.get(key := self._find_key(self._fit, call))
        if step is None:
            step = self._steps[key] = _Step()
            if len(self._steps) > MAX_GRAPHS:
                step.why_eager = f"there are more than {MAX_GRAPHS} shapes of batches"
        return step

    def _is_ready(self, fit: Fit, step: _Step) -> bool:
        """Whether a step is to be captured now; sets why none is, where that has come."""
        warmup = WARMUP_STEPS_DDP if fit.distributed else WARMUP_STEPS
        if step.graph is not None or step.why_eager is not None:
            return False
        if step.seen < (1 if self._captured else warmup):
            return False
        # Hooks may have come since the fit began.
        self._why_eager = find_obstacle(self._trainer, self._model, device_type=Gpu.type)
        return self._why_eager is None

    def _agree_to_capture(self, fit: Fit, ready: bool) -> bool:
        """Whether all processes capture this step: one that runs twice must do so in all. All ask
        each other at the same steps, whatever each of them has found."""
        self._asked += 1
        together = fit.agree(ready)
        if not together and self._asked > MAX_ASKED:
            self._undecided = False
            self._why_eager = self._why_eager or "other processes do not capture their steps"
        return together

    def _find_key(self, fit: Fit, call: Call) -> tuple[Any, ...]:
        """Returns what a graph is for: two steps with the same key can be the same graph."""
        batch = call.kwargs["batch"]
        places = [*map(id, tensors_of(batch))]
        aliases = () if len({*places}) == len(places) else tuple(map(places.index, places))
        added = fit.kept if call.first else fit.parameters
        present = tuple([p.grad is not None for p in added])
        return describe(batch), aliases, *call[3:], self._trainer.accumulate_grad_batches, present

    def _find_change(self, unchanged: Unchanged) -> str | None:
        """Returns the name of something that graphs froze and that has changed since, or None."""
        if (changed := unchanged.find_changed_option()) is not None:
            return changed
        if self._compared != self._moment:
            self._unknown = find_unknown(self._trainer, self._model)
        elif self._unknown is None:
            return None
        self._compared = self._moment
        return unchanged.find_changed()

    def _position(self, batch_idx: int) -> tuple[bool, bool, bool]:
        """Returns whether a batch is the first whose gradients are accumulated, whether it is the
        last, after which the optimizer steps, and whether it has gradients."""
        first = batch_idx % self._trainer.accumulate_grad_batches == 0
        backward = not self._loop._skip_backward
        return first, not self._trainer.fit_loop._should_accumulate(), backward

    def _run_eagerly(self, call: Call, why: str) -> dict[str, Any]:
        self._say(why)
        self.eager_steps[why] += 1
        self._moment += 1
        if self._fit is None:
            return self._run_step(*call[:3])
        with self._fit.optimizer.rates_on_gpu(self._model):
            return self._run_step(*call[:3])

    def _replay(self, graph: StepGraph, call: Call) -> dict[str, Any]:
        result = graph.run(call)
        self.replays += 1
        return result

    def _prepare(self, fit: Fit, step: _Step, call: Call, ready: bool) -> dict[str, Any]:
        """Runs a step eagerly; first captures it, and afterwards compares, when it is time."""
        if step.graph is None and not ready:
            return self._observe(fit, step, call)
        if step.graph is None:
            step.trials = TRIALS if self._unchanged is None else LATER_TRIALS
            if fit.distributed:
                step.trials = min(step.trials, 0 if self._captured else 1)
            try:
                step.graph = capture(fit, call)
            except CaptureError as error:
                step.why_eager = str(error)
            if self._undecided and not fit.agree(step.why_eager is None):
                step.why_eager = step.why_eager or "another process could not capture it"
            if step.why_eager is not None:
                step.graph = None
                return self._run_eagerly(call, step.why_eager)
            assert step.graph is not None
            self.captures += 1
            self._captured, self._undecided = True, False
            self._unchanged = self._unchanged or Unchanged(fit)
            self._unchanged.add(step.graph.reads)
        if not step.trials:
            return self._replay(step.graph, call)
        step.trials -= 1
        run = functools.partial(self._run_eagerly, call, TRIAL)
        result, step.why_eager = compare(step.graph, call.kwargs["batch"], run)
        if step.why_eager is not None:
            step.graph = None
        return result

    def _observe(self, fit: Fit, step: _Step, call: Call) -> dict[str, Any]:
        """Runs a step eagerly, and finds what a graph of it would freeze."""
        step.seen += 1
        run = functools.partial(self._run_eagerly, call, WARMUP)
        observed = ObservedStep(fit, call.kwargs["batch"], run)
        if observed.changed_batch:
            step.why_eager = "training_step changes the batch"
        # The first steps fill caches, which are attributes too.
        elif step.seen >= WARMUP_STEPS or self._captured:
            changed = observed.find_changed()
            if changed is not None and changed.startswith("optimizer") and not step.unsettled:
                # It has made its state of new parameters, perhaps: another step shows.
                step.unsettled, step.seen = True, step.seen - 1
            elif changed is not None:
                step.why_eager = f"training_step changes {changed}"
            else:
                step.why_eager = observed.why_unfit()
        return observed.result

    def _renew(self, fit: Fit, changed: str) -> None:
        """Drops the graphs, since what they froze has changed."""
        self._steps.clear()
        self._unchanged = None
        self._strikes = (
            0 if self.replays - self._replays_before > MIN_REPLAYS else self._strikes + 1
        )
        self._replays_before = self.replays
        self._why_eager = find_obstacle(self._trainer, self._model, device_type=Gpu.type)
        if self._why_eager is not None:
            return
        if self._strikes <= MAX_STRIKES:
            fit.prepare()
            return
        self._why_eager = f"{changed} changes again and again"
        if changed.endswith(".lr"):
            self._why_eager += "; an optimizer with fused=True reads it on the GPU"

    def _say(self, why: str) -> None:
        if why in (WARMUP, TRIAL) or why in self._said:
            return
        self._said.add(why)
        if self.mode == "step":
            raise CaptureError(f"capture=step: a step cannot be captured: {why}; use capture=auto")
        on_gpu = self._trainer.strategy.root_device.type == "cuda"
        if self.mode == "auto" and on_gpu:
            console.stdout().print(f"Steps run uncaptured: {why}", soft_wrap=True, highlight=False)
