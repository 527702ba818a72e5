"""A package with C++ and CUDA of its own, as `hoconv new` writes it; and the public headers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hoconv import jit
from hoconv.jit import headers
from hoconv.tools.new import TEMPLATE
from tests.hoconv.tools.generated import install

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "extend" / "compiled_code.md"
PUBLIC = sorted(path.relative_to(headers.PUBLIC) for path in headers.PUBLIC.rglob("*.*h"))
needs_compiler = pytest.mark.skipif(
    jit.obstacle("cpu") is not None, reason=str(jit.obstacle("cpu"))
)
CHECK = ("-m", "hoconv.tools.check", "--operator", "soft_clip", "--device", "cpu", "--seed", "0")


class Package:
    """The package, as if it were installed."""

    def __init__(self, site: Path) -> None:
        self.site = site / "site"
        site = self.site
        self.path = install("soft_clip", site)
        self.source = self.path / "soft_clip" / "kernels" / "soft_clip.cpp"

    def python(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(self.path), str(ROOT)])
        return subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, "PYTHONPATH": path, **environment},
            cwd=self.site, capture_output=True, text=True, check=False,
        )  # fmt: skip


@pytest.fixture
def package(tmp_path: Path) -> Package:
    return Package(tmp_path)


@pytest.mark.slow
@needs_compiler
def test_a_package_builds_its_own_operator(package: Package) -> None:
    cache = str(package.site / "cache")
    done = package.python(*CHECK, TORCH_EXTENSIONS_DIR=cache)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"cpp +bfloat16 +5 .*pass", done.stdout)
    assert "compiling soft_clip for cpu, once (1 of 1 files" in done.stderr
    assert "hoconv: compiling" not in package.python(*CHECK, TORCH_EXTENSIONS_DIR=cache).stderr


@pytest.mark.slow
@needs_compiler
def test_its_broken_code_is_named_and_costs_no_other_operator(package: Package) -> None:
    errors = [f"no_such_name_{i}" for i in range(9)]
    wrong = "".join(f"int f{name}() {{ return {name}; }}\n" for name in errors)
    package.source.write_text(package.source.read_text() + wrong)

    done = package.python(*CHECK)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"cpp +broken", done.stdout)
    for name in errors[:5]:  # the compiler's first errors, in full, once
        assert len(re.findall(rf"soft_clip\.cpp:\d+:\d+: error: .*{name}", done.stdout)) == 1
    assert "... and 4 more errors" in done.stdout
    assert errors[5] not in done.stdout + done.stderr

    code = (
        "import torch, soft_clip; x = torch.ones(1, 1); print(soft_clip.soft_clip(x, x[0]).item())"
    )
    done = package.python("-c", code)
    assert done.stdout.startswith("0.76"), done.stderr
    assert "soft_clip uses reference on cpu; cpp is broken: the compiler failed" in done.stderr

    code = "from hoconv.dispatch.declaration import operators\n"
    code += "from hoconv.dispatch.implementations import choose\n"
    code += "print(*(o.name for o in operators() if choose(o, 'auto', 'cpu').name != 'cpp'))"
    done = package.python("-c", code)
    assert done.stdout == "soft_clip\n", done.stderr


@pytest.mark.slow
@needs_compiler
def test_unstable_headers_of_torch_are_an_error(package: Package) -> None:
    package.source.write_text("#include <ATen/ATen.h>\n" + package.source.read_text())
    done = package.python(*CHECK)
    assert done.returncode == 1
    assert "should not be included when" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc")
def test_its_cuda_compiles_without_a_gpu(package: Package) -> None:
    code = (
        "from soft_clip.operator import OPERATOR; "
        "print(OPERATOR.implementations['cuda'].libraries[0].compile(('9.0',)))"
    )
    done = package.python("-c", code)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).exists()


def test_the_code_of_the_page_is_that_of_the_package() -> None:
    package = [path.read_text() for path in TEMPLATE.rglob("src/**/*.*") if path.is_file()]
    blocks = re.findall(
        r"^```\w+\n(?:(?:#|//) src/soft_clip/\S+\n)?(.*?)^```", PAGE.read_text(), re.M | re.S
    )
    assert len(blocks) == 4
    for block in blocks:
        assert any(block in text for text in package), block


def test_the_page_names_every_public_header() -> None:
    named = re.findall(r"^\| `(hoconv/\S+)` \|", PAGE.read_text(), re.M)
    assert sorted(named) == [str(path) for path in PUBLIC]


@needs_compiler
def test_each_public_header_compiles_alone(tmp_path: Path) -> None:
    sources = []
    for i, header in enumerate(path for path in PUBLIC if path.suffix == ".h"):
        sources.append(tmp_path / f"{i}.cpp")
        sources[-1].write_text(f'#include "{header}"\n#include "{header}"\n')
    jit.Library("headers", sources).compile()


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc")
def test_all_public_headers_compile_together(tmp_path: Path) -> None:
    source = tmp_path / "all.cu"
    source.write_text("".join(f'#include "{header}"\n' for header in PUBLIC))
    jit.Library("headers", [source], "cuda").compile(("9.0",))
