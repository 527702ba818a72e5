"""Training a checkpoint further, in the folder of a new run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities import rank_zero_only
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from training import console, disk
from training.configuration.errors import MisconfigurationException

NEEDED = ("callbacks", "loops", "lr_schedulers", "optimizer_states", "resume")
# Of the state of a schedule: how long it is, which the new length of the run says.
LENGTH = ("total_steps", "_schedule_phases")
# Schedules whose rate follows from the number of the step alone.
CLOSED = (LambdaLR, OneCycleLR)


class GoesOn(pl.Callback):
    """Lets a fit go on from a checkpoint of another run, where that had fewer epochs or steps.

    What that run has left so far, its losses and the checkpoint that it kept, is copied: the new
    folder is that of the whole training. A schedule that has a length gets the new one, from its
    next step on, as if it had had it from the beginning.

    Args:
        path: of the checkpoint.
        run_dir: the folder of the new run.

    Raises:
        MisconfigurationException: when the fit starts: the checkpoint holds no state of training,
            or there is nothing left to do.
    """

    def __init__(self, path: Path, run_dir: Path) -> None:
        self._path = path
        self._run_dir = run_dir

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn != TrainerFn.FITTING:  # what was kept is tested
            self._move_states(trainer, checkpoint)
            return
        if missing := [name for name in NEEDED if name not in checkpoint]:
            raise MisconfigurationException(
                f"ckpt: {self._path} holds no {', '.join(missing)}, with which training would go "
                "on; leave resume=true out to start from its weights"
            )
        self._require_more(trainer, checkpoint)
        _place_loader(checkpoint)
        for state in checkpoint["lr_schedulers"]:
            for name in LENGTH:
                state.pop(name, None)
        for source, path in self._move_states(trainer, checkpoint):
            self._copy(source, path)
        self._copy(self._path.parents[1] / "losses.csv", self._run_dir / "losses.csv")
        step, epoch = checkpoint["global_step"], checkpoint["epoch"]
        console.stdout().print(
            f"Going on after step {step}, of epoch {epoch}, of {self._path}",
            soft_wrap=True, highlight=False, markup=False,
        )  # fmt: skip

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for config in trainer.lr_scheduler_configs:
            scheduler: Any = config.scheduler
            if isinstance(scheduler, CLOSED):  # its rate is still that of the other length
                scheduler.last_epoch -= 1
                scheduler._step_count -= 1
                scheduler.step()

    def _require_more(self, trainer: pl.Trainer, checkpoint: dict[str, Any]) -> None:
        done = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]
        for name, so_far, most in (
            ("max_epochs", done, trainer.max_epochs),
            ("max_steps", checkpoint["global_step"], trainer.max_steps),
        ):
            if most is not None and 0 <= most <= so_far:
                raise MisconfigurationException(
                    f"trainer.{name}: {self._path} has trained for {so_far}; expected more, got "
                    f"{most}"
                )

    def _move_states(
        self, trainer: pl.Trainer, checkpoint: dict[str, Any]
    ) -> list[tuple[Path, Path]]:
        """Has callbacks keep their best checkpoint so far in their own folders; returns where it is
        and is to be."""
        return [
            self._move_state(callback, checkpoint["callbacks"][callback.state_key])
            for callback in trainer.checkpoint_callbacks
            if isinstance(callback, ModelCheckpoint)
            and callback.state_key in checkpoint["callbacks"]
        ]

    def _move_state(self, callback: ModelCheckpoint, state: dict[str, Any]) -> tuple[Path, Path]:
        folder = Path(callback.dirpath or self._run_dir)
        best = Path(state["best_model_path"])
        source = self._path if best.name == self._path.name else best
        if not source.is_file():  # the other run is gone, and this checkpoint was not its best
            source = self._path
        moved = str(folder / source.name)
        score = state["current_score" if source == self._path else "best_model_score"]
        state |= {
            "dirpath": str(folder),
            "best_model_path": moved,
            "last_model_path": "",
            "best_k_models": {} if score is None else {moved: score},
            "kth_best_model_path": "" if score is None else moved,
        }
        return source, Path(moved)

    @rank_zero_only
    def _copy(self, source: Path, path: Path) -> None:
        def write() -> None:
            with source.open("rb") as old, disk.replaced(path) as new:
                shutil.copyfileobj(old, new)

        if source.is_file() and source != path:
            disk.attempt(path, write)


def _place_loader(checkpoint: dict[str, Any]) -> None:
    """Corrects the place of the training loader, which says how many batches were left behind.

    A checkpoint of an epoch is written after its last batch, and one of a validation after some
    batch; those of ``resume=auto`` are written before one.
    """
    loop = checkpoint["loops"]["fit_loop"]
    epoch, batch = (
        loop[name]["current"] for name in ("epoch_progress", "epoch_loop.batch_progress")
    )
    loader = checkpoint["resume"]["loader"]
    if epoch["processed"] == epoch["started"]:  # the next one begins
        checkpoint["resume"]["loader"] = None
    elif loader is not None and loader.keys() == {"epoch", "batches"}:  # of this project
        loader["batches"] = batch["processed"]
