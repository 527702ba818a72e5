"""Folders of the checkout; importing it lets the scripts import models/ and training/."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"  # of the figures in README and docs
sys.path.append(str(ROOT))  # for models/ and training/, which are not installed
