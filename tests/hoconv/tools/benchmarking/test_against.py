"""hoconv benchmark --against: what it finds between two copies of a package, and refuses."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hoconv.dispatch.declaration import Operator
from hoconv.tools import cli
from hoconv.tools.benchmarking import against

ROOT = Path(__file__).parents[4]
SIZES = (64, 256)
PAIRS = 11
Factor = Callable[[str], float]  # of a direction

PACE = """
import os

import torch
from hoconv.dispatch.declaration import Benchmark, Cost, Implementation, Operator, Sample, declare


def doubled(x):
    for _ in range(WORK):
        y = x + x
    return y


def pace(x, *, impl="loop"):
    return OPERATOR.implementations[impl].function(x)


def sample(size, device, dtype):
    return Sample((torch.randn(size, device=device, dtype=dtype),))


OPERATOR = declare(Operator(
    name="pace", function=pace,
    implementations={
        "reference": Implementation(lambda x: 2 * x),
        NAME: Implementation(doubled),
    },
    samples=lambda device, dtype: [sample(4, device, dtype)],
    tolerances={torch.float32: 1e-6},
    cost=lambda sample: Cost(1, 1, 1, 1),
    benchmark=Benchmark("n", (4,), sample),
))
"""


def pace(folder: Path, work: str = "1", name: str = "loop") -> Path:
    """Writes a package whose kernel does some amount of work; returns the folder that holds it."""
    folder.mkdir()
    source = PACE.replace("WORK", work).replace("NAME", repr(name))
    (folder / "pace.py").write_text(textwrap.dedent(source))
    info = folder / "pace-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pace\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[hoconv.operators]\npace = pace\n")
    return folder


def benchmark(new: Path, old: Path) -> subprocess.CompletedProcess[str]:
    command = ["-m", "hoconv.tools.cli", "benchmark", "pace", "--device", "cpu"]
    return subprocess.run(
        [sys.executable, *command, "--out", new / "out", "--against", old],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (new, ROOT)))},
        cwd=new, capture_output=True, text=True, check=False,
    )  # fmt: skip


def changes(new: Path) -> dict[str, str]:
    """Direction -> verdict, of the record."""
    record = json.loads((new / "out" / "against_pace_cpu_float32.json").read_text())
    assert str(new.parent) not in json.dumps(record["against"])
    return {change["way"]: change["verdict"] for change in record["changes"]}


@pytest.mark.slow
def test_the_copy_in_the_folder_is_compared_with_the_one_that_is_imported(tmp_path: Path) -> None:
    quick, slow = pace(tmp_path / "quick"), pace(tmp_path / "slow", work="100")
    done = benchmark(slow, quick)
    assert done.returncode == 1, done.stderr
    assert re.search(r" 4 +loop +forward .* slower", done.stdout)
    assert changes(slow)["forward"] == "slower"

    done = benchmark(quick, slow)
    assert changes(quick)["forward"] == "faster"
    assert done.returncode == int("slower" in changes(quick).values()), done.stderr


@pytest.mark.parametrize(
    ("name", "work", "said"),
    [
        ("other", "1", "loop at 4: the older package: KeyError: 'loop'"),
        ("loop", "os._exit(7)", "loop at 4: the older package: it ended its process"),
    ],
)
def test_what_the_older_copy_cannot_do_is_said(
    tmp_path: Path, name: str, work: str, said: str
) -> None:
    new, old = pace(tmp_path / "new"), pace(tmp_path / "old", work, name)
    done = benchmark(new, old)
    assert done.returncode == 1, done.stderr
    assert f"\n{said}\n" in done.stdout
    assert not changes(new)


def test_a_folder_without_the_package_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    done = benchmark(pace(tmp_path / "new"), empty)
    assert done.returncode == 2
    assert f"--against: {empty}: expected a checkout of the package pace" in done.stderr
    assert f"pace would come from {tmp_path / 'new' / 'pace.py'}" in done.stderr


class MadeUp:
    """In place of a process."""

    made = 0

    def __init__(self, *_: Any) -> None:
        MadeUp.made += 1

    def found(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def run(toy: Operator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs the command with ratios of a factor and noise; returns the exit code, and size and
    direction -> verdict."""
    monkeypatch.setattr(against, "Copy", MadeUp)
    monkeypatch.setattr(MadeUp, "made", 0)

    def run(factor: Factor, noise: float, seed: int = 0) -> tuple[int, dict[Any, str]]:
        draw = random.Random(seed)
        monkeypatch.setattr(
            against, "pair_ratios",
            lambda *_: {way: factor(way) * draw.lognormvariate(0, noise) for way in against.WAYS},
        )  # fmt: skip
        fixed = ("--device", "cpu", "--out", str(tmp_path), "--against", str(tmp_path))
        code = cli.main(["benchmark", "toy", *fixed])
        record = json.loads((tmp_path / "against_toy_cpu_float32.json").read_text())
        # Fewer calls are compared once more, by fewer pairs.
        assert all(PAIRS - 2 <= len(change["ratios"]) <= PAIRS for change in record["changes"])
        return code, {(c["size"], c["way"]): c["verdict"] for c in record["changes"]}

    return run


def same(way: str) -> float:
    return 1.0


def slower_backward(way: str) -> float:
    return 1.05 if way == "backward" else 1.0


def test_a_kernel_that_takes_five_percent_longer_is_found(
    run: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    verdicts = {"forward": "not slower", "backward": "slower"}
    code, found = run(slower_backward, 0.005)
    assert (code, found) == (1, {(n, way): verdicts[way] for n in SIZES for way in verdicts})
    out = capsys.readouterr().out
    assert re.search(r" 256 +swapped +backward +1\.0\d\d +1\.0\d\d-1\.0\d\d +slower", out)


@pytest.mark.parametrize(
    ("factor", "noise", "verdict"),
    [
        (same, 0.005, "not slower"),
        (lambda way: 1.008, 0.0005, "not slower"),
        (lambda way: 0.992, 0.0005, "not slower"),
        (lambda way: 0.9, 0.005, "faster"),
        (slower_backward, 0.5, "unclear"),
    ],
    ids=["equal", "a slow process", "a fast process", "faster", "noise"],
)
def test_what_is_not_slower_for_certain_passes(
    run: Callable[..., Any], factor: Factor, noise: float, verdict: str
) -> None:
    code, found = run(factor, noise)
    assert (code, {*found.values()}) == (0, {verdict})


def test_what_only_one_process_is_slower_by_is_no_change(run: Callable[..., Any]) -> None:
    code, found = run(lambda way: 1.05 if MadeUp.made == 2 else 1.0, 0.005)
    assert (code, {*found.values()}) == (0, {"not slower"})
    assert MadeUp.made == 2 + 2 * PAIRS  # two for every pair that is compared once more


@pytest.mark.parametrize("seed", range(5))
def test_what_each_process_is_slower_by_is_no_change(run: Callable[..., Any], seed: int) -> None:
    """Each process has a speed of its own, by percents."""

    def own(way: str) -> float:
        return 1.06 if MadeUp.made == 2 else random.Random(f"{seed} {MadeUp.made}").gauss(1, 0.03)

    code, found = run(own, 0.002)
    assert code == 0
    assert "slower" not in found.values()


def test_equal_code_raises_few_alarms_and_five_percent_is_seen() -> None:
    draw = random.Random(1)
    alarms = found = 0
    for _ in range(2000):
        noise = [draw.lognormvariate(0, 0.01) for _ in range(PAIRS)]
        alarms += against.interval(noise, against.FALSE_ALARMS)[1] > 1
        found += against.interval([1.05 * n for n in noise], against.FALSE_ALARMS / 4)[1] > 1
    assert 5 <= alarms <= 40  # of 1 %
    assert found >= 1980


def test_a_quick_comparison_is_refused(
    run: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["benchmark", "toy", "--quick", "--against", str(tmp_path)])
    assert "three repeats show no noise" in capsys.readouterr().err
