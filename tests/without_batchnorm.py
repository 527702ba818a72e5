"""train.py with group normalisation in place of batch normalisation, whose statistics are those of
one process: what several train is then what one does."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


class GroupNorm(nn.GroupNorm):
    def __init__(self, channels: int, **_: Any) -> None:
        super().__init__(2, channels)


nn.BatchNorm2d = GroupNorm  # pyright: ignore[reportAttributeAccessIssue]

import train  # noqa: E402  after its networks' layers are others
from training.command import run_command  # noqa: E402

if __name__ == "__main__":
    sys.exit(run_command(train.main))
