"""``scripts/benchmark.py calls``: what it writes of every layer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

Script = Callable[[str], ModuleType]


def test_every_layer_is_compared_with_one_of_pytorch(
    script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = script("benchmarks.library.calls")
    monkeypatch.setattr(calls, "CALLS", 1)
    monkeypatch.setattr(calls, "TURNS", 3)
    threads = torch.get_num_threads()
    options = ["calls", "--device", "cpu", "--impl", "reference", "--out", str(tmp_path)]
    assert script("benchmark").main(options) == 0
    assert torch.get_num_threads() == threads

    record = json.loads((tmp_path / "calls_cpu.json").read_text())
    assert (record["device"], record["impl"]) == ("cpu", "reference")
    rows = {row["layer"]: row for row in record["rows"]}
    assert {row["peer"] for row in rows.values()} == {"nn.Conv2d", "nn.LSTM"} < rows.keys()
    for name, row in rows.items():
        for phase in ("forward", "forward_backward"):
            times = row[phase]
            assert 0 < times["p20_us"] <= times["median_us"] <= times["p80_us"]
            assert times["ratio"] == times["median_us"] / rows[row["peer"]][phase]["median_us"]
            assert (times["ratio"] == 1) >= (name == row["peer"])
