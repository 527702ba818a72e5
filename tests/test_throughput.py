"""hoconv.lightning.Throughput, on a clock that moves only where the test moves it."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers.logger import DummyLogger
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset

import hoconv.lightning.throughput
from hoconv.lightning.throughput import Throughput, batch_size, leave_out_step

# Seconds of each.
FETCH, STEP, BEFORE_VALIDATION, VALIDATION, EPOCH_END = 0.25, 0.75, 4.0, 8.0, 16.0


class Clock:
    now = 0.0

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(
        hoconv.lightning.throughput, "time", SimpleNamespace(perf_counter=lambda: clock.now)
    )
    return clock


class Batches(Dataset):
    """One batch an item; getting one takes FETCH seconds."""

    def __init__(self, sizes: list[int], clock: Clock) -> None:
        self.sizes = sizes
        self.clock = clock

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.clock.advance(FETCH)
        size = self.sizes[index]
        return {"name": "batch", "x": torch.ones(size, 1), "y": torch.ones(size, 1)}


class Model(pl.LightningModule):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.clock = clock

    def training_step(self, batch, batch_idx):
        self.clock.advance(STEP)
        return self(batch["x"]).mean()

    def forward(self, x):
        return self.layer(x)

    def on_validation_model_eval(self):  # before on_validation_start
        super().on_validation_model_eval()
        self.clock.advance(BEFORE_VALIDATION)

    def validation_step(self, batch, batch_idx):
        self.clock.advance(VALIDATION)

    def on_train_epoch_end(self):
        self.clock.advance(EPOCH_END)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Log(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics, step=None):
        if "throughput/samples_per_sec" in metrics:
            self.rows.append((step, dict(metrics)))


@dataclass
class Fit:
    throughput: Throughput
    rows: list[tuple[int | None, dict[str, float]]]


def fit(
    clock: Clock,
    sizes: list[int],
    throughput: Throughput,
    model: Model | None = None,
    **options: Any,
) -> Fit:
    log = Log()
    options = {"max_epochs": 1, "log_every_n_steps": 4, "accelerator": "cpu"} | options
    trainer = pl.Trainer(
        logger=log,
        callbacks=throughput,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    train = DataLoader(Batches(sizes, clock), batch_size=None)
    val = DataLoader(Batches([1], clock), batch_size=None)
    trainer.fit(model or Model(clock), train, val)
    return Fit(throughput, log.rows)


def test_counts_the_batches_as_they_are(clock):
    sizes = [5, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    run = fit(clock, sizes, Throughput(warmup_steps=0), limit_val_batches=0)
    assert [step for step, _ in run.rows] == [4, 8, 12]
    seconds = 4 * (FETCH + STEP)
    for (_, row), first in zip(run.rows[1:], (4, 8), strict=True):
        samples_per_sec = sum(sizes[first : first + 4]) / seconds
        assert row["throughput/samples_per_sec"] == pytest.approx(samples_per_sec)
        assert row["throughput/step_ms"] == pytest.approx(1000 * seconds / 4)
        assert row["throughput/data_wait_fraction"] == pytest.approx(FETCH / (FETCH + STEP))
        assert row["throughput/peak_memory_mb"] > 10


def test_warm_up_is_not_counted(clock):
    sizes = [1000] * 5 + [2] * 7
    run = fit(clock, sizes, Throughput(warmup_steps=5), limit_val_batches=0)
    assert [step for step, _ in run.rows] == [8, 12]
    for _, row in run.rows:
        assert row["throughput/samples_per_sec"] == pytest.approx(2 / (FETCH + STEP))
    summary = run.throughput.summary()
    assert summary["samples_per_sec"] == pytest.approx(2 / (FETCH + STEP))
    assert summary["step_ms"] == pytest.approx(1000 * (FETCH + STEP))
    assert summary["data_wait_fraction"] == pytest.approx(FETCH / (FETCH + STEP))


def test_steps_that_compile_are_not_counted(clock):
    compile_seconds = 100.0

    def backend(graph: Any, inputs: Any) -> Any:
        clock.advance(compile_seconds)
        return graph

    model = Model(clock)
    model.compile(backend=backend, dynamic=False)
    sizes = [4] * 10 + [3, 4]  # the last batch of an epoch is often a short one
    run = fit(clock, sizes, Throughput(2), model, limit_val_batches=0, max_epochs=2)
    assert [step for step, _ in run.rows] == [4, 8, 12, 16, 20, 24]
    assert run.rows[2][1]["throughput/step_ms"] == pytest.approx(1000 * (FETCH + STEP))
    summary = run.throughput.summary()
    assert summary["step_ms"] == pytest.approx(1000 * (FETCH + STEP))
    assert summary["samples_per_sec"] == pytest.approx((20 * 4 + 3) / 21 / (FETCH + STEP))
    assert summary["data_wait_fraction"] == pytest.approx(FETCH / (FETCH + STEP))
    assert run.throughput.warmup_seconds == pytest.approx(3 * STEP + 2 * compile_seconds)


def test_steps_that_ask_for_it_are_left_out(clock):
    capture_seconds = 100.0

    class Capturing(Model):
        def training_step(self, batch, batch_idx):
            if batch_idx == 4:
                clock.advance(capture_seconds)
                leave_out_step()
            return super().training_step(batch, batch_idx)

    run = fit(clock, [4] * 10, Throughput(2), Capturing(clock), limit_val_batches=0)
    assert run.throughput.summary()["step_ms"] == pytest.approx(1000 * (FETCH + STEP))
    assert run.throughput.warmup_seconds == pytest.approx(3 * STEP + capture_seconds)


@pytest.mark.parametrize("interval", [1.0, 0.5], ids=["after the epoch", "within the epoch"])
def test_validation_and_work_between_epochs_are_not_counted(clock, interval):
    run = fit(clock, [6] * 8, Throughput(2), max_epochs=3, val_check_interval=interval)
    assert run.throughput.summary()["step_ms"] == pytest.approx(1000 * (STEP + FETCH), rel=0.05)
    assert run.throughput.summary()["samples_per_sec"] == pytest.approx(
        6 / (STEP + FETCH), rel=0.05
    )
    _, row = run.rows[-1]
    validations = (2 if interval == 1.0 else 5) * VALIDATION  # those before the last row
    assert row["time/val"] == pytest.approx(validations, rel=0.2)
    assert row["time/total"] == pytest.approx(row["time/train"] + row["time/val"])


def test_short_fits_measure_nothing_rather_than_something(clock):
    run = fit(clock, [4] * 10, Throughput(warmup_steps=10))
    assert run.rows == []
    assert run.throughput.summary() == {
        "samples_per_sec": None,
        "step_ms": None,
        "data_wait_fraction": None,
        "peak_memory_mb": None,
    }
    assert Throughput().summary() == run.throughput.summary()


def test_steps_after_the_last_logged_one_are_in_the_summary(clock):
    run = fit(clock, [1] * 4 + [101] * 2, Throughput(0), limit_val_batches=0)
    assert [step for step, _ in run.rows] == [4]
    assert run.throughput.summary()["samples_per_sec"] == pytest.approx(206 / 6, rel=0.05)


def test_gradient_accumulation_logs_each_global_step_once(clock):
    run = fit(clock, [2] * 16, Throughput(0), accumulate_grad_batches=2, limit_val_batches=0)
    assert [step for step, _ in run.rows] == [4, 8]
    assert run.rows[1][1]["throughput/step_ms"] == pytest.approx(1000 * (FETCH + STEP))


def test_a_second_fit_starts_anew(clock):
    throughput = Throughput(warmup_steps=2)
    fit(clock, [1000] * 8, throughput, limit_val_batches=0)
    fit(clock, [3] * 8, throughput, limit_val_batches=0)
    assert throughput.summary()["samples_per_sec"] == pytest.approx(3 / (FETCH + STEP))


def test_memory_that_an_earlier_fit_has_freed_is_not_counted(clock):
    def peak() -> float:
        throughput = Throughput(0)
        fit(clock, [2] * 8, throughput, limit_val_batches=0)
        return throughput.summary()["peak_memory_mb"] or 0.0

    peak()
    before = peak()
    pieces = [torch.ones(4096) for _ in range(20_000)]  # 312 MB, too small to be mapped one by one
    last = pieces.pop()  # lies above the others, so that they are not given back
    pieces.append(pieces)  # pyright: ignore
    del pieces
    assert peak() < before + 100
    assert last.sum() == 4096


def test_a_batch_size_function_of_ones_own(clock):
    throughput = Throughput(0, batch_size_fn=lambda batch: 7)
    run = fit(clock, [1] * 8, throughput, limit_val_batches=0)
    assert run.rows[1][1]["throughput/samples_per_sec"] == pytest.approx(7 / (FETCH + STEP))


def test_negative_warm_up_is_an_error():
    with pytest.raises(ValueError, match="warmup_steps: expected at least 0, got -1"):
        Throughput(warmup_steps=-1)


@dataclass
class Captioned:
    caption: str
    images: torch.Tensor


@pytest.mark.parametrize(
    "batch",
    [
        torch.ones(3),
        (torch.ones(3, 2), torch.ones(5)),
        [torch.tensor(1.0), {"x": torch.ones(3)}],
        {"names": ["a", "b"], "x": {"y": torch.ones(3, 4, 4)}},
        Captioned("of all", torch.ones(3, 1, 2, 2)),
        pack_sequence([torch.ones(4), torch.ones(2), torch.ones(1)]),
    ],
    ids=["tensor", "tuple", "list", "dict", "dataclass", "packed sequence"],
)
def test_finds_the_batch_dimension(batch):
    assert batch_size(batch) == 3


@pytest.mark.parametrize("batch", [None, "text", [], {"n": 3}, torch.tensor(1.0)])
def test_a_batch_without_one_is_an_error(batch):
    with pytest.raises(ValueError, match="batch_size_fn"):
        batch_size(batch)


class Busy(Clock):
    """The GPU gets more to do than the host waits for."""

    def advance(self, seconds: float) -> None:
        x = torch.ones(2048, 2048, device="cuda")
        for _ in range(10):
            x = x @ x


class Waits(Throughput):
    """How often the host has waited for an event before the fit ends, and then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(warmup_steps=0)
        self.count = self.before_the_end = 0
        synchronize = torch.cuda.Event.synchronize

        def counted(event: torch.cuda.Event) -> None:
            self.count += not event.query()
            synchronize(event)

        monkeypatch.setattr(torch.cuda.Event, "synchronize", counted)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.before_the_end = self.count
        super().on_train_end(trainer, pl_module)


@pytest.mark.gpu
def test_waits_for_the_gpu_at_the_end_of_the_fit_only(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: pytest.fail("synchronised"))
    # Validation twice an epoch: it ends stretches, not intervals.
    throughput = Waits(monkeypatch)
    run = fit(
        Busy(),
        [4] * 16,
        throughput,
        accelerator="gpu",
        devices=1,
        max_epochs=2,
        val_check_interval=0.5,
    )
    assert [step for step, _ in run.rows] == [4, 8, 12, 16, 20, 24, 28, 32]
    assert throughput.before_the_end == 0
    assert throughput.count > 0
    summary = run.throughput.summary()
    assert all(value is not None and value > 0 for value in summary.values())


class WaitsWhileFetching(Busy):
    def advance(self, seconds: float) -> None:
        if seconds == FETCH:
            torch.cuda.synchronize()
        else:
            super().advance(seconds)


@pytest.mark.gpu
def test_a_host_that_waits_for_the_gpu_is_not_waiting_for_data():
    run = fit(WaitsWhileFetching(), [4] * 16, Throughput(4), accelerator="gpu", devices=1)
    fraction = run.throughput.summary()["data_wait_fraction"]
    assert fraction is not None
    assert 0 < fraction < 0.5  # on the host's clock nearly all is
