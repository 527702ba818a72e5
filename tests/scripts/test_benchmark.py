"""scripts/benchmark.py on a toy operator: what it writes, and what it does when one cannot run."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from hoconv import jit
from hoconv.declaration import Implementation, Operator

Script = Callable[[str], ModuleType]
CONTENDERS = ["reference", "twice", "torch.compile", "swapped"]


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares most tests the seconds of a compilation."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


@pytest.fixture(autouse=True)
def small_buffers(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    measurement = script("benchmarks.measurement")
    monkeypatch.setattr(measurement, "FLUSH_BYTES", 2**20)
    monkeypatch.setattr(measurement, "COPY_BYTES", {"cpu": 2**22})


def run(script: Script, out: Path, *options: str) -> dict[str, Any]:
    arguments = ["op", "--device", "cpu", "--out", str(out), *options]
    assert script("benchmark").main(arguments) == 0
    return json.loads((out / "op_toy_cpu_float32.json").read_text())


def add(toy: Operator, name: str, implementation: Implementation) -> None:
    assert isinstance(toy.implementations, dict)
    toy.implementations[name] = implementation


@pytest.mark.usefixtures("uncompiled")
def test_every_contender_is_timed_at_every_size(
    script: Script, toy: Operator, tmp_path: Path
) -> None:
    record = run(script, tmp_path)

    assert (record["operator"], record["device"], record["dtype"]) == ("toy", "cpu", "float32")
    assert record["command"] == f"python scripts/benchmark.py op --device cpu --out {tmp_path}"
    assert record["environment"]["torch"] == torch.__version__
    found = [(row["size"], row["contender"]) for row in record["rows"]]
    assert found == [(size, name) for size in (64, 256) for name in CONTENDERS]
    for row in record["rows"]:
        assert row["error"] is None
        for direction in ("forward", "backward"):
            timing = row[direction]
            assert 0 < timing["p20_ms"] <= timing["median_ms"] <= timing["p80_ms"]
            assert timing["repeats"] == 15
    assert (tmp_path / "op_toy_cpu_float32.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.usefixtures("uncompiled")
def test_floor_is_the_declared_bytes_over_the_copy_bandwidth(
    script: Script, toy: Operator, tmp_path: Path
) -> None:
    record = run(script, tmp_path, "--quick")

    for row in record["rows"]:
        tensor = 4 * row["size"]
        for direction, least_bytes in (("forward", 3 * tensor), ("backward", 5 * tensor)):
            timing = row[direction]
            floor = 1e3 * least_bytes / (1e9 * record["copy_gb_per_s"])
            assert timing["floor_ms"] == pytest.approx(floor)
            assert timing["share_of_floor"] == pytest.approx(floor / timing["median_ms"])
            per_second = 1e-9 * least_bytes / (1e-3 * timing["median_ms"])
            assert timing["gb_per_s"] == pytest.approx(per_second)


def test_copy_reads_and_writes(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    measurement = script("benchmarks.measurement")
    monkeypatch.setattr(measurement, "_timed", lambda call, device: (call(), 4.0))

    assert measurement.copy_bandwidth(torch.device("cpu"), 3) == pytest.approx(2 * 2**22 / 4e-3)


@pytest.mark.usefixtures("uncompiled")
def test_memory_is_what_a_call_holds_beyond_its_inputs(
    script: Script, toy: Operator, tmp_path: Path
) -> None:
    size = 2**16
    tensor = 4 * size

    record = run(script, tmp_path, "--quick", "--sizes", str(size))

    rows = {row["contender"]: row for row in record["rows"]}
    assert {row["least_memory_bytes"] for row in rows.values()} == {3 * tensor}
    # x + x and the product with y are held while it computes; y * x gets by with one less.
    assert rows["swapped"]["extra_memory_bytes"] >= 3 * tensor
    assert rows["twice"]["extra_memory_bytes"] > rows["swapped"]["extra_memory_bytes"]


@pytest.mark.usefixtures("uncompiled")
def test_quick_takes_the_first_size(script: Script, toy: Operator, tmp_path: Path) -> None:
    record = run(script, tmp_path, "--quick", "--sizes", "16", "32")

    assert {row["size"] for row in record["rows"]} == {16}
    assert {row["forward"]["repeats"] for row in record["rows"]} == {3}


@pytest.mark.usefixtures("uncompiled")
def test_out_of_memory_is_a_row_and_the_run_goes_on(
    script: Script, toy: Operator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def greedy(x: Tensor, y: Tensor, scale: float) -> Tensor:
        if len(x) == 256:  # Linux would grant it, and kill the process once it is written to
            torch.empty(int(0.95 * available), dtype=torch.uint8)
        return x * y * scale

    lines = Path("/proc/meminfo").read_text().splitlines()
    (available,) = (1024 * int(line.split()[1]) for line in lines if "MemAvailable" in line)
    add(toy, "greedy", Implementation(greedy))
    limit = resource.getrlimit(resource.RLIMIT_DATA)

    record = run(script, tmp_path)

    rows = {(row["size"], row["contender"]): row for row in record["rows"]}
    assert rows[64, "greedy"]["error"] is None
    assert rows[256, "greedy"]["error"] == "out of memory"
    assert rows[256, "greedy"]["forward"] is None
    assert rows[256, "swapped"]["forward"] is not None
    assert resource.getrlimit(resource.RLIMIT_DATA) == limit
    assert "greedy at 256: out of memory" in capsys.readouterr().out


@pytest.mark.usefixtures("uncompiled")
def test_an_unavailable_implementation_says_why(
    script: Script, toy: Operator, tmp_path: Path
) -> None:
    def broken(*args: Any) -> Tensor:
        raise RuntimeError("a tensor is missing")

    add(toy, "broken", Implementation(broken))
    add(toy, "unbuilt", Implementation(broken, load=lambda: "no such name"))
    add(toy, "absent", Implementation(broken, obstacle=lambda: "it was never written; write it"))

    record = run(script, tmp_path, "--quick")

    assert "never written" in record["unavailable"]["absent"]
    errors = {row["contender"]: row["error"] for row in record["rows"]}
    assert errors["broken"] == "a tensor is missing"
    assert errors["unbuilt"] == "impl=unbuilt is broken for toy: no such name"
    assert list(record["unavailable"]) == ["absent"]


def test_reference_is_compiled_anew_for_every_size(
    script: Script, toy: Operator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        compiled.append(inputs[0].numel())
        return graph.forward

    compile = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **options: compile(function, backend=backend, **options)
    )

    sizes = range(2, 12)  # more than PyTorch recompiles one function for

    record = run(script, tmp_path, "--sizes", *map(str, sizes))

    assert compiled == list(sizes)
    assert all(row["error"] is None for row in record["rows"])


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
