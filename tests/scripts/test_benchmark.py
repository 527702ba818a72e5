"""scripts/benchmark.py: its options, and the time of a start."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from hoconv import jit

Script = Callable[[str], ModuleType]


def test_start_is_the_first_and_the_median_of_the_later_ones(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter([9.0, 0.1, 0.5, 0.2, 0.4, 0.3])
    monkeypatch.setattr(
        script("benchmarks.library.start"), "_start", lambda library, cache: next(seconds)
    )

    assert script("benchmark").main(["start", "--device", "cpu", "--out", str(tmp_path)]) == 0

    record = json.loads((tmp_path / "start_cpu.json").read_text())
    assert record["first_s"] == 9.0
    assert record["later_s"] == {"median_s": 0.3, "each_s": [0.1, 0.5, 0.2, 0.4, 0.3]}


def test_start_is_timed_in_a_new_process(script: Script) -> None:
    if reason := jit.obstacle("cpu"):
        pytest.skip(reason)
    usual_cache = os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache"

    assert script("benchmarks.library.start")._start("cpu", str(usual_cache)) > 0


def test_start_that_fails_says_why(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")

    with pytest.raises(jit.BuildError, match=r"cpu: a C\+\+ compiler was not found"):
        script("benchmarks.library.start")._start("cpu", str(tmp_path))


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many"])
def test_option_that_counts_is_at_least_one(
    script: Script, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        script("benchmark").main(["throughput", f"--pairs={text}"])
    assert (
        f"--pairs: expected a whole number of at least 1, got '{text}'" in capsys.readouterr().err
    )
