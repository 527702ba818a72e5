"""python -m hoconv.doctor: what it says, and that looking compiles nothing."""

from __future__ import annotations

import json
import subprocess

import pytest
import torch
from torch import Tensor

from hoconv import build, doctor, operators
from hoconv.operators import Benchmark, Cost, Implementation, Operator, Sample, declare


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Declares one operator; tells which of its implementations have been loaded."""
    loaded: list[str] = []

    def load(name: str, reason: str | None) -> str | None:
        loaded.append(name)
        return reason

    implementations = {
        "reference": Implementation(Tensor.clone),
        "cpp": Implementation(Tensor.clone, ("cpu",), lambda: load("cpp", None)),
        "fast": Implementation(Tensor.clone, ("cpu",), lambda: load("fast", "its disk is full")),
        "elsewhere": Implementation(Tensor.clone, ("meta",), lambda: load("elsewhere", None)),
    }
    monkeypatch.setattr(operators, "_declared", {})
    declare(
        Operator(
            name="toy",
            function=lambda x, *, impl="auto": x,
            implementations=implementations,
            samples=lambda device, dtype: [],
            tolerances={torch.float32: 0.0},
            cost=lambda sample: Cost(0, 0, 0, 0),
            benchmark=Benchmark("size", (1,), lambda size, device, dtype: Sample(())),
        )
    )
    return loaded


def report(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, str]:
    """Name -> what is said of it."""
    assert doctor.main(options) == 0
    lines = capsys.readouterr().out.splitlines()
    pairs = (line.strip().split("  ", 1) for line in lines if line.startswith("  "))
    return {name: fact.strip() for name, fact in pairs}


def test_report_names_versions_compilers_and_devices(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "compiler", {"cpu": "/bin/echo", "cuda": "/bin/echo"}.__getitem__)

    facts = report(capsys)

    assert facts["torch"] == torch.__version__
    assert facts["threads"] == str(torch.get_num_threads())
    assert facts["C++"].startswith("/bin/echo: ")
    assert facts["CUDA"].startswith("/bin/echo: ")
    assert facts["reference"] == "available"
    assert "gpu" in facts or "gpu 0" in facts


def test_missing_compiler_is_reported_with_the_fix(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(library: str) -> str:
        raise build.BuildError(f"no {library} compiler was found; install one")

    monkeypatch.setattr(build, "compiler", none)

    facts = report(capsys)

    assert facts["C++"] == "no cpu compiler was found; install one"
    assert facts["CUDA"] == "no cuda compiler was found; install one"


def test_looking_loads_nothing(
    loaded: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"reference": "available", "cpp": "available", "cuda": "no GPU"}
    monkeypatch.setattr(doctor, "implementations", lambda: dict(known))
    monkeypatch.setattr(doctor, "devices", lambda: ("cpu",))

    assert report(capsys)["toy"] == "cpu: fast"  # the disk is not known of yet
    assert loaded == []

    known["fast"] = "needs a licence"
    assert report(capsys)["toy"] == "cpu: cpp"


def test_build_tells_what_is_really_chosen(
    loaded: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = {"cpu": None, "cuda": "no GPU"}
    monkeypatch.setattr(build, "load", reasons.__getitem__)
    monkeypatch.setattr(doctor, "devices", lambda: ("cpu",))

    facts = report(capsys, "--build")

    assert facts["cpp"] == "available, compiled and loaded"
    assert facts["cuda"] == "no GPU"
    assert facts["toy"] == "cpu: cpp (fast cannot: its disk is full)"
    assert loaded == ["fast", "cpp"]


def test_environment_is_json(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: object, **kwargs: object) -> None:
        raise FileNotFoundError

    assert json.loads(json.dumps(doctor.environment()))["torch"] == torch.__version__

    monkeypatch.setattr(subprocess, "run", missing)
    environment = doctor.environment()
    assert environment["driver"] is None
    assert environment["commit"] is None
