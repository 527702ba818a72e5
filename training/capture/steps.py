"""Training steps as CUDA graphs: one launch runs zero_grad, forward, backward and the optimizer.

The host takes longer to launch the kernels of a small model's step, one by one, than the GPU takes
to run them. A CUDA graph is the list of a step's kernels, recorded once and launched as one.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from torch import Tensor

from hoconv.lightning.throughput import leave_out_step
from training import console
from training.capture.fit import Fit
from training.capture.gpu import Gpu
from training.capture.graph import Call, CaptureError, StepGraph, capture
from training.capture.obstacles import find_obstacle
from training.capture.trial import compare
from training.configuration.errors import MisconfigurationException
from training.lightning_loop import is_last_of_step, replace_steps, restore_steps
from training.tensors import describe

# Steps that run before one is captured: the first make the optimizer's state, and libraries choose
# algorithms. DistributedDataParallel arranges its buckets and measures itself for ten.
WARMUP_STEPS, WARMUP_STEPS_DDP = 3, 11
# Steps in which a new graph runs beside an eager step. The first has the batch that was captured,
# and the values that the host had then: another one shows whether these matter.
TRIALS = 3
# Steps in which processes ask each other whether all are ready for the first capture.
MAX_ASKED = 100
MAX_GRAPHS = 32  # each keeps the memory of its batch and results
# Why steps run eagerly in the end that could be captured.
WARMUP, TRIAL = "before a capture", "to compare"
MODES = ("auto", "on", "off")


@dataclasses.dataclass
class _Kind:
    """The state of the steps that can be the same graph.

    Attributes:
        seen: how many ran eagerly.
        why_eager: why they cannot be captured.
        graph: of the step, once captured.
        trials: how many steps are still to run twice, eagerly and as the graph.
    """

    seen: int = 0
    why_eager: str | None = None
    graph: StepGraph | None = None
    trials: int = 0


class CapturedSteps(pl.Callback):
    """Runs training steps as CUDA graphs, one for each shape of the batches.

    A LightningModule with ``capturable = True`` promises that its training step, with automatic
    optimization, depends on the batch, parameters, buffers and the optimizer's state alone, and
    changes nothing else: a graph repeats the kernels and the Python values that it was captured
    with. Another structure of the batch, another number in it, ``train()`` or ``requires_grad_()``
    of a part, or another option of the optimizer, makes another graph; a schedule's learning rate
    does not.

    The first steps run eagerly. Then a step is captured, and the next ones run twice, eagerly and
    as the graph on copies: both must give the same, to the last bit where two captured steps do.
    So does one step in `verify_every_n_steps`.

    Args:
        mode: ``"auto"`` captures the steps of a module that is ``capturable``; ``"on"`` those of
            any module, and a step that cannot be captured is an error; ``"off"`` captures none.
        verify_every_n_steps: replays of a graph after which it is compared with an eager step.

    Attributes:
        captures: how many graphs there were.
        replays: how many steps ran as graphs.
        eager_steps: why -> how many steps ran eagerly, those before a capture included.
        seconds: what capturing and comparing took, on the host's clock.

    Raises:
        MisconfigurationException: an argument is none of these.
        CaptureError: while training: a graph gives something else than an eager step, long after
            its capture; says what, and since which step. With ``"on"``: a step cannot be captured.
    """

    def __init__(self, mode: str = "auto", verify_every_n_steps: int = 1000) -> None:
        if mode not in MODES:
            raise MisconfigurationException(
                f"capture: expected one of {', '.join(MODES)}; got {mode!r}"
            )
        if verify_every_n_steps < 1:
            raise MisconfigurationException(
                f"capture.verify_every_n_steps: expected at least 1, got {verify_every_n_steps}"
            )
        self.mode = mode
        self.verify_every_n_steps = verify_every_n_steps
        self.captures = 0
        self.replays = 0
        self.eager_steps: Counter[str] = Counter()
        self.seconds = 0.0
        self._said: set[str] = set()

    def summary(self) -> dict[str, Any]:
        """Returns the attributes, as numbers and text."""
        return {
            "captures": self.captures,
            "replays": self.replays,
            "eager_steps": dict(self.eager_steps),
            "capture_seconds": self.seconds,
        }

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._trainer: Any = trainer
        self._kinds: dict[Any, _Kind] = {}
        self._captured = False  # whether this fit has had a graph
        self._replaced: str | None = None  # what a step replaced, which its graph would not see
        self._why_eager = self._find_obstacle(pl_module)
        # Whether processes still ask each other which step they capture first, and how often.
        self._undecided, self._asked = self.mode != "off" and trainer.world_size > 1, 0
        if self._undecided and not trainer.strategy.reduce_boolean_decision(
            self._why_eager is None, all=True
        ):
            self._why_eager = self._why_eager or "other processes do not capture their steps"
            self._undecided = False
        self._run_as_lightning = replace_steps(trainer, self._run)
        self._fit = None
        if self._why_eager is None:
            gpu = Gpu(trainer.strategy.root_device)
            self._fit = Fit(trainer, pl_module, self._run_as_lightning, gpu)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._kinds = {}
        restore_steps(trainer)

    def on_exception(self, trainer: pl.Trainer, *_: Any) -> None:
        restore_steps(trainer)

    def _find_obstacle(self, model: pl.LightningModule) -> str | None:
        if self.mode == "off":
            return "capture=off"
        if (obstacle := find_obstacle(self._trainer, model, Gpu.type)) is not None:
            return obstacle
        if self.mode == "on" or getattr(model, "capturable", False):
            return None
        return (
            f"{type(model).__name__} does not say capturable = True, which promises that its "
            "training step depends on the batch, parameters, buffers and the optimizer alone"
        )

    def _run(self, optimizer: Any, batch_idx: int, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Does what Lightning's loop does in a step, eagerly or by a graph."""
        first = batch_idx % self._trainer.accumulate_grad_batches == 0
        call = Call(optimizer, batch_idx, kwargs, first, is_last_of_step(self._trainer))
        if (fit := self._fit) is None:
            return self._run_eagerly(call, self._why_eager or "")
        tensors: list[Tensor] = []
        kind = self._find_kind(fit, call, tensors)
        graph = kind.graph if not kind.trials else None
        verify = self._must_verify(fit, graph)
        if graph is not None and not verify:
            self.replays += 1
            graph.replays += 1
            return graph.run(call, tensors)
        leave_out_step()
        begun = time.perf_counter()
        try:
            if graph is not None:
                return self._verify(graph, call, tensors)
            return self._prepare(fit, kind, call, tensors)
        finally:
            self.seconds += time.perf_counter() - begun

    def _find_kind(self, fit: Fit, call: Call, tensors: list[Tensor]) -> _Kind:
        """Returns what is known of steps as this one; appends the tensors of its batch to a list.
        Another key, another graph."""
        if fit.optimizer.changes_rates:
            return _Kind(why_eager="the step changes the learning rate")
        if self._replaced is not None:
            return _Kind(why_eager=f"the step replaces {self._replaced}; write into it")
        batch = describe(call.kwargs["batch"], tensors)
        trainer = self._trainer
        key = batch, *call[3:], trainer.accumulate_grad_batches, *fit.describe(call.first)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _Kind()
            if len(self._kinds) > MAX_GRAPHS:
                kind.why_eager = (
                    f"there are more than {MAX_GRAPHS} kinds of steps: other shapes or values of "
                    "the batch, or options of the optimizer (with fused=True it reads its learning "
                    "rate on the GPU)"
                )
        return kind

    def _must_verify(self, fit: Fit, graph: StepGraph | None) -> bool:
        """Returns whether a step is to run twice; processes do so in the same step."""
        if not fit.distributed:
            return graph is not None and graph.replays >= self.verify_every_n_steps
        step = self._trainer.global_step
        due = self._captured and step > 0 and step % self.verify_every_n_steps == 0
        return due and fit.agree(graph is not None and graph.replays > 0)

    def _compare(self, graph: StepGraph, call: Call, tensors: list[Tensor]) -> Any:
        """Runs a step twice; returns what `compare` returns."""
        return compare(graph, tensors, lambda: self._run_eagerly(call, TRIAL))

    def _verify(self, graph: StepGraph, call: Call, tensors: list[Tensor]) -> dict[str, Any]:
        """Compares a graph that was used for long with an eager step."""
        step, since = graph.compared
        result, why = self._compare(graph, call, tensors)
        if why is None:
            return result
        folder = Path(self._trainer.default_root_dir)
        later = [p for p in folder.rglob("*.ckpt") if p.stat().st_mtime > since]
        raise CaptureError(
            f"step {self._trainer.global_step}: {why}; the training step reads something that has "
            f"changed since step {step}, after which all steps may be wrong. Checkpoints written "
            f"since: {', '.join(str(p.relative_to(folder)) for p in sorted(later)) or 'none'}. "
            "Use capture=off, or keep what changes in a buffer"
        )

    def _prepare(self, fit: Fit, kind: _Kind, call: Call, tensors: list[Tensor]) -> dict[str, Any]:
        """Runs a step eagerly; first captures it, and afterwards compares, when it is time."""
        if kind.graph is None and not self._is_ready(fit, kind):
            if kind.why_eager is not None:
                return self._run_eagerly(call, kind.why_eager)
            kind.seen += 1
            fit.optimizer.prepare()
            before = fit.state()
            with fit.gpu.beside():
                result = self._run_eagerly(call, WARMUP)
            after = fit.state()
            fit.optimizer.find_changed_rates()
            for name in before.keys() & after.keys():
                if after[name] is not before[name]:
                    self._replaced = name
            return result
        if kind.graph is None:
            try:
                kind.graph = capture(fit, call)
            except CaptureError as error:
                kind.why_eager = str(error)
            if self._undecided and not fit.agree(kind.why_eager is None):
                kind.why_eager = kind.why_eager or "another process could not capture it"
            if kind.why_eager is not None:
                kind.graph = None
                return self._run_eagerly(call, kind.why_eager)
            # Processes compare together, and so the first graph only.
            kind.trials = TRIALS if not fit.distributed else int(not self._captured)
            self.captures += 1
            self._captured, self._undecided = True, False
        assert kind.graph is not None
        if not kind.trials:
            self.replays += 1
            return kind.graph.run(call, tensors)
        kind.trials -= 1
        result, kind.why_eager = self._compare(kind.graph, call, tensors)
        if kind.why_eager is not None:
            kind.graph, kind.trials = None, 0
        return result

    def _is_ready(self, fit: Fit, kind: _Kind) -> bool:
        """Returns whether a step is to be captured now, in all processes the first one."""
        warmup = WARMUP_STEPS_DDP if fit.distributed else WARMUP_STEPS
        ready = kind.why_eager is None and kind.seen >= (1 if self._captured else warmup)
        if ready:  # hooks may have come since the fit began
            kind.why_eager = find_obstacle(self._trainer, fit.model, Gpu.type)
            ready = kind.why_eager is None
        if not self._undecided:
            return ready
        self._asked += 1
        together = fit.agree(ready)
        if not together and self._asked > MAX_ASKED:
            self._undecided = False
            kind.why_eager = kind.why_eager or "other processes do not capture their steps"
        return together

    def _run_eagerly(self, call: Call, why: str) -> dict[str, Any]:
        self._say(why)
        self.eager_steps[why] += 1
        # Also where it is not to be captured: state that is on the GPU would be waited for.
        with nullcontext() if self._fit is None else self._fit.optimizer.on_gpu():
            return self._run_as_lightning(*call[:3])

    def _say(self, why: str) -> None:
        if why in (WARMUP, TRIAL) or why in self._said:
            return
        self._said.add(why)
        if self.mode == "on":
            raise CaptureError(f"capture=on: a step cannot be captured: {why}; use capture=auto")
        if self.mode == "auto" and self._trainer.strategy.root_device.type == "cuda":
            console.stdout().print(f"Steps run uncaptured: {why}", soft_wrap=True, highlight=False)
