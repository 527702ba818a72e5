"""Runs saved programs in a process of its own, which imports hoconv alone: paths in, files out."""

from __future__ import annotations

import sys

import torch

import hoconv  # noqa: F401

for path in sys.argv[1:]:
    inputs = torch.load(f"{path}.inputs")
    program = torch.export.load(f"{path}.pt2").module()
    torch.save(program(*inputs), f"{path}.outputs")
