"""Trains a model on a data set: ``python train.py``; ``--help`` shows what can be chosen.

Compose the configuration, check the implementations, then data, model, fit, test, results.json.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from pathlib import Path

import hydra
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning_fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.strategies import FSDPStrategy
from pytorch_lightning.utilities.exceptions import SIGTERMException

from datamodules.images import CacheError, DataNotFoundError
from hoconv.implementations import ImplementationError
from hoconv.lightning import Throughput
from models.networks.backbone import WeightsNotFoundError
from training import console, disk, loggers
from training.callbacks.finite import NotFiniteError
from training.checkpoints import continuation, discard
from training.folder import as_given, begin, finished
from training.implementations import as_plain, choose_implementations
from training.instantiation import instantiate
from training.lock import RunningError, held
from training.model import build
from training.predict import predict
from training.resolvers import check, register
from training.results.record import Results
from training.trainer import make_trainer

ROOT = Path(__file__).resolve().parent
USER_ERRORS = (
    CacheError,
    DataNotFoundError,
    disk.DiskError,
    ImplementationError,
    MisconfigurationException,
    NotFiniteError,
    WeightsNotFoundError,
)

register()
# Lightning counts cores; our images are in memory, where more workers are slower.
warnings.filterwarnings("ignore", message=".*does not have many workers.*")
# Lightning calls a function that torch 2.15 is replacing.
warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")

failed_jobs: list[Path] = []


@hydra.main(version_base="1.3", config_path=str(ROOT / "conf"), config_name="config")
def main(config: DictConfig) -> float | None:
    """One job: everything it makes is in its own folder, results.json whatever happens.

    Returns the metric that `config.objective` names, for a sweep that searches.
    """
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    try:
        with held(run_dir):
            return run(config, run_dir)
    except RunningError as error:
        failed_jobs.append(run_dir)
        console.show_problem("Error", str(error))
        return None


def run(config: DictConfig, run_dir: Path) -> float | None:
    """The job, in a folder that is its own."""
    if config.resume == "auto" and finished(run_dir):
        console.stdout().print(f"{run_dir} is finished", soft_wrap=True, highlight=False)
        return None
    choices = HydraConfig.get().runtime.choices
    results = Results(
        run_dir / "results.json",
        impl=as_plain(config.impl),
        model=choices["model"],
        data=choices["data"],
        seed=config.seed,
        overrides=as_given(HydraConfig.get().overrides.task),
    )
    try:
        with results:
            if config.mode == "train":  # to predict, the run of the checkpoint says what it was
                check(config)
                console.show_config(config)
            if config.mode not in MODES:
                raise MisconfigurationException(
                    f"mode: expected {' or '.join(MODES)}, got {config.mode!r}"
                )
            begin(config, run_dir)
            checkpoint = MODES[config.mode](config, run_dir, results)
        if checkpoint and config.mode == "train":
            discard(run_dir)
    except Exception as error:
        failed_jobs.append(run_dir)
        if not isinstance(error, USER_ERRORS) or os.environ.get("HYDRA_FULL_ERROR") == "1":
            if HydraConfig.get().mode == RunMode.RUN:
                raise
            traceback.print_exc()  # Hydra would leave the table of the other jobs out
        console.show_problem("Error", str(error))
        return None
    except (KeyboardInterrupt, SystemExit) as stop:  # Lightning turns the first into the second
        console.show_problem("Interrupted", f"what there is so far is in {run_dir}")
        if isinstance(stop, SIGTERMException):  # all processes stop after the same step
            leave_group()
            sys.exit(143)
        sys.exit(130)
    finally:
        wandb_dir = loggers.finish(
            exit_code=0 if results.status == "finished" else 1, summary=results.summary()
        )
        disk.settle()
    paths = {"checkpoint": checkpoint, "results": results.path, "run": run_dir, "wandb": wandb_dir}
    console.show_results(results.metrics, results.throughput, paths)
    found = results.metrics.get(config.objective)
    if found is None and config.mode == "train" and HydraConfig.get().mode == RunMode.MULTIRUN:
        measured = ", ".join(results.metrics)
        console.warn(
            f"objective: {config.objective!r} was not measured; a search needs one of {measured}"
        )
    return found


def fit_and_test(config: DictConfig, run_dir: Path, results: Results) -> Path | None:
    """Fits, tests and fills in `results`; returns the path of the checkpoint that was tested.

    None where that could not be written: the weights of the last step are tested then.
    """
    pl.seed_everything(config.seed, workers=True, verbose=False)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = config.tf32

    data = instantiate(config.data)  # reads nothing yet
    model = build(config.model, config)
    resumed, logged = continuation(run_dir) if config.resume == "auto" else (None, {})
    logger = instantiate(config.logger, **logged) if config.logger else False
    throughput = Throughput()
    trainer = make_trainer(config, run_dir, logger, throughput)

    device = trainer.strategy.root_device.type
    chosen = choose_implementations(model, device)
    console.show_implementations(chosen)
    results.environment["implementations"] = {name: c.name for name, c in chosen.items()}

    try:
        if logger:
            logger.log_hyperparams(OmegaConf.to_container(config, resolve=True))
        trainer.fit(model, datamodule=data, ckpt_path=resumed)
        results.metrics |= {name: float(value) for name, value in trainer.callback_metrics.items()}
        best = Path(trainer.checkpoint_callback.best_model_path)  # pyright: ignore
        checkpoint = trainer.strategy.broadcast(best if disk.current(best) else None)
        if not isinstance(trainer.strategy, FSDPStrategy):
            if checkpoint is None:
                console.warn("what is tested are the weights of the last step, in no checkpoint")
            trainer.test(model, datamodule=data, ckpt_path=checkpoint, verbose=False)
        elif checkpoint:  # what is trained was left in parts, which cannot be divided again
            whole = build(config.model, config)
            contents = torch.load(checkpoint, map_location="cpu", weights_only=True)
            whole.load_state_dict(contents["state_dict"])
            trainer.test(whole, datamodule=data, verbose=False)
        else:
            console.warn("not tested: no checkpoint could be written, and FSDP left only parts")
    finally:
        results.metrics |= {name: float(value) for name, value in trainer.callback_metrics.items()}
        results.throughput |= throughput.summary()
        if results.throughput["step_ms"] is not None:
            results.throughput["warmup_seconds"] = throughput.warmup_seconds
    return checkpoint


def leave_group() -> None:
    """Ends what joined this process to others, where none of them still waits for it.

    Lightning does so with NCCL, but not with gloo, whose threads may abort an ending process.
    """
    if dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()


MODES = {"train": fit_and_test, "predict": predict}

if __name__ == "__main__":
    import train  # by this name other processes find it, to which a sweep sends jobs

    train.main()
    if train.failed_jobs:
        sys.exit(1)
    train.leave_group()
