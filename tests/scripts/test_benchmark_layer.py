"""The sub-command `layer` of scripts/benchmark.py: what it writes, and what it makes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from hoconv import high_order_layer

Script = Callable[[str], ModuleType]
SIZE, LARGE = 2, 3


@pytest.fixture
def layer(script: Script, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, with a problem and buffers that are small."""
    measurement, module = (
        script("hoconv.tools.benchmarking.measurement"),
        script("benchmarks.library.layer"),
    )
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(measurement, "FLUSH_BYTES", 2**20)
    for device in ("cpu", "cuda"):
        monkeypatch.setitem(measurement.COPY_BYTES, device, 2**22)
        monkeypatch.setitem(measurement.MATMUL_SIZE, device, 64)
        monkeypatch.setitem(measurement.REPEATS, device, 3)
        monkeypatch.setitem(module.TRAINS, device, (LARGE,))
    monkeypatch.setattr(module, "IMAGE", 12)
    monkeypatch.setattr(module, "EXACT_IMAGES", 1)
    return module


@pytest.fixture
def contend(layer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces the contenders by functions of this file."""

    def replace(*ways: Any) -> None:
        monkeypatch.setattr(layer, "_ways", lambda device_type: (list(ways), {}))

    return replace


def run(script: Script, out: Path, *options: str, device: str = "cpu") -> dict[str, Any]:
    arguments = ["layer", "--device", device, "--out", str(out), *options]
    assert script("benchmark").main(arguments) == 0
    return json.loads((out / f"layer_{device}.json").read_text())


def definition(x: Tensor, *parameters: Tensor, kernel_size: int) -> Tensor:
    return high_order_layer(x, *parameters, kernel_size=kernel_size, impl="reference")


def test_every_contender_is_timed_at_its_sizes(
    script: Script, layer: ModuleType, tmp_path: Path
) -> None:
    sizes = ["--sizes", str(SIZE), "4", "--slow-sizes", "4"]

    record = run(script, tmp_path, *sizes)

    assert record["command"].startswith("python scripts/benchmark.py layer --device cpu")
    assert (record["device"], list(record["matmul_tflop_per_s"])) == ("cpu", ["float32"])
    fast = ["conv + op", "channels-last conv + op", "cpp", "cuda"]
    slow = ["reference", "torch.compile", "conv + torch.compile",
            "channels-last conv + torch.compile"]  # fmt: skip
    assert "cuda" in record["unavailable"]
    for size, names in ((SIZE, fast), (4, slow + fast)):
        found = {row["contender"] for row in record["rows"] if row["size"] == size}
        assert found == set(names) - set(record["unavailable"])
    for row in record["rows"]:
        assert row["error"] is None
        for phase in ("forward", "forward_backward"):
            timing = row[phase]
            assert 0 < timing["p20_ms"] <= timing["median_ms"] <= timing["p80_ms"]
            assert timing["repeats"] == 3
    assert {row["size"] for row in record["errors"]} == {4}
    for name in ("layer_cpu.png", "layer_cpu_memory.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.gpu
def test_every_precision_is_timed_on_a_gpu(
    script: Script, layer: ModuleType, tmp_path: Path
) -> None:
    record = run(script, tmp_path, "--sizes", "2", "--slow-sizes", "2", device="cuda")

    assert list(record["matmul_tflop_per_s"]) == ["float32", "tf32", "bfloat16", "float16"]
    assert len(record["rows"]) == len(record["errors"]) == 4 * 8
    for row in record["rows"] + record["errors"] + record["trains"]:
        assert row["error"] is None


def test_floors_are_least_bytes_and_operations_over_measured_rates(
    script: Script, layer: ModuleType, contend: Callable[..., None], tmp_path: Path
) -> None:
    contend(layer.Way("ours", "ours", definition))

    record = run(script, tmp_path, "--sizes", str(SIZE))

    (row,) = record["rows"]
    pixels, weights = SIZE * 12 * 12, 25 * 3 * 5 * 5
    image, parameters = 4 * 3 * pixels, 4 * (weights + 25)
    flops = 2 * pixels * (weights + 3 * 25)
    for phase, least_bytes, operations in (
        ("forward", 2 * image + parameters, flops),
        ("forward_backward", 5 * image + 3 * parameters, 3 * flops),
    ):
        bandwidth = 1e9 * record["copy_gb_per_s"]
        assert row[phase]["bytes_floor_ms"] == pytest.approx(1e3 * least_bytes / bandwidth)
        peak = 1e12 * record["matmul_tflop_per_s"]["float32"]
        assert row[phase]["flops_floor_ms"] == pytest.approx(1e3 * operations / peak)


def test_matrix_product_counts_multiplications_and_additions(
    script: Script, layer: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    measurement = script("hoconv.tools.benchmarking.measurement")
    monkeypatch.setattr(measurement, "_timed", lambda call, device: (call(), 4.0))

    # A part of the key by which Inductor finds what it compiled: it stays as it was.
    before = torch.backends.cuda.matmul.fp32_precision

    peak = measurement.matmul_peak(torch.device("cpu"), torch.float32, False, 3)

    assert peak == pytest.approx(2 * 64**3 / 4e-3)
    assert torch.backends.cuda.matmul.fp32_precision == before


def test_best_peer_is_the_fastest_that_ran(layer: ModuleType) -> None:
    def row(kind: str, name: str, forward: float | None, both: float | None) -> dict[str, Any]:
        phases = {"forward": forward, "forward_backward": both}
        times = {phase: time and {"median_ms": time} for phase, time in phases.items()}
        error = None if forward else "out of memory"
        return {"kind": kind, "contender": name, "error": error, **times}

    ours = [row("ours", "cuda", 2.0, 5.0), row("ours", "cpp", 16.0, None)]
    ours[1]["error"] = "out of memory"
    peers = [row("peer", "a", 4.0, 30.0), row("peer", "b", 8.0, 20.0), row("peer", "c", None, None)]

    best = layer.best_peer([row("reference", "reference", 1.0, 1.0), *peers, *ours])

    assert best == {
        "among": ["a", "b"],
        "forward": {"contender": "a", "median_ms": 4.0, "speed_up": {"cuda": 2.0}},
        "forward_backward": {"contender": "b", "median_ms": 20.0, "speed_up": {"cuda": 4.0}},
    }
    assert layer.best_peer(ours) == {"among": [], "forward": None, "forward_backward": None}


def test_errors_are_those_against_the_definition_in_float64(
    script: Script, layer: ModuleType, contend: Callable[..., None], tmp_path: Path
) -> None:
    def off(x: Tensor, weight: Tensor, bias: Tensor, *, kernel_size: int) -> Tensor:
        """The output a hundredth too large; of the gradients only that of the bias."""
        others = definition(x, weight, bias.detach(), kernel_size=kernel_size)
        own = definition(x.detach(), weight.detach(), bias, kernel_size=kernel_size)
        return others + 1.01 * own - 0.99 * others.detach() - 0.01 * own.detach()

    def undefined(x: Tensor, *parameters: Tensor, kernel_size: int) -> Tensor:
        return definition(x, *parameters, kernel_size=kernel_size) + torch.nan

    contend(
        layer.Way("definition", "peer", definition, channels_last=True),
        layer.Way("off", "ours", off),
        layer.Way("undefined", "ours", undefined),
    )

    record = run(script, tmp_path, "--sizes", str(SIZE))

    errors = {row["contender"]: row for row in record["errors"]}
    assert all(row["size"] == SIZE and row["error"] is None for row in errors.values())
    for name in ("output", "x", "weight", "bias"):
        assert 0 < errors["definition"][name] < 1e-6
    assert errors["off"]["output"] == pytest.approx(1e-2, rel=1e-3)
    assert errors["off"]["bias"] == pytest.approx(1e-2, rel=1e-3)
    assert errors["off"]["x"] < 1e-6
    assert errors["off"]["weight"] < 1e-6
    assert errors["undefined"]["output"] == "nan"


def test_precisions_set_the_flags_and_put_them_back(
    script: Script,
    layer: ModuleType,
    contend: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    seen: list[tuple[object, ...]] = []

    def flags() -> tuple[object, ...]:
        return cudnn.allow_tf32, cudnn.benchmark, matmul.allow_tf32

    def curious(x: Tensor, *parameters: Tensor, kernel_size: int) -> Tensor:
        seen.append(flags())
        return definition(x, *parameters, kernel_size=kernel_size)

    contend(layer.Way("curious", "ours", curious))
    precisions = [layer.FLOAT32, layer.TF32]
    monkeypatch.setitem(layer.PRECISIONS, "cpu", precisions)
    before = flags()

    for names, expected in (
        (["float32"], {(False, True, before[2])}),
        (["tf32"], {(True, True, before[2])}),
        (["float32", "tf32"], {(False, True, before[2]), (True, True, before[2])}),
    ):
        seen.clear()
        run(script, tmp_path, "--sizes", str(SIZE), "--precision", *names)
        assert set(seen) == expected
        assert flags() == before

    monkeypatch.setattr(layer, "take_turns", None)  # what is raised here is not a contender's
    with pytest.raises(TypeError):
        run(script, tmp_path, "--sizes", str(SIZE))
    assert flags() == before


def test_out_of_memory_is_recorded_and_the_run_goes_on(
    script: Script,
    layer: ModuleType,
    contend: Callable[..., None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def greedy(limit: int) -> Callable[..., Tensor]:
        def function(x: Tensor, *parameters: Tensor, kernel_size: int) -> Tensor:
            if len(x) > limit:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB.")
            return definition(x, *parameters, kernel_size=kernel_size)

        return function

    contend(
        layer.Way("modest", "ours", definition),
        layer.Way("greedy", "peer", greedy(LARGE - 1)),
        layer.Way("greediest", "peer", greedy(0)),
    )

    record = run(script, tmp_path, "--sizes", str(SIZE))

    rows = {row["contender"]: row for row in record["rows"]}
    assert rows["greediest"]["error"] == "out of memory"
    assert rows["greediest"]["forward"] is rows["greediest"]["extra_memory_bytes"] is None
    assert rows["modest"]["error"] is rows["greedy"]["error"] is None
    (best,) = record["best_peers"]
    assert best["among"] == ["greedy"]
    trains = {row["contender"]: row for row in record["trains"]}
    assert list(trains) == ["modest", "greedy"]
    assert (trains["greedy"]["error"], trains["greedy"]["peak_memory_bytes"]) == (
        "out of memory", None
    )  # fmt: skip
    assert trains["modest"]["error"] is None
    image, parameters = 4 * 3 * LARGE * 12 * 12, 4 * (25 * 3 * 5 * 5 + 25)
    least = 2 * image + parameters + 2 * image + parameters  # inputs, output and gradients
    assert trains["modest"]["peak_memory_bytes"] > least
    errors = {row["contender"]: row["error"] for row in record["errors"]}
    assert errors == {"modest": None, "greedy": None, "greediest": "out of memory"}
    assert "float32 greediest at 2: out of memory" in capsys.readouterr().out


def test_precision_that_the_device_lacks_is_said(
    script: Script, layer: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["layer", "--device", "cpu", "--out", str(tmp_path), "--precision", "tf32"]

    assert script("benchmark").main(arguments) == 0

    assert "cpu: it has none of the precisions tf32" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
