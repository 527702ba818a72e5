"""What the benchmark makes of the profiler's answer."""

from __future__ import annotations

import csv
import io
import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def profile(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("benchmarks.library.profile")


@pytest.fixture
def profiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts an ncu on the path that answers with a text and an exit code."""

    def answer(text: str, code: int = 0) -> None:
        (tmp_path / "answer").write_text(text)
        ncu = tmp_path / "ncu"
        ncu.write_text(f"#!/bin/sh\ncat {tmp_path}/answer\nexit {code}\n")
        ncu.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return answer


def report(profile: ModuleType, **counters: str) -> str:
    """As ncu prints it: its own lines, then names, units and a row for each of two kernels."""
    metrics = [*profile._PERCENT.values(), *map(profile._STALL.format, profile._STALLS)]
    row = dict.fromkeys([*metrics, *profile._OTHER], "1,024.5") | counters
    text = io.StringIO()
    text.write("==PROF== Connected to process 1\n")
    writer = csv.writer(text, quoting=csv.QUOTE_ALL)
    writer.writerow(["ID", "Kernel Name", *row])
    writer.writerow(["", "", *["unit"] * len(row)])
    for number, kernel in enumerate(("void hoconv::forward<P>()", "void hoconv::backward<P>()")):
        writer.writerow([number, kernel, *row.values()])
    return text.getvalue()


def test_counters_become_a_record(
    profile: ModuleType, profiler: Callable[..., None], tmp_path: Path
) -> None:
    wait = profile._STALL.format("wait")
    profiler(report(profile, **{"launch__registers_per_thread": "128", wait: "0.04"}))
    arguments = Namespace(device=["cuda"], case=["layer tf32"], out=tmp_path)
    profile.run(arguments, {"command": "it"})
    record = json.loads((tmp_path / "profile_cuda.json").read_text())
    assert record["command"] == "it"
    forward, backward = record["kernels"]
    assert (forward["kernel"], backward["kernel"]) == ("forward", "backward")
    assert forward["case"] == "layer tf32"
    assert forward["registers_per_thread"] == 128
    assert forward["million_instructions"] == pytest.approx(1024.5 / 1e6)
    assert forward["percent"]["issue"] == 1024.5
    assert "wait" not in forward["stalls"]
    assert forward["stalls"]["barrier"] == 1024.5


@pytest.mark.parametrize(("text", "code"), [("==ERROR== no permission", 1), ("nothing ran", 0)])
def test_a_profiler_that_fails_is_quoted(
    profile: ModuleType, profiler: Callable[..., None], tmp_path: Path, text: str, code: int
) -> None:
    profiler(text, code)
    arguments = Namespace(device=["cuda"], case=["layer tf32"], out=tmp_path)
    with pytest.raises(SystemExit, match=text):
        profile.run(arguments, {})


def test_a_missing_profiler_is_said(
    profile: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="ncu was not found"):
        profile.run(Namespace(device=["cuda"], case=["layer tf32"], out=tmp_path), {})


def test_a_cpu_has_no_counters(profile: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="profile: "):
        profile.run(Namespace(device=["cpu"], case=["layer tf32"], out=tmp_path), {})
