"""Fixtures and settings of all tests, beside those of hoconv.tools.testing.fixtures."""

import csv
import gc
import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Threads that wait must not spin: the tests share their cores with other processes. OpenMP reads
# this when it is loaded, and so do the processes that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import hypothesis
import pytest
import torch
from torch import Tensor

from hoconv.dispatch import declaration as operators
from hoconv.dispatch.declaration import Benchmark, Cost, Implementation, Operator, Sample, declare
from hoconv.dispatch.implementations import resolve

hypothesis.settings.register_profile(
    "same every time",
    derandomize=True,
    deadline=None,
    # `variant` does not change from example to example.
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("same every time")


@dataclass
class Run:
    exit_code: int
    folder: Path
    out: str
    err: str

    @property
    def results(self) -> dict[str, Any]:
        return json.loads((self.folder / "results.json").read_text())

    @property
    def losses(self) -> list[str]:
        """As text: equal means equal to the last bit."""
        with (self.folder / "losses.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert [int(row["step"]) for row in rows] == list(range(1, len(rows) + 1))
        return [row["loss"] for row in rows]


@pytest.fixture(scope="session")
def train_main() -> Any:
    """Returns ``main`` of train.py. Each fit collects garbage, which looks at every object: those
    of imports are put aside, once."""
    import train
    import training.run  # noqa: F401  # imports what a job needs

    gc.collect()
    gc.freeze()
    return train.main


@pytest.fixture
def run(train_main, monkeypatch, tmp_path, capfd):
    """Runs train.py in this process, in a folder of its own in tmp_path or in one that is there."""
    from training.command import run_command

    count = 0

    def run(*overrides: str, folder: Path | None = None) -> Run:
        nonlocal count
        count += 1
        folder = folder or tmp_path / f"run{count}"
        where = (
            f"hydra.run.dir={folder}",
            f"hydra.sweep.dir={folder}",
            "hydra.sweep.subdir=${hydra:job.num}",
        )
        monkeypatch.setattr(sys, "argv", ["train.py", *overrides, *where])
        try:
            code = run_command(train_main)
        except SystemExit as exit:
            code = int(exit.code or 0)
        out, err = capfd.readouterr()
        return Run(code, folder, out, err)

    # A fit takes both signals; Lightning ignores SIGINT after an interrupt.
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def wandb_alone(monkeypatch, tmp_path) -> Any:
    """Weights & Biases without a key, no folders of anyone's, and no settings of earlier tests."""
    wandb = pytest.importorskip("wandb")
    wandb.teardown()  # a process reads the environment once
    for name in [name for name in os.environ if name.startswith("WANDB_")] + ["NETRC"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return wandb


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Operator:
    """``x * y * scale``, the only declared operator; a test may add implementations to it."""

    def function(x: Tensor, y: Tensor, *, scale: float = 1.0, impl: str = "auto") -> Tensor:
        name = resolve("toy", impl, x.device.type)
        return operator.implementations[name].function(x, y, scale)

    def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        for scale in (1.0, -2.0):
            x, y = (torch.randn(4, 5, dtype=torch.float64).to(device, dtype) for _ in "xy")
            yield Sample((x, y), {"scale": scale}, name=f"scale {scale:g}")
        yield Sample((torch.empty(0, device=device, dtype=dtype),) * 2, name="empty")

    def benchmark_sample(size: int, device: torch.device, dtype: torch.dtype) -> Sample:
        return Sample((torch.randn(size, device=device, dtype=dtype),) * 2, name=f"n={size}")

    def cost(sample: Sample) -> Cost:
        n, tensor = sample.args[0].numel(), sample.args[0].nbytes
        return Cost(3 * tensor, 5 * tensor, 2 * n, 4 * n)

    operator = Operator(
        name="toy",
        function=function,
        implementations={
            "reference": Implementation(lambda x, y, scale: x * y * scale),
            "swapped": Implementation(lambda x, y, scale: y * x * scale),
        },
        samples=samples,
        tolerances={torch.float32: 1e-6, torch.float16: 2e-3},
        cost=cost,
        benchmark=Benchmark("elements", (64, 256), benchmark_sample, {"twice": _twice}),
    )
    monkeypatch.setattr(operators, "_declared", {})
    return declare(operator)


def _twice(x: Tensor, y: Tensor) -> Tensor:
    return (x + x) * y / 2
