"""Measuring how fast a training run is, without slowing it down."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch._dynamo.callback import callback_handler
from torch.nn.utils.rnn import PackedSequence

MB = 2**20


class Throughput(pl.Callback):
    """Measures the training steps of a fit: samples per second, waiting for data, peak memory.

    The metrics of every ``trainer.log_every_n_steps`` steps go to the trainer's loggers under the
    step that ends them. Time on a GPU, waiting for data included, is taken with CUDA events and
    nothing waits for them before the end of the fit, so those of a GPU go there later, when it has
    come so far, all of a second at once. Validation, checkpoints and other work between epochs are
    not counted; waiting for the first batch of an epoch is. Nor is a step, with the wait for its
    batch, in which torch.compile compiled, as it does again where a batch has another shape, or
    which called :func:`leave_out_step`: what is measured is how the fit runs once that is over.

    Logged, of the last steps; :meth:`summary` has the same of the whole fit:

    ====================================  =======================================================
    ``throughput/samples_per_sec``        all devices together
    ``throughput/step_ms``                milliseconds from one batch to the next
    ``throughput/data_wait_fraction``     share of it between the end of a step and the start of the
                                          next, in which a batch comes, is moved to the device and
                                          prepared there: 0 ... 1
    ``throughput/peak_memory_mb``         of 2**20 bytes: the most that PyTorch had allocated on the
                                          GPU when this was logged; on a CPU the most that the
                                          process had resident
    ``time/train``, ``time/val``,         seconds since the fit began, and of the fits that it
    ``time/total``                        resumes
    ====================================  =======================================================

    Args:
        warmup_steps: the first steps of the fit, not counted: they compile, tune and allocate.
        batch_size_fn: batch -> number of samples in it. The default takes the first dimension of
            the first tensor in the batch, looking into tuples, lists, dicts and dataclasses; a
            batch that is a list of samples needs a function of its own.

    Attributes:
        warmup_seconds: what the steps that are not counted took, on the host's clock, without the
            wait for their batches: the first ones and those that compiled or were left out.

    Raises:
        ValueError: `warmup_steps` is negative; or, while training, a batch holds no tensor and
            there is no `batch_size_fn`.
    """

    def __init__(
        self, warmup_steps: int = 10, batch_size_fn: Callable[[Any], int] | None = None
    ) -> None:
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps: expected at least 0, got {warmup_steps}")
        self.warmup_steps = warmup_steps
        self.batch_size_fn = batch_size_fn or batch_size
        self.warmup_seconds = 0.0
        self._fit = _Interval()
        self._before = {"train": 0.0, "val": 0.0}  # seconds of the fits that are resumed
        self._fit_start, self._val_seconds = time.perf_counter(), 0.0

    def state_dict(self) -> dict[str, float]:
        times = self._times()
        return {name: times[f"time/{name}"] for name in self._before}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        self._before = dict(state_dict)

    def summary(self) -> dict[str, float | None]:
        """All steps of the fit that are counted, together: their samples over their time is
        ``samples_per_sec``, of all devices; ``step_ms`` is their mean, ``data_wait_fraction`` the
        share of all their time; ``peak_memory_mb``. None for what the fit was too short to measure.
        """
        keys = ("samples_per_sec", "step_ms", "data_wait_fraction", "peak_memory_mb")
        if self._fit.steps == 0:
            return dict.fromkeys(keys)
        metrics = self._metrics(self._fit)
        return {key: metrics[f"throughput/{key}"] for key in keys}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._device = trainer.strategy.root_device
        self._world_size = trainer.world_size
        self._clock = _CudaClock() if self._device.type == "cuda" else _HostClock()
        _reset_peak_memory(self._device)
        if leave_out_step not in callback_handler.start_callbacks:  # none is after a reset
            callback_handler.register_start_callback(leave_out_step)
        self.warmup_seconds = 0.0
        self._fit = _Interval()  # what has been measured
        self._interval = _Interval()  # what is being counted
        self._stretch_start = None  # a mark while counting, None while not
        self._ended: deque[_Interval] = deque()  # what the device may still be busy with
        self._waiting_since = None  # a mark, once there is one to wait from
        self._steps = 0
        self._logged_step = 0
        self._reported = 0.0
        self._fit_start = time.perf_counter() - sum(self._before.values())
        self._val_start = 0.0
        self._val_seconds = self._before["val"]
        self._before = {"train": 0.0, "val": 0.0}

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._resume()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._began = time.perf_counter(), _left_out
        self._resume()  # after a validation within the epoch
        if self._stretch_start is not None:
            self._interval.waits.append((self._waiting_since, self._clock.mark()))

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._steps += 1
        seconds, left_out = time.perf_counter() - self._began[0], _left_out != self._began[1]
        if left_out or self._stretch_start is None:
            self.warmup_seconds += seconds
        if self._stretch_start is None:
            self._resume()  # the last step of the warm-up
            return
        if left_out:
            end_of_the_step_before, _ = self._interval.waits.pop()
            self._interval.stretches.append((self._stretch_start, end_of_the_step_before))
            self._stretch_start = None
            self._resume()
        else:
            self._waiting_since = self._clock.mark()
            self._interval.steps += 1
            self._interval.samples += self.batch_size_fn(batch)
        step, every = trainer.global_step, trainer.log_every_n_steps  # pyright: ignore
        # Several batches share a global step where gradients are accumulated.
        if every and step % every == 0 and step != self._logged_step:
            self._logged_step = step
            self._end_interval(step)
        self._report(trainer)
        self._resume()  # after an interval; what loggers did is not counted

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            self._pause()
            self._val_start = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            self._val_seconds += time.perf_counter() - self._val_start

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._pause()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end_interval()
        self._report(trainer, wait=True)

    def _resume(self) -> None:
        if self._stretch_start is None and self._steps >= self.warmup_steps:
            self._stretch_start = self._waiting_since = self._clock.mark()

    def _pause(self) -> None:
        """Counts no further than to the end of the last step."""
        if self._stretch_start is not None:
            self._interval.stretches.append((self._stretch_start, self._waiting_since))
            self._stretch_start = None

    def _end_interval(self, step: int | None = None) -> None:
        """Ends the interval, which is logged under the step if there is one."""
        self._pause()
        ended, self._interval = self._interval, _Interval()
        if ended.steps:
            ended.step, ended.times = step, self._times()
            self._ended.append(ended)

    def _report(self, trainer: pl.Trainer, wait: bool = False) -> None:
        """Adds the intervals that the device has done, or all, to the fit, and logs them."""
        now = time.perf_counter()
        if not self._ended or (not wait and now < self._reported + self._clock.patience):
            return
        self._reported = now
        peak_memory_mb = _peak_memory_mb(self._device)
        while self._ended and (wait or self._clock.passed(self._ended[0].stretches[-1][1])):
            interval = self._ended.popleft()
            interval.seconds = self._clock.seconds(interval.stretches)
            interval.wait_seconds = self._clock.seconds(interval.waits)
            self._clock.forget(
                mark for pair in interval.stretches + interval.waits for mark in pair
            )
            interval.peak_memory_mb = peak_memory_mb
            self._fit.add(interval)
            for logger in trainer.loggers if interval.step is not None else ():
                logger.log_metrics(self._metrics(interval) | interval.times, step=interval.step)

    def _metrics(self, interval: _Interval) -> dict[str, Any]:
        of_device = interval.samples / interval.seconds
        return {
            "throughput/samples_per_sec": of_device * self._world_size,
            "throughput/step_ms": 1000 * interval.seconds / interval.steps,
            "throughput/data_wait_fraction": interval.wait_seconds / interval.seconds,
            "throughput/peak_memory_mb": interval.peak_memory_mb,
        }

    def _times(self) -> dict[str, float]:
        total = time.perf_counter() - self._fit_start
        return {
            "time/train": total - self._val_seconds,
            "time/val": self._val_seconds,
            "time/total": total,
        }


_left_out = 0  # how often a step of this process was to be left out


def leave_out_step(*_: Any) -> None:
    """Lets every :class:`Throughput` leave out the step that is running, since it does what later
    steps will not do."""
    global _left_out
    _left_out += 1


def batch_size(batch: Any) -> int:
    """The number of samples in a batch: the first dimension of the first tensor found in it.

    Looks into mappings, sequences and dataclasses, in order; a PackedSequence counts sequences.

    Raises:
        ValueError: there is no tensor with a dimension.
    """
    size = _first_dimension(batch)
    if size is None:
        raise ValueError(
            f"batch: expected a tensor somewhere in it, got {type(batch).__name__}; give "
            "Throughput a batch_size_fn that counts its samples"
        )
    return size


def _first_dimension(batch: Any) -> int | None:
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else None
    if isinstance(batch, PackedSequence):
        return int(batch.batch_sizes[0])
    if isinstance(batch, Mapping):
        parts = list(batch.values())
    elif isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        parts = list(batch)
    elif dataclasses.is_dataclass(batch):
        parts = [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    else:
        return None
    return next((size for part in parts if (size := _first_dimension(part)) is not None), None)


@dataclasses.dataclass
class _Interval:
    """Steps that were counted, and what is measured of them."""

    steps: int = 0
    samples: int = 0
    stretches: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)  # marks around them
    waits: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)  # within the stretches
    seconds: float = 0.0  # between the marks, on the device
    wait_seconds: float = 0.0
    peak_memory_mb: float | None = None
    step: int | None = None  # to log it under
    times: dict[str, float] = dataclasses.field(default_factory=dict)  # when it ended

    def add(self, other: _Interval) -> None:
        self.steps += other.steps
        self.samples += other.samples
        self.seconds += other.seconds
        self.wait_seconds += other.wait_seconds
        self.peak_memory_mb = other.peak_memory_mb  # a peak since the fit began


class _HostClock:
    """For devices that have finished when the call returns."""

    patience = 0.0  # seconds from one report to the next

    def mark(self) -> float:
        return time.perf_counter()

    def passed(self, mark: float) -> bool:
        return True

    def seconds(self, stretches: list[tuple[float, float]]) -> float:
        return sum(end - start for start, end in stretches)

    def forget(self, marks: Iterable[float]) -> None:
        pass


class _CudaClock:
    """Marks are events in the GPU's own queue: recording one waits for nothing.

    They are used again once forgotten: making an event and finding the stream take longer than
    recording it, and there are two in every step. Many read at once take less than some now and
    then: a step of a small model is a few milliseconds of the host's.
    """

    patience = 1.0

    def __init__(self) -> None:
        self._stream = torch.cuda.current_stream()
        self._forgotten: set[torch.cuda.Event] = set()

    def mark(self) -> torch.cuda.Event:
        free = self._forgotten
        event = free.pop() if free else torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def passed(self, mark: torch.cuda.Event) -> bool:
        return mark.query()

    def seconds(self, stretches: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> float:
        stretches[-1][1].synchronize()
        return sum(start.elapsed_time(end) for start, end in stretches) / 1000

    def forget(self, marks: Iterable[torch.cuda.Event]) -> None:
        self._forgotten.update(marks)


def _reset_peak_memory(device: torch.device) -> None:
    """Begins a peak, of which what an earlier fit in this process has left behind is no part."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(AttributeError, OSError):  # not with every C library
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):  # not Linux, or not allowed: the peak is the process's
        Path("/proc/self/clear_refs").write_text("5")


def _peak_memory_mb(device: torch.device) -> float | None:
    if device.type == "cuda":
        # As max_memory_allocated, which makes a sorted dictionary of all statistics each time.
        stats = torch.cuda.memory_stats_as_nested_dict(device)
        return stats["allocated_bytes"]["all"]["peak"] / MB
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / MB
    return None
