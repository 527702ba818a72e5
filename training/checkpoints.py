"""Writing checkpoints, and resuming a killed run from them, bit for bit."""

from __future__ import annotations

import contextlib
import io
import random
import signal
import threading
import warnings
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from pickle import PicklingError, UnpicklingError
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from lightning_fabric.plugins import TorchCheckpointIO
from lightning_fabric.plugins.environments.slurm import SLURMEnvironment
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.utilities.exceptions import SIGTERMException
from torch import Tensor

from training import console, disk, lightning_loop
from training.configuration.errors import MisconfigurationException
from training.configuration.instantiation import instantiate
from training.folder import STEP_CHECKPOINTS, find_step_checkpoints
from training.processes import Exchange

# Of a model and of its data, where they save their arguments.
HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
# A resumed run finds its own checkpoints there.
warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
# WholeFiles says what becomes of it.
warnings.filterwarnings("ignore", message="Attribute .* is an instance of `nn.Module`")
# Said at the start of a run, with what to do.
warnings.filterwarnings("ignore", message=".*your dataloader is not resumable.*")


class WholeFiles(TorchCheckpointIO):
    """Writes checkpoints whole or not at all, and loads data only, no pickled code.

    A checkpoint that another one replaces is deleted once that one is on the disk. Where the disk
    is full, all step checkpoints but the newest are deleted to make room.

    Args:
        run_dir: the folder of the run.
        describe: returns what a file holds beside Lightning's state; a model's own entries stay.
    """

    def __init__(self, run_dir: Path, describe: Callable[[], dict[str, Any]]) -> None:
        self._run_dir = run_dir
        self._describe = describe
        self._written = True  # whether the last checkpoint is on the disk
        self._replaced: list[Path] = []
        self._readable: dict[str, bool] = {}  # by name, of arguments that a model saves

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        path = Path(path)

        def write() -> None:
            try:
                save()
            except disk.DiskError:
                older = find_step_checkpoints(self._run_dir)[:-1]
                if not older:
                    raise
                for _, old in older:
                    _delete(old)
                save()

        def save() -> None:
            with disk.replaced(path) as file:
                torch.save(self._complete(checkpoint), file)

        self._written = disk.attempt(path, write)

    def _complete(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Adds the description; of the arguments that a model or its data saved, what is plain data
        takes the place of ours."""
        whole = self._describe() | checkpoint
        for key in HYPER_PARAMETERS:
            if key in checkpoint:
                readable = {k: v for k, v in checkpoint[key].items() if self._is_readable(k, v)}
                whole[key] = self._describe().get(key, {}) | readable
        return whole

    def _is_readable(self, name: str, value: Any) -> bool:
        """Returns whether a checkpoint of plain data can hold a value; warns the first time that
        not."""
        if name not in self._readable:
            file = io.BytesIO()
            try:
                torch.save(value, file)
                torch.load(io.BytesIO(file.getvalue()), weights_only=True)
                self._readable[name] = True
            except (AttributeError, PicklingError, RuntimeError, TypeError, UnpicklingError):
                self._readable[name] = False
                console.warn(
                    f"save_hyperparameters() saves {name}, a {type(value).__name__}: checkpoints "
                    f"are plain data and leave it out; use save_hyperparameters(ignore=[{name!r}])"
                )
        return self._readable[name]

    def remove_checkpoint(self, path: Any) -> None:
        disk.forget(Path(path))
        self._replaced.append(Path(path))
        if self._written:
            for old in self._replaced:
                _delete(old)
            self._replaced = []

    def load_checkpoint(
        self, path: Any, map_location: Any = "cpu", weights_only: bool | None = True
    ) -> dict[str, Any]:
        return torch.load(path, map_location=map_location, weights_only=True)


class EpochCheckpoints(ModelCheckpoint):
    """Keeps the weights to be tested: a value that is NaN or infinite is never the best of what is
    monitored, and where none was kept when the fit ends, those of the last step are.

    Attributes:
        notes: a line where those of the last step were kept, and why.
    """

    notes: Sequence[str] = ()

    def check_monitor_top_k(self, trainer: pl.Trainer, current: Tensor | None = None) -> bool:
        # Asked of all processes: one that left here would let the others wait.
        finite = current is not None and bool(torch.isfinite(current))
        if not trainer.strategy.reduce_boolean_decision(finite):
            return False
        return super().check_monitor_top_k(trainer, current)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        dry = trainer.fast_dev_run  # pyright: ignore[reportAttributeAccessIssue]
        wanted = self.save_top_k and trainer.global_step and not dry
        if self.best_model_path or not wanted:
            return
        progress: Any = trainer.fit_loop.epoch_progress.current
        self.best_model_path = self.format_checkpoint_name(
            {"epoch": torch.tensor(max(0, progress.processed - 1))}
        )
        trainer.save_checkpoint(self.best_model_path, self.save_weights_only)
        why = "checkpoint: none was due before the fit ended"
        if self.monitor in trainer.callback_metrics:
            why = f"checkpoint.monitor: {self.monitor!r} was never a finite number"
        elif self.monitor:
            logged = ", ".join(trainer.callback_metrics) or "nothing"
            why = f"checkpoint.monitor: {self.monitor!r} was not logged, but {logged}"
        self.notes = [f"{why}; the weights of the last step are kept and tested"]
        console.warn(self.notes[0])


def make_epoch_checkpoints(run_dir: Path, arguments: DictConfig) -> EpochCheckpoints:
    """Makes the callback that keeps the weights to be tested; `arguments` are ModelCheckpoint's.

    Raises:
        MisconfigurationException: it has no such argument, or does not take the value.
    """
    ours = {
        "dirpath": run_dir / "checkpoints",
        "filename": "epoch_{epoch}",
        "auto_insert_metric_name": False,  # Hydra would read "="
        "enable_version_counter": False,  # a resumed run overwrites the file of the same epoch
    }
    for name in ours:
        if name in arguments:
            raise MisconfigurationException(f"checkpoint.{name}: runs set it; leave it out")
    target = f"{__name__}.{EpochCheckpoints.__name__}"
    described = OmegaConf.create({"checkpoint": {"_target_": target, **arguments}})
    return instantiate(described.checkpoint, **ours)


class StepCheckpoints(pl.Callback):
    """Writes a checkpoint every `every_n_steps` steps, and one on SIGTERM or Ctrl-C before the run
    stops. A second Ctrl-C stops it at once.

    Checkpoints are written when the next batch has been fetched: by then the step, its validation
    and its logging are over. Beside Lightning's state they hold the state of the training loader,
    where it has one, of the random number generators of every process, and of the loggers.

    Args:
        run_dir: the folder of the run; the files are ``resume/step_<number>.ckpt`` in it.
        every_n_steps: optimizer steps from one checkpoint to the next.
        keep: how many of the newest checkpoints are kept.

    Raises:
        SIGTERMException: after a checkpoint, where the process received SIGTERM.
        KeyboardInterrupt: after a checkpoint, where it was interrupted.
    """

    def __init__(self, run_dir: Path, every_n_steps: int, keep: int) -> None:
        self.folder = run_dir / STEP_CHECKPOINTS
        self.every_n_steps = every_n_steps
        self.keep = keep
        self._restored: dict[str, Any] | None = None
        self._asked_to_stop = False
        self._interrupted = False
        self._step = 0
        self._on_interrupt: Any = None  # what Ctrl-C called before the fit

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._restored = checkpoint["resume"]

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        loader: Any = trainer.train_dataloader
        checkpoint["resume"] = {
            "loader": loader.state_dict() if _resumes_exactly(loader) else None,
            "logged_step": lightning_loop.count_logged_steps(trainer),
            "loggers": [getattr(logger, "continuation", {}) for logger in trainer.loggers]
            if trainer.is_global_zero
            else [],
            "random": _of_all_processes(_random_state(trainer.strategy.root_device)),
        }

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._step = trainer.global_step
        every, device = trainer.log_every_n_steps, trainer.strategy.root_device  # pyright: ignore
        self._exchange = Exchange("max", max(1, every), device, self._step)
        loader: Any = trainer.train_dataloader
        if not _resumes_exactly(loader):
            console.warn(
                f"data: the training loader, a {type(loader).__name__}, has no state_dict and "
                "load_state_dict: resume=auto restores all but the place in the epoch, and draws "
                "other batches for the rest of it (docs/use/your_own.md)"
            )
        if self._restored is not None and self._restored["loader"] is not None:
            # Lightning does it too, but not if the model asks for the number of steps in its setup.
            loader.load_state_dict(self._restored["loader"])
        if threading.current_thread() is threading.main_thread():
            # Lightning's own handler, which stops where a checkpoint would not be exact, comes
            # back when the fit ends.
            signal.signal(signal.SIGTERM, self._stop)
            self._on_interrupt = signal.signal(signal.SIGINT, self._interrupt)
        lightning_loop.ask_less_often_for_sigterm(trainer)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._restored is not None:
            lightning_loop.set_logged_steps(trainer, self._restored["logged_step"])
            _set_random_state(
                self._restored["random"][trainer.global_rank], trainer.strategy.root_device
            )
            self._restored = None
        if trainer.global_step == self._step:
            return  # gradients that are being accumulated are in no checkpoint
        self._step = trainer.global_step
        stop = self._must_stop(trainer)
        if stop or self._step % self.every_n_steps == 0:
            self._save(trainer)
        if stop and self._interrupted:
            raise KeyboardInterrupt
        if stop:
            raise SIGTERMException(f"SIGTERM after step {self._step}")

    def on_train_end(self, *_: Any) -> None:
        self._leave_interrupts()

    def on_exception(self, *_: Any) -> None:
        self._leave_interrupts()

    def _stop(self, *_: Any) -> None:
        self._asked_to_stop = True

    def _interrupt(self, *_: Any) -> None:
        if self._interrupted:
            raise KeyboardInterrupt
        self._interrupted = self._asked_to_stop = True
        console.warn("the run stops after this step; Ctrl-C again stops it at once")

    def _leave_interrupts(self) -> None:
        """Lets others handle Ctrl-C again, unless they do already."""
        if self._on_interrupt is not None and signal.getsignal(signal.SIGINT) == self._interrupt:
            signal.signal(signal.SIGINT, self._on_interrupt)
        self._on_interrupt = None

    def _must_stop(self, trainer: pl.Trainer) -> bool:
        """Returns whether any process received SIGTERM.

        Several processes ask each other now and then, since it takes time.
        """
        if trainer.world_size == 1:
            return self._asked_to_stop
        if not self._exchange.due(self._step):
            return False
        asked = torch.full((1,), float(self._asked_to_stop), device=trainer.strategy.root_device)
        self._exchange.send(self._step, asked)
        answers = self._exchange.read(left=self._exchange.newest)
        return any(answer > 0 for (answer,), _ in answers)

    def _save(self, trainer: pl.Trainer) -> None:
        path = self.folder / f"step_{self._step}.ckpt"
        for logger in trainer.loggers:
            logger.save()  # a run that is killed later goes on with a record up to here
        trainer.save_checkpoint(path)
        if trainer.is_global_zero:
            if path.exists():
                disk.forget(self.folder)  # earlier ones that could not be written are not missed
            for _, old in find_step_checkpoints(self.folder.parent)[: -self.keep]:
                _delete(old)


def _resumes_exactly(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def find_newest(run_dir: Path) -> tuple[Path | None, list[dict[str, Any]]]:
    """Finds the newest checkpoint that can be read; returns it and the resumed loggers' arguments.

    Warns of each checkpoint that cannot be read. Without any it returns None and no arguments.
    """
    for step, path in reversed(find_step_checkpoints(run_dir)):
        try:
            with zipfile.ZipFile(path) as file:
                if bad := file.testzip():  # torch.load does not look at checksums
                    raise zipfile.BadZipFile(f"wrong checksum of {bad}")
            contents = torch.load(path, map_location="cpu", weights_only=True)
        except (EOFError, OSError, RuntimeError, UnpicklingError, zipfile.BadZipFile) as error:
            reason = " ".join(str(error).split())
            console.warn(f"{path} is damaged ({reason}); the checkpoint before it is used")
            continue
        console.stdout().print(f"Going on after step {step} of {run_dir}", soft_wrap=True)
        resume = contents["resume"]
        return path, resume["loggers"] if "loggers" in resume else [resume["logger"]]
    return None, []


def _delete(path: Path) -> None:
    with contextlib.suppress(OSError):  # a file that stays does no harm
        path.unlink(missing_ok=True)


def make_plugins(run_dir: Path, describe: Callable[[], dict[str, Any]]) -> list[Any]:
    """Returns the trainer's plugins; `describe` is that of :class:`WholeFiles`.

    They write checkpoints whole, and keep Lightning from requeueing a SLURM job: SLURM does it,
    with --requeue.
    """
    slurm = [SLURMEnvironment(auto_requeue=False)] if SLURMEnvironment.detect() else []
    return [WholeFiles(run_dir, describe), *slurm]


def _random_state(device: torch.device) -> dict[str, Any]:
    name, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": (name, np.asarray(keys).tolist(), *rest),
        "python": random.getstate(),
    }


def _set_random_state(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
    np.random.set_state(state["numpy"])  # noqa: NPY002
    random.setstate(state["python"])


def _of_all_processes(value: Any) -> list[Any]:
    if not torch.distributed.is_initialized():
        return [value]
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values
