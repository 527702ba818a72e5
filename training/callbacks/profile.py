"""The profile of some training steps: where their time goes, and how much of it is arithmetic."""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import rank_zero_only
from rich.table import Table
from torch.profiler import ProfilerActivity
from torch.utils.flop_counter import FlopCounterMode

from hoconv.tools.tables import print_table
from training import console, disk

SHOWN = 10  # operators or kernels
NAME_WIDTH = 44  # characters: with the figures beside it, a table of 80 columns
# The matrix product to whose speed the steps' is compared: its size, and how often it is timed.
PRODUCT, REPEATS = {"cpu": 1024, "cuda": 8192}, 5


def shorten_name(name: str) -> str:
    """The name of an operator, or of a kernel without its namespaces and arguments."""
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    depth = 0  # of template arguments
    for i, character in enumerate(name):
        depth += (character == "<") - (character == ">")
        if character == "(" and not depth and name[i - 1] != " ":
            name = re.sub(r"\w+::", "", name[:i]).replace(" >", ">")
            break
    return name if len(name) <= NAME_WIDTH else name[: NAME_WIDTH - 1] + "…"


class Profile(pl.Callback):
    """Writes ``profile/trace.json`` of some steps, which chrome://tracing and Perfetto show; prints
    the kernels that take most of their time, and the floating-point operations of a step.

    The operations are those that PyTorch's FlopCounterMode counts in the first step: convolutions,
    matrix products, attention, and operators that declare theirs. The utilization is what a step
    reaches of the rate of a matrix product, measured on this device in the precision of the
    step: the model FLOPs utilization (MFU), against a measured peak.

    Args:
        first: the step with which the profile begins; the ones before it warm up, and on a GPU are
            captured as graphs.
        steps: how many are profiled.
    """

    def __init__(self, first: int = 20, steps: int = 10) -> None:
        self.first = first
        self.steps = steps

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._device = trainer.strategy.root_device
        self._batches = 0
        self._counter = FlopCounterMode(display=False)
        self._profiler: Any = None
        self._seconds = 0.0
        self._open = contextlib.ExitStack()

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._batches == 0:
            self._open.enter_context(self._counter)
        elif self._batches == self.first:
            activities = [ProfilerActivity.CPU]
            activities += [ProfilerActivity.CUDA] if self._device.type == "cuda" else []
            self._synchronize()
            # acc_events: torch 2.11 warns that it drops all cycles but one, although there is one.
            profile = torch.profiler.profile(activities=activities, acc_events=True)
            self._profiler = self._open.enter_context(profile)
            self._begin = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        self._batches += 1
        if self._batches == 1:
            self._open.close()
        elif self._batches == self.first + self.steps:
            self._synchronize()
            self._seconds = (time.perf_counter() - self._begin) / self.steps
            self._open.close()
            with trainer.precision_plugin.forward_context():
                mixed = torch.is_autocast_enabled(self._device.type)
                autocast = torch.get_autocast_dtype(self._device.type)
            self._report(trainer, autocast if mixed else next(pl_module.parameters()).dtype)

    def on_train_end(self, *_: Any) -> None:
        if self._open.pop_all() and not self._seconds:
            console.warn(
                f"no profile: it takes {self.first + self.steps} steps, the fit had {self._batches}"
            )

    def on_exception(self, *_: Any) -> None:
        if hasattr(self, "_open"):
            self._open.close()

    @rank_zero_only
    def _report(self, trainer: pl.Trainer, dtype: torch.dtype) -> None:
        path = Path(trainer.default_root_dir) / "profile" / "trace.json"

        def write() -> None:
            with disk.named(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                self._profiler.export_chrome_trace(str(path))

        disk.attempt(path, write)
        kind = "device" if self._device.type == "cuda" else "cpu"
        events = self._profiler.key_averages()
        total = sum(getattr(event, f"self_{kind}_time_total") for event in events)
        table = Table("kernel", title=f"Profile of {self.steps} steps")
        for column in ("ms per step", "share", "calls per step"):
            table.add_column(column, justify="right")
        of = sorted(events, key=lambda event: -getattr(event, f"self_{kind}_time_total"))
        for event in of[:SHOWN]:
            microseconds = getattr(event, f"self_{kind}_time_total")
            table.add_row(
                shorten_name(event.key), f"{microseconds / 1000 / self.steps:.3f}",
                f"{microseconds / total:.1%}" if total else "", f"{event.count / self.steps:.4g}",
            )  # fmt: skip
        out = console.stdout()
        print_table(out, table)
        operations, peak = self._counter.get_total_flops(), self._peak(dtype)
        rate = operations / self._seconds
        for label, text in (
            ("a step", f"{1000 * self._seconds:.2f} ms, with the profiler's own time"),
            ("operations", f"{operations:.4g} floating-point operations a step"),
            ("rate", f"{rate:.4g} a second"),
            ("utilization", f"{rate / peak:.2%} of a matrix product's {peak:.4g} a second"),
            ("trace", str(path)),
        ):
            out.print(f"{label:<12}{text}", soft_wrap=True, highlight=False)

    def _peak(self, dtype: torch.dtype) -> float:
        """Measures the operations a second of a matrix product."""
        size = PRODUCT[self._device.type]
        a = torch.ones(size, size, dtype=dtype, device=self._device)
        seconds = []
        for _ in range(REPEATS):
            self._synchronize()
            begin = time.perf_counter()
            torch.mm(a, a)
            self._synchronize()
            seconds.append(time.perf_counter() - begin)
        return 2 * size**3 / min(seconds)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
