"""The resolvers ``${name:...}`` of conf/, beside Hydra's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from training.configuration.direction import direction, mode
from training.configuration.instantiation import instantiate
from training.folder import run_folder

MAX_LABEL, MAX_TITLE = 64, 128  # characters that W&B takes of a tag and of a name
# Groups and values that say what a run computes, and not where or how it is recorded.
NAMED = (
    "capture", "channels_last", "compile", "data", "model", "optimizer", "scheduler", "callbacks",
    "tf32", "trainer",
)  # fmt: skip
ROOT = Path(__file__).resolve().parents[2]


def register() -> None:
    """``${project:x}`` is a path in the project; ``${attribute:${data},x}`` is what the class of
    ``data`` declares, or what an object of it says where that is a property;
    ``${attribute:module.Class,x}`` is what a class declares; ``${run_folder:...}`` is
    :func:`training.folder.run_folder`; ``${direction:...}`` and ``${mode:...}`` are those of
    :mod:`training.configuration.direction`; ``${run_name:...}``, ``${label:${impl}}``,
    ``${title:...}`` and ``${runs:...}`` are :func:`run_name`, :func:`label`, :func:`title` and
    :func:`runs`."""
    OmegaConf.register_new_resolver("project", lambda path: str(ROOT / path), replace=True)
    OmegaConf.register_new_resolver("attribute", _attribute, replace=True)
    OmegaConf.register_new_resolver("run_folder", run_folder, replace=True)
    OmegaConf.register_new_resolver("run_name", run_name, replace=True)
    OmegaConf.register_new_resolver("label", label, replace=True)
    OmegaConf.register_new_resolver("direction", direction, replace=True)
    OmegaConf.register_new_resolver("mode", mode, replace=True)
    OmegaConf.register_new_resolver("title", title, replace=True)
    OmegaConf.register_new_resolver("runs", runs, replace=True)


def run_name(mode: str, trained: str) -> str:
    """The name of a run: what is `trained`, or the mode of one that has a checkpoint do it."""
    return mode if mode in ("test", "predict", "export") else trained


def label(impl: str | DictConfig) -> str:
    """`impl` in the name of a folder or of a run: ``cuda``, or ``recurrent-cpp_approx_conv2d-cuda``
    for a mapping; what is longer than `MAX_LABEL` is cut off."""
    from hoconv.dispatch.implementations import (
        impl_label,  # brings PyTorch, which composing does without
    )

    return impl_label(impl)[:MAX_LABEL]


def title(impl: str, seed: int) -> str:
    """The name of a run at a logger: its implementation, what was set of it, its seed."""
    given = (text.lstrip("+").partition("=") for text in HydraConfig.get().overrides.task)
    said = [
        f"{name.rpartition('.')[2]}={value}"
        for name, _, value in given
        if name.partition(".")[0] in NAMED and name != "trainer" and not name.endswith("_dir")
    ]
    return " ".join([impl, *said, f"seed {seed}"])[:MAX_TITLE]


def runs(name: str) -> str:
    """The group of a run at a logger: the runs of a sweep are one, others those of their name."""
    chosen = HydraConfig.get()
    sweep = chosen.mode == RunMode.MULTIRUN
    return f"{name} {Path(chosen.sweep.dir).name}" if sweep else name


def _attribute(described: str | DictConfig, name: str) -> Any:
    declared: Any = get_class(described if isinstance(described, str) else described._target_)
    if not hasattr(declared, name):
        raise AttributeError(f"{declared.__name__} has none; choose another model= or data=")
    value = getattr(declared, name)
    if isinstance(value, property):  # data of the user's, which its files describe
        if isinstance(described, str):
            raise AttributeError(f"it depends on the data; use ${{attribute:${{data}},{name}}}")
        value = getattr(instantiate(described), name)
    return OmegaConf.create([value])[0]
