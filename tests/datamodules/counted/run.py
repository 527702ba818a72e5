"""Small data sets with oddities at random: what counts in them is what a second definition says, a
score of nothing is no number, and what is wrong is one line.

``python -m tests.datamodules.counted.folders FIRST COUNT``, or ``coco``, makes those of COUNT seeds
from FIRST on, trains a step on each and validates it.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.exceptions import MisconfigurationException

from datamodules.images import DataNotFoundError

SHOWN = 110  # characters of what was said


class Problem(Exception):
    """A data set was refused, in one line."""


def attempt(function: Any, *args: Any, **options: Any) -> Any:
    """Calls a function; an error of the user's becomes a Problem."""
    try:
        return function(*args, **options)
    except (DataNotFoundError, MisconfigurationException) as error:
        text = str(error)
        assert text.isprintable(), f"not one line that a terminal can show: {text!r}"
        raise Problem(text) from error


def run(
    stage: str, model: pl.LightningModule, data: Any, *callbacks: pl.Callback
) -> dict[str, float]:
    """Fits a step and validates, or validates alone; returns the scores of val."""
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, max_epochs=1, limit_train_batches=1, num_sanity_val_steps=0,
        callbacks=list(callbacks),
    )  # fmt: skip
    options = {"verbose": False} if stage == "validate" else {}
    attempt(getattr(trainer, stage), model, datamodule=data, **options)
    metrics = trainer.callback_metrics.items()
    return {name: float(value) for name, value in metrics if name.startswith("val/")}


def outcome(make: Callable[[np.random.Generator, Path], None], seed: int) -> str:
    """Makes the data of a seed and trains on it; returns "trained", or why it was refused."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        try:
            make(np.random.default_rng(seed), Path(folder))
        except Problem as problem:
            return str(problem).replace(folder, "")
    return "trained"


def main(make: Callable[[np.random.Generator, Path], None]) -> None:
    """The command of a kind of data: its arguments are the first seed and how many there are."""
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    first, count = map(int, sys.argv[1:])
    said: Counter[str] = Counter()
    for seed in range(first, first + count):
        print(f"\rseed {seed} ", end="", file=sys.stderr, flush=True)
        said[outcome(make, seed)[:SHOWN]] += 1
    for reason, times in said.most_common():
        print(f"{times:6} {reason}")
