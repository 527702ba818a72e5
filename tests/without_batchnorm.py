"""train.py with group normalisation in place of batch normalisation, whose statistics are those of
one process: what several train is then what one does."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def group_norm(channels: int, **_: Any) -> nn.GroupNorm:
    return nn.GroupNorm(2, channels)


nn.BatchNorm2d = group_norm  # pyright: ignore[reportAttributeAccessIssue]

import train  # noqa: E402  after its networks' layers are others
from training.command import run_command  # noqa: E402

if __name__ == "__main__":
    sys.exit(run_command(train.main))
