"""Times the callback that measures throughput: ``python scripts/benchmark.py throughput``.

Writes::

    throughput_<device>.json
        command, date, method, environment, device, log_every_n_steps
        steps_per_block
        step_ms           of blocks without and with the callback: median_ms, p20_ms, p80_ms,
                          repeats
        cost              time that the callback adds to a step, as a share of the step, over
                          pairs of neighbouring blocks: median, and low and high, its 95 %
                          confidence interval
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from collections.abc import Sequence
from statistics import median
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.loggers.logger import DummyLogger
from rich.table import Table
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.training.step import CLASSES, NETWORKS, synchronize
from hoconv.lightning import Throughput
from hoconv.tools.benchmarking.measurement import percentiles
from hoconv.tools.commands import count, write_json
from hoconv.tools.tables import console, show

NETWORK = NETWORKS["mnist_cnn"]
PAIRS = 200
STEPS = {"cpu": 10, "cuda": 100}  # of a block
WARM_UP = 20  # steps
EVERY = 10  # steps between two readings of the callback, as conf/trainer has it
METHOD = (
    "One fit of mnist_cnn (impl=auto) on batches in memory, page-locked for a GPU as in train.py, "
    "with a logger that writes nothing. Blocks of steps come in pairs, one with and one without "
    "the callback, in turns the one and the other first. The device is synchronised between "
    "blocks. The confidence interval of the median over the pairs is that of order statistics."
)

logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)  # else it lists the devices


class Network(pl.LightningModule):
    """The network, trained as `python train.py experiment=mnist_cnn` does."""

    def __init__(self) -> None:
        super().__init__()
        self.network = NETWORK.make("auto")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels = batch
        return F.cross_entropy(self.network(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return NETWORK.optimizer(self.parameters(), lr=1e-3)


class InTurns(Throughput):
    """The callback, active in every other block of steps, and the milliseconds of each block."""

    def __init__(self, steps: int) -> None:
        super().__init__(warmup_steps=WARM_UP)
        self.block = steps
        self.blocks: list[tuple[bool, float]] = []  # whether it was active, and a step's time
        self.begin = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, *rest: Any) -> None:
        if self._is_active(trainer.global_step):
            super().on_train_batch_start(trainer, *rest)

    def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        done = trainer.global_step  # this step included
        if self._is_active(done - 1):
            super().on_train_batch_end(trainer, *rest)
        if (done - WARM_UP) % self.block == 0:
            synchronize(trainer.strategy.root_device)
            now = time.perf_counter()
            if done > WARM_UP:
                step_ms = 1e3 * (now - self.begin) / self.block
                self.blocks.append((self._is_active(done - 1), step_ms))
            self.begin = time.perf_counter()

    def _is_active(self, step: int) -> bool:
        """Says whether the callback is active: in warm-up, and in the blocks 1, 2, 5, 6, ..."""
        return step < WARM_UP or (step - WARM_UP) // self.block % 4 in (1, 2)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pairs", type=count, default=PAIRS, help="of blocks; default: %(default)s"
    )


def run(arguments: argparse.Namespace, head: dict[str, Any]) -> None:
    """Measures, shows and writes the results."""
    for device in arguments.device:
        blocks = measure(device, arguments.pairs)
        step_ms = {
            how: percentiles([ms for is_active, ms in blocks if is_active == (how == "with")])
            for how in ("without", "with")
        }
        pairs = (dict(pair) for pair in zip(blocks[::2], blocks[1::2], strict=True))
        cost = median_interval([pair[True] / pair[False] - 1 for pair in pairs])
        title = f"its cost: {cost['median']:+.2%} ({cost['low']:+.2%} to {cost['high']:+.2%})"
        table = Table("callback", "ms per step", "from", "to", title=title)
        for how, of in step_ms.items():
            shown = (f"{of[key]:.4g}" for key in ("median_ms", "p20_ms", "p80_ms"))
            table.add_row(how, *shown)
        show(table)
        measured = {"method": METHOD, "device": device, "log_every_n_steps": EVERY}
        measured |= {"steps_per_block": STEPS[device], "step_ms": step_ms, "cost": cost}
        write_json(arguments.out / f"throughput_{device}.json", head | measured)


def measure(device: str, pairs: int) -> list[tuple[bool, float]]:
    """Trains; returns of each block whether the callback was active, and milliseconds per step."""
    steps = WARM_UP + 2 * pairs * STEPS[device]
    images = torch.randn(NETWORK.batch, *NETWORK.image_shape)
    labels = torch.randint(CLASSES, (NETWORK.batch,))
    if device == "cuda":
        images, labels = images.pin_memory(), labels.pin_memory()
    batches = (tensor.expand(steps, *tensor.shape) for tensor in (images, labels))
    data = DataLoader(TensorDataset(*batches), batch_size=None)
    callback = InTurns(STEPS[device])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Lightning's: workers
        trainer = pl.Trainer(
            accelerator="gpu" if device == "cuda" else "cpu",
            devices=1,
            max_steps=steps,
            log_every_n_steps=EVERY,
            logger=DummyLogger(),
            callbacks=callback,
            enable_checkpointing=False,
            enable_progress_bar=console().is_terminal,
            enable_model_summary=False,
        )
        trainer.fit(Network(), data)
    return callback.blocks


def median_interval(values: Sequence[float]) -> dict[str, float]:
    """Returns the sample's median, and its confidence interval of 95 %.

    The bounds are the values whose ranks are 0.98 sqrt(n) from the middle. The number of n values
    below the median is binomial, with a standard deviation of sqrt(n) / 2, and 0.98 is 1.96 / 2.
    """
    ordered = sorted(values)
    away = round(0.98 * len(ordered) ** 0.5)
    low = max(0, len(ordered) // 2 - away)
    return {"median": median(ordered), "low": ordered[low], "high": ordered[-1 - low]}
