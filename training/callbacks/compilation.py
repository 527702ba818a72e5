"""Limiting when torch.compile compiles."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch


class CompileFirst(pl.Callback):
    """Lets torch.compile compile in the first batches of training and of evaluation only.

    A batch of another shape, the short last one of an epoch, say, would compile for longer than the
    rest of a small run takes. It runs uncompiled, as does all that no compiled program fits.

    Two batches: the second tells torch.compile which dimensions change, the lengths of sentences,
    say, and the program that it makes for them serves all others.
    """

    batches = 2

    def __init__(self) -> None:
        self._seen = {"training": 0, "evaluation": 0}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._set("default")

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        self._start("training")

    def on_validation_batch_start(self, *_: Any, **__: Any) -> None:
        self._start("evaluation")

    def on_test_batch_start(self, *_: Any, **__: Any) -> None:
        self._start("evaluation")

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._set("default")

    def on_exception(self, *_: Any) -> None:
        self._set("default")

    def _start(self, kind: str) -> None:
        self._seen[kind] += 1
        self._set("default" if self._seen[kind] <= self.batches else "eager_on_recompile")

    def _set(self, stance: Any) -> None:
        torch.compiler.set_stance(stance)
