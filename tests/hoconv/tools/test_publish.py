"""``hoconv publish``: repositories that compile as kernel-builder does it, with its two files that
are written here."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import hoconv
from hoconv import jit
from hoconv.tools import cli
from tests.hoconv.tools.generated import install

ROOT = Path(__file__).parents[3]
REGISTRATION = """
#define STABLE_TORCH_LIBRARY_EXPAND(name, m) STABLE_TORCH_LIBRARY(name, m)
#define REGISTER_EXTENSION(name)
"""


def configuration(repository: Path) -> dict[str, Any]:
    return tomllib.loads((repository / "build.toml").read_text())


def build(repository: Path, operator: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Compiles a repository for a CPU and imports its package."""
    if reason := jit.obstacle("cpu"):
        pytest.skip(reason)
    config, space = configuration(repository), f"_{operator}_cpu_0123abc"
    kernels = [each for each in config["kernel"].values() if each["backend"] == "cpu"]
    sources = [*config["torch"]["src"], *(path for each in kernels for path in each["src"])]
    (repository / "torch-ext/registration.h").write_text(REGISTRATION)
    library = jit.Library(
        space,
        [repository / path for path in sources if path.endswith(".cpp")],
        include=[repository / path for each in kernels for path in each["include"]],
        flags=["-DCPU_KERNEL", f"-DTORCH_EXTENSION_NAME={space}"],
    )
    assert library.load() is None
    package = repository / "torch-ext" / operator
    (package / "_ops.py").write_text(f"import torch\n\nops = torch.ops.{space}\n")
    # Under another name than an installed package may have.
    package.rename(package.with_name(f"published_{operator}"))
    monkeypatch.syspath_prepend(str(package.parent))
    return importlib.import_module(f"published_{operator}")


@pytest.mark.slow
def test_ops_of_hoconv_compute_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "repository"
    assert cli.main(["publish", "dynamic_conv1d", str(repository)]) == 0
    published = build(repository, "dynamic_conv1d", monkeypatch)
    x, weight = torch.randn(2, 6, 9), torch.randn(2, 3, 4, 9)
    exact = hoconv.dynamic_conv1d(x, weight, padding=3, impl="cpp")
    torch.testing.assert_close(published.dynamic_conv1d(x, weight, 3), exact, rtol=0, atol=0)
    assert published.dynamic_conv1d.overloads() == ["cpp"]


@pytest.mark.slow
def test_an_operator_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site, repository = tmp_path / "site", tmp_path / "repository"
    # No other test has an operator of this name: one that trained in this process stays declared.
    install("hue_shift", site)
    code = "import sys; from hoconv.tools.cli import main; sys.exit(main())"
    path = os.pathsep.join([str(site / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    subprocess.run(
        [sys.executable, "-c", code, "publish", "hue_shift", repository],
        env={**os.environ, "PYTHONPATH": path}, cwd=site, check=True,
    )  # fmt: skip
    assert (repository / "csrc/hue_shift.cu").is_file()
    published = build(repository, "hue_shift", monkeypatch)
    x, limit = torch.randn(2, 3, 5), torch.rand(3) + 0.5
    exact = limit[:, None] * torch.tanh(x / limit[:, None])
    torch.testing.assert_close(published.hue_shift(x, limit), exact)


def test_the_files_say_what_is_built(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repository = tmp_path / "repository"
    assert cli.main(["publish", "high_order_layer", str(repository)]) == 0
    config = configuration(repository)
    assert config["general"]["name"] == "high-order-layer"
    assert config["general"]["backends"] == ["cpu", "cuda"]
    assert {each["backend"] for each in config["kernel"].values()} == {"cpu", "cuda"}
    for kernel in config["kernel"].values():
        for path in kernel["src"]:
            # In the namespace of hoconv's ops, two versions could not be loaded at once.
            text = (repository / path).read_text()
            assert "STABLE_TORCH_LIBRARY_IMPL(hoconv" not in text
    assert "By hand:" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["publish", "high_order_layer", str(repository)])
    assert f"DIR: {repository} has files already" in capsys.readouterr().err


@pytest.mark.parametrize("operator", ["recurrent", "cnn"])
def test_what_has_no_compiled_ops(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], operator: str
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["publish", operator, str(tmp_path / "repository")])
    said = " ".join(capsys.readouterr().err.split())
    assert "OPERATOR: expected one of" in said
    assert f"; got {operator!r}" in said
    assert "recurrent" not in said.partition("; got")[0]
    assert not (tmp_path / "repository").exists()
