"""hoconv benchmark on a toy operator: what it writes, and what it does when one cannot run."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hoconv.dispatch.declaration import Implementation, Operator, Sample
from hoconv.tools import cli, tables
from hoconv.tools.benchmarking import command, measurement

CONTENDERS = ["reference", "twice", "torch.compile", "swapped"]


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares most tests the seconds of a compilation."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "FLUSH_BYTES", 2**20)
    monkeypatch.setattr(measurement, "COPY_BYTES", {"cpu": 2**22})
    monkeypatch.setattr(measurement, "MATMUL_SIZE", {"cpu": 64})


def run(out: Path, *options: str, code: int = 0) -> dict[str, Any]:
    assert cli.main(["benchmark", "--device", "cpu", "--out", str(out), *options]) == code
    return json.loads((out / "op_toy_cpu_float32.json").read_text())


def add(toy: Operator, name: str, implementation: Implementation) -> None:
    assert isinstance(toy.implementations, dict)
    toy.implementations[name] = implementation


@pytest.mark.usefixtures("uncompiled")
def test_every_contender_is_timed_at_every_size(toy: Operator, tmp_path: Path) -> None:
    record = run(tmp_path)

    assert (record["operator"], record["device"], record["dtype"]) == ("toy", "cpu", "float32")
    assert record["command"] == f"hoconv benchmark --device cpu --out {tmp_path}"
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
def test_floor_is_the_longer_of_moving_the_declared_bytes_and_computing(
    toy: Operator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for peak, bound in ((1e15, "memory"), (1e3, "arithmetic")):
        monkeypatch.setattr(command, "matmul_peak", lambda *_, peak=peak: peak)
        record = run(tmp_path, "--quick")
        assert record["matmul_tflop_per_s"] == pytest.approx(1e-12 * peak)
        for row in record["rows"]:
            size = row["size"]
            for way, least_bytes, flops in (
                ("forward", 12 * size, 2 * size), ("backward", 20 * size, 4 * size),
            ):  # fmt: skip
                timing = row[way]
                moving, computing = least_bytes / (1e9 * record["copy_gb_per_s"]), flops / peak
                assert (timing["least_bytes"], timing["least_flops"]) == (least_bytes, flops)
                assert timing["floor_is"] == bound
                assert timing["floor_ms"] == pytest.approx(1e3 * max(moving, computing))
                share = timing["floor_ms"] / timing["median_ms"]
                assert timing["share_of_floor"] == pytest.approx(share)
                seconds = 1e-3 * timing["median_ms"]
                assert timing["gb_per_s"] == pytest.approx(1e-9 * least_bytes / seconds)
                assert timing["tflop_per_s"] == pytest.approx(1e-12 * flops / seconds)


def test_tables_fit_eighty_columns_and_name_what_was_timed(
    toy: Operator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(tables, "PIPE_WIDTH", 80)
    record = run(tmp_path, "--quick")
    out = capsys.readouterr().out
    printed = [line for line in out.splitlines() if not line.startswith(str(tmp_path))]
    assert max(map(len, printed)) <= 80
    assert all(name in out for name in CONTENDERS)
    assert record["package"]["distribution"] is None  # of the test's own module
    assert set(record["package"]) == {"distribution", "version", "commit"}


def test_copy_reads_and_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "_timed", lambda call, device: (call(), 4.0))

    assert measurement.copy_bandwidth(torch.device("cpu"), 3) == pytest.approx(2 * 2**22 / 4e-3)


@pytest.mark.usefixtures("uncompiled")
def test_memory_is_what_a_call_holds_beyond_its_inputs(toy: Operator, tmp_path: Path) -> None:
    size = 2**16
    tensor = 4 * size

    record = run(tmp_path, "--quick", "--sizes", str(size))

    rows = {row["contender"]: row for row in record["rows"]}
    assert {row["least_memory_bytes"] for row in rows.values()} == {3 * tensor}
    # x + x and the product with y are held while it computes; y * x gets by with one less.
    assert rows["swapped"]["extra_memory_bytes"] >= 3 * tensor
    assert rows["twice"]["extra_memory_bytes"] > rows["swapped"]["extra_memory_bytes"]


@pytest.mark.usefixtures("uncompiled")
def test_the_grid_is_timed_against_torch_compile_where_that_pays_and_drawn(
    toy: Operator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "benchmark", "--device", "cpu", "--out", str(tmp_path), "--grid"
    assert cli.main(options) == 0
    assert capsys.readouterr().err.splitlines() == ["toy: it declares no grid"]

    def make(size: int, device: torch.device, dtype: torch.dtype) -> Sample:
        x = torch.ones(size, device=device, dtype=dtype)
        return Sample((x, x), {"scale": 3.0}, name="ones")

    grid = {"many": partial(make, 512), "a few": partial(make, 8)}
    changed = replace(toy.benchmark, grid=grid, compiles=lambda sample: len(sample.args[0]) < 512)
    object.__setattr__(toy, "benchmark", changed)
    assert cli.main(options) == 0
    record = json.loads((tmp_path / "grid_toy_cpu_float32.json").read_text())
    found = [(row["size"], row["sample"], row["contender"]) for row in record["rows"]]
    assert found == [
        ("many", "ones", "swapped"),
        ("a few", "ones", "torch.compile"),
        ("a few", "ones", "swapped"),
    ]
    assert record["rows"][0]["forward"]["least_bytes"] == 3 * 4 * 512
    assert (tmp_path / "grid_toy_cpu_float32.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "op_toy_cpu_float32.json").exists()


@pytest.mark.usefixtures("uncompiled")
def test_quick_takes_the_first_size(toy: Operator, tmp_path: Path) -> None:
    record = run(tmp_path, "--quick", "--sizes", "16", "32")

    assert {row["size"] for row in record["rows"]} == {16}
    assert {row["forward"]["repeats"] for row in record["rows"]} == {3}


@pytest.mark.usefixtures("uncompiled")
def test_out_of_memory_is_a_row_and_the_run_goes_on(
    toy: Operator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def greedy(x: Tensor, y: Tensor, scale: float) -> Tensor:
        if len(x) == 256:  # Linux would grant it, and kill the process once it is written to
            torch.empty(int(0.95 * available), dtype=torch.uint8)
        return x * y * scale

    lines = Path("/proc/meminfo").read_text().splitlines()
    (available,) = (1024 * int(line.split()[1]) for line in lines if "MemAvailable" in line)
    add(toy, "greedy", Implementation(greedy))
    limit = resource.getrlimit(resource.RLIMIT_DATA)

    record = run(tmp_path)

    rows = {(row["size"], row["contender"]): row for row in record["rows"]}
    assert rows[64, "greedy"]["error"] is None
    assert rows[256, "greedy"]["error"] == "out of memory"
    assert rows[256, "greedy"]["forward"] is None
    assert rows[256, "swapped"]["forward"] is not None
    assert resource.getrlimit(resource.RLIMIT_DATA) == limit
    assert "greedy at 256: out of memory" in capsys.readouterr().out


@pytest.mark.slow
def test_where_a_contender_loses_the_device_another_process_measures_the_rest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failure = measurement.failure
    calls = 0

    def lose(action: Callable[[], Any]) -> str | None:
        nonlocal calls
        calls += 1
        if calls == 2:  # of the second contender in this process
            raise torch.AcceleratorError("an illegal memory access\nand more")
        return failure(action)

    monkeypatch.setattr(measurement, "failure", lose)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    argv = ["dynamic_conv1d", "--device", "cpu", "--out", str(tmp_path), "--quick"]
    assert cli.main(["benchmark", *argv]) == 0
    record = json.loads((tmp_path / "op_dynamic_conv1d_cpu_float32.json").read_text())
    errors = {row["contender"]: row["error"] for row in record["rows"]}
    second = [*errors][1]
    assert {each for each in errors if errors[each]} == {second}
    assert errors[second] == "an illegal memory access"
    assert calls == 2  # the others were measured elsewhere
    assert all(row["error"] or row["forward"]["median_ms"] > 0 for row in record["rows"])


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("wrong", ["output", "gradient"])
def test_a_contender_that_keeps_results_loses_its_times(
    toy: Operator, tmp_path: Path, wrong: str
) -> None:
    kept: dict[int, Tensor] = {}

    def keeps(x: Tensor, y: Tensor, scale: float) -> Tensor:
        out = x * y * scale
        if wrong == "output":
            return out - out.detach() + kept.setdefault(x.data_ptr(), out.detach().clone())
        first = kept.setdefault(x.data_ptr(), x.detach().clone())
        surrogate = (x * y.detach() + first * y) * scale
        return surrogate - surrogate.detach() + out.detach()

    add(toy, "keeps", Implementation(keeps))

    record = run(tmp_path, code=1)

    rows = {(row["size"], row["contender"]): row for row in record["rows"]}
    for size in (64, 256):
        assert rows[size, "keeps"]["error"].startswith(f"wrong: {wrong}: error")
        assert rows[size, "keeps"]["forward"] is None
        for name in CONTENDERS:
            assert rows[size, name]["error"] is None
            assert rows[size, name]["compared"] >= 1


@pytest.mark.usefixtures("uncompiled")
def test_an_unavailable_implementation_says_why(toy: Operator, tmp_path: Path) -> None:
    def broken(*args: Any) -> Tensor:
        raise RuntimeError("a tensor is missing")

    add(toy, "broken", Implementation(broken))
    add(toy, "unbuilt", Implementation(broken, load=lambda: "no such name"))
    add(toy, "absent", Implementation(broken, obstacle=lambda: "it was never written; write it"))

    record = run(tmp_path, "--quick", code=1)

    assert "never written" in record["unavailable"]["absent"]
    errors = {row["contender"]: row["error"] for row in record["rows"]}
    assert errors["broken"] == "a tensor is missing"
    assert errors["unbuilt"] == "impl=unbuilt is broken for toy: no such name"
    assert list(record["unavailable"]) == ["absent"]


def test_reference_is_compiled_anew_for_every_size(
    toy: Operator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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

    record = run(tmp_path, "--sizes", *map(str, sizes))

    assert compiled == list(sizes)
    assert all(row["error"] is None for row in record["rows"])
