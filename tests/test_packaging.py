"""The package as people install it: in four ways, used from another folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from hoconv.dispatch.declaration import libraries

ROOT = Path(__file__).parents[1]
OPTIONS = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation")
FILES = ("pyproject.toml", "README.md", "LICENSE")
# Compiles nothing where the cache has the library of exactly these sources.
USE = """
import sys, torch, hoconv
layer = hoconv.HighOrderConv2d(3, impl="cpp")
layer(torch.randn(1, 3, 8, 8)).sum().backward()
print(hoconv.__file__, layer.generator.weight.grad.norm() > 0, sep="\\n")
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout of what the package is made of, in which nothing was built."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in FILES:
        shutil.copy(ROOT / name, folder)
    for name in ("hoconv", "csrc"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    return folder


def editable(sources: Path, tmp_path: Path) -> list[str]:
    return ["--editable", str(sources)]


def folder(sources: Path, tmp_path: Path) -> list[str]:
    return [str(sources)]


def wheel(sources: Path, tmp_path: Path) -> list[str]:
    return [str(build("build_wheel", sources, tmp_path))]


def wheel_of_an_sdist(sources: Path, tmp_path: Path) -> list[str]:
    packed = build("build_sdist", sources, tmp_path)
    shutil.unpack_archive(packed, tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    return [str(build("build_wheel", unpacked, tmp_path))]


def build(what: str, sources: Path, out: Path) -> Path:
    """Builds with the backend that pyproject.toml names; returns the file."""
    program = f"from setuptools import build_meta; print(build_meta.{what}({str(out)!r}))"
    run(sys.executable, "-c", program, cwd=sources)
    (made,) = out.glob("*.whl" if what == "build_wheel" else "*.tar.gz")
    return made


def run(*command: str, cwd: Path, **environment: str) -> str:
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env=clean | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def compiled() -> None:
    """The CPU libraries of these sources are in the cache, or cannot be made here."""
    for library in libraries("cpu"):
        if reason := library.load():
            pytest.skip(reason)


@pytest.mark.slow
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("way", [editable, folder, wheel, wheel_of_an_sdist])
def test_each_way_of_installing_brings_the_kernels(
    way: Callable[[Path, Path], list[str]], sources: Path, tmp_path: Path
) -> None:
    made = tmp_path / "environment"
    venv.create(made, with_pip=False)
    python = made / "bin" / "python"
    (site,) = made.glob("lib/python*/site-packages")
    # What the package needs, without the package itself.
    (site / "needed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    run(str(python), "-m", "pip", "install", *OPTIONS, *way(sources, tmp_path), cwd=tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    where, learns = run(str(python), "-c", USE, cwd=elsewhere).splitlines()

    assert Path(where).is_relative_to(sources if way is editable else made)
    assert learns == "tensor(True)"
    run(str(made / "bin" / "hoconv"), "new", "brought", cwd=elsewhere)
    assert (elsewhere / "brought/src/brought/kernels/brought.cu").is_file()


@pytest.mark.slow
@pytest.mark.usefixtures("compiled")
def test_an_installed_package_compiles_its_kernels(sources: Path, tmp_path: Path) -> None:
    target = ["--target", str(tmp_path / "site")]
    run(sys.executable, "-m", "pip", "install", *OPTIONS, *target, str(sources), cwd=tmp_path)
    where, _ = run(
        sys.executable, "-c", USE, cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"),
        TORCH_EXTENSIONS_DIR=str(tmp_path / "cache"),
    ).splitlines()  # fmt: skip
    assert Path(where).is_relative_to(tmp_path / "site")
    assert list((tmp_path / "cache").rglob("high_order_layer-cpu-*.so"))
