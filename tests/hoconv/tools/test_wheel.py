"""`hoconv build --wheel`: a package of `hoconv new`, installed where there is no compiler."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from hoconv import jit
from hoconv.tools import build
from tests.hoconv.tools.generated import install

ROOT = Path(__file__).parents[3]
missing = [name for name in ("auditwheel", "wheel") if importlib.util.find_spec(name) is None]


def run(
    *arguments: str, path: Path, where: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs Python with `path` to import from, there or in another folder."""
    search = os.pathsep.join([str(path), str(ROOT)])
    return subprocess.run(
        [sys.executable, *arguments], env={**os.environ, "PYTHONPATH": search, **environment},
        cwd=where or path, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(bool(missing), reason=f"no {' and no '.join(missing)}")
@pytest.mark.skipif(jit.obstacle("cpu") is not None, reason=str(jit.obstacle("cpu")))
def test_a_package_of_one_operator_runs_without_a_compiler(tmp_path: Path) -> None:
    package = tmp_path / "package"
    sources = install("soft_clip", package)
    build_it = ("-m", "hoconv.tools.cli", "build", "cpu", "--wheel", package.name)
    done = run(*build_it, path=sources, where=tmp_path)
    assert done.returncode == 0, done.stderr
    made = tmp_path / done.stdout.splitlines()[-1]
    assert made.parent == package / "dist"
    assert re.fullmatch(r"soft_clip-0\.1-py3-none-manylinux_2_\d+_x86_64\.whl", made.name)

    site = tmp_path / "site"
    with zipfile.ZipFile(made) as wheel:
        wheel.extractall(site)
    kernels = site / "soft_clip" / "kernels"
    assert len(list((kernels / "prebuilt").glob("soft_clip-cpu-*.so"))) == 3  # levels
    (tmp_path / "no programs").mkdir()
    nothing: Any = {"PATH": str(tmp_path / "no programs"), "CXX": ""}
    nothing["TORCH_EXTENSIONS_DIR"] = str(tmp_path / "cache")
    check = ("-m", "hoconv.tools.check", "--operator", "soft_clip", "--device", "cpu")
    done = run(*check, path=site, **nothing)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"cpp +bfloat16 +5 .*pass", done.stdout)
    said = run("-m", "hoconv.tools.cli", "doctor", path=site, **nothing).stdout
    assert re.search(r"soft_clip for cpu +prebuilt$", said, re.MULTILINE)
    assert re.search(r"approx for cpu +a C\+\+ compiler was not found; install", said)


def test_a_folder_without_operators_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        build.main(["cpu", "--wheel", str(tmp_path)])
    assert f"no installed operator has sources in {tmp_path}; pip install -e" in (
        capsys.readouterr().err
    )
