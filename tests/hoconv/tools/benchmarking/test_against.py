"""hoconv benchmark --against, with the times of processes made up: what it finds, and refuses."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hoconv.dispatch.declaration import Operator
from hoconv.tools import cli, tables
from hoconv.tools.benchmarking import against, command, measurement

PROCESSES = 8
SIZES = (64, 256)
Factor = Callable[[int, str], float]  # of a size and a direction


def per_read(factor: Factor, noise: float, seed: int) -> list[dict[str, Any]]:
    """Makes up what processes measure; `noise` is the standard deviation of the logarithm."""
    draw = random.Random(seed)

    def times(size: int, way: str) -> list[float]:
        return [factor(size, way) * draw.lognormvariate(0, noise) for _ in range(PROCESSES)]

    ways = ("forward", "backward")
    return [
        {"size": size, "contender": "swapped"} | {way: times(size, way) for way in ways}
        for size in SIZES
    ]


def same(size: int, way: str) -> float:
    return 1.0


def slower_backward(size: int, way: str) -> float:
    return 1.05 if (size, way) == (256, "backward") else 1.0


@pytest.fixture
def run(toy: Operator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs the command, whose processes have times by a factor; returns the exit code."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(command, "find_spec", lambda name: None)  # no charts
    monkeypatch.setattr(command, "REPEATS", {"cpu": 2})
    monkeypatch.setattr(measurement, "FLUSH_BYTES", 2**20)
    monkeypatch.setattr(measurement, "COPY_BYTES", {"cpu": 2**22})
    monkeypatch.setattr(measurement, "MATMUL_SIZE", {"cpu": 64})
    asked: list[int] = []

    def run(
        out: str, *options: str, factor: Factor = same, noise: float = 0.002, dtype: str = "float32"
    ) -> int:
        def made_up(processes: int, *_: Any) -> Any:
            asked.append(processes)
            yield per_read(factor, noise, len(asked))

        monkeypatch.setattr(command, "per_read", made_up)
        fixed = ("--device", "cpu", "--dtype", dtype, "--out", str(tmp_path / out))
        try:
            return cli.main(["benchmark", "toy", *fixed, *options])
        except SystemExit as error:
            return int(error.code or 0)
        finally:
            assert set(asked) <= {PROCESSES}

    return run


@pytest.fixture
def old(run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert run("old", "--processes", str(PROCESSES)) == 0
    capsys.readouterr()
    return tmp_path / "old" / "op_toy_cpu_float32.json"


def verdicts(out: str) -> dict[tuple[str, str], str]:
    """Size and direction -> verdict, of the table that was printed."""
    rows = [line.split() for line in out.partition("against")[2].splitlines()]
    return {(row[0], row[2]): " ".join(row[5:]) for row in rows if "swapped" in row}


def test_a_kernel_that_takes_five_percent_longer_is_found(
    run: Callable[..., int], old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(tables, "PIPE_WIDTH", 100)
    assert run("new", "--against", str(old), factor=slower_backward) == 1
    out = capsys.readouterr().out
    assert verdicts(out) == {
        ("64", "forward"): "not slower",
        ("64", "backward"): "not slower",
        ("256", "forward"): "not slower",
        ("256", "backward"): "slower",
    }
    printed = [line for line in out.splitlines() if not line.startswith(str(tmp_path))]
    assert max(map(len, printed)) <= 100
    record = json.loads((tmp_path / "new" / "op_toy_cpu_float32.json").read_text())
    assert len(record["rows"]) == 8
    assert [len(row["backward"]) for row in record["per_read"]] == [PROCESSES, PROCESSES]


def test_equal_code_and_faster_code_pass(
    run: Callable[..., int], old: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("new", "--against", str(old)) == 0
    assert {*verdicts(capsys.readouterr().out).values()} == {"not slower"}
    assert run("new", "--against", str(old), factor=lambda size, way: 0.9) == 0
    assert {*verdicts(capsys.readouterr().out).values()} == {"faster"}


def test_what_cannot_be_told_is_said_to_be_unclear(
    run: Callable[..., int], old: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("new", "--against", str(old), factor=slower_backward, noise=0.2) == 0
    assert {*verdicts(capsys.readouterr().out).values()} == {"unclear"}


def test_equal_code_raises_few_alarms_and_five_percent_is_seen() -> None:
    alarms = found = 0
    for seed in range(1000):
        old = {"per_read": per_read(same, 0.01, 2 * seed)}
        for factor in (same, slower_backward):
            changes = against.compare(old, {"per_read": per_read(factor, 0.01, 2 * seed + 1)})
            slower = {(change.size, change.way) for change in changes if change.verdict == "slower"}
            if factor is same:
                alarms += bool(slower)
            else:
                found += (256, "backward") in slower
    # The four tests have levels of a quarter of 1 %: of 1000, 10 are expected at most.
    assert 1 <= alarms <= 15
    assert found >= 990


def change(record: dict[str, Any], **facts: Any) -> None:
    record.update(facts)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda r: change(r, operator="other"), "has operator other, this run has toy"),
        (lambda r: change(r, device="cuda"), "has device cuda, this run has cpu"),
        (lambda r: change(r, dtype="float16"), "has dtype float16, this run has float32"),
        (lambda r: r["environment"].update(cpu="abacus"), "has hardware abacus, "),
        (lambda r: change(r, rows=r["rows"][:4]), "has sizes [64], this run has [64, 256]"),
        (lambda r: r.pop("per_read"), "has times of 0 processes"),
        (lambda r: [row[way].__delitem__(slice(2, None)) for row in r["per_read"]
                    for way in ("forward", "backward")],
         "has times of 2 processes, a comparison takes 6"),
        (lambda r: r.pop("rows"), "is no record of hoconv benchmark"),
    ],
    ids=["operator", "device", "dtype", "hardware", "sizes",
         "no processes", "few processes", "no rows"],
)  # fmt: skip
def test_another_record_is_refused_before_anything_is_measured(
    run: Callable[..., int], old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    damage: Callable[[dict[str, Any]], None], said: str,
) -> None:  # fmt: skip
    record = json.loads(old.read_text())
    damage(record)
    old.write_text(json.dumps(record))
    assert run("new", "--against", str(old)) == 2
    assert said in capsys.readouterr().err
    assert not list((tmp_path / "new").iterdir())


def test_an_earlier_record_is_not_overwritten(
    run: Callable[..., int], old: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = old.read_text()
    assert run("old", "--against", str(old)) == 2
    assert "would be overwritten; name another folder by --out" in capsys.readouterr().err
    assert old.read_text() == before


def test_options_that_fit_no_comparison_are_refused(
    run: Callable[..., int], old: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("new", "--against", str(old), "--quick") == 2
    assert "three repeats show no noise" in capsys.readouterr().err
    assert run("new", "--against", str(old), "--dtype", "float32", "float16") == 2
    assert "name one operator, one --device and one --dtype" in capsys.readouterr().err
    assert run("new", "--against", str(old.with_name("gone.json"))) == 2
    assert "gone.json cannot be read" in capsys.readouterr().err
