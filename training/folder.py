"""Choosing the folder of a run, a new one or that of a run to resume, and its config.yaml."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from lightning_utilities.core.rank_zero import rank_zero_only
from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from training import console, disk
from training.configuration.errors import MisconfigurationException
from training.configuration.names import as_override
from training.configuration.same import LONGER, require_same
from training.lock import is_running

RESUMING = ("auto", True)  # values of resume with which a run may go on
# In the folder of a run.
CONFIG, RESULTS, STEP_CHECKPOINTS = "config.yaml", "results.json", "resume"
PROBE_BYTES = 2**15  # a run writes less than that beside checkpoints and pictures


def run_folder(resume: str | bool | None, parent: str, name: str, *, _root_: Any) -> str:
    """Chooses ``hydra.run.dir``. With ``resume=auto`` or ``true`` it is the newest folder in
    `parent` whose run had the same overrides, did not finish, and has a checkpoint or still runs;
    otherwise ``parent/name``."""
    if resume in RESUMING:
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


def find_step_checkpoints(run_dir: Path) -> list[tuple[int, Path]]:
    """Returns the step and the path of every step checkpoint, the newest last."""
    paths = (run_dir / STEP_CHECKPOINTS).glob("step_*.ckpt")
    return sorted((int(path.stem.removeprefix("step_")), path) for path in paths)


@rank_zero_only
def discard(run_dir: Path) -> None:
    """Deletes the step checkpoints of a run that finished."""
    shutil.rmtree(run_dir / STEP_CHECKPOINTS, ignore_errors=True)
    disk.forget(run_dir / STEP_CHECKPOINTS)


def begin(config: DictConfig, run_dir: Path) -> None:
    """Writes config.yaml. Of an earlier run in this folder it deletes partial files, and the step
    checkpoints unless this run resumes from them.

    Raises:
        MisconfigurationException: `resume` is neither null, auto nor true; or the run to be resumed
            was begun with another configuration, or with one that cannot be read.
    """
    if config.resume not in (None, *RESUMING):
        raise MisconfigurationException(
            f"resume: expected null, auto or true, got {config.resume!r}"
        )
    now = OmegaConf.create(OmegaConf.to_container(config, resolve=True))
    if config.resume in RESUMING and find_step_checkpoints(run_dir):
        _require_same(run_dir, now)
    elif config.mode == "train":
        discard(run_dir)
        if config.resume == "auto" and HydraConfig.get().mode == RunMode.RUN:
            _say_shorter(run_dir)
    _write(now, run_dir / CONFIG)


@rank_zero_only
def _write(config: Any, path: Path) -> None:
    from hoconv.files import PARTIAL  # brings PyTorch, which composing a configuration does without

    def write() -> None:
        with disk.replaced(path) as file:
            file.write(OmegaConf.to_yaml(config).encode())

    for partial in path.parent.rglob(f"*{PARTIAL}"):
        partial.unlink(missing_ok=True)
    disk.attempt(path, write, again=True)


def saved_config(run_dir: Path) -> Any:
    """The configuration that a run was begun with.

    Raises:
        MisconfigurationException: it cannot be read.
    """
    path = run_dir / CONFIG
    try:
        config = OmegaConf.load(path)
        if "model" not in config:
            raise ValueError("it names no model")
        return config
    except (OSError, ValueError, YAMLError) as error:
        raise MisconfigurationException(
            f"the configuration of the run in {run_dir} cannot be read from {path} "
            f"({' '.join(str(error).split())}); put the file back"
        ) from error


def _require_same(run_dir: Path, now: Any) -> None:
    try:
        before = saved_config(run_dir)
    except MisconfigurationException as error:
        raise MisconfigurationException(f"resume: {error}, or leave resume out") from error
    fix = f"{_train_longer(run_dir)} trains it longer; for another run, leave resume out"
    require_same(before, now, f"the run in {run_dir}", fix)


def _say_shorter(run_dir: Path) -> None:
    """Says which run did the same as a new one, but for its length."""
    wanted = _identity(as_given(HydraConfig.get().overrides.task))
    for folder in sorted(run_dir.parent.glob("*"), reverse=True):
        found = _identity(_record(folder).get("overrides", [])) if folder != run_dir else set()
        differing = {text.partition("=")[0] for text in found ^ wanted}
        if found and differing and differing <= {*LONGER}:
            console.warn(
                f"resume=auto: this is a new run, since that in {folder} had another "
                f"{' and '.join(sorted(differing))}; {_train_longer(folder)} trains that one longer"
            )
            return


def _train_longer(run_dir: Path) -> str:
    """Returns the arguments that let a run go on for more epochs."""
    kept = sorted((run_dir / "checkpoints").glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    paths = kept or [path for _, path in find_step_checkpoints(run_dir)]
    ckpt = shlex.quote(as_override("ckpt", str(paths[-1]))) if paths else "ckpt=<its checkpoint>"
    return f"{ckpt} resume=true trainer.max_epochs=..."


def is_finished(config: DictConfig, run_dir: Path) -> bool:
    """Returns whether the run that a command would resume is over.

    Raises:
        MisconfigurationException: it is, and the command is for another one.
    """
    if config.resume not in RESUMING or _record(run_dir).get("status") != "finished":
        return False
    if config.resume == "auto" and config.mode == "train":
        _require_same(run_dir, config)
    elif config.resume is True and saved_config(run_dir).get("ckpt") != config.ckpt:
        raise MisconfigurationException(
            f"hydra.run.dir: the run in {run_dir} is finished; choose another folder"
        )
    return True


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
    """Returns overrides but for the one that says to go on."""
    return {*overrides} - {"resume=auto"}
