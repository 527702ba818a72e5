"""The resolvers ``${name:...}`` of conf/, beside Hydra's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.utils import get_class
from omegaconf import OmegaConf

from training.folder import run_folder
from training.implementations import label

ROOT = Path(__file__).resolve().parents[2]


def register() -> None:
    """``${project:x}`` is a path in the project; ``${attribute:module.Class,x}`` is what a class
    declares; ``${run_folder:...}`` is :func:`training.folder.run_folder`; ``${label:${impl}}`` is
    :func:`training.implementations.label`."""
    OmegaConf.register_new_resolver("project", lambda path: str(ROOT / path), replace=True)
    OmegaConf.register_new_resolver("attribute", _attribute, replace=True)
    OmegaConf.register_new_resolver("run_folder", run_folder, replace=True)
    OmegaConf.register_new_resolver("label", label, replace=True)


def _attribute(path: str, name: str) -> Any:
    declared = get_class(path)
    if not hasattr(declared, name):
        raise AttributeError(f"{declared.__name__} has none; choose another model= or data=")
    return OmegaConf.create([getattr(declared, name)])[0]
