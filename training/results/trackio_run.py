"""A logger of Lightning for Trackio, which has none of its own."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from pytorch_lightning.loggers.logger import Logger
from pytorch_lightning.utilities import rank_zero_only
from torch import Tensor

from training.configuration.errors import MisconfigurationException


class TrackioRun(Logger):
    """Logs the numbers of a run to Trackio: in a local SQLite file, unless a Space is named.

    Args:
        project: of the run.
        name: of the run, which tells it from all others of the project.
        resume: ``"never"``, or ``"must"`` where a run is continued; as of ``trackio.init``.
        arguments: others of ``trackio.init``.

    Raises:
        MisconfigurationException: Trackio is not installed.
    """

    def __init__(self, project: str, name: str, resume: str = "never", **arguments: Any) -> None:
        super().__init__()
        if importlib.util.find_spec("trackio") is None:
            raise MisconfigurationException(
                "logger=trackio needs the package trackio: `pip install trackio`, or use logger=csv"
            )
        self._name, self._config = name, {}
        self._arguments = {"project": project, "name": name, "resume": resume, **arguments}

    @cached_property
    def experiment(self) -> Any:
        """Returns the run of Trackio, which begins with the first call."""
        import trackio  # pyright: ignore[reportMissingImports]

        with contextlib.suppress(RuntimeError):  # without one
            trackio.finish()  # the run of the job before, in this process; it ends the last itself
        return trackio.init(config=self._config, **self._arguments)

    @property
    def name(self) -> str:
        return self._name

    @property
    def version(self) -> str:
        return ""

    @property
    def continuation(self) -> dict[str, Any]:
        return {"name": self._name, "resume": "must"}

    @rank_zero_only
    def log_hyperparams(self, params: Mapping[str, Any], *_: Any) -> None:
        self._config.update(params)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        numbers = {n: float(v) for n, v in metrics.items() if isinstance(v, int | float | Tensor)}
        if numbers:
            self.experiment.log(numbers, step=step)
