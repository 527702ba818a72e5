"""Compiling on first use: where the library goes, when another is made, and what can go wrong.

Most tests compile a toy source in place of the kernels: how they are built is what is tested.
"""

from __future__ import annotations

import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from hoconv import jit
from hoconv.dispatch.registration import definition, kernels
from hoconv.jit import Library, cache, compilers, headers
from hoconv.jit.library import _load_once
from hoconv.ops.high_order.conv2d.ops import KERNELS
from hoconv.tools import build

ROOT = Path(__file__).parents[3]
PATIENCE = 100  # seconds until another process or thread is given up
needs_compiler = pytest.mark.skipif(
    not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")),
    reason="no C++ compiler",
)


@pytest.fixture
def _new_process() -> Iterator[None]:
    """Returns what is remembered once a process is forgotten, before the test and after it."""
    remembered = (_load_once, compilers.compiler, compilers.identity)
    for function in remembered:
        function.cache_clear()
    yield
    for function in remembered:
        function.cache_clear()


class Toy:
    """A source, an empty cache, and a compiler that notes how it was called."""

    def __init__(self, folder: Path) -> None:
        self.csrc, self.cache = folder / "csrc", folder / "a cache"
        self.source = self.csrc / "toy" / "cpu" / "toy.cpp"
        self.source.parent.mkdir(parents=True)
        self.source.write_text('extern "C" int answer() { return 42; }\n')
        self.library = Library("toy", [self.source], include=[self.csrc])
        self.compiler, self.calls = folder / "compiler", folder / "calls"
        self.gate, self.started, self.first = (folder / n for n in ("gate", "started", "first"))
        self.calls.touch()
        self.processes: list[subprocess.Popen[str]] = []
        self.compiles_with('exec c++ "$@"')

    def compiles_with(self, script: str) -> None:
        note = f'echo "$@" >> {shlex.quote(str(self.calls))}'
        self.compiler.write_text(f"#!/bin/sh\n{note}\n{script}\n")
        self.compiler.chmod(0o755)

    def stops_half_way(self) -> None:
        """The first compilation says that it has started and goes on once the gate is opened."""
        os.mkfifo(self.gate)
        os.mkfifo(self.started)
        started, gate, first = map(shlex.quote, map(str, (self.started, self.gate, self.first)))
        wait = f"mkdir {first} 2>&- && {{ echo started > {started}; read _ < {gate}; }}"
        self.compiles_with(f'case " $* " in *" -c "*) {wait} ;; esac\nexec c++ "$@"')

    @property
    def compilations(self) -> int:
        return sum(" -c " in line for line in self.calls.read_text().splitlines())

    @property
    def cached(self) -> list[str]:
        return sorted(path.name for path in (self.cache / "hoconv").glob("*"))


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, _new_process: None) -> Iterator[Toy]:
    toy = Toy(tmp_path)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(toy.cache))
    monkeypatch.setenv("CXX", str(toy.compiler))
    yield toy
    for process in toy.processes:
        with process:  # closes its pipe and waits for it
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def compiled() -> Path:
    """A library of kernels, in the user's cache."""
    return KERNELS["cpp"].compile()


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a new process; environment variables that are empty are removed."""
    merged = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={name: value for name, value in merged.items() if value},
        capture_output=True,
        text=True,
        check=False,
    )


def without_compiler(folder: Path, cache: Path) -> Mapping[str, str]:
    empty = folder / "no programs"
    empty.mkdir()
    return {"PATH": str(empty), "CXX": "", "TORCH_EXTENSIONS_DIR": str(cache)}


# Where the library goes


@needs_compiler
@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.5, ", about 7 s if it stays as busy"),
        (3.0, ", about 42 s if it stays as busy"),
        (30.0, ", about 7 minutes if it stays as busy"),
        (None, ""),
    ],
)
def test_the_estimate_is_of_this_machine(
    toy: Toy, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, seconds, said
) -> None:
    monkeypatch.setattr(compilers, "probe_seconds", lambda: seconds)
    toy.library.compile()
    assert capfd.readouterr().err.splitlines()[0].endswith(f"(1 of 1 files{said})")


@needs_compiler
def test_library_is_compiled_once_and_this_is_said_once(
    toy: Toy, capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = toy.library.compile(), toy.library.compile()
    assert first == second
    assert first.exists()
    assert toy.compilations == 1
    said = capfd.readouterr()
    assert said.out == ""
    began, ended = said.err.splitlines()
    estimate = (
        r"hoconv: compiling toy for cpu, once \(1 of 1 files, about \d+ s if it stays as busy\)"
    )
    assert re.fullmatch(estimate, began)
    assert re.fullmatch(r"hoconv: compiled toy for cpu in \d+ s", ended)


@needs_compiler
def test_cache_is_where_torch_extensions_dir_says(toy: Toy) -> None:
    assert toy.library.compile().parent == toy.cache / "hoconv"


@needs_compiler
def test_cache_is_in_the_home_folder_by_default(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert toy.library.compile().parent == tmp_path / ".cache" / "hoconv"


@needs_compiler
def test_only_files_with_their_digests_and_locks_are_left(toy: Toy) -> None:
    library = toy.library.compile()
    (made,) = toy.cache.rglob("*.o")
    assert {*toy.cached} == {
        name
        for path in (library, made)
        for name in (path.name, f"{path.name}.sha256", path.with_suffix(".lock").name)
    }


@needs_compiler
def test_found_library_is_used_where_nothing_can_be_written(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = toy.library.compile()

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setattr(cache, "open", refuse, raising=False)
    assert toy.library.compile() == library


# When another library is made


class Family:
    """Two libraries of two sources each, in a cache of their own; headers are shared."""

    def __init__(self, toy: Toy) -> None:
        self.toy, self.folder = toy, toy.csrc / "toy"
        (self.folder / "used.h").write_text("#define USED 1\n")
        (self.folder / "deep.h").write_text('#include "used.h"\n')
        (self.folder / "other.h").write_text("#define OTHER 1\n")
        self.write("one", "two", "three", "four")
        self.libraries = [self.library("one", "two"), self.library("three", "four")]

    def write(self, *names: str) -> None:
        includes = {
            "one": '#include "deep.h"',
            "two": "#  include <toy/deep.h>  // with the prefix",
            "three": '#include "toy/other.h"',
            "four": "#include <hoconv/blocks.h>",
        }
        for name in names:
            (self.folder / f"{name}.cpp").write_text(f"{includes[name]}\nint {name};\n")

    def library(self, *names: str) -> Library:
        sources = [self.folder / f"{name}.cpp" for name in names]
        return Library("".join(names), sources, include=[self.toy.csrc])

    def compile(self) -> tuple[list[Path], set[str]]:
        """The libraries, and the sources that were compiled for them."""
        self.toy.calls.write_text("")
        made = [each.compile() for each in self.libraries]
        words = self.toy.calls.read_text().split()
        return made, {Path(word).stem for word in words if word.endswith(".cpp")}


@needs_compiler
def test_a_build_of_several_files_says_what_is_left(
    toy: Toy, capfd: pytest.CaptureFixture[str]
) -> None:
    family = Family(toy)
    family.libraries[0].compile()
    began, progress, ended = capfd.readouterr().err.splitlines()
    assert "(2 of 2 files" in began
    assert re.fullmatch(r"hoconv: 1 of 2 files of onetwo for cpu, up to about \d+ s left", progress)
    assert ended.startswith("hoconv: compiled onetwo")
    (family.folder / "one.cpp").write_text("int one;\n")
    family.libraries[0].compile()
    assert len(capfd.readouterr().err.splitlines()) == 2  # one file: nothing in between


@needs_compiler
@pytest.mark.parametrize(
    ("changed", "compiled"),
    [
        ("one.cpp", {"one"}),
        ("used.h", {"one", "two"}),  # included by a header
        ("other.h", {"three"}),
        ("unused.h", set()),
    ],
)
def test_only_what_includes_a_change_is_compiled_again(
    toy: Toy, changed: str, compiled: set[str]
) -> None:
    family = Family(toy)
    before, everything = family.compile()
    assert everything == {"one", "two", "three", "four"}
    with (family.folder / changed).open("a") as file:
        file.write("// changed\n")
    after, again = family.compile()
    assert again == compiled
    touched = bool({"one", "two"} & compiled), bool({"three", "four"} & compiled)
    assert (before[0] != after[0], before[1] != after[1]) == touched
    assert all(path.exists() for path in before)


@needs_compiler
def test_a_change_of_a_public_header_is_seen(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    public = toy.csrc / "public"
    shutil.copytree(headers.PUBLIC, public)
    monkeypatch.setattr(headers, "PUBLIC", public)
    family = Family(toy)
    family.compile()
    with (public / "hoconv" / "blocks.h").open("a") as file:
        file.write("// changed\n")
    assert family.compile()[1] == {"four"}


@needs_compiler
def test_the_same_sources_elsewhere_are_not_compiled_again(toy: Toy, tmp_path: Path) -> None:
    family = Family(toy)
    before, _ = family.compile()
    shutil.copytree(toy.csrc, tmp_path / "elsewhere")
    toy.csrc = tmp_path / "elsewhere"
    moved = Family(toy)
    assert moved.compile() == (before, set())


@needs_compiler
def test_a_header_in_a_folder_that_comes_first_is_seen(toy: Toy, tmp_path: Path) -> None:
    family, first = Family(toy), tmp_path / "first"
    library = Library("toy", [family.folder / "two.cpp"], include=[first, toy.csrc])
    before = library.compile()
    (first / "toy").mkdir(parents=True)
    (first / "toy" / "deep.h").write_text("#define DEEP 1\n")
    assert library.compile() != before


def test_a_header_that_a_macro_names_is_refused(toy: Toy) -> None:
    toy.source.write_text("#define HEADER <vector>\n#include HEADER\n")
    with pytest.raises(jit.BuildError, match=r'#include HEADER: expected "a header" or <a header>'):
        toy.library.compile()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"name": "a/b"}, "name: expected up to 100 letters, digits, _, - and ., got 'a/b'"),
        ({"name": "a" * 101}, "name: expected up to 100 letters"),
        ({"device": "gpu"}, "device: expected cpu or cuda, got 'gpu'"),
        ({"sources": []}, "sources: expected at least one file, got none"),
        ({"sources": "toy.cpp"}, "sources: expected a list, got 'toy.cpp'"),
        ({"flags": ["-I/opt/include"]}, "flags: got '-I/opt/include'; name folders of headers in"),
        ({"flags": ["-isystem", "/opt"]}, "flags: got '-isystem'; name folders of headers in"),
        ({"flags": ["@options"]}, "flags: got '@options'; name folders of headers in"),
    ],
)
def test_a_wrong_argument_is_named(arguments: Mapping[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        Library(**{"name": "toy", "sources": ["toy.cpp"], **arguments})


@needs_compiler
def test_flags_compile_and_link_and_make_another_library(toy: Toy) -> None:
    toy.source.write_text('extern "C" int answer() { return ANSWER; }\n')
    made = [Library("toy", [toy.source], flags=[f"-DANSWER={n}", "-lm"]) for n in (42, 43)]
    assert [each.functions().answer() for each in made] == [42, 43]
    assert all("-lm" in line for line in toy.calls.read_text().splitlines() if "-shared" in line)


@needs_compiler
def test_an_object_among_the_flags_that_changed_is_linked_again(toy: Toy, tmp_path: Path) -> None:
    toy.source.write_text('extern "C" int other();\nextern "C" int answer() { return other(); }\n')
    source, made = tmp_path / "other.cpp", tmp_path / "other.o"
    found = []
    for n in (42, 43):
        source.write_text(f'extern "C" int other() {{ return {n}; }}\n')
        subprocess.run(["g++", "-fPIC", "-c", source, "-o", made], check=True)
        found.append(Library("toy", [toy.source], flags=[str(made)]).functions().answer())
    assert found == [42, 43]


def test_a_source_that_is_not_there_is_named(toy: Toy) -> None:
    toy.source.unlink()
    reason = f"toy: cannot read the source {toy.source} (No such file or directory)"
    assert toy.library.load() == reason


@needs_compiler
def test_link_to_the_sources_that_became_a_text_file_is_an_error(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.write_text("../csrc")
    monkeypatch.setattr(headers, "CSRC", text)
    monkeypatch.setattr(definition, "CSRC", text)
    with pytest.raises(jit.BuildError, match=r"approx: cannot read .* core\.symlinks=true"):
        kernels("approx")["cpp"].compile()
    assert toy.compilations == 0


@needs_compiler
def test_other_version_of_the_compiler_makes_another_library(toy: Toy) -> None:
    first = toy.library.compile()
    toy.compiles_with('[ "$1" = --version ] && echo 99.0 && exit; exec c++ "$@"')
    compilers.identity.cache_clear()
    assert toy.library.compile() != first


@needs_compiler
def test_other_instruction_set_makes_another_library(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = set()
    for capability in ("DEFAULT", "AVX2", "AVX512"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda c=capability: c)
        made.add(toy.library.compile())
    assert len(made) == 3
    calls = [line for line in toy.calls.read_text().splitlines() if " -c " in line]
    assert [("-mavx2" in call, "-mavx512f" in call) for call in calls] == [
        (False, False),
        (True, False),
        (False, True),
    ]


CHECK_ALL_OPERATORS = """
import torch
from hoconv.dispatch.declaration import operators
from hoconv.tools.testing.test_operators import test_agrees_with_the_reference as check
from hoconv.tools.testing.variants import Variant
for operator in operators():
    for dtype in operator.tolerances:
        check(Variant(operator, "cpp", "cpu"), dtype)
print(*(path for path in torch.ops.loaded_libraries if "conv2d" in path))
"""


@pytest.mark.slow
@needs_compiler
def test_lesser_machine_with_the_same_cache_gets_its_own_library(compiled: Path) -> None:
    lesser = {"AVX512": "avx2", "AVX2": "default"}
    here = torch.backends.cpu.get_cpu_capability()
    if here not in lesser:
        pytest.skip(f"there is no lesser machine than {here}")
    done = python(CHECK_ALL_OPERATORS, ATEN_CPU_CAPABILITY=lesser[here])
    assert done.returncode == 0, done.stderr
    loaded = Path(done.stdout.strip())
    assert loaded.parent == compiled.parent
    assert loaded != compiled


# What can go wrong

CALL_AUTO_TWICE_THEN_CPP = """
import torch, hoconv
from hoconv.dispatch.implementations import ImplementationError
x, weight = torch.randn(1, 2, 4, 5), torch.randn(9, 1, 1, 4, 5)
expected = hoconv.high_order_conv2d(x, weight, impl="reference")
for _ in range(2):
    assert torch.equal(hoconv.high_order_conv2d(x, weight), expected)
print(hoconv.implementations()["cpp"])
try:
    hoconv.high_order_conv2d(x, weight, impl="cpp")
except ImplementationError as error:
    print(error)
"""


def test_missing_compiler_makes_auto_the_reference_and_cpp_an_error(
    tmp_path: Path,
) -> None:
    done = python(CALL_AUTO_TWICE_THEN_CPP, **without_compiler(tmp_path, tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    reason = "a C++ compiler was not found; install g++ or clang++, or set CXX to one"
    listed, raised = done.stdout.splitlines()
    assert listed == reason
    assert raised == f"impl=cpp cannot run high_order_conv2d: {reason}"
    assert done.stderr == (
        f"hoconv: high_order_conv2d uses reference on cpu; cpp cannot: {reason}\n"
    )
    assert not (tmp_path / "cache").exists()


@needs_compiler
def test_broken_compiler_makes_auto_the_reference_and_cpp_an_error(
    tmp_path: Path,
) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'x.cpp:1: error: out of order' >&2\nexit 1\n")
    compiler.chmod(0o755)
    cache = str(tmp_path / "cache")
    done = python(CALL_AUTO_TWICE_THEN_CPP, CXX=str(compiler), TORCH_EXTENSIONS_DIR=cache)
    assert done.returncode == 0, done.stderr
    listed, raised, command = done.stdout.splitlines()
    assert listed == "available"  # nothing was compiled to find out
    assert raised == (
        "impl=cpp is broken for high_order_conv2d: "
        "the compiler failed: x.cpp:1: error: out of order"
    )
    assert command.startswith(f"  command: {compiler} ")
    fallback = "high_order_conv2d uses reference on cpu; cpp is broken: the compiler failed"
    assert done.stderr.count(fallback) == 1
    assert done.stderr.count("compiling high_order_conv2d for cpu") == 1  # not at every call


@needs_compiler
def test_library_compiled_before_is_loaded_without_a_compiler(
    tmp_path: Path, compiled: Path
) -> None:
    folder = tmp_path / "cache"
    (folder / "hoconv").mkdir(parents=True)
    for file in (compiled, compiled.with_name(f"{compiled.name}.sha256")):
        shutil.copy(file, folder / "hoconv")
    code = """
import torch, hoconv
from hoconv.ops.high_order.conv2d.operator import OPERATOR
from hoconv.dispatch.implementations import choose
x, weight = torch.randn(1, 2, 4, 5), torch.randn(9, 1, 1, 4, 5)
out = hoconv.high_order_conv2d(x, weight, impl="cpp")
torch.testing.assert_close(out, hoconv.high_order_conv2d(x, weight, impl="reference"))
print(choose(OPERATOR, "auto", "cpu").name)
"""
    done = python(code, **without_compiler(tmp_path, folder))
    assert (done.stdout, done.stderr) == ("cpp\n", "")


def test_missing_named_compiler_is_not_replaced(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    reason = toy.library.load()
    assert reason is not None
    assert "CXX=/nowhere/c++ was not found" in reason
    assert toy.library.obstacle() == reason


def test_failing_compiler_shows_its_first_errors_and_leaves_no_files(
    toy: Toy, capfd: pytest.CaptureFixture[str]
) -> None:
    script = 'echo note; for i in 7 8 9 10 11 12 13; do echo "t.cpp:$i: error: no x$i"; done'
    toy.compiles_with(f'case " $* " in *" -c "*) {{ {script}; }} >&2; exit 1 ;; esac')
    with pytest.raises(jit.BuildError) as raised:
        toy.library.compile()
    first, *more, last, command = str(raised.value).splitlines()
    assert first == "the compiler failed: t.cpp:7: error: no x7"
    assert more == [f"  t.cpp:{i}: error: no x{i}" for i in (8, 9, 10, 11)]
    assert last == "  ... and 2 more errors"
    assert command.startswith(f"  command: {toy.compiler} ")
    assert "compiled" not in capfd.readouterr().err
    assert [name for name in toy.cached if not name.endswith(".lock")] == []


def test_compiler_that_fails_silently_is_reported(toy: Toy) -> None:
    toy.compiles_with("exit 1")
    reason = toy.library.load()
    assert reason is not None
    assert "the compiler failed: no output, exit status 1" in reason
    assert str(toy.compiler) in reason


def test_cache_that_cannot_be_written_is_named_with_the_fix(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(file))
    reason = toy.library.load()
    assert reason is not None
    assert f"cannot write the build cache {file}/hoconv" in reason
    assert "set TORCH_EXTENSIONS_DIR to a folder that can be written" in reason


def test_compiler_that_cannot_be_run_is_named(toy: Toy) -> None:
    toy.compiler.write_bytes(b"\0 no program")
    assert toy.library.load() == f"the compiler {toy.compiler} cannot be run (Exec format error)"


def test_library_that_cannot_be_loaded_is_named(toy: Toy) -> None:
    toy.compiles_with('for last; do :; done; [ $# = 1 ] || echo "not a library" > "$last"')
    assert str(toy.library.compile()) in (toy.library.load() or "")


@needs_compiler
def test_threads_that_load_at_once_compile_once(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(Library.load, [toy.library] * 8)) == {None}
    assert len(loaded) == toy.compilations == 1


@needs_compiler
def test_missing_cuda_compiler_is_said_with_the_fix(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    which = shutil.which

    def without_nvcc(name: str, path: str | None = None) -> str | None:
        return None if name == "nvcc" else which(name, path=path)

    monkeypatch.setattr(shutil, "which", without_nvcc)
    with pytest.raises(jit.BuildError, match=r"no CUDA compiler was found; .* CUDA_HOME"):
        Library("toy", [toy.source], "cuda").compile(("9.0",))


# Several processes


def compile_in_another_process(toy: Toy) -> subprocess.Popen[str]:
    """Returns once its compiler is half-way."""
    code = f"""
from hoconv.jit import Library
print(Library("toy", [{str(toy.source)!r}], include=[{str(toy.csrc)!r}]).compile())
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    toy.processes.append(process)
    started = os.open(toy.started, os.O_RDONLY | os.O_NONBLOCK)
    ready, _, _ = select.select([started], [], [], PATIENCE)
    os.close(started)
    assert ready, "the other process compiled nothing"
    return process


@needs_compiler
def test_second_process_waits_for_the_first_rather_than_compile_twice(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy.stops_half_way()
    first = compile_in_another_process(toy)
    locks, made = threading.Event(), []
    acquire = cache.FileLock.acquire

    def noted(*arguments: Any) -> Any:
        locks.set()
        return acquire(*arguments)

    monkeypatch.setattr(cache.FileLock, "acquire", noted)
    second = threading.Thread(target=lambda: made.append(toy.library.compile()), daemon=True)
    second.start()
    assert locks.wait(PATIENCE)
    toy.gate.write_text("go on\n")
    second.join(PATIENCE)
    assert first.communicate()[0] == f"{made[0]}\n"
    assert toy.compilations == 1


@needs_compiler
def test_killed_build_is_no_obstacle_to_the_next(toy: Toy) -> None:
    toy.stops_half_way()
    killed = compile_in_another_process(toy)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert len(toy.cached) == 4  # lock files and half-made files of the library and its object
    assert toy.library.compile().exists()
    assert toy.library.load() is None


# hoconv build


@pytest.fixture
def broken(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> Library:
    """Declares the toy's library, and one after it that does not compile."""
    source = toy.csrc / "broken.cpp"
    source.write_text("int broken() { return nothing; }\n")
    broken = Library("broken", [source])

    def libraries(device: str) -> list[Library]:
        return [broken, toy.library] if device == "cpu" else []

    monkeypatch.setattr(build, "libraries", libraries)
    return broken


@needs_compiler
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_command_compiles_what_it_can_and_explains_the_rest(
    toy: Toy,
    broken: Library,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for source in broken.sources:
        Path(source).write_text("int whole() { return 1; }\n")
    build.main([])
    said = capsys.readouterr()
    assert said.out == f"{broken.compile()}\n{toy.library.compile()}\n"
    assert f"cuda: not compiled: {jit.no_gpu()}" in said.err


@needs_compiler
@pytest.mark.parametrize("named", [["cpu"], []])
def test_command_fails_with_the_reason_and_compiles_the_others(
    toy: Toy,
    broken: Library,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    named: list[str],
) -> None:
    with pytest.raises(SystemExit) as exit:
        build.main(named)
    assert re.match(r"broken for cpu: the compiler failed: .*broken\.cpp:1", str(exit.value))
    assert capsys.readouterr().out == f"{toy.library.compile()}\n"


@pytest.mark.parametrize("arguments", [["--arch", "9.0"], ["cpu", "--arch", "9.0"], ["rocm"]])
def test_command_refuses_wrong_arguments(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        build.main(arguments)
    assert exit.value.code == 2
