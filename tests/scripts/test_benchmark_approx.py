"""scripts/benchmark.py approx: what it writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from hoconv import jit
from hoconv.dispatch.implementations import ImplementationError

Script = Callable[[str], ModuleType]
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
