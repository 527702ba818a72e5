"""scripts/report.py: the runs that it starts, and what of them it keeps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
Script = Callable[[str], ModuleType]


@pytest.fixture
def report(script: Script) -> Any:
    return script("report")


def test_implementations_take_turns_and_the_first_comes_twice(report: Any, tmp_path: Path) -> None:
    jobs = report.plan(["experiment=mnist_cnn", "impl=reference,cpp,cuda", "seed=4,5"], tmp_path)
    short, runs = jobs[:3], jobs[3:]
    assert [job.folder.name for job in short] == ["reference", "cpp", "cuda"]
    assert all("capture=off" in job.overrides and job.proof == "shares.json" for job in short)
    turns = [job.folder.name for job in runs]
    assert turns == [
        "000_seed4_reference", "001_seed4_cpp", "002_seed4_cuda", "003_seed4_reference",
        "004_seed5_reference", "005_seed5_cpp", "006_seed5_cuda", "007_seed5_reference",
    ]  # fmt: skip
    assert turns == sorted(turns)  # the order in which a report reads them
    assert runs[1].overrides == [
        "impl=cpp", "seed=4", "logger=csv", "experiment=mnist_cnn", "resume=null"
    ]  # fmt: skip


def test_an_implementation_for_each_operator(report: Any, tmp_path: Path) -> None:
    jobs = report.plan(["impl=reference,{high_order_layer: cpp}", "seed=1"], tmp_path)
    assert jobs[1].folder.name == "high_order_layer-cpp"
    assert "impl={high_order_layer:cpp}" in [text.replace(" ", "") for text in jobs[1].overrides]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["impl=cpp"], "impl: expected two implementations or more"),
        (["seed=1,2"], "impl: expected two implementations or more"),
        (["impl=reference,cpp", "model.learning_rate=0.1,0.2"], "only impl and seed"),
        (["impl=reference,cpp", "nonsense"], "nonsense"),
    ],
)
def test_what_cannot_be_run_is_one_line(
    report: Any, tmp_path: Path, capsys: Any, overrides: list[str], message: str
) -> None:
    pytest.importorskip("vl_convert", reason="needs hoconv[report]")
    assert report.main([*overrides, "--out", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("Error: ")
    assert message in line


def test_a_run_is_kept_only_as_it_would_be_made_again(report: Any, tmp_path: Path) -> None:
    (job, *_) = report.plan(["impl=reference,cpp"], tmp_path)
    assert not report.is_done(job, 0.0)
    job.folder.mkdir(parents=True)

    def write(status: str, overrides: list[str]) -> None:
        results = {"status": status, "overrides": overrides}
        (job.folder / "results.json").write_text(json.dumps(results))

    write("finished", job.overrides)
    assert not report.is_done(job, 0.0)  # a short run is there for its shares.json
    (job.folder / "shares.json").write_text("{}")
    assert report.is_done(job, 0.0)
    assert not report.is_done(job, (job.folder / "shares.json").stat().st_mtime + 1)
    write("interrupted", job.overrides)
    assert not report.is_done(job, 0.0)
    write("finished", ["impl=cpp"])
    assert not report.is_done(job, 0.0)


def test_sources_of_other_packages_count(
    report: Any, toy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "SOURCES", ())  # those of the toy operator are all in its folder
    folder = Path(toy.function.__code__.co_filename).parent
    newest = max(f.stat().st_mtime for f in folder.rglob("*.py"))
    assert report.newest_source(None) == newest
    config = tmp_path / "conf" / "model.yaml"
    config.parent.mkdir()
    config.touch()
    assert report.newest_source(config.parent) == config.stat().st_mtime > newest


@pytest.mark.slow
def test_two_implementations_on_digits_become_a_page(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert", reason="needs hoconv[report]")
    command = [
        sys.executable, "scripts/report.py", "impl=reference,{high_order_layer: reference}",
        "seed=0", "trainer=cpu", "trainer.max_epochs=1", "--out", str(tmp_path),
    ]  # fmt: skip
    environment = os.environ | {"COLUMNS": "300"}

    def run() -> str:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stderr

    said = run()
    assert "[5/5] reference, seed 0: " in said
    contents = json.loads((tmp_path / "report_high_order_layer.json").read_text())
    training = contents["training"]
    assert [each["runs"] for each in training["groups"]] == [2, 1]
    assert [each["parts"]["shares"]["operator"] > 0 for each in training["groups"]] == [True] * 2
    assert len(training["noise"]["pairs"]) == 1
    assert training["predictions"][0]["predicted"] is not None
    assert {row["impl"] for row in contents["correctness"]} >= {"reference", "cpp"}
    assert contents["command"].startswith("python scripts/report.py 'impl=reference,")

    (tmp_path / "runs" / "001_seed0_high_order_layer-reference" / "results.json").unlink()
    said = run()
    assert "4 of 5 runs are in" in said
    assert "[1/1] high_order_layer-reference, seed 0: " in said
