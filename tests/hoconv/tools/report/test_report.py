"""``hoconv report``: what its page and its JSON say of files."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

import hoconv
from hoconv.tools.cli import main

DOCS = Path(__file__).parents[4] / "docs"
RESULTS, PAGE = DOCS / "results", DOCS / "measure" / "report.md"
Write = Callable[..., Any]


def group(report: dict[str, Any], label: str) -> dict[str, Any]:
    (found,) = (each for each in report["training"]["groups"] if each["label"] == label)
    return found


def test_everything_is_joined(three_seeds: Write) -> None:
    files = three_seeds([10.0, 10.2, 9.8], [5.0, 5.2, 4.9], [10.1, 10.2, 9.9])
    files.share("reference", step_ms=9.0, operator_ms=6.0)
    files.share("cpp", step_ms=4.5, operator_ms=1.5)
    files.check()
    files.kernels(reference=10.0, unfold=5.0, cpp=2.0)
    report = files.report()

    assert report["verdict"]["headline"].startswith("cpp trains 1.99 ± 0.0")
    assert report["verdict"]["tone"] == "good"
    (prediction,) = report["training"]["predictions"]
    # Two thirds of a step get 4 times as fast: 1 / (1/3 + 1/6).
    assert prediction["share"] == pytest.approx(2 / 3)
    assert prediction["speedup"] == 4
    assert prediction["predicted"] == pytest.approx(2.0)
    assert prediction["limit"] == pytest.approx(3.0)
    assert prediction["inside"] is True
    pairs = report["training"]["noise"]["pairs"]
    assert [(p["label"], p["seed"]) for p in pairs] == [("reference", s) for s in range(3)]
    assert report["training"]["noise"]["most"] == pytest.approx(1 - 9.8 / 9.9)
    reference = group(report, "reference")
    assert (reference["runs"], reference["seeds"]) == (6, [0, 1, 2])
    # Two steps of an epoch, by metrics.csv; the two runs of a seed count as their mean.
    assert reference["epoch_s"]["mean"] == pytest.approx(2e-3 * (10.05 + 10.2 + 9.85) / 3)
    parts = reference["parts"]
    assert parts["operator_ms"] == pytest.approx(parts["step_ms"] * 2 / 3)
    (measured,) = report["kernels"]
    best = {row["contender"]: row for row in measured["summary"]}["cpp"]
    # Forward and backward of the larger size: 8 + 8 of 16 + 32.
    assert (best["size"], best["median_ms"]) == (64, 48.0)
    assert best["share_of_floor"] == pytest.approx(1 / 3)
    assert (best["best_other"], best["speedup_over_best_other"]) == ("unfold", 2.5)
    assert best["speedup_over_reference"] == 5
    assert [row["impl"] for row in report["correctness"]] == ["reference", "cpp", "cuda"]
    assert report["missing"] == []
    assert files.page.stat().st_size <= 3e6


def test_the_page_holds_its_json_and_what_it_says(three_seeds: Write) -> None:
    files = three_seeds([10.0] * 3, [4.0, 5.0, 4.5], [10.0] * 3)
    files.check()
    files.kernels(reference=10.0, cpp=2.0)
    report = files.report()
    html = files.page.read_text()
    (kept,) = re.findall(r'<script type="application/json" id="contents">(.*?)</script>', html)
    assert json.loads(kept) == report
    for text in (report["verdict"]["headline"], "it runs on a GPU", "2 of 2", "33%"):
        assert text in html
    assert not re.search(r"""(src|href)=["']?(?!data:)\w+:""", html.split("<script")[0])


def test_two_runs_of_the_same_code_that_differ_more_say_nothing(three_seeds: Write) -> None:
    files = three_seeds([9.0, 11.0, 9.0], [9.5, 9.5, 9.51], [11.0, 9.0, 11.0])
    report = files.report()
    (prediction,) = report["training"]["predictions"]
    assert prediction["measured"]["mean"] - prediction["measured"]["ci95"] > 1.04
    assert report["training"]["noise"]["most"] == pytest.approx(11 / 9 - 1)
    assert report["verdict"]["headline"] == (
        "No difference between cpp and reference can be told from noise."
    )


def test_a_step_that_waits_for_data(three_seeds: Write) -> None:
    files = three_seeds([10.0, 10.1, 9.9], [10.1, 9.9, 10.0], [10.0] * 3, wait=0.6)
    files.share("reference", step_ms=4.0, operator_ms=3.0)
    files.share("cpp", step_ms=2.0, operator_ms=1.0)
    report = files.report()
    assert report["verdict"]["headline"] == (
        "The step waits for data: a faster kernel cannot help."
    )
    (prediction,) = report["training"]["predictions"]
    assert prediction["share"] == pytest.approx(0.3)  # of 10 ms, 6 wait; of 4, 3 are the operator
    assert prediction["inside"] is False
    assert any("waits for data 60%" in why for why in prediction["why"])


def test_an_operator_too_small_to_matter(three_seeds: Write) -> None:
    files = three_seeds([10.0, 10.1, 9.9], [9.9, 10.0, 10.1], [10.0] * 3)
    files.share("reference", step_ms=10.0, operator_ms=0.2)
    files.share("cpp", step_ms=10.0, operator_ms=0.1)
    report = files.report()
    assert "too small a part" in report["verdict"]["headline"]


def test_a_gpu_that_waits_for_the_host(three_seeds: Write) -> None:
    gpu = {"environment": {"gpu": "a GPU", "cpu": "a CPU", "threads": 2, "torch": "2.11"}}
    files = three_seeds([10.0, 10.1, 9.9], [9.9, 10.0, 10.1], [10.0] * 3, **gpu)
    files.share("reference", step_ms=2.0, operator_ms=1.6, device="cuda")
    files.share("cpp", step_ms=1.0, operator_ms=0.6, device="cuda")
    report = files.report()
    assert (
        report["verdict"]["headline"] == "The GPU waits for the host: a faster kernel cannot help."
    )
    reference = group(report, "reference")
    assert reference["gpu_busy"] == pytest.approx(0.2, rel=0.01)
    assert reference["launches"] == 7


def test_a_cuda_graph_saves_the_same_at_each_launch(three_seeds: Write) -> None:
    gpu = {"environment": {"gpu": "a GPU"}, "capture": {"replays": 90}}
    files = three_seeds([3.3, 3.3, 3.31], [1.0, 1.0, 1.01], [3.3] * 3, **gpu)
    # 0.1 ms a launch: 7 of them, of which 5 in the operator, or 1 of a kernel that does it all.
    files.share("reference", step_ms=4.0, operator_ms=3.0, device="cuda")
    files.share("cpp", step_ms=1.7, operator_ms=0.5, device="cuda", operator_launches=1)
    report = files.report()
    reference, cpp = group(report, "reference"), group(report, "cpp")
    assert reference["parts"]["operator_ms"] == pytest.approx(3.0 - 0.5, rel=0.01)
    assert cpp["parts"]["operator_ms"] == pytest.approx(0.5 - 0.1, rel=0.01)
    for each in (reference, cpp):
        assert each["parts"]["idle_ms"] == pytest.approx(0, abs=1e-9)
        assert (each["captured"], each["launches"]) == (True, 1)
    (prediction,) = report["training"]["predictions"]
    assert prediction["speedup"] == pytest.approx(2.5 / 0.4, rel=0.01)


def test_launches_that_were_not_seen_save_nothing(three_seeds: Write) -> None:
    gpu = {"environment": {"gpu": "a GPU"}, "capture": {"replays": 90}}
    files = three_seeds([3.3, 3.3, 3.31], [1.0, 1.0, 1.01], [3.3] * 3, **gpu)
    files.share("reference", step_ms=4.0, operator_ms=3.0, device="cuda", launches=0,
                operator_launches=0)  # fmt: skip
    files.share("cpp", step_ms=1.7, operator_ms=0.5, device="cuda")
    reference = group(files.report(), "reference")
    assert reference["parts"]["shares"]["operator"] == pytest.approx(0.75)


def test_steps_that_are_no_graph_save_nothing_at_a_launch(three_seeds: Write) -> None:
    gpu = {"environment": {"gpu": "a GPU"}}
    files = three_seeds([3.3, 3.3, 3.31], [1.0, 1.0, 1.01], [3.3] * 3, **gpu)
    files.share("reference", step_ms=4.0, operator_ms=3.0, device="cuda")
    files.share("cpp", step_ms=1.7, operator_ms=0.5, device="cuda")
    reference = group(files.report(), "reference")
    assert reference["parts"]["shares"]["operator"] == pytest.approx(0.75)


def test_wrong_results_come_before_speed(three_seeds: Write) -> None:
    files = three_seeds([10.0] * 3, [5.0, 5.1, 4.9], [10.0] * 3)
    files.check(cpp=["case 1: output: error 1.0e+00"])
    report = files.report()
    assert report["verdict"]["tone"] == "bad"
    assert report["verdict"]["headline"].startswith("cpp computes something else")


def test_quality_that_differs_is_said(files: Any) -> None:
    for seed in range(3):
        files.run("reference", seed, 10.0, accuracy=0.90 + 0.01 * seed)
        files.run("cpp", seed, 5.0, accuracy=0.80 + 0.01 * seed + 0.001 * seed)
    report = files.report()
    change = group(report, "cpp")["differences"]["test/accuracy"]
    assert change["mean"] == pytest.approx(-0.099)
    assert any("test/accuracy differs by -0.09" in r for r in report["verdict"]["reasons"])


def test_one_run_is_a_page_that_says_what_is_missing(files: Any) -> None:
    files.run("cpp", 0)
    report = files.report()
    said = " ".join(report["missing"])
    for text in ("hoconv check", "hoconv benchmark", "two implementations", "3 seeds", "Noise"):
        assert text in said
    assert report["training"]["predictions"] == []


def test_kernels_alone_are_a_page(files: Any) -> None:
    files.kernels(reference=10.0, cpp=2.0)
    report = files.report()
    assert report["training"] is None
    assert any("cpp is the fastest" in reason for reason in report["verdict"]["reasons"])


def test_runs_that_did_not_use_the_operator_are_no_page(files: Any, capsys: Any) -> None:
    files.run("cpp", 0)
    files.share("cpp", step_ms=4.0, operator_ms=1.0)
    assert main(["report", "caraffe", str(files.folder), "--out", str(files.out)]) == 1
    assert "no file says anything of caraffe; they speak of carafe; " in capsys.readouterr().err


def test_where_nothing_is_there_the_error_is_one_line(files: Any, capsys: Any) -> None:
    files.json("op.json", {"operator": "other", "axis": "n", "rows": [{"contender": "a"}]})
    files.report(code=1)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("Error: no file says anything of carafe; they speak of other; ")
    assert not files.out.exists()


def test_a_baseline_that_no_run_has(files: Any, capsys: Any) -> None:
    files.run("cpp", 0)
    files.report("--baseline", "cuda", code=1)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "Error: --baseline: expected one of ['cpp'], got 'cuda'"


def test_failed_runs_and_numbers_that_are_none(files: Any) -> None:
    for seed in range(2):
        files.run("reference", seed, 10.0)
        files.run("cpp", seed, 5.0, losses=[2.0, float("nan"), float("inf"), 1.0])
    files.run("cuda", 0, None, status="failed", error="RuntimeError: out of luck", metrics={})
    files.run("cpp", 2, None, losses=[2.0, 1.0, 1.0, 1.0], metrics={"test/accuracy": "nan"})
    (files.folder / "broken.json").write_text("{")
    report = files.report()
    assert group(report, "cuda")["unfinished"] == [str(files.folder / "runs" / "004")]
    assert any("out of luck" in problem for problem in group(report, "cuda")["problems"])
    said = " ".join(group(report, "cpp")["problems"])
    assert "the loss of step 2 is nan" in said
    assert "test/accuracy is nan" in said
    (curve,) = (c for c in report["training"]["curves"] if c["label"] == "cpp")
    assert [point["mean"] for point in curve["points"]] == [2.0, None, None, 1.0]
    assert any("broken.json cannot be read" in line for line in report["missing"])
    assert any("the loss of step 2 is nan" in reason for reason in report["verdict"]["reasons"])


def test_a_baseline_that_did_not_finish(files: Any) -> None:
    files.run("reference", 0, None, status="failed", error="RuntimeError: out of luck", metrics={})
    files.run("cpp", 0)
    report = files.report()
    assert report["verdict"]["headline"].startswith("No run of reference finished")
    assert any("out of luck" in reason for reason in report["verdict"]["reasons"])


def test_runs_of_lightnings_own_logger(files: Any) -> None:
    for impl, step_ms in (("reference", 8.0), ("cpp", 4.0)):
        for version in range(2):
            path = files.folder / "logs" / impl / f"version_{version}" / "metrics.csv"
            path.parent.mkdir(parents=True)
            path.write_text(
                "epoch,step,train_loss,val_loss,test_accuracy,throughput/step_ms\n"
                f"0,9,1.5,,,{step_ms + version}\n0,9,,1.2,,\n1,19,0.5,,,{step_ms + version}\n"
                f"1,19,,,0.9{version},\n"
            )
    report = files.report()
    cpp = group(report, "cpp")
    assert cpp["seeds"] == [0, 1]
    assert cpp["step_ms"]["mean"] == 4.5
    assert cpp["speedup"]["mean"] == pytest.approx((8 / 4 + 9 / 5) / 2)
    assert cpp["metrics"]["test_accuracy"]["mean"] == pytest.approx(0.905)
    assert cpp["epoch_s"]["mean"] == pytest.approx(10 * 4.5e-3)
    assert [p["step"] for p in report["training"]["curves"][0]["points"]] == [9, 19]


def test_the_program_of_the_page_measures_any_module(files: Any, monkeypatch: Any) -> None:
    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = hoconv.HighOrderConv2d(3, 3)

        def training_step(self, batch: Any) -> Any:
            loss = self.layer(batch[0]).square().mean()
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    loader = DataLoader(TensorDataset(torch.randn(40, 3, 8, 8)), batch_size=2)
    monkeypatch.chdir(files.folder)
    trainer = functools.partial(pl.Trainer, accelerator="cpu", enable_progress_bar=False,
                                enable_model_summary=False, log_every_n_steps=1,
                                enable_checkpointing=False)  # fmt: skip
    monkeypatch.setattr(pl, "Trainer", trainer)
    exec(program, {"MyModule": Module, "loader": loader})
    report = files.report(operator="high_order_layer")
    assert group(report, "cpp")["seeds"] == [0, 1, 2]
    assert group(report, "cpp")["speedup"]["mean"] > 0
    for impl in ("reference", "cpp"):
        assert group(report, impl)["parts"]["operator_ms"] > 0


def test_the_committed_measurements_make_a_page(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert", reason="needs hoconv[report]")
    runs = [str(RESULTS / f"mnist_{impl}.json") for impl in ("reference", "cuda")]
    # A share of another GPU's step predicts nothing: as if all were of one.
    step = json.loads((RESULTS / "step_cuda.json").read_text())
    step["environment"]["gpu"] = json.loads(Path(runs[0]).read_text())["environment"]["gpu"]
    (tmp_path / "step_cuda.json").write_text(json.dumps(step))
    others = [str(tmp_path / "step_cuda.json"), str(RESULTS / "check_cuda.json")]
    assert main(["report", "high_order_layer", *runs, *others, "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "report_high_order_layer.json").read_text())
    assert report["verdict"]["headline"].endswith("times as fast as reference, by one seed alone.")
    (prediction,) = report["training"]["predictions"]
    old, new = (json.loads(Path(run).read_text())["throughput"]["step_ms"] for run in runs)
    assert prediction["measured"]["mean"] == pytest.approx(old / new)
    # How near they are says something of the day of each measurement, and nothing of the report.
    share, speedup = prediction["share"], prediction["speedup"]
    assert prediction["predicted"] == pytest.approx(1 / (1 - share + share / speedup))
    assert 1 < prediction["predicted"] < prediction["limit"]
