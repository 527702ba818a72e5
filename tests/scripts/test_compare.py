"""scripts/compare.py: what it says of runs, and that the committed comparison comes from them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from PIL import Image

from hoconv.tools import tables

RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.fixture
def write(tmp_path):
    """Writes a run."""

    def write(
        name: str, seed: int, step_ms: float | None = 10.0, accuracy: float = 0.9, **other: Any
    ):
        folder = tmp_path / "runs" / f"{len(list(tmp_path.glob('runs/*')))}"
        folder.mkdir(parents=True)
        throughput = {"step_ms": step_ms, "samples_per_sec": 1.0, "peak_memory_mb": 5.0}
        results = {
            "impl": name, "model": "cnn", "data": "digits", "seed": seed,
            "overrides": [f"impl={name}", f"seed={seed}"], "status": "finished",
            "metrics": {"train/loss": 0.5, "test/accuracy": accuracy}, "throughput": throughput,
            "environment": {"cpu": "a CPU"}, "commit": "abc",
        } | other  # fmt: skip
        (folder / "results.json").write_text(json.dumps(results))
        (folder / "losses.csv").write_text("step,loss\n1,2.0\n2,1.0\n")
        return folder

    return write


@pytest.fixture
def compare(script, tmp_path):
    def compare(*arguments: str) -> dict[str, Any]:
        out = tmp_path / "out"
        command = [str(tmp_path / "runs"), "--out", str(out), *arguments]
        assert script("compare").main(command) == 0
        assert (out / "compare.png").stat().st_size > 0
        return json.loads((out / "compare.json").read_text()) | {
            "table": (out / "compare.md").read_text()
        }

    return compare


def test_a_terminal_that_is_too_narrow_cuts_nothing(write, compare, monkeypatch, capsys):
    monkeypatch.setattr(tables, "PIPE_WIDTH", 80)
    for impl in ("cpp", "reference"):
        for seed in range(3):
            write(impl, seed, 10.0 + seed, metrics={"test/loss": 0.25, "test/mean_iou": 0.125})
    found = compare()
    lines = capsys.readouterr().out.splitlines()
    out = "\n".join(line for line in lines if not line.startswith("/"))  # without the paths
    assert max(map(len, out.splitlines())) <= 80
    cells = [line.strip("| ").split(" | ") for line in found["table"].splitlines()]
    for text in (*cells[0], *cells[2], *cells[3]):
        assert text in out


def test_runs_with_the_same_seed_are_compared(write, compare):
    for seed, (slow, fast) in enumerate([(10.0, 5.0), (20.0, 5.0), (30.0, 5.0)]):
        write("cpp", seed, fast, accuracy=0.8)
        write("reference", seed, slow, accuracy=0.9)
    found = compare()
    assert found["baseline"] == "reference"
    cpp, reference = found["groups"]
    assert (cpp["label"], cpp["seeds"]) == ("cpp", [0, 1, 2])
    # Of 2, 4 and 6: mean 4, deviation 2; Student's t for two degrees of freedom is 4.303.
    assert cpp["speedup"]["mean"] == pytest.approx(4)
    assert cpp["speedup"]["ci95"] == pytest.approx(4.303 * 2 / math.sqrt(3), rel=1e-3)
    assert reference["speedup"] == {"mean": 1.0, "ci95": 0.0, "n": 3}
    assert cpp["differences"]["test/accuracy"]["mean"] == pytest.approx(-0.1)
    assert "train/loss" not in cpp["metrics"]
    assert "| cpp | 3 | 5.00 ± 0.00 | 4.00 ± 4.97 |" in found["table"]


def test_an_implementation_for_each_operator_is_one_label(write, compare):
    write("reference", 0)
    write("reference", 0, impl={"high_order_layer": "cpp", "recurrent": "cuda"})
    labels = [group["label"] for group in compare()["groups"]]
    assert labels == ["reference", "high_order_layer-cpp_recurrent-cuda"]


def test_one_seed_has_no_interval_and_a_short_run_no_speed(write, compare):
    write("reference", 0, None)
    write("cpp", 0, 5.0)
    found = compare("--baseline", "cpp")
    reference, cpp = found["groups"]
    nothing = {"mean": None, "ci95": None, "n": 0}
    assert reference["step_ms"] == reference["speedup"] == nothing
    assert cpp["step_ms"] == {"mean": 5.0, "ci95": None, "n": 1}


def test_runs_of_one_seed_count_as_one_their_mean(write, compare):
    for step_ms in (8.0, 12.0):
        write("reference", 0, step_ms)
    write("cpp", 0, 5.0)
    reference, cpp = compare()["groups"]
    assert (reference["runs"], reference["seeds"]) == (2, [0])
    assert reference["step_ms"] == {"mean": 10.0, "ci95": None, "n": 1}
    assert cpp["speedup"]["mean"] == 2.0


def test_two_seeds_have_no_interval(write, compare):
    for seed in (0, 1):
        write("reference", seed, 10.0 + seed)
    (found,) = compare()["groups"]
    assert found["step_ms"] == {"mean": 10.5, "ci95": None, "n": 2}


def test_runs_of_several_tasks_are_compared(write, compare):
    write("reference", 0)
    write("reference", 0, model="captions", metrics={"test/cider_d": 0.2})
    found = compare()
    assert [each["label"] for each in found["groups"]] == ["cnn", "captions"]
    digits, captions = found["groups"]
    assert captions["metrics"] == {"test/cider_d": {"mean": 0.2, "ci95": None, "n": 1}}
    assert captions["differences"]["test/cider_d"]["mean"] is None
    assert digits["differences"]["test/accuracy"]["mean"] == 0


def test_each_group_is_compared_with_the_one_that_differs_in_one_setting(write, compare):
    for cell, slow, fast in (("gru", 30.0, 10.0), ("lru", 20.0, 4.0), ("gla", None, 2.0)):
        overrides = [f"model.network.cell={cell}"]
        write("cuda", 1, fast, accuracy=0.5, overrides=overrides)
        if slow:
            write("reference", 1, slow, accuracy=0.25, overrides=overrides)
    found = compare("--baseline", "impl=reference")
    groups = {each["label"]: each for each in found["groups"]}
    assert found["baseline"] == "impl=reference"
    assert groups["gru cuda"]["baseline"] == groups["gru reference"]["baseline"] == "gru reference"
    assert groups["gru cuda"]["speedup"]["mean"] == 3
    assert groups["lru cuda"]["speedup"]["mean"] == 5
    assert groups["lru cuda"]["differences"]["test/accuracy"]["mean"] == 0.25
    assert groups["gla cuda"]["baseline"] == ""
    assert groups["gla cuda"]["speedup"]["mean"] is None
    *_, title = found["table"].splitlines()[0].strip("| ").split(" | ")
    assert title == "Δ vs impl=reference"
    rows = [line.split(" | ") for line in found["table"].splitlines()[2:]]
    assert [row[-1].strip("| ") for row in rows] == ["+0.2500", "", "+0.2500", "", ""]


def test_the_record_names_the_commit_if_all_runs_are_of_one(write, compare):
    write("reference", 0)
    write("cpp", 0)
    assert compare()["commit"] == "abc"
    write("cpp", 1, commit="def")
    assert compare()["commit"] is None


def test_a_label_with_an_equals_sign_is_a_label(write, compare):
    for window in ("16", "32"):
        write("cpp", 0, overrides=[f"approx.gradient=difference:window={window}"])
    found = compare("--baseline", "difference:window=32")
    assert [each["baseline"] for each in found["groups"]] == ["difference:window=32"] * 2


def test_a_setting_that_only_some_runs_have_has_a_label_to_write(write, compare):
    write("cpp", 0)
    write("cpp", 0, overrides=["model.learning_rate=0.1"])
    found = compare("--baseline", "default")
    assert found["baseline"] == "default"
    assert [each["label"] for each in found["groups"]] == ["default", "0.1"]
    assert "Δ vs default" in found["table"]


def test_groups_differ_in_what_is_varied_and_failed_runs_are_counted(write, compare):
    for rate in ("0.1", "0.2"):
        overrides = [f"model.learning_rate={rate}", "seed=0"]
        write("cpp", 0, overrides=overrides)
        write("cpp", 1, overrides=overrides, status="failed" if rate == "0.2" else "finished")
    found = compare()
    assert [each["label"] for each in found["groups"]] == ["0.1", "0.2"]
    assert found["groups"][1]["settings"] == {"model.learning_rate": "0.2"}
    assert found["groups"][1]["seeds"] == [0]
    assert "1, 1 unfinished" in found["table"]


@pytest.mark.parametrize(
    ("seeds", "arguments", "message"),
    [
        ((), (), "no results.json"),
        ((0,), ("--baseline", "cuda"), "expected one of ['cpp'], got 'cuda'"),
        ((0,), ("--baseline", "impl=cuda"), "expected one of ['cpp'], got 'impl=cuda'"),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    script, write, tmp_path, capsys, seeds, arguments, message
):
    for seed in seeds:
        write("cpp", seed)
    assert script("compare").main([str(tmp_path), "--out", str(tmp_path), *arguments]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_the_committed_comparison_comes_from_the_committed_runs(script, tmp_path):
    command = [str(RESULTS / "digits"), "--name", "digits", "--out", str(tmp_path)]
    assert script("compare").main(command) == 0
    assert (tmp_path / "digits.md").read_text() == (RESULTS / "digits.md").read_text()
    with Image.open(tmp_path / "digits.png") as drawn, Image.open(RESULTS / "digits.png") as kept:
        software = f"Matplotlib version{matplotlib.__version__}"
        if not kept.info["Software"].startswith(software):
            pytest.skip(f"digits.png was drawn by {kept.info['Software']}")
        assert drawn.tobytes() == kept.tobytes()
