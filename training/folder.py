"""Choosing the folder of a run, a new one or that of a run to resume, and its config.yaml."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from lightning_fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.utilities import rank_zero_only
from yaml import YAMLError

from training import console, disk
from training.checkpoints import discard, find_step_checkpoints
from training.configuration.moved import renamed, upgrade
from training.lock import is_running

CONFIG, RESULTS = "config.yaml", "results.json"  # in the folder of a run
PROBE_BYTES = 2**15  # a run writes less than that beside checkpoints and pictures


def run_folder(resume: str | None, parent: str, name: str, *, _root_: Any) -> str:
    """Chooses ``hydra.run.dir``. With ``resume=auto`` it is the newest folder in `parent` whose run
    had the same overrides, did not finish, and has a checkpoint or is still going on; otherwise
    ``parent/name``."""
    if resume == "auto":
        wanted = _identity(as_given(_root_.hydra.overrides.task))
        for folder in sorted(Path(parent).glob("*"), reverse=True):
            if find_step_checkpoints(folder) or is_running(folder):
                record = _record(folder)
                if not record:
                    console.warn(
                        f"resume=auto: {folder / RESULTS} cannot be read, so nobody knows which "
                        f"command began it; hydra.run.dir={folder} goes on with it"
                    )
                elif _identity(record["overrides"]) == wanted and record["status"] != "finished":
                    return str(folder)
    if rank := int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0):
        # Processes that torchrun or SLURM started read the clock at different times, and only the
        # first of them has something to write.
        return str(Path(tempfile.gettempdir()) / f"hoconv_rank{rank}_{os.getpid()}")
    return str(Path(parent) / name)


class WritableFolder(Callback):
    """A Hydra callback: exits with 1 and one line where the folder of a run or a sweep cannot be
    written, before Hydra writes there."""

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
    """Writes config.yaml. Of an earlier run in this folder it deletes partial files, and the step
    checkpoints unless this run resumes from them.

    Raises:
        MisconfigurationException: `resume` is neither null nor auto; or the run to be resumed was
            begun with another configuration, or with one that cannot be read.
    """
    if config.resume not in (None, "auto"):
        raise MisconfigurationException(f"resume: expected null or auto, got {config.resume!r}")
    path = run_dir / CONFIG
    now = OmegaConf.create(OmegaConf.to_container(config, resolve=True))
    if config.resume == "auto" and find_step_checkpoints(run_dir):
        _require_same(path, now)
    elif config.mode == "train":
        discard(run_dir)
    _write(now, path)


@rank_zero_only
def _write(config: Any, path: Path) -> None:
    def write() -> None:
        with disk.replaced(path) as file:
            file.write(OmegaConf.to_yaml(config).encode())

    for partial in path.parent.rglob(f"*{disk.PARTIAL}"):
        partial.unlink(missing_ok=True)
    disk.attempt(path, write, again=True)


def saved_config(run_dir: Path) -> Any:
    """The configuration that a run was begun with, in the names of today.

    Raises:
        MisconfigurationException: it cannot be read.
    """
    path = run_dir / CONFIG
    try:
        return upgrade(OmegaConf.load(path))
    except (OSError, YAMLError, AttributeError, KeyError, TypeError) as error:
        raise MisconfigurationException(
            f"the configuration of the run in {run_dir} cannot be read from {path} "
            f"({' '.join(str(error).split())}); put the file back"
        ) from error


def _require_same(path: Path, now: Any) -> None:
    try:
        before = saved_config(path.parent)
    except MisconfigurationException as error:
        raise MisconfigurationException(
            f"resume=auto: {error}, or leave resume=auto out"
        ) from error
    before.resume = now.resume
    if before != now:
        raise MisconfigurationException(
            f"resume=auto: the run in {path.parent} was begun with another configuration, which is "
            f"in {path}; go on with that one, or leave resume=auto out"
        )


def is_finished(folder: Path) -> bool:
    return _record(folder).get("status") == "finished"


def _record(folder: Path) -> dict[str, Any]:
    """The contents of results.json; empty where it cannot be read or is not what a run wrote."""
    try:
        record = json.loads((folder / RESULTS).read_text())
    except (OSError, ValueError):
        return {}
    whole = isinstance(record, dict) and isinstance(record.get("status"), str)
    overrides = record.get("overrides") if whole else None
    texts = isinstance(overrides, list) and all(isinstance(each, str) for each in overrides)
    return record if texts else {}


def as_given(overrides: Any) -> list[str]:
    """Returns Hydra's list of overrides, with interpolations such as ``seed=${x}`` unresolved."""
    return [str(text) for text in OmegaConf.to_container(overrides, resolve=False)]  # pyright: ignore


def _identity(overrides: Iterable[str]) -> set[str]:
    return {renamed(text) for text in overrides if not text.startswith("resume=")}
