"""train.py, killed or held up at a moment, in a process of its own.

In `main` the process gets SIGKILL at so many function calls after the first training step has
begun; at none it is left alone, and prints how many there were. Losses depend on every random
number generator.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Sequence
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import torch

import train
from models.tasks.classifier import Classifier
from training.command import run_command


def held_up(step: int, overrides: Sequence[str], reached: Event, go_on: Event) -> None:
    """Sets `reached` in a training step, and waits for `go_on` there. Does not return."""

    def training_step(self: Classifier, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step + 1 == step:
            reached.set()
            go_on.wait()
        return original(self, batch, batch_idx)

    original = Classifier.training_step
    Classifier.training_step = training_step
    sys.argv = ["train.py", *overrides]
    sys.exit(run_command(train.main))


def main(kill_at: int, overrides: Sequence[str], output: Path) -> None:
    """Does not return. The file `output` gets what the process prints."""
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def training_step(self: Classifier, batch: Any, batch_idx: int) -> Any:
        sys.setprofile(count)
        threading.setprofile(None)
        noise = torch.rand(()) + np.random.rand() + random.random()  # noqa: NPY002
        outputs = original(self, batch, batch_idx)
        return outputs | {"loss": outputs["loss"] * (1 + noise)}

    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    original = Classifier.training_step
    Classifier.training_step = training_step
    sys.argv = ["train.py", *overrides]
    code = run_command(train.main)
    sys.setprofile(None)
    print("calls", calls)
    sys.exit(code)
