"""The libraries that a wheel brings: when they are taken, and what is said where they are not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hoconv import jit
from hoconv.jit import Library, compilers, prebuilt

ROOT = Path(__file__).parents[3]
needs_compiler = pytest.mark.skipif(
    jit.obstacle("cpu") is not None, reason=str(jit.obstacle("cpu"))
)
LEVEL = """
#if defined(__AVX512F__)
extern "C" int level() { return 4; }
#elif defined(__AVX2__)
extern "C" int level() { return 3; }
#else
extern "C" int level() { return 2; }
#endif
"""


@pytest.fixture(scope="module")
def brought(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """A library whose package brings it compiled."""
    source = tmp_path_factory.mktemp("package") / "level.cpp"
    source.write_text(LEVEL)
    library = Library("level", [source])
    library.place(source.parent)
    return library


def load(library: Library, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Calls the library in a process that finds no compiler, with an empty cache in `folder`."""
    code = f"""
from hoconv.jit import BuildError, Library
library = Library("level", {[str(source) for source in library.sources]})
try:
    print(library.functions().level())
except BuildError as error:
    print(error)
print(library.obstacle())
"""
    (folder / "no programs").mkdir()
    kept = {name: value for name, value in os.environ.items() if name != "CXX"}
    paths = {"PATH": str(folder / "no programs"), "TORCH_EXTENSIONS_DIR": str(folder / "cache")}
    return subprocess.run(
        [sys.executable, "-c", code], env={**kept, "PYTHONPATH": str(ROOT), **paths, **environment},
        capture_output=True, text=True, check=True,
    )  # fmt: skip


@needs_compiler
@pytest.mark.parametrize(
    ("capability", "level"), [("default", 2), ("avx2", 3), ("avx512", 4)]
)  # fmt: skip
def test_a_machine_without_a_compiler_loads_the_library_of_its_level(
    brought: Library, tmp_path: Path, capability: str, level: int
) -> None:
    here = {"AVX512": 4, "AVX2": 3}.get(torch.backends.cpu.get_cpu_capability(), 2)
    if level > here:
        pytest.skip(f"this machine's level is {here}")
    done = load(brought, tmp_path, ATEN_CPU_CAPABILITY=capability)
    assert (done.stdout, done.stderr) == (f"{level}\nNone\n", "")
    assert not (tmp_path / "cache").exists()


@needs_compiler
def test_a_library_of_other_sources_is_not_taken(brought: Library, tmp_path: Path) -> None:
    source = Path(brought.sources[0])
    source.write_text(f"{LEVEL}// changed\n")
    try:
        assert brought.prebuilt() is None
        reason = "a C++ compiler was not found; install g++ or clang++, or set CXX to one"
        assert load(brought, tmp_path).stdout == f"{reason}\n{reason}\n"
    finally:
        source.write_text(LEVEL)
    assert brought.prebuilt() == brought.compile() == brought.find()


@needs_compiler
def test_a_compiler_makes_what_a_wheel_does_not_bring(
    brought: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    other = Library("level", brought.sources, flags=["-DOTHER"])
    assert other.prebuilt() is None
    assert other.compile().is_relative_to(tmp_path)
    assert brought.compile(compilers.machine("cpu")).is_relative_to(tmp_path)  # asked for by level


class Gpus:
    """A library for GPUs that a wheel brings, on a machine whose GPUs a test chooses."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        source = folder / "level.cu"
        source.write_text("int level() { return 0; }\n")
        self.library = Library("level", [source], "cuda")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(compilers, "compiler", self.find_no_compiler)
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder))
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        flags = compilers.flags("cuda", prebuilt.target("cuda"))
        name = self.library._key(self.library._object_keys(flags, "cuda13"), "cuda13")
        self.path = folder / prebuilt.FOLDER / name
        self.path.parent.mkdir()
        self.path.touch()

    @staticmethod
    def find_no_compiler(device: str) -> str:
        raise jit.BuildError("no CUDA compiler was found; install the CUDA toolkit")

    def have(self, *capabilities: tuple[int, int]) -> None:
        self.monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        self.monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gpus:
    return Gpus(tmp_path, monkeypatch)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 3), (11, 0), (12, 1)])
def test_gpus_from_8_0_on_take_the_library_of_a_wheel(
    gpus: Gpus, capability: tuple[int, int]
) -> None:
    gpus.have(capability)
    assert gpus.library.obstacle() is None
    assert gpus.library.prebuilt() == gpus.library.compile() == gpus.path


def test_an_older_gpu_is_refused_in_one_line_with_the_fix(gpus: Gpus) -> None:
    gpus.have((9, 0), (7, 5))
    assert gpus.library.prebuilt() is None
    reason = (
        "the wheel's library is for GPUs of compute capability 8.0 and later, and this machine has "
        "one of 7.5; no CUDA compiler was found; install the CUDA toolkit"
    )
    assert gpus.library.obstacle() == reason


def test_a_driver_too_old_for_the_runtime_inside_is_refused(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus.have((9, 0))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    reason = "the wheel's library is for CUDA 13, and torch is for 12.8; no CUDA compiler was found"
    assert (gpus.library.obstacle() or "").startswith(reason)
