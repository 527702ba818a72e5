"""scripts/benchmark.py approx: what it writes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hoconv import jit
from hoconv.dispatch.implementations import ImplementationError

Script = Callable[[str], ModuleType]
FILES = Path(__file__).parents[2] / "scripts/benchmarks/library/multipliers"
SMALL = ("--size", "24", "--images", "1", "--channels", "4", "--threads", "1")


@pytest.fixture(autouse=True)
def small_buffers(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script("hoconv.tools.benchmarking.measurement"), "FLUSH_BYTES", 2**20)


def test_rates_are_multiply_accumulates_over_the_median(script: Script, tmp_path: Path) -> None:
    if reason := jit.obstacle("cpu"):
        pytest.skip(reason)
    options = ["--device", "cpu", "--out", str(tmp_path), "--multiplier", "mbm16", "exact", *SMALL]
    assert script("benchmark").main(["approx", *options]) == 0
    record = json.loads((tmp_path / "approx_cpu.json").read_text())

    assert [row["contender"] for row in record["rows"]] == 2 * ["torch", "mbm16", "exact"]
    assert [row["macs"] for row in record["rows"]] == 3 * [24**3] + 3 * [14 * 14 * 9 * 4 * 4]
    for row in record["rows"]:
        torchs = record["rows"][0 if row["macs"] == 24**3 else 3]
        assert row["error"] is None
        for direction, passes in (("forward", 1), ("backward", 2)):
            timing = row[direction]
            rate = 1e-6 * passes * row["macs"] / timing["median_ms"]
            assert timing["gmac_per_s"] == pytest.approx(rate)
            share = torchs[direction]["median_ms"] / timing["median_ms"]
            assert timing["share_of_torch"] == pytest.approx(share)
        if row["contender"] != "torch":
            scalar = record["scalar_gmac_per_s"][row["contender"]]
            assert row["forward"]["times_scalar"] == pytest.approx(
                row["forward"]["gmac_per_s"] / scalar
            )
    assert (tmp_path / "approx_cpu.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_compiler_only_pytorch_is_timed_with_the_reason(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unavailable(*args: object) -> None:
        raise ImplementationError("no compiler here")

    monkeypatch.setattr(script("benchmarks.library.approx"), "choose", unavailable)
    options = ["--device", "cpu", "--out", str(tmp_path), *SMALL]
    assert script("benchmark").main(["approx", *options]) == 0
    record = json.loads((tmp_path / "approx_cpu.json").read_text())
    assert [row["contender"] for row in record["rows"]] == ["torch", "torch"]
    assert record["unavailable"] == "no compiler here"


def run(script: Script, folder: Path, *options: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Problem -> contender -> its row."""
    if reason := jit.obstacle("cpu"):
        pytest.skip(reason)
    common = ["--device", "cpu", "--out", str(folder), *SMALL, "--enough-ms", "1"]
    assert script("benchmark").main(["approx", *common, *options]) == 0
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for row in json.loads((folder / "approx_cpu.json").read_text())["rows"]:
        rows.setdefault(row["problem"], {})[row["contender"]] = row
    return rows


def test_products_of_integers_are_timed_alone_and_in_layers(script: Script, tmp_path: Path) -> None:
    names = ("mul8u_cut", "mul4s_cut", "mul12u_drum6")
    files = [str(FILES / f"{name}.c") for name in names]
    rows = run(script, tmp_path, "--multiplier", *files, "drum:k=4")
    assert len(rows) == 2
    for each in rows.values():
        layers = [part for name in names for part in (name, f"{name}, layer")]
        assert [*each] == ["torch", *layers, "drum:k=4"]
        for name, row in each.items():
            assert row["error"] is None
            assert row["forward"]["gmac_per_s"] > 0
            assert (row["backward"] is None) == (name in names)


def test_a_step_of_a_network_is_timed_exact_and_converted(script: Script, tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    files = [str(FILES / f"{name}.c") for name in ("mul8s_cut", "mul12u_drum6")]
    network = ["--problem", "mobilenet_v2", "--batch", "2", "--pixels", "32"]
    (step,) = run(script, tmp_path, *network, "--multiplier", *files).values()
    assert [*step] == ["torch", "mul8s_cut"]
    for row in step.values():
        assert row["error"] is None
        assert row["backward"]["median_ms"] > 0
        assert row["macs"] % 2 == 0


def test_without_torchvision_the_other_problems_are_timed(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    rows = run(script, tmp_path, "--problem", "mobilenet_v2", "matmul", "--multiplier", "mbm16")
    absent, product = rows.values()
    assert absent["torch"]["error"].startswith("torchvision: ")
    assert absent["torch"]["forward"] is None
    assert f", torch: {absent['torch']['error']}\n" in capsys.readouterr().out
    assert product["mbm16"]["forward"]["gmac_per_s"] > 0


def test_convolutions_are_those_of_the_networks(script: Script) -> None:
    problems = script("benchmarks.library.approx").PROBLEMS
    given = argparse.Namespace(batch=2, pixels=224)
    macs = [problem.macs for problem in problems["resnet18"](given)]
    first, whole, pointwise = 118_013_952, 115_605_504, 6_422_528
    expected = [first, whole, *3 * [whole // 2, pointwise, whole]]
    assert macs == [2 * each for each in expected]
    macs = [problem.macs for problem in problems["depthwise"](given)]
    assert macs == [2 * 9 * 32 * 112**2, 2 * 9 * 576 * 7**2]


def test_what_is_no_multiplier_is_refused(
    script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        script("benchmark").main(["approx", "--multiplier", "mbm17"])
    assert "--multiplier: expected one of exact, mitchell32" in capsys.readouterr().err


def test_an_interrupted_run_leaves_what_was_measured(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(given: argparse.Namespace) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setitem(script("benchmarks.library.approx").PROBLEMS, "conv", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(script, tmp_path, "--multiplier", "mbm16")
    record = json.loads((tmp_path / "approx_cpu.json").read_text())
    assert [row["contender"] for row in record["rows"]] == ["torch", "mbm16"]
