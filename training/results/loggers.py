"""Loggers of metrics: a CSV file, Weights & Biases, or Lightning's own.

A logger's `continuation` holds the arguments with which a resumed run makes it again.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
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

from pytorch_lightning.loggers import WandbLogger
from pytorch_lightning.loggers.logger import Logger
from pytorch_lightning.utilities import rank_zero_only
from torch import Tensor

from training import console, disk
from training.configuration.direction import direction
from training.configuration.errors import MisconfigurationException
from training.configuration.instantiation import entries, instantiate_as
from training.results.table import GrowingTable

# W&B's names of the number of a row, and of that of the training step to which it belongs.
STEP, GLOBAL_STEP = "_step", "trainer/global_step"


def make_loggers(described: Any, continued: Sequence[Mapping[str, Any]] = ()) -> list[Logger]:
    """Makes the loggers of a configuration: name -> ``_target_`` and arguments, or null for none.

    Args:
        continued: the `continuation` of each, where a run is resumed.

    Raises:
        MisconfigurationException: one is no logger of Lightning's, or has no name; or its package
            is missing.
    """
    descriptions = entries("logger", described)
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

    W&B's process writes what it is given later: a run that is killed leaves a record without its
    end. So the numbers are also in a table, at once. A run that is continued logs again those that
    its record lacks, under the same steps: all of them offline, where the record is a new one.

    Args:
        table: the path of that CSV file; None for none.
        rows: how many of its rows a run that is continued has.
        best: of a run that is continued.
        arguments: of ``pytorch_lightning.loggers.WandbLogger``.
    """

    def __init__(
        self,
        table: str | Path | None = None,
        rows: int = 0,
        best: Mapping[str, float] | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self._path, self._rows = table, rows
        if self._wandb_init.get("anonymous") is None:  # wandb warns of it, although nobody set it
            self._wandb_init.pop("anonymous", None)
        self._best = dict(best or {})

    @property
    def continuation(self) -> dict[str, Any]:
        rows = 0 if self._table is None else self._table.rows
        return {"id": self.version, "best": self._best, "rows": rows}

    @rank_zero_only
    def begin(self) -> None:
        """Begins the record, and logs again the rows of the table that it lacks."""
        self._step = self.experiment.step
        if self._path is not None:
            self._table = GrowingTable(Path(self._path), (STEP,), self._rows)
            for row in self._table.read():
                values = {name: float(value) for name, value in row.items() if value}
                if (step := int(values.pop(STEP))) >= self._step:
                    self.experiment.log(values, step=step, commit=True)
                    self._step = step + 1

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        whole = {disk.plain(n): v for n, v in {**metrics, **self._best_of(metrics)}.items()}
        numbers = {n: float(v) for n, v in whole.items() if isinstance(v, int | float | Tensor)}
        if self._table is not None and numbers:
            self._table.extend([{STEP: self._step, GLOBAL_STEP: step, **numbers}])
        self._step += 1
        try:
            super().log_metrics(whole, step)
        except (OSError, wandb_error()) as error:
            if not self._lost:
                console.warn(f"Weights & Biases takes no more metrics ({_line(error)})")
            self._lost = True

    def _best_of(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """The best so far of the metrics of a validation whose names say which way they improve,
        under ``best/``."""
        for name, value in metrics.items():
            if not name.startswith("val/") or not isinstance(value, int | float | Tensor):
                continue
            number = float(value)
            with contextlib.suppress(ValueError):  # by a name that says nothing
                best = min if direction(name) == "minimize" else max
                if math.isfinite(number):
                    key = f"best/{name}"
                    self._best[key] = best(number, self._best.get(key, number))
        found = {f"best/{name}" for name in metrics} & self._best.keys()
        return {name: self._best[name] for name in found}

    _lost = False
    _table: GrowingTable | None = None
    _step = 0  # W&B's, of the next row


def wandb_logger(**arguments: Any) -> WandbRun:
    """Makes a W&B logger, offline where there is no API key, unless WANDB_MODE says otherwise, and
    where the server cannot be reached.

    Args:
        arguments: of ``pytorch_lightning.loggers.WandbLogger``.

    Raises:
        MisconfigurationException: wandb is not installed, or cannot name the folder of its files.
    """
    if importlib.util.find_spec("wandb") is None:
        raise MisconfigurationException(
            "logger=wandb needs the package wandb: `pip install wandb`, or use logger=csv"
        )
    folder = str(arguments.get("save_dir", "."))
    if disk.plain(folder) != folder:
        raise MisconfigurationException(
            f"logger.wandb.save_dir: {folder} is not UTF-8, and wandb takes no other name; choose "
            "another folder, or use logger=csv"
        )
    table = arguments.pop("table", None)  # a path of our own, which may be anything
    arguments = {name: _plain(value) for name, value in arguments.items()} | {"table": table}
    if "WANDB_MODE" not in os.environ and not has_api_key():
        arguments["mode"] = "offline"
        os.environ.setdefault("WANDB_SILENT", "true")
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # the rest of what needs a network
        import wandb

        wandb.setup()  # reads these settings before Lightning makes the run
    logger = WandbRun(**arguments)
    try:
        logger.begin()
    except wandb_error() as error:
        console.warn(
            f"Weights & Biases cannot be reached ({_line(error)}): the run is recorded offline, "
            "and `wandb sync` uploads it"
        )
        logger = WandbRun(**arguments, mode="offline")
        logger.begin()
    return logger


def _plain(value: Any) -> Any:
    """Makes texts, and those of a list, such as W&B takes."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return disk.plain(value) if isinstance(value, str) else value


def wandb_error() -> type[Exception]:
    """wandb's base exception, imported late: the import takes a second."""
    from wandb.errors import Error

    return Error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def has_api_key() -> bool:
    """Returns whether wandb would find a key without asking: in the environment or in a netrc
    file."""
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
