"""The folder of a run: a new one, or that of the run which is to go on."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from lightning_fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.utilities import rank_zero_only

from reporting import console
from training.checkpoints import saved

PROBE_BYTES = 2**16  # more than what Hydra writes before the run begins


def run_folder(resume: str | None, parent: str, name: str, *, _root_: Any) -> str:
    """For ``hydra.run.dir``: with ``resume=auto`` the newest folder in `parent` of a run of the
    same overrides that has a checkpoint and did not finish; otherwise ``parent/name``."""
    if resume == "auto":
        wanted = _identity(_root_.hydra.overrides.task)
        for folder in sorted(Path(parent).glob("*"), reverse=True):
            if saved(folder) and not finished(folder) and _overrides(folder) == wanted:
                return str(folder)
    if rank := int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0):
        # Processes that torchrun or SLURM started read the clock at different times, and only the
        # first of them has something to write.
        return str(Path(tempfile.gettempdir()) / f"hoconv_rank{rank}_{os.getpid()}")
    return str(Path(parent) / name)


class WritableFolder(Callback):
    """A hook of Hydra: where the folder of a run or a sweep cannot be written, the process exits
    with 1 and one line, before Hydra writes there."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        HydraConfig.instance().set_config(config)  # the name of the folder refers to it
        _require_writable(config.hydra.run.dir, "hydra.run.dir")

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        _require_writable(config.hydra.sweep.dir, "hydra.sweep.dir")


def _require_writable(folder: str, name: str) -> None:
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(PROBE_BYTES))
    except OSError as error:
        console.show_problem(
            "Error",
            f"{name}: {folder} cannot be written ({error.strerror}); set {name} to a folder that "
            "can be",
        )
        sys.exit(1)


def begin(config: DictConfig, run_dir: Path) -> None:
    """Writes config.yaml.

    Raises:
        MisconfigurationException: the run is to go on, and was begun with another configuration;
            or `resume` is neither null nor auto.
    """
    if config.resume not in (None, "auto"):
        raise MisconfigurationException(f"resume: expected null or auto, got {config.resume!r}")
    path = run_dir / "config.yaml"
    now = OmegaConf.create(OmegaConf.to_container(config, resolve=True))
    if config.resume == "auto" and saved(run_dir):
        before = OmegaConf.load(path)
        before.resume = now.resume
        if before != now:
            raise MisconfigurationException(
                f"resume=auto: the run in {run_dir} was begun with another configuration, which is "
                f"in {path}; go on with that one, or leave resume=auto out"
            )
    rank_zero_only(OmegaConf.save)(now, path)


def finished(folder: Path) -> bool:
    path = folder / "results.json"
    return path.exists() and json.loads(path.read_text())["status"] == "finished"


def as_given(overrides: Any) -> list[str]:
    """Hydra's list of overrides with the interpolations that are in it, such as ``seed=${x}``."""
    return [str(text) for text in OmegaConf.to_container(overrides, resolve=False)]  # pyright: ignore


def _overrides(folder: Path) -> set[str] | None:
    path = folder / ".hydra" / "overrides.yaml"
    return _identity(OmegaConf.load(path)) if path.exists() else None


def _identity(overrides: Any) -> set[str]:
    return {text for text in as_given(overrides) if not text.startswith("resume=")}
