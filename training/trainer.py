"""The Lightning Trainer of a run, and its callbacks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.strategies import DDPStrategy

from training import console
from training.callbacks.census import Census
from training.callbacks.compilation import CompileFirst
from training.callbacks.finite import FiniteLayers
from training.callbacks.losses import LossRecord
from training.callbacks.outcome.evaluated import EvaluatedLosses
from training.callbacks.outcome.feasible import Feasible
from training.callbacks.progress import make_progress
from training.callbacks.statistics import FirstStatistics
from training.checkpoints import StepCheckpoints, make_epoch_checkpoints, make_plugins
from training.configuration.direction import missing_mode
from training.configuration.errors import MisconfigurationException
from training.configuration.instantiation import entries, instantiate_as
from training.configuration.kinds import check_kinds

# Lightning counts cores; our images are in memory, where more workers are slower.
warnings.filterwarnings("ignore", message=".*does not have many workers.*")
# Lightning makes DistributedDataParallel on a stream of its own, as captures of steps need it.
warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream does not match.*")
# Lightning calls a function that torch 2.15 is replacing.
warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")


def make_trainer(
    config: DictConfig,
    run_dir: Path,
    callbacks: list[pl.Callback],
    describe: Callable[[], dict[str, Any]],
) -> pl.Trainer:
    """Makes the Trainer that `config` describes in ``trainer``, ``callbacks``, ``checkpoint``,
    ``step_checkpoints`` and ``find_nan``; without loggers.

    Args:
        callbacks: that come before all others.
        describe: of :class:`~training.checkpoints.WholeFiles`.

    Raises:
        MisconfigurationException: the hardware is missing, a sweep would start itself again, or the
            trainer cannot clip gradients, synchronise batch normalisation or look into layers.
    """
    if config.find_nan and config.compile:
        raise MisconfigurationException(
            "find_nan looks into every layer, and compile=true makes one program of them; use "
            "compile=false"
        )
    clip = config.trainer.gradient_clip_val
    by_value = config.trainer.get("gradient_clip_algorithm") == "value"
    if str(config.trainer.strategy).startswith("fsdp") and clip is not None and not by_value:
        raise MisconfigurationException(
            f"trainer.gradient_clip_val: Lightning cannot clip by norm with FSDP, got {clip}; add "
            "trainer.gradient_clip_val=null or +trainer.gradient_clip_algorithm=value, or use "
            "trainer=ddp"
        )
    options: Any = OmegaConf.to_container(config.trainer, resolve=True)
    if options["strategy"] == "ddp":  # gradients are reduced where they are made, not copied
        options["strategy"] = DDPStrategy(gradient_as_bucket_view=True)
    configured = make_callbacks(config.callbacks)
    trainer = new_trainer(
        options,
        logger=False,
        callbacks=[
            *callbacks,
            LossRecord(run_dir / "losses.csv"),
            make_progress(),
            FirstStatistics(),
            Census(),
            Feasible(configured),
            EvaluatedLosses(),
            make_epoch_checkpoints(run_dir, config.checkpoint),
            StepCheckpoints(run_dir, **config.step_checkpoints),
            *([CompileFirst()] if config.compile else []),
            *([FiniteLayers()] if config.find_nan else []),
            *configured.values(),
        ],
        plugins=make_plugins(run_dir, describe),
        default_root_dir=run_dir,
        enable_progress_bar=console.stdout().is_terminal,
    )
    if config.trainer.get("sync_batchnorm") and trainer.strategy.root_device.type == "cpu":
        raise MisconfigurationException(
            "trainer.sync_batchnorm: PyTorch has it for GPUs only, got true on a CPU; use "
            "trainer.sync_batchnorm=false"
        )
    if trainer.world_size > 1 and HydraConfig.get().mode == RunMode.MULTIRUN:
        raise MisconfigurationException(
            "a sweep (-m) cannot use several devices a job: Lightning would start the sweep again "
            "in every process; use trainer.devices=1, or one command for each job"
        )
    return trainer


def new_trainer(options: Mapping[str, Any], **arguments: Any) -> pl.Trainer:
    """Makes a Trainer with the options of the configuration.

    Raises:
        MisconfigurationException: it does not take one of them.
    """
    check_kinds("trainer", pl.Trainer, options)
    try:
        return pl.Trainer(**options, **arguments)
    except (ModuleNotFoundError, TypeError, ValueError) as error:  # the first of an accelerator
        reason = " ".join(str(error).split()).removeprefix("Trainer.__init__() ")
        raise MisconfigurationException(f"trainer: {reason}") from error


def make_callbacks(described: Any) -> dict[str, pl.Callback]:
    """Makes the callbacks of a configuration: name -> ``_target_`` and arguments, or null for none.

    Returns them by their keys in the configuration, such as ``callbacks.early_stopping``.

    Raises:
        MisconfigurationException: one is no callback of Lightning's, or has no name.
    """
    kind = "the _target_ of a Lightning callback, or null to switch it off"
    callbacks = {}
    for name, description in entries("callbacks", described).items():
        full = f"callbacks.{name}"
        mode = missing_mode(full, description)
        callbacks[full] = instantiate_as(pl.Callback, full, description, kind, **mode)
    return callbacks


def notes_of(trainer: pl.Trainer) -> list[str]:
    """Returns what the callbacks of a trainer want to be read at the end of the run."""
    callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    return [note for each in callbacks for note in getattr(each, "notes", ())]
