"""results.json: settings, status, metrics, throughput and environment of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from pytorch_lightning.utilities import rank_zero_only
from pytorch_lightning.utilities.exceptions import SIGTERMException

from hoconv.tools import doctor
from training import disk

THROUGHPUT = (
    "samples_per_sec", "step_ms", "data_wait_fraction", "peak_memory_mb", "warmup_seconds"
)  # fmt: skip


def logged_costs(cost: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of all layers together that are known, as loggers name them."""
    return {
        f"cost/{name}": float(cost[name])
        for name in ("multiplications", "unknown", "energy_pj")
        if cost.get(name) is not None
    }


class Results:
    """The contents of a results.json, kept current on disk while the run lasts.

    As a context manager it writes the file with ``"status": "running"``, and at the end again with
    ``"finished"``, ``"interrupted"`` or ``"failed"``; :meth:`skip` replaces the last by
    ``"skipped"``; ``error`` says why a run failed, or after
    which step SIGTERM stopped it.
    Each write replaces the whole file at once: a reader never sees half of one.

    Args:
        path: of the file.
        impl, model, data, seed: as the configuration has them.
        overrides: of the configuration, from the command line or a sweep.

    Attributes:
        metrics: name -> value; empty at first.
        notes: lines that a reader of the metrics should know: why a fit ended before its last
            epoch, which losses were no numbers. The file has them where there are any.
        throughput: ``samples_per_sec`` of all devices, ``step_ms``, ``data_wait_fraction``,
            ``peak_memory_mb`` of the steps that :class:`~hoconv.lightning.Throughput` counts, and
            ``warmup_seconds``, the time of the other steps; None where not measured.
        capture: what :meth:`~training.capture.steps.CapturedSteps.summary` returns.
        cost: what :meth:`~training.callbacks.cost.Cost.summary` returns. The file has it where
            there is any.
        identity: ``impl``, ``model``, ``data``, ``seed``.
        environment: versions, hardware, and under ``implementations`` that of each layer.
    """

    def __init__(
        self,
        path: Path,
        *,
        impl: str | dict[str, str],
        model: str,
        data: str,
        seed: int,
        overrides: list[str],
    ) -> None:
        self.path = path
        self.status = "running"
        self.error: str | None = None
        self.metrics: dict[str, float] = {}
        self.notes: list[str] = []
        self.throughput: dict[str, float | None] = dict.fromkeys(THROUGHPUT)
        self.capture: dict[str, Any] = {}
        self.cost: dict[str, Any] = {}
        self.environment = doctor.environment()
        self.identity = {"impl": impl, "model": model, "data": data, "seed": seed}
        self._overrides = overrides
        self._commit = self.environment.pop("commit")

    def summary(self) -> dict[str, float | None]:
        """Metrics, throughput and cost under the names by which they are logged."""
        throughput = {f"throughput/{name}": value for name, value in self.throughput.items()}
        return self.metrics | throughput | logged_costs(self.cost)

    def __enter__(self) -> Results:
        self.write()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.status = "finished"
        elif isinstance(error, KeyboardInterrupt | SystemExit):
            self.status = "interrupted"
            self.error = str(error) if isinstance(error, SIGTERMException) else None
        else:
            self.status = "failed"
            self.error = f"{type(error).__name__}: {error}"
        self.write()

    def skip(self) -> None:
        """Says that the run failed because its implementation cannot run here, as was expected."""
        self.status = "skipped"
        self.write()

    @rank_zero_only
    def write(self) -> None:
        disk.attempt(self.path, self._write, again=True)

    def _write(self) -> None:
        contents: dict[str, Any] = {
            **self.identity,
            "overrides": self._overrides,
            "status": self.status,
            **({"error": self.error} if self.error else {}),
            **({"notes": self.notes} if self.notes else {}),
            "metrics": self.metrics,
            "throughput": self.throughput,
            "capture": self.capture,
            **({"cost": self.cost} if self.cost else {}),
            "environment": self.environment,
            "commit": self._commit,
        }
        with disk.replaced(self.path) as file:
            file.write((json.dumps(_without_nan(contents), indent=2) + "\n").encode())


def _without_nan(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become strings."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, float) and not abs(value) < float("inf"):
        return str(value)
    return value
