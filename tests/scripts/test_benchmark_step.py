"""The sub-command `step` of scripts/benchmark.py: what it writes, what counts as a layer's."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

Script = Callable[[str], ModuleType]


@pytest.fixture
def step(script: Script, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, with networks on small images."""
    module = script("benchmarks.training.step")
    for name, network in module.NETWORKS.items():
        shape = (network.image_shape[0], 32, 32)
        labels = shape[1:] if len(network.label_shape) == 2 else network.label_shape
        small = dataclasses.replace(network, batch=2, image_shape=shape, label_shape=labels)
        monkeypatch.setitem(module.NETWORKS, name, small)
    return module


def run(script: Script, out: Path, device: str = "cpu") -> dict[str, Any]:
    assert script("benchmark").main(["step", "--device", device, "--out", str(out)]) == 0
    return json.loads((out / f"step_{device}.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_network_is_timed_with_every_implementation(
    script: Script, step: ModuleType, tmp_path: Path, device: str
) -> None:
    record = run(script, tmp_path, device)

    impls = {"reference", "cuda" if device == "cuda" else "cpp"} - set(record["unavailable"])
    precisions = ["float32"] if device == "cpu" else ["float32", "bfloat16"]
    found = [(row["network"], row["precision"], row["impl"]) for row in record["rows"]]
    assert sorted(found) == sorted(product(step.NETWORKS, precisions, impls))
    for row in record["rows"]:
        assert row["error"] is None
        assert row["samples_per_s"] > 0
        share = row["layers_ms"]["median_ms"] / row["step_ms"]["median_ms"]
        assert row["layers_share"] == share
        assert 0 < share < 1
        assert row["speed_up_limit"] == 1 / (1 - share)


@pytest.mark.slow
def test_network_that_fails_says_why(
    script: Script,
    step: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def build() -> nn.Module:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    broken = dataclasses.replace(step.NETWORKS["mnist_cnn"], build=build)
    monkeypatch.setitem(step.NETWORKS, "mnist_cnn", broken)
    flag = torch.backends.cudnn.allow_tf32

    record = run(script, tmp_path)

    errors = {(row["network"], row["impl"]): row["error"] for row in record["rows"]}
    assert errors["mnist_cnn", "reference"] == "out of memory"
    assert errors["one layer at 224 x 224", "reference"] is None
    assert "mnist_cnn, float32, reference: out of memory" in capsys.readouterr().out
    assert torch.backends.cudnn.allow_tf32 == flag
