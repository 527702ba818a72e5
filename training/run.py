"""A job: training or prediction, what goes wrong, the exit code."""

from __future__ import annotations

import math
import os
import shlex
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning_fabric.utilities import exceptions as of_lightning
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.utilities.exceptions import SIGTERMException

from datamodules.images import CacheError, DataNotFoundError
from datamodules.placement import DataDeviceError
from hoconv.dispatch.implementations import ImplementationError
from models.networks.backbone import WeightsNotFoundError
from training import console, disk
from training.approximation import find_files
from training.callbacks.finite import NotFiniteError
from training.capture.graph import CaptureError
from training.command import failed_jobs
from training.configuration.checks import check_config
from training.configuration.errors import MisconfigurationException
from training.configuration.names import as_override
from training.folder import as_given, begin, discard, find_step_checkpoints, is_finished
from training.lock import RunningError, held
from training.model import as_plain
from training.modes.export import export
from training.modes.fit import fit_and_test
from training.modes.predict import predict, test, written
from training.results import loggers
from training.results.record import Results
from training.results.saved import read
from training.start.merging import UNKNOWN, merge, uses_configuration

MODES = {"train": fit_and_test, "test": test, "predict": predict, "export": export}
WRITES = {"predict": "predictions", "export": "model"}  # what else than results.json
# Their messages say what the user can do: no traceback is shown.
USER_ERRORS = (
    CacheError,
    CaptureError,
    DataDeviceError,
    DataNotFoundError,
    disk.DiskError,
    ImplementationError,
    MisconfigurationException,
    NotFiniteError,
    WeightsNotFoundError,
    of_lightning.MisconfigurationException,  # of Lightning, of models and of users' code
)
# Exit codes, as a shell has them: 128 and the number of the signal.
INTERRUPTED, TERMINATED = 130, 143


def run_job(config: DictConfig) -> float | None:
    """Runs one job in the folder that Hydra made for it.

    Whatever happens is in the folder's results.json; an error of the user's is one line on stderr,
    and the folder is added to `failed_jobs`.

    Returns the metric that ``config.objective`` names, for a sweep that searches; None where it is
    not a number.

    Raises:
        SystemExit: the job was interrupted.
    """
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    try:
        with held(run_dir), console.plain_warnings():
            if is_finished(config, run_dir):
                console.stdout().print(f"{run_dir} is finished", soft_wrap=True, highlight=False)
                return None
            return _run(config, run_dir)
    except (MisconfigurationException, RunningError) as error:
        if isinstance(error, MisconfigurationException) and _wants_tracebacks():
            raise
        failed_jobs.append(run_dir)
        console.show_problem("Error", str(error))
        return None


def _run(config: DictConfig, run_dir: Path) -> float | None:
    """As `run_job`, in a folder that no other command uses."""
    results = _new_results(config, run_dir)
    try:
        with results:
            checkpoint = _train_or_predict(config, run_dir, results)
        if checkpoint and config.mode == "train":
            discard(run_dir)
    except Exception as error:
        if isinstance(error, ImplementationError) and config.unavailable == "skip":
            results.skip()
        _report(error, run_dir, results.status)
        return None
    except (KeyboardInterrupt, SystemExit) as stop:  # Lightning turns the first into the second
        _exit(stop, run_dir)
    finally:
        wandb_dir = loggers.finish(
            exit_code=0 if results.status == "finished" else 1, summary=results.summary()
        )
        disk.settle()
    paths = [("checkpoint", checkpoint), ("results", results.path), ("run", run_dir)]
    paths += [("wandb", wandb_dir)]
    if config.mode in WRITES:
        paths += [(WRITES[config.mode], path) for path in written(run_dir)]
    throughput = results.throughput if config.mode == "train" else {}
    console.show_results(
        results.metrics, results.notes, throughput, results.capture, results.cost, paths
    )
    _leave_process_group()
    return _objective(config, results)


def _new_results(config: DictConfig, run_dir: Path) -> Results:
    chosen = HydraConfig.get()
    return Results(
        run_dir / "results.json",
        impl=as_plain(config.impl),
        model=chosen.runtime.choices["model"],
        data=chosen.runtime.choices["data"],
        seed=config.seed,
        overrides=as_given(chosen.overrides.task),
    )


def _train_or_predict(config: DictConfig, run_dir: Path, results: Results) -> Path | None:
    """Does what ``config.mode`` names; returns the path of the checkpoint, where there is one."""
    if config.mode not in MODES:
        raise MisconfigurationException(f"mode: expected {', '.join(MODES)}; got {config.mode!r}")
    if OmegaConf.select(config, "approx.multiplier") is not None:
        config.approx.multiplier = find_files(as_plain(config.approx.multiplier))
        config.approx.accumulator = find_files(config.approx.accumulator)
    chosen = HydraConfig.get()
    given = as_given(chosen.overrides.task)
    saved = None if config.ckpt is None else read(config.ckpt)
    if saved and config.resume is True and saved.path.suffix == ".safetensors":
        raise MisconfigurationException(
            f"resume=true: {saved.path} has the weights alone; give the run's own checkpoint, or "
            "start from these weights without resume"
        )
    if uses_configuration(config.mode, config.resume):
        if saved is None:
            needing = "resume=true" if config.mode == "train" else f"mode={config.mode}"
            raise MisconfigurationException(f"{needing} needs ckpt=<a checkpoint of a run>")
        config = merge(config, saved, given)
        results.identity |= {**saved.identity, "seed": config.seed}
        if (data := chosen.runtime.choices["data"]) != UNKNOWN:
            results.identity["data"] = data
        results.identity["impl"] = as_plain(config.impl)
    check_config(config)
    if config.print_config:
        console.show_config(config)
    elif config.mode == "train":
        console.show_choices(chosen.runtime.choices, given)
    begin(config, run_dir)
    return MODES[config.mode](config, run_dir, results, saved)


def _report(error: Exception, run_dir: Path, status: str) -> None:
    """Shows why a job failed, or was skipped; raises an error that is not the user's again, except
    in a sweep, whose table is followed by the reasons."""
    alone = HydraConfig.get().mode == RunMode.RUN
    if status != "skipped":
        failed_jobs.append(run_dir)
    if not isinstance(error, USER_ERRORS) or _wants_tracebacks():
        if alone:
            raise error
        traceback.print_exc()  # Hydra would stop before the table of the other jobs
    if alone:
        console.show_problem("Error", str(error))
    else:
        console.warn(f"{run_dir} {status}; the reason is below the table at the end")


def _wants_tracebacks() -> bool:
    return os.environ.get("HYDRA_FULL_ERROR") == "1"


def _exit(stop: BaseException, run_dir: Path) -> NoReturn:
    """Ends the process after Ctrl-C or SIGTERM."""
    console.show_problem("Interrupted", f"the results so far are in {run_dir}")
    if steps := find_step_checkpoints(run_dir):
        command = _resuming(sys.argv, HydraConfig.get())
        console.show_problem("To go on", f"after step {steps[-1][0]}: {command}")
    if isinstance(stop, SIGTERMException):  # all processes stop after the same step
        _leave_process_group()
        sys.exit(TERMINATED)
    sys.exit(INTERRUPTED)


def _resuming(argv: list[str], hydra: Any) -> str:
    """Returns the command that continues this one."""
    given = [*argv]
    if "resume=true" not in given:
        given = [part for part in given if not part.startswith("resume=")] + ["resume=auto"]
    if hydra.mode == RunMode.MULTIRUN:
        given = [part for part in given if not part.startswith("hydra.sweep.dir=")]
        given.append(as_override("hydra.sweep.dir", hydra.sweep.dir))
    return shlex.join(["python", *given])


def _objective(config: DictConfig, results: Results) -> float | None:
    found = results.metrics.get(config.objective)
    if found is None and config.mode == "train" and HydraConfig.get().mode == RunMode.MULTIRUN:
        measured = ", ".join(results.metrics)
        console.warn(
            f"objective: {config.objective!r} was not measured; a search needs one of {measured}"
        )
    return found if found is not None and math.isfinite(found) else None


def _leave_process_group() -> None:
    """Destroys the process group of a distributed run with gloo, when no process waits for it.

    Lightning does so with NCCL only, and gloo's threads may abort a process that ends without it.
    """
    if dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()
