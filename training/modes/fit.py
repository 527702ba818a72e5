"""``mode=train``: fits a model, tests it, and keeps the checkpoint that was tested."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.strategies import FSDPStrategy

from hoconv.lightning import Throughput
from training import console, disk
from training.callbacks.cost import Cost
from training.callbacks.outcome.ending import why_ended
from training.callbacks.outcome.feasible import explained, require_trained
from training.capture.steps import CapturedSteps
from training.checkpoints import find_newest
from training.configuration.instantiation import instantiate_as
from training.folder import RESUMING
from training.model import build, show_implementations
from training.modes.predict import missing_for_test
from training.results.loggers import make_loggers
from training.results.record import Results
from training.results.saved import Saved, describe
from training.start.longer import GoesOn
from training.start.weights import InitialWeights
from training.trainer import make_trainer, notes_of


def fit_and_test(
    config: DictConfig, run_dir: Path, results: Results, start: Saved | None
) -> Path | None:
    """Fits, tests and fills in `results`; returns the path of the checkpoint that was tested.

    None where that could not be written: the weights of the last step are tested then.

    Args:
        start: from whose weights the fit starts, or with ``resume=true`` goes on.
    """
    pl.seed_everything(config.seed, workers=True, verbose=False)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = config.tf32

    data = instantiate_as(  # reads nothing yet
        pl.LightningDataModule,
        "data",
        config.data,
        "the _target_ of a pytorch_lightning.LightningDataModule",
    )
    model = build(config.model, config)
    resumed, logged = find_newest(run_dir) if config.resume in RESUMING else (None, [])
    throughput, capture = Throughput(), CapturedSteps(**config.capture)
    cost = Cost(config.approx.energies)
    callbacks: list[pl.Callback] = [throughput, capture, cost]
    if start is not None and resumed is None:
        if config.resume is True:
            resumed = start.path
            callbacks.append(GoesOn(start.path, run_dir))
        else:
            described = OmegaConf.to_container(config.model, resolve=True)
            callbacks.append(InitialWeights(start, described, config.approx))
    # Each checkpoint has it; to resolve the configuration takes longer than to write a small one.
    description = functools.cache(functools.partial(describe, config, results.identity, data))
    trainer = make_trainer(config, run_dir, callbacks, description)

    results.environment["implementations"] = show_implementations(model, trainer, data)

    # Last: a run that cannot begin leaves nothing at W&B.
    trainer.loggers = loggers = make_loggers(config.logger, logged)
    try:
        about: dict[str, Any] = {
            **OmegaConf.to_container(config, resolve=True),  # pyright: ignore
            "implementations": results.environment["implementations"],
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
        }
        for logger in loggers:
            logger.log_hyperparams(about)
        with explained(trainer):
            trainer.fit(model, datamodule=data, ckpt_path=resumed)
        require_trained(trainer)
        if ended := why_ended(trainer):
            results.notes.append(f"the fit {ended}")
            console.stdout().print(f"The fit {ended}", soft_wrap=True, highlight=False)
        results.metrics |= {name: float(value) for name, value in trainer.callback_metrics.items()}
        best = Path(trainer.checkpoint_callback.best_model_path)  # pyright: ignore
        checkpoint = trainer.strategy.broadcast(best if disk.is_current(best) else None)
        # Loggers count epochs from 0: those of the test have the last one, not the one after it.
        epochs = trainer.fit_loop.epoch_progress.current
        epochs.completed = max(0, epochs.completed - 1)
        _test(trainer, model, data, checkpoint, config)
    finally:
        results.metrics |= {name: float(value) for name, value in trainer.callback_metrics.items()}
        results.notes += notes_of(trainer)
        results.throughput |= throughput.summary()
        if results.throughput["step_ms"] is not None:
            results.throughput["warmup_seconds"] = throughput.warmup_seconds
        results.capture = capture.summary()
        results.cost = cost.summary()
    return checkpoint


def _test(
    trainer: pl.Trainer,
    model: pl.LightningModule,
    data: pl.LightningDataModule,
    checkpoint: Path | None,
    config: DictConfig,
) -> None:
    """Tests the weights of `checkpoint`, or those of the last step where there is none."""
    if missing := missing_for_test(trainer, model, data):
        console.warn(f"not tested: {missing}")
    elif not isinstance(trainer.strategy, FSDPStrategy):
        if checkpoint is None:
            console.warn(f"the weights of the last step are tested: {_why_none(trainer)}")
        trainer.test(model, datamodule=data, ckpt_path=checkpoint, verbose=False)
    elif checkpoint:
        # A fit leaves each process a part of the model, which FSDP cannot wrap again.
        whole = build(config.model, config)
        contents = torch.load(checkpoint, map_location="cpu", weights_only=True)
        whole.load_state_dict(contents["state_dict"])
        trainer.test(whole, datamodule=data, verbose=False)
    else:
        console.warn(
            f"not tested: {_why_none(trainer)}, and FSDP left each process only a part of the model"
        )
    if trainer.num_test_batches and not sum(trainer.num_test_batches):
        console.warn("not tested: the test loader has no batches")


def _why_none(trainer: pl.Trainer) -> str:
    """Returns why there is no checkpoint."""
    if trainer.fast_dev_run:  # pyright: ignore[reportAttributeAccessIssue]
        return "trainer.fast_dev_run keeps no checkpoint"
    if not trainer.checkpoint_callback.best_model_path:  # pyright: ignore
        return "checkpoint.save_top_k=0 keeps no checkpoint"
    return "no checkpoint could be written"
