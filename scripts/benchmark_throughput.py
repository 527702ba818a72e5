"""Times the callback that measures throughput: ``python scripts/benchmark.py throughput``.

Writes::

    throughput_<device>.json
        command, date, method, environment, device, log_every_n_steps
        step_ms           without and with the callback: median_ms, p20_ms, p80_ms, repeats
        cost              by which share of a step the one median is more than the other; less than
                          nothing where the difference is lost in the spread
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from benchmark_step import CLASSES, NETWORKS
from common import console, write_json
from measurement import percentiles
from rich.table import Table
from torch.utils.data import DataLoader, TensorDataset

from hoconv.lightning import Throughput

NETWORK = NETWORKS["mnist_cnn"]
TURNS = 15
STEPS = {"cpu": 40, "cuda": 400}  # of a turn
WARM_UP = 20  # steps of each turn that are not counted
EVERY = 10  # steps between two readings of the callback, as conf/trainer has it
METHOD = (
    "A fit of mnist_cnn (impl=auto) on batches in memory, with and without the callback in turn; "
    "the time from the end of a warm-up to the end of the last step, the device synchronised at "
    "both, over the steps between."
)

logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)  # it says what it runs on


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


class StopWatch(pl.Callback):
    """The time after the warm-up, and at the end."""

    begin = end = 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == WARM_UP:
            self.begin = self._now(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.end = self._now(trainer)

    def _now(self, trainer: pl.Trainer) -> float:
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--turns", type=int, default=TURNS, help="default: %(default)s")


def run(arguments: argparse.Namespace, head: dict[str, Any]) -> None:
    """Measures, shows and writes what the arguments ask for."""
    for device in arguments.device:
        times: dict[str, list[float]] = {"without": [], "with": []}
        for _ in range(arguments.turns):
            for how, found in times.items():
                found.append(_step_ms(device, [Throughput()] if how == "with" else []))
        step_ms = {how: percentiles(found) for how, found in times.items()}
        cost = step_ms["with"]["median_ms"] / step_ms["without"]["median_ms"] - 1
        table = Table("callback", "ms a step", "from", "to", title=f"its cost: {cost:+.2%}")
        for how, of in step_ms.items():
            shown = (f"{of[key]:.4g}" for key in ("median_ms", "p20_ms", "p80_ms"))
            table.add_row(how, *shown)
        console().print(table)
        measured = {"method": METHOD, "device": device, "log_every_n_steps": EVERY}
        measured |= {"step_ms": step_ms, "cost": cost}
        write_json(arguments.out / f"throughput_{device}.json", head | measured)


def _step_ms(device: str, callbacks: list[pl.Callback]) -> float:
    steps = WARM_UP + STEPS[device]
    images = torch.randn(NETWORK.batch, *NETWORK.image_shape)
    labels = torch.randint(CLASSES, (NETWORK.batch,))
    batches = (tensor.expand(steps, *tensor.shape) for tensor in (images, labels))
    data = DataLoader(TensorDataset(*batches), batch_size=None)
    watch = StopWatch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Lightning's: workers, a logger that is not there
        trainer = pl.Trainer(
            accelerator="gpu" if device == "cuda" else "cpu",
            devices=1,
            max_steps=steps,
            log_every_n_steps=EVERY,
            logger=False,
            callbacks=[*callbacks, watch],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Network(), data)
    return 1e3 * (watch.end - watch.begin) / STEPS[device]
