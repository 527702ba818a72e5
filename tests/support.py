"""Helpers for tests of several rooms."""

from __future__ import annotations

import shutil
import subprocess
from typing import TypeVar

from torch import nn

from hoconv.dispatch.implementations import set_impl

Network = TypeVar("Network", bound=nn.Module)


def has_sanitizers() -> bool:
    """Returns whether g++ has the sanitizers that scripts/sanitize.py uses."""
    if not shutil.which("g++"):
        return False
    command = ["g++", "-print-file-name=libasan.so"]
    return "/" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def set_to_reference(network: Network) -> Network:
    """Sets the layers of a network to the reference, so that nothing is compiled; returns it."""
    set_impl(network, "reference")
    return network
