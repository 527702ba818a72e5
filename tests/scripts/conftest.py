"""The scripts as modules."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a script by name, as Python does when it is run: its folder is on the path."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module
