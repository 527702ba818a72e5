"""The callback LayerShares in a run of train.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

TARGET = "+callbacks.shares._target_=hoconv.lightning.LayerShares"


@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_the_share_of_each_operator_is_measured(
    run: Callable[..., Any], tmp_path: Any, device: str
) -> None:
    path = tmp_path / "shares.json"
    done = run("impl=reference", f"trainer={device}", "logger=none", "capture=off", TARGET,
               f"+callbacks.shares.path={path}", "+callbacks.shares.steps=5")  # fmt: skip
    assert done.exit_code == 0
    shares = json.loads(path.read_text())
    assert shares["device"] == {"cpu": "cpu", "gpu": "cuda"}[device]
    assert [*shares["operators"]] == ["high_order_layer"]
    times = shares["operators"]["high_order_layer"]
    assert times["repeats"] == shares["step_ms"]["repeats"] == 5
    assert 0 < times["median_ms"] < shares["step_ms"]["median_ms"]
    assert times["p20_ms"] <= times["median_ms"] <= times["p80_ms"]
    if device == "gpu":
        assert 0 < shares["operator_launches"]["high_order_layer"] < shares["launches"]
    else:
        assert (shares["launches"], shares["operator_launches"]) == (None, None)
    assert len(done.losses) == 15 + (device == "gpu")  # the fit ended after these steps
