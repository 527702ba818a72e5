"""Measuring how much of a training step each operator takes, layer by layer."""

from __future__ import annotations

import bisect
import functools
import itertools
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from hoconv.tools.benchmarking.marks import LayerMarks, mark, milliseconds_between
from hoconv.tools.benchmarking.measurement import percentiles
from hoconv.tools.commands import write_json

CYCLES_A_MS = 2_000_000  # of a GPU, at most: how long it sleeps is not measured
LAUNCHES = ("LaunchKernel", "GraphLaunch")  # in the names of CUDA's functions
METHOD = (
    "Marks at the begin and end of a training step, and where the device enters and leaves the "
    "layers of an operator, forward and backward: CUDA events, or time.perf_counter on a CPU. A "
    "GPU's steps are queued behind a wait that outlasts their launch: their times exclude gaps in "
    "which it waits for the host or for data. Median, 20th and 80th percentiles. Launches: "
    "those of one more step, and those within the layers, counted by torch.profiler."
)


class LayerShares(pl.Callback):
    """Times some steps and the layers in them, writes the times as JSON, and ends the fit.

    The steps run eagerly, for the marks are hooks: it is for a short run of its own. Writes::

        method
        device               its type
        step_ms              median_ms, p20_ms, p80_ms, repeats
        operators            name -> the same, of all its layers together; left out where a layer
                             was called in a way that marks cannot follow
        launches             kernels that the host launches in a step; null on a CPU
        operator_launches    name -> those of all its layers; null on a CPU

    Args:
        path: of the JSON.
        warmup_steps: steps before those that are timed.
        steps: how many are timed; fewer where the fit ends before.
    """

    def __init__(self, path: str | Path, warmup_steps: int = 10, steps: int = 20) -> None:
        self.path = Path(path)
        self.warmup_steps = warmup_steps
        self.steps = steps

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._device = trainer.strategy.root_device
        self._marks: LayerMarks | None = None
        self._profiler: Any = None
        self._launches: int | None = None
        self._operator_launches: dict[str, int] | None = None
        self._step = 0
        self._host_ms = 0.0  # of the last step of the warm-up
        self._step_ms: list[float] = []
        self._layers_ms: list[dict[str, float]] = []

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._step += 1
        self._began = time.perf_counter()
        if self._step <= self.warmup_steps:
            return
        if len(self._step_ms) == self.steps:
            self._marks = LayerMarks(pl_module, _ProfilerMarks())
            self._profiler = torch.profiler.profile(acc_events=True)
            self._profiler.start()
            return
        if self._marks is None:
            self._marks = LayerMarks(pl_module, functools.partial(mark, self._device))
        self._marks.clear()
        if self._device.type == "cuda":
            torch.cuda._sleep(int(3 * self._host_ms * CYCLES_A_MS))
        self._begin = mark(self._device)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if self._profiler is not None:
            self._count_launches()
            trainer.should_stop = True
            return
        if self._marks is None:
            self._host_ms = 1e3 * (time.perf_counter() - self._began)
            return
        self._step_ms.append(milliseconds_between(self._begin, mark(self._device)))
        self._layers_ms.append(self._marks.milliseconds())
        if len(self._step_ms) == self.steps:
            self._marks.remove()
            trainer.should_stop = self._device.type != "cuda"

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._step_ms and trainer.is_global_zero:
            self._write()

    def _count_launches(self) -> None:
        assert self._marks is not None
        torch.cuda.synchronize()
        self._profiler.stop()
        self._marks.remove()
        begin = {event.name: event.time_range.start for event in self._profiler.events()}
        launches = sorted(
            event.time_range.start
            for event in self._profiler.events()
            if any(part in event.name for part in LAUNCHES)
        )
        self._launches = len(launches)
        self._operator_launches = {
            operator: sum(
                bisect.bisect(launches, begin[end]) - bisect.bisect(launches, begin[start])
                for start, end in spans
            )
            for operator, spans in self._marks.spans().items()
        }
        self._profiler = None

    def _write(self) -> None:
        operators = set.intersection(*(set(each) for each in self._layers_ms))
        contents = {
            "method": METHOD,
            "device": self._device.type,
            "step_ms": percentiles(self._step_ms),
            "operators": {
                name: percentiles([each[name] for each in self._layers_ms])
                for name in sorted(operators)
            },
            "launches": self._launches,
            "operator_launches": self._operator_launches,
        }
        write_json(self.path, contents, say=False)


class _ProfilerMarks:
    """Marks points by events of the profiler that runs; a mark is the name of its event."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def __call__(self) -> str:
        name = f"{type(self).__qualname__} {next(self._numbers)}"
        with torch.profiler.record_function(name):
            return name
