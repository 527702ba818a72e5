"""train.py, killed at a moment: ``python tests/killed.py <calls> <override>...``.

The process gets SIGKILL at so many function calls after the first training step has begun; at none
it is left alone, and prints how many there were. Losses depend on every random number generator.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from typing import Any

import numpy as np
import torch

import train
from models.classifier import Classifier

kill_at = int(sys.argv.pop(1))
calls = 0


def count(*_: Any) -> None:
    global calls
    calls += 1
    if calls == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)


def training_step(self: Classifier, batch: Any, batch_idx: int) -> torch.Tensor:
    sys.setprofile(count)
    threading.setprofile(None)
    noise = torch.rand(()) + np.random.rand() + random.random()  # noqa: NPY002
    return original(self, batch, batch_idx) * (1 + noise)


original = Classifier.training_step
Classifier.training_step = training_step
train.main()
sys.setprofile(None)
print("calls", calls)
sys.exit(1 if train.failed_jobs else 0)
