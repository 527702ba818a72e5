"""What ``${name:...}`` means in conf/, beside Hydra's own."""

from __future__ import annotations

from pathlib import Path

from hydra.utils import get_class
from omegaconf import OmegaConf

from training.folder import run_folder

ROOT = Path(__file__).resolve().parents[1]


def register() -> None:
    """``${project:x}`` is a path in the project; ``${attribute:module.Class,x}`` is what a class
    declares; ``${run_folder:...}`` is :func:`training.folder.run_folder`."""
    OmegaConf.register_new_resolver("project", lambda path: str(ROOT / path), replace=True)
    OmegaConf.register_new_resolver(
        "attribute",
        lambda path, name: OmegaConf.create([getattr(get_class(path), name)])[0],
        replace=True,
    )
    OmegaConf.register_new_resolver("run_folder", run_folder, replace=True)
