"""The sub-commands that train, `table`, `scaling`, `loading` and `throughput`: what they write."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from datamodules.coco import shapes

Script = Callable[[str], ModuleType]
DIGITS = ("experiment=mnist_lstm", "data=digits", "impl=reference", "data.batch_size=8")


def run(script: Script, out: Path, *arguments: str) -> dict[str, Any]:
    command = [arguments[0], "--device", "cpu", "--out", str(out), *arguments[1:]]
    assert script("benchmark").main(command) == 0
    return json.loads((out / f"{arguments[0]}_cpu.json").read_text())


@pytest.fixture
def table(script: Script, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, with a small simple model and columns that need no compiler."""
    module = script("benchmarks.training.table")
    name = "one layer at 224 x 224"
    small = dataclasses.replace(module.NETWORKS[name], image_shape=(3, 8, 8))
    monkeypatch.setitem(module.NETWORKS, name, small)
    for column in [column for column in module.COLUMNS if column.startswith("torch.compile")]:
        monkeypatch.delitem(module.COLUMNS, column)
    return module


def test_cells_of_the_simple_model(script: Script, table: ModuleType, tmp_path: Path) -> None:
    record = run(script, tmp_path, "table", "--batch", "2", "32", "--model", table.SIMPLE)
    assert [cell["column"] for cell in record["cells"]] == ["reference CPU", "cpp CPU"]
    assert [row["batch"] for row in record["batches"]] == [2, 32, 2, 32]
    (reference, _) = record["cells"]
    assert reference["error"] is None
    assert reference["step_ms"]["p20_ms"] <= reference["step_ms"]["median_ms"]
    assert reference["peak_memory_mb"] > 0
    text = (tmp_path / "table_cpu.md").read_text()
    assert "|  | reference CPU | cpp CPU |" in text
    assert "| simple, 32 images, ms |" in text  # the nearest to 64
    assert (tmp_path / "table_cpu.png").stat().st_size > 0


@pytest.mark.slow
def test_cells_of_experiments_or_why_they_are_empty(
    script: Script, table: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(table.COLUMNS, "cpp CPU")
    experiments = {"mnist_lstm": ("data=digits",), "digits_cnn": ("data=nothing",)}
    monkeypatch.setattr(table, "EXPERIMENTS", experiments)
    monkeypatch.setitem(table.STEPS, "cpu", 30)
    record = run(script, tmp_path, "table", "--model", "mnist_lstm", "digits_cnn")
    measured, failed = record["cells"]
    assert measured["error"] is None
    assert measured["step_ms"]["repeats"] >= 3
    assert measured["samples_per_s"] > 0
    assert "data: there is no 'nothing'" in failed["error"]
    assert failed["step_ms"] is None
    text = (tmp_path / "table_cpu.md").read_text()
    assert "| digits_cnn, ms | (1) |" in text
    assert f"(1) {failed['error']}" in text


def test_an_interrupted_measurement_is_continued(
    script: Script, table: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    arguments = "table", "--batch", "2", "--model", table.SIMPLE
    complete = run(script, tmp_path, *arguments)
    begun = tmp_path / "table_cpu.begun.json"
    assert not begun.exists()
    monkeypatch.setattr(table, "_experiment", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(script, tmp_path, *arguments, "mnist_lstm")
    cells = json.loads(begun.read_text())["cells"]
    assert [cell["column"] for cell in cells] == ["reference CPU", "cpp CPU"]
    assert json.loads((tmp_path / "table_cpu.json").read_text()) == complete

    monkeypatch.setattr(table, "_simple", interrupted)
    monkeypatch.setattr(table, "_experiment", lambda column, model, _: {
        **cells[0], "model": model, "column": column, "batch": None,
    })  # fmt: skip
    whole = run(script, tmp_path, *arguments, "mnist_lstm")
    assert whole["cells"][:2] == cells
    assert [cell["model"] for cell in whole["cells"][2:]] == ["mnist_lstm", "mnist_lstm"]
    assert not begun.exists()


def test_a_measurement_of_another_command_is_not_continued(
    script: Script, table: ModuleType, tmp_path: Path
) -> None:
    begun = tmp_path / "table_cpu.begun.json"
    arguments = "table", "--batch", "2", "--model", table.SIMPLE
    complete = run(script, tmp_path, *arguments)
    begun.write_text(json.dumps(complete | {"command": "another", "cells": [], "batches": []}))
    assert len(run(script, tmp_path, *arguments)["cells"]) == 2


def test_columns_are_in_one_order_in_whichever_they_were_measured(table: ModuleType) -> None:
    names = ["reference GPU", "cuda GPU", "cuda GPU, captured"]
    nothing = dict.fromkeys(table.MEASURED)
    cells = [table._cell("mnist_cnn", name) | {"error": "slow", **nothing} for name in names]
    measured = {"cells": cells[::-1], "batches": [], "largest_batch": {}}
    assert table.markdown(measured).startswith("|  | " + " | ".join(names) + " |")


def test_an_experiment_over_its_limit_says_so(script: Script) -> None:
    found = script("benchmarks.training.training_run").measure_training(
        DIGITS, 10**6, 10**6, 0.1, threads=1
    )
    assert found["error"] == "3 intervals of 1000000 steps take more than 0.1 s"


def test_an_experiment_over_its_limit_is_killed_with_its_processes(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntrap '' TERM\n(sleep 3; touch {tmp_path}/survived) & wait\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    found = script("benchmarks.training.training_run").measure_training((), 1, 1, 1.0, threads=1)
    assert found["error"] == "3 intervals of 1 steps take more than 1 s"
    # Whoever survived would have held the other end of a pipe that is closed by now.
    assert not (tmp_path / "survived").exists()


@pytest.mark.slow
def test_scaling_is_efficiency_beside_one_device(script: Script, tmp_path: Path) -> None:
    record = run(
        script, tmp_path, "scaling", "--devices", "1", "2", "--steps", "60", "--", *DIGITS
    )  # fmt: skip
    one, two = record["rows"]
    assert one["error"] is two["error"] is None
    assert one["efficiency"] == 1
    assert two["efficiency"] == pytest.approx(two["samples_per_s"] / (2 * one["samples_per_s"]))
    assert record["overrides"] == list(DIGITS)


@pytest.mark.slow
def test_waiting_for_data_from_every_source(script: Script, tmp_path: Path) -> None:
    shapes.write(tmp_path)
    small = ("data.image_size=16", "model.network.width=2", "impl=reference")
    record = run(
        script, tmp_path, "loading", "--steps", "26", "--experiment", "coco_segmentation",
        "--input", str(tmp_path / "coco"), "--images", "600", "--batch-size", "8", "--", *small,
    )  # fmt: skip
    assert [row["source"] for row in record["rows"]] == ["a loader", "the cache"]
    for row in record["rows"]:
        assert row["error"] is None
        assert row["batch_size"] == 8
        assert 0 <= row["data_wait_fraction"] < 1
        assert row["step_ms"]["median_ms"] > 0
    assert record["overrides"] == list(small)
    assert record["images"] == 600


def test_an_unwritable_folder_is_refused_before_measuring(
    script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "out"
    with pytest.raises(SystemExit):
        script("benchmark").main(["throughput", "--device", "cpu", "--out", str(out)])
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.endswith(f"argument --out: {out} cannot be written (Not a directory)")


@pytest.mark.slow
def test_the_cost_of_the_throughput_callback(script: Script, tmp_path: Path) -> None:
    command = ["throughput", "--device", "cpu", "--pairs", "3", "--out", str(tmp_path)]
    assert script("benchmark").main(command) == 0
    record = json.loads((tmp_path / "throughput_cpu.json").read_text())
    assert [record["step_ms"][how]["repeats"] for how in ("without", "with")] == [3, 3]
    assert record["step_ms"]["with"]["median_ms"] > 0
    assert record["cost"]["low"] <= record["cost"]["median"] <= record["cost"]["high"]


def test_the_cost_is_found_between_neighbours(
    script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = script("benchmarks.training.throughput")
    blocks = []
    for i in range(100):  # the machine slows down all the time; the callback costs 5 %
        block = (False, 10.0 + i), (True, 1.05 * (10.0 + i))
        blocks += block if i % 2 else block[::-1]
    monkeypatch.setattr(module, "measure", lambda *_: blocks)
    script("benchmark").main(["throughput", "--device", "cpu", "--out", str(tmp_path)])
    cost = json.loads((tmp_path / "throughput_cpu.json").read_text())["cost"]
    assert cost == pytest.approx({"median": 0.05, "low": 0.05, "high": 0.05})
