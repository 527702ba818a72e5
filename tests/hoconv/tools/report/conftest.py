"""Files as training runs, checks and benchmarks leave them, and the command that reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hoconv.tools.cli import main

OPERATOR = "carafe"  # declared nowhere here: the page needs the files alone
ENVIRONMENT = {"cpu": "a CPU", "threads": 2, "gpu": None, "torch": "2.11"}


class Files:
    """Writes files into a folder, and reports on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "out"
        self.count = 0

    def json(self, name: str, contents: Any) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(contents))
        return path

    def run(
        self, impl: Any, seed: int, step_ms: float | None = 10.0, accuracy: float = 0.9,
        wait: float = 0.0, losses: Sequence[float] = (2.0, 1.0, 0.5, 0.4), **others: Any,
    ) -> Path:  # fmt: skip
        """A run of train.py with logger=csv, of two epochs; `others` replace keys of its JSON."""
        name = f"runs/{self.count:03}"
        self.count += 1
        results = {
            "impl": impl, "model": "cnn", "data": "digits", "seed": seed, "status": "finished",
            "overrides": [f"impl={impl}", f"seed={seed}"],
            "metrics": {"train/loss": 0.5, "test/accuracy": accuracy},
            "throughput": {"step_ms": step_ms, "samples_per_sec": 1e3, "peak_memory_mb": 5.0,
                           "data_wait_fraction": wait},
            "capture": {"replays": 0}, "environment": ENVIRONMENT, "commit": "abc",
        } | others  # fmt: skip
        folder = self.json(f"{name}/results.json", results).parent
        rows = "".join(f"{step},{loss}\n" for step, loss in enumerate(losses, 1))
        (folder / "losses.csv").write_text("step,loss\n" + rows)
        (folder / "csv").mkdir()
        (folder / "csv" / "metrics.csv").write_text("step,epoch,val/loss\n1,0,0.7\n3,1,0.6\n")
        return folder

    def share(
        self,
        impl: str,
        step_ms: float,
        operator_ms: float,
        device: str = "cpu",
        launches: int = 7,
        operator_launches: int = 5,
        **others: Any,
    ) -> None:
        """Returns what the callback LayerShares leaves, beside the results.json of its run."""

        def times(ms: float) -> dict[str, float]:
            return {"median_ms": ms, "p20_ms": ms, "p80_ms": ms, "repeats": 20}

        folder = f"shares/{impl}"
        self.json(f"{folder}/shares.json", {
            "method": "marks", "device": device, "step_ms": times(step_ms),
            "operators": {OPERATOR: times(operator_ms)},
            "launches": launches if device == "cuda" else None,
            "operator_launches": {OPERATOR: operator_launches} if device == "cuda" else None,
        })  # fmt: skip
        self.json(f"{folder}/results.json", {
            "impl": impl, "model": "cnn", "data": "digits", "seed": 0, "status": "finished",
            "overrides": [f"impl={impl}", "capture=off"], "metrics": {}, "throughput": {},
        } | others)  # fmt: skip

    def check(self, **failures: list[str]) -> None:
        """A check of three implementations: the failures of each."""
        rows = [
            {"operator": OPERATOR, "impl": impl, "device": "cpu", "dtype": "float32", "cases": 9,
             "tolerance": 1e-6, "output_error": 1e-8, "gradient_error": "nan", "same_bits": True,
             "failures": failures.get(impl, []), "unavailable": None}
            for impl in ("reference", "cpp")
        ] + [
            {"operator": OPERATOR, "impl": "cuda", "device": "cpu", "dtype": None, "cases": 0,
             "tolerance": None, "output_error": 0.0, "gradient_error": 0.0, "same_bits": True,
             "failures": [], "unavailable": "it runs on a GPU"}
        ]  # fmt: skip
        self.json("check.json", {"command": "c", "date": "2026-01-01", "environment": ENVIRONMENT,
                                 "seed": 0, "rows": rows})  # fmt: skip

    def kernels(self, **times: float) -> None:
        """A benchmark of two sizes: contender -> milliseconds of the smaller one; floor 1."""

        def timing(ms: float, scale: float) -> dict[str, float]:
            percentiles = dict.fromkeys(("median_ms", "p20_ms", "p80_ms"), ms * scale)
            floor = {"floor_ms": scale, "share_of_floor": 1 / ms, "gb_per_s": 3 / ms}
            return {**percentiles, "repeats": 5, **floor}

        rows = [
            {"size": size, "sample": f"n={size}", "contender": name, "error": None,
             "forward": timing(ms, scale), "backward": timing(2 * ms, scale),
             "extra_memory_bytes": 5, "least_memory_bytes": 3}
            for size, scale in ((8, 1.0), (64, 8.0))
            for name, ms in times.items()
        ]  # fmt: skip
        self.json("op.json", {
            "command": "b", "date": "2026-01-01", "environment": ENVIRONMENT, "method": "timed",
            "operator": OPERATOR, "device": "cpu", "dtype": "float32", "axis": "batch size",
            "copy_gb_per_s": 9.0, "unavailable": {"cuda": "it runs on a GPU"}, "rows": rows,
        })  # fmt: skip

    def report(self, *options: str, code: int = 0, operator: str = OPERATOR) -> dict[str, Any]:
        """Runs ``hoconv report`` over the folder; returns what its JSON says."""
        command = ["report", operator, str(self.folder), "--out", str(self.out), *options]
        assert main(command) == code
        return {} if code else json.loads((self.out / f"report_{operator}.json").read_text())

    @property
    def page(self) -> Path:
        return self.out / f"report_{OPERATOR}.html"


@pytest.fixture
def files(tmp_path: Path) -> Files:
    pytest.importorskip("vl_convert", reason="needs hoconv[report]")
    return Files(tmp_path)


@pytest.fixture
def three_seeds(files: Files) -> Callable[..., Files]:
    """Three seeds of reference, cpp and reference again, the times of their steps in order."""

    def write(old: Sequence[float], new: Sequence[float], again: Sequence[float], **others: Any):
        for seed, times in enumerate(zip(old, new, again, strict=True)):
            for impl, ms in zip(("reference", "cpp", "reference"), times, strict=True):
                files.run(impl, seed, ms, **others)
        return files

    return write
