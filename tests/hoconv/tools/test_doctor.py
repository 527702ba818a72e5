"""hoconv doctor: what it says, and that looking compiles nothing."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hoconv import jit
from hoconv.dispatch import declaration as operators
from hoconv.dispatch.declaration import Benchmark, Cost, Implementation, Operator, Sample, declare
from hoconv.dispatch.implementations import _find_failure, obstacle
from hoconv.dispatch.registration import compiled as compiled_code
from hoconv.jit import compilers, nvrtc
from hoconv.jit.library import _load_once
from hoconv.tools import doctor


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Declares one operator; tells which of its implementations have been loaded."""
    loaded: list[str] = []

    def implementation(name: str, missing: str | None, failed: str | None = None) -> Implementation:
        def load() -> str | None:
            loaded.append(name)
            return failed

        return Implementation(Tensor.clone, ("cpu",), load, lambda: missing)

    implementations = {
        "reference": Implementation(Tensor.clone),
        "slow": implementation("slow", None, "no such name\n  command: c++"),
        "cpp": implementation("cpp", None),
        "fast": implementation("fast", None, "its disk is full"),
        "licensed": implementation("licensed", "needs a licence"),
        "elsewhere": Implementation(Tensor.clone, ("meta",)),
    }
    monkeypatch.setattr(operators, "_declared", {})
    monkeypatch.setattr(doctor, "devices", lambda: ("cpu",))
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


def report(capsys: pytest.CaptureFixture[str], *options: str, code: int = 0) -> dict[str, str]:
    """Name -> what is said of it."""
    assert doctor.main(options) == code
    lines = capsys.readouterr().out.splitlines()
    pairs = (line.strip().split("  ", 1) for line in lines if re.match("  [^ ].*  ", line))
    return {name: fact.strip() for name, fact in pairs}


def test_report_names_versions_compilers_and_devices(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit, "compiler", {"cpu": "/bin/echo", "cuda": "/bin/echo"}.__getitem__)

    facts = report(capsys)

    assert facts["torch"] == torch.__version__
    assert facts["threads"] == str(torch.get_num_threads())
    assert facts["C++"].startswith("/bin/echo: ")
    assert facts["CUDA"].startswith("/bin/echo: ")
    assert facts["reference"] == "available"
    assert "gpu" in facts or "gpu 0" in facts


def test_a_terminal_has_long_facts_in_lines_of_whole_words(
    loaded: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit, "no_gpu", lambda: "none is here; " + "put one in " * 8)
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert doctor.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    (first,) = (i for i, line in enumerate(lines) if "none is here" in line)
    column = lines[first].index("none")
    assert re.match(rf" {{{column}}}\w", lines[first + 1])
    assert all(len(line) <= 50 for line in lines[first : first + 3])


def test_missing_compiler_is_reported_with_the_fix(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(library: str) -> str:
        raise jit.BuildError(f"no {library} compiler was found; install one")

    monkeypatch.setattr(jit, "compiler", none)

    facts = report(capsys)

    assert facts["C++"] == "no cpu compiler was found; install one"
    assert facts["CUDA"] == "no cuda compiler was found; install one"


def test_looking_loads_nothing_and_claims_nothing(
    loaded: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor.main([]) == 0
    said = capsys.readouterr().out
    assert "What impl=auto means, unless it turns out to be broken: --build tries" in said
    assert re.search("toy +cpu: fast$", said, re.MULTILINE)  # the disk is not known of yet
    assert loaded == []


@pytest.fixture
def compiled(
    loaded: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[jit.Library]:
    """A library that the operator's implementation `cpp` calls, in a cache of its own."""
    if reason := jit.obstacle("cpu"):
        pytest.skip(reason)
    (tmp_path / "toy.cpp").touch()
    library = jit.Library("toy", [tmp_path / "toy.cpp"])
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    operator = operators.find("toy")
    made = {**operator.implementations, "cpp": compiled_code(Tensor.clone, ("cpu",), library)}
    monkeypatch.setattr(operators, "_declared", {})
    declare(dataclasses.replace(operator, implementations=made))
    yield library
    _load_once.cache_clear()


def test_a_library_is_only_said_to_be_built_where_it_is(
    compiled: jit.Library, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(capsys)["toy for cpu"] == "not compiled yet"
    path = compiled.compile()
    capsys.readouterr()
    assert report(capsys)["toy for cpu"] == "compiled here"
    path.write_bytes(b"")
    assert report(capsys)["toy for cpu"] == "not compiled yet"
    path.parent.chmod(0o777)
    assert report(capsys, code=1)["toy for cpu"].startswith("broken: the build cache")


def test_build_tells_what_is_really_chosen_and_what_is_broken(
    loaded: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    facts = report(capsys, "--build", code=1)

    assert facts["toy"] == (
        "cpu: cpp (licensed cannot: needs a licence; fast is broken: its disk is full)"
    )
    assert facts["toy fast on cpu"] == "broken: its disk is full"
    assert facts["toy slow on cpu"] == "broken: no such name"
    assert sorted(loaded) == ["cpp", "fast", "slow"]  # each once


def test_build_shows_the_first_errors_of_a_broken_library_once(
    compiled: jit.Library, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(capsys, "--build", code=1)["toy for cpu"] == "compiled here"
    Path(compiled.sources[0]).write_text("int f() { return one; }\nint g() { return two; }\n")
    _load_once.cache_clear()
    obstacle.cache_clear()
    _find_failure.cache_clear()

    assert doctor.main(["--build"]) == 1

    said = capsys.readouterr().out
    assert re.search(r"toy for cpu +broken: the compiler failed: .*one", said)
    assert re.search(r"toy cpp on cpu +broken: the compiler failed: .*one", said)
    assert len(re.findall("two", said)) == 1


def test_packages_that_cannot_be_imported_are_named(
    loaded: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "broken_packages", lambda: {"bad = gone": "ImportError: gone"})
    facts = report(capsys, code=1)
    assert facts["bad = gone"] == "broken: ImportError: gone"
    assert facts["toy"] == "cpu: fast"


def test_each_operator_is_judged_by_what_it_needs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Generated code for a GPU needs no CUDA toolkit, as the library does."""

    def compiler(library: str) -> str:
        if library == "cuda":
            raise jit.BuildError("no CUDA compiler was found; install one")
        return "/bin/echo"

    for module in (jit, compilers):
        monkeypatch.setattr(module, "compiler", compiler)
    monkeypatch.setattr(jit.Library, "find", lambda library: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor, "devices", lambda: ("cpu", "cuda"))
    monkeypatch.setattr(nvrtc, "_library", lambda: None)
    monkeypatch.setattr(doctor, "environment", dict)
    obstacle.cache_clear()
    try:
        facts = report(capsys)
    finally:
        obstacle.cache_clear()
    assert facts["cuda"] == "no CUDA compiler was found; install one"
    assert facts["high_order_conv2d"] == "cpu: cpp; cuda: cpp"
    assert facts["recurrent"] == "cpu: cpp; cuda: cuda"


def test_environment_is_json(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: object, **kwargs: object) -> None:
        raise FileNotFoundError

    assert json.loads(json.dumps(doctor.environment()))["torch"] == torch.__version__

    monkeypatch.setattr(subprocess, "run", missing)
    environment = doctor.environment()
    assert environment["driver"] is None
    assert environment["commit"] is None


def test_a_commit_is_dirty_where_tracked_files_outside_docs_differ(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def git(*words: str) -> str:
        return subprocess.check_output(["git", *words], cwd=tmp_path, text=True)

    for name in ("hoconv/a.py", "docs/record.json", "csrc/b.cu"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("1")
    monkeypatch.setattr("hoconv.__file__", str(tmp_path / "hoconv/a.py"))
    assert doctor.environment()["commit"] is None
    git("init", "-q")
    git("add", ".")
    git("-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "all")
    commit = git("rev-parse", "HEAD").strip()
    (tmp_path / "docs/record.json").write_text("2")
    (tmp_path / "hoconv/untracked.py").write_text("2")
    assert doctor.environment()["commit"] == commit
    (tmp_path / "csrc/b.cu").write_text("2")
    assert doctor.environment()["commit"] == f"{commit}-dirty"
