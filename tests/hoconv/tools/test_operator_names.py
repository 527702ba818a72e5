"""Every command takes the names of operators before, between and after its options."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from hoconv.dispatch.declaration import Operator, declare
from hoconv.tools import check
from hoconv.tools.benchmarking import command as benchmark
from hoconv.tools.report import command as report
from hoconv.tools.testing import run

FORMS = [
    ["toy", "other"],
    ["--operator", "toy", "other"],
    ["toy", "--operator", "other"],
    ["--operator", "toy", "--operator", "other"],
]


@pytest.fixture(autouse=True)
def other(toy: Operator) -> None:
    declare(dataclasses.replace(toy, name="other"))
    declare(dataclasses.replace(toy, name="third"))


@pytest.mark.parametrize("names", FORMS)
def test_check_benchmark_and_test_take_names_in_both_ways(
    names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check._parse(["--small", *names]).operator == ["toy", "other"]
    assert check._parse([*names, "--small"]).operator == ["toy", "other"]
    assert not check._parse(["--small"]).operator
    values = ["--impl", "reference", "swapped", "--device", "cpu"]
    for argv in ([*names, *values], [*values, *names], [*values[:3], *names, *values[3:]]):
        parsed = check._parse([*argv, "--small"])
        assert (parsed.operator, parsed.device) == (["toy", "other"], ["cpu"])
        assert parsed.impl == ["reference", "swapped"]
    assert check._parse(["toy", "--small", "other"]).operator == ["toy", "other"]
    assert check._parse(["--json", "toy", "other"]).json == Path("toy")

    timed: list[str] = []
    monkeypatch.setattr(benchmark, "_run", lambda operator, *_: bool(timed.append(operator.name)))
    benchmark.main([*names, "--device", "cpu"])
    benchmark.main(["--sizes", "4", "8", *names, "--device", "cpu"])
    assert timed == ["toy", "other"] * 2

    def tested(options: list[str], plugins: Any) -> int:
        assert plugins[0].names == {"toy", "other"}
        assert options[options.index("-k") + 1] == "meta"
        assert "-x" in options
        return 0

    monkeypatch.setattr(pytest, "main", tested)
    assert run.main([*names, "-x", "-k", "meta"]) == 0
    assert run.main(["-k", "meta", "-x", *names]) == 0


@pytest.mark.parametrize("names", [["unknown"], ["--operator", "unknown"]])
@pytest.mark.parametrize("command", [check.main, benchmark.main, run.main])
def test_an_unknown_name_is_refused(
    command: Any, names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command(names)
    assert "expected toy, other, third; got 'unknown'" in capsys.readouterr().err


def test_report_takes_the_name_in_both_ways(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = []
    monkeypatch.setattr(report, "make", lambda operator, paths, *_: made.append((operator, paths)))
    for argv in (["toy", "runs"], ["--operator", "toy", "runs"], ["runs", "--operator", "toy"]):
        assert report.main(argv) == 0
    assert report.main(["--operator", "toy"]) == 0
    assert made == [("toy", [Path("runs")])] * 3 + [("toy", [Path()])]
    with pytest.raises(SystemExit):
        report.main([])
    assert "OPERATOR: expected the name of an operator" in capsys.readouterr().err
