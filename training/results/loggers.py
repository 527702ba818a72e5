"""Loggers of metrics: a CSV file, Weights & Biases, or Lightning's own.

A logger's `continuation` holds the arguments with which a resumed run makes it again.
"""

from __future__ import annotations

import importlib.util
import netrc
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lightning_fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning.loggers import WandbLogger
from pytorch_lightning.loggers.logger import Logger
from pytorch_lightning.utilities import rank_zero_only
from torch import Tensor

from training import console
from training.configuration.instantiation import instantiate_as
from training.results.table import GrowingTable


def make_loggers(described: Any, continued: Sequence[Mapping[str, Any]] = ()) -> list[Logger]:
    """Makes the loggers of a configuration: name -> ``_target_`` and arguments, or null for none.

    Args:
        continued: the `continuation` of each, where a run is resumed.

    Raises:
        MisconfigurationException: one is no logger of Lightning's, or its package is missing.
    """
    descriptions = {name: each for name, each in (described or {}).items() if each is not None}
    kind = "the _target_ of a Lightning logger, or null to switch it off"
    made = []
    for (name, each), arguments in zip_longest(descriptions.items(), continued, fillvalue={}):
        try:
            made.append(instantiate_as(Logger, f"logger.{name}", each, kind, **arguments))
        except ModuleNotFoundError as error:
            raise MisconfigurationException(
                f"logger.{name}: {' '.join(str(error).split())}"
            ) from error
    return made


class CSVMetrics(Logger):
    """Writes each group of metrics as a row of a CSV file, at once.

    Args:
        path: of the file.
        rows: how many rows of an existing file are kept; new ones follow.
    """

    def __init__(self, path: str | Path, rows: int = 0) -> None:
        super().__init__()
        self._path = Path(path)
        self._rows = rows

    @cached_property
    def _table(self) -> GrowingTable:
        return GrowingTable(self._path, ("step",), self._rows)

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> str:
        return ""

    @property
    def continuation(self) -> dict[str, Any]:
        return {"rows": self._table.rows}

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        values = {name: float(value) for name, value in metrics.items()}
        self._table.extend([{"step": step, **values}])

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """They are in config.yaml."""


class WandbRun(WandbLogger):
    """A WandbLogger that also logs the best of each metric so far, and warns once, instead of
    raising, where W&B's server or process is lost.

    Args:
        best: of a run that is continued.
        arguments: of ``pytorch_lightning.loggers.WandbLogger``.
    """

    def __init__(self, best: Mapping[str, float] | None = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        if self._wandb_init.get("anonymous") is None:  # wandb warns of it, although nobody set it
            self._wandb_init.pop("anonymous", None)
        self._best = dict(best or {})

    @property
    def continuation(self) -> dict[str, Any]:
        return {"id": self.version, "best": self._best}

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        try:
            super().log_metrics({**metrics, **self._best_of(metrics)}, step)
        except (OSError, wandb_error()) as error:
            if not self._lost:
                console.warn(f"Weights & Biases takes no more metrics ({_line(error)})")
            self._lost = True

    def _best_of(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """The best so far of the metrics of a validation: the least of a loss, else the greatest,
        under ``best/``."""
        for name, value in metrics.items():
            if name.startswith("val/") and isinstance(value, int | float | Tensor):
                best = min if name.endswith("loss") else max
                self._best[f"best/{name}"] = best(
                    float(value), self._best.get(f"best/{name}", float(value))
                )
        found = {f"best/{name}" for name in metrics} & self._best.keys()
        return {name: self._best[name] for name in found}

    _lost = False


def wandb_logger(**arguments: Any) -> WandbRun:
    """Makes a W&B logger, offline where there is no API key, unless WANDB_MODE says otherwise, and
    where the server cannot be reached.

    Args:
        arguments: of ``pytorch_lightning.loggers.WandbLogger``.

    Raises:
        MisconfigurationException: wandb is not installed.
    """
    if importlib.util.find_spec("wandb") is None:
        raise MisconfigurationException(
            "logger=wandb needs the package wandb: `pip install wandb`, or use logger=csv"
        )
    if "WANDB_MODE" not in os.environ and not has_api_key():
        arguments["mode"] = "offline"
        os.environ.setdefault("WANDB_SILENT", "true")
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # the rest of what needs a network
        import wandb

        wandb.setup()  # reads these settings before Lightning makes the run
    logger = WandbRun(**arguments)
    try:
        _ = logger.experiment
    except wandb_error() as error:
        console.warn(
            f"Weights & Biases cannot be reached ({_line(error)}): the run is recorded offline, "
            "and `wandb sync` uploads it"
        )
        logger = WandbRun(**arguments, mode="offline")
    return logger


def wandb_error() -> type[Exception]:
    """wandb's base exception, imported late: the import takes a second."""
    from wandb.errors import Error

    return Error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def has_api_key() -> bool:
    """Whether wandb would find a key without asking: in the environment or in a netrc file."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    import wandb

    own = os.environ.get("WANDB_BASE_URL")
    # A key that was stored under wandb's former address still counts.
    servers = [own] if own else [wandb.Settings().base_url, "https://api.wandb.ai"]
    try:
        stored = netrc.netrc(Path(os.environ.get("NETRC", "~/.netrc")).expanduser())
        return any(stored.authenticators(urlsplit(server).netloc) for server in servers)
    except (OSError, netrc.NetrcParseError):
        return False


def finish(exit_code: int, summary: Mapping[str, float | None]) -> Path | None:
    """Ends the W&B run of this process, if there is one, so that the next job gets its own.

    Args:
        exit_code: 0 if the run finished.
        summary: values that W&B shows in its tables, beside the last ones logged.

    Returns the folder of the run.
    """
    wandb = sys.modules.get("wandb")
    if wandb is None or wandb.run is None:
        return None
    folder = Path(wandb.run.dir).parent
    try:
        wandb.run.summary.update(summary)
        wandb.finish(exit_code=exit_code)
    except (OSError, wandb_error()) as error:
        console.warn(f"Weights & Biases did not take the end of the run ({_line(error)})")
    if folder.exists() and not shutil.disk_usage(folder).free:  # wandb itself does not say so
        console.warn(f"the disk of {folder} is full: what W&B recorded there may not be whole")
    return folder
