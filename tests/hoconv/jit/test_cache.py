"""The cache of compiled code: whose files are run, what is made again, and where it is.

Libraries, generated C++ and generated CUDA go the same way.
"""

from __future__ import annotations

import functools
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hoconv import jit
from hoconv.jit import cache, generated, nvrtc
from hoconv.jit.generated import compile_cpp, compile_cuda

ROOT = Path(__file__).parents[3]
CPP = 'extern "C" int answer() { return 42; }\n'
CUDA = 'extern "C" __global__ void answer(int* a) { *a = 42; }\n'
ANOTHER = 12345  # a user who is neither the one that runs the tests nor root
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")

Maker = Callable[[], Path]


def library_in(folder: Path) -> jit.Library:
    return jit.Library("toy", [folder / "toy.cpp"])


MAKERS: dict[str, tuple[Callable[[Path], Path], str | None]] = {
    "library": (lambda folder: library_in(folder).compile(), jit.obstacle("cpu")),
    "C++": (lambda folder: compile_cpp("toy", CPP), jit.obstacle("cpu")),
    "CUDA": (lambda folder: compile_cuda("toy", CUDA, "sm_90"), nvrtc.obstacle()),
}


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Maker:
    """Makes a file of each kind, in a cache of its own."""
    maker, reason = MAKERS[request.param]
    if reason:
        pytest.skip(reason)
    (tmp_path / "toy.cpp").write_text(CPP)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    return functools.partial(maker, tmp_path)


def digest_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def flip_a_bit(path: Path) -> None:
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 1
    path.write_bytes(contents)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replace_by_a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "truncated": truncate,
    "a bit flipped": flip_a_bit,
    "garbage": lambda path: path.write_bytes(b"not what was made"),
    "grown": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "gone": Path.unlink,
    "a link": replace_by_a_link,
    "writable by everyone": lambda path: path.chmod(0o777),
    "without a digest": lambda path: digest_of(path).unlink(),
    "with half a digest": lambda path: truncate(digest_of(path)),
    "with a digest that is no text": lambda path: digest_of(path).write_bytes(b"\xff" * 64),
    "with a digest writable by everyone": lambda path: digest_of(path).chmod(0o666),
    "another user's": lambda path: os.chown(path, ANOTHER, ANOTHER),
    "with another user's digest": lambda path: os.chown(digest_of(path), ANOTHER, ANOTHER),
}
GIVEN_AWAY = {"another user's", "with another user's digest"}


@pytest.mark.parametrize(
    "damage", [pytest.param(d, marks=[as_root] if d in GIVEN_AWAY else []) for d in DAMAGE]
)
def test_what_is_not_as_it_was_made_is_made_again(make: Maker, damage: str) -> None:
    path = make()
    contents = path.read_bytes()
    DAMAGE[damage](path)
    assert make() == path
    assert path.read_bytes() == contents
    assert (path.lstat().st_uid, stat.S_ISREG(path.lstat().st_mode)) == (os.geteuid(), True)
    made = path.stat().st_mtime_ns
    make()
    assert path.stat().st_mtime_ns == made  # and then it is as it was made


def plant(make: Maker) -> Path:
    """Returns what others could leave in the cache: a file that fits in all, and is not what it
    says."""
    path = make()
    path.write_bytes(b"planted")
    digest_of(path).write_text(cache._digest(path))
    return path


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775])
def test_a_folder_that_others_can_write_to_is_refused(make: Maker, mode: int) -> None:
    folder = plant(make).parent
    os.chown(folder, -1, ANOTHER) if os.geteuid() == 0 else None
    if mode == 0o775 and cache._is_private(folder.stat().st_gid):
        pytest.skip("its group has no other member")
    folder.chmod(mode)
    with pytest.raises(jit.BuildError) as refused:
        make()
    reason = str(refused.value)
    assert f"{folder} is not safe to run code from: {folder} can be written by" in reason
    assert "chmod go-w" in reason
    assert "set TORCH_EXTENSIONS_DIR" in reason


def test_a_cache_folder_that_others_can_replace_is_refused(make: Maker) -> None:
    folder = plant(make).parent
    folder.parent.chmod(0o777)
    with pytest.raises(jit.BuildError, match=f": {folder.parent} can be written by everyone"):
        make()


def test_a_folder_of_the_users_own_in_one_as_tmp_is_trusted(make: Maker) -> None:
    path = make()
    path.parents[1].chmod(0o1777)
    made = path.stat().st_mtime_ns
    assert make().stat().st_mtime_ns == made


@as_root
@pytest.mark.parametrize("level", [0, 1])
def test_a_folder_of_another_user_is_refused(make: Maker, level: int) -> None:
    folder = plant(make).parents[level]
    os.chown(folder, ANOTHER, -1)
    folder.chmod(0o1755)
    with pytest.raises(jit.BuildError, match=f": {folder} belongs to user {ANOTHER}"):
        make()


@as_root
def test_a_planted_library_is_neither_loaded_nor_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a folder for all, where another was first."""
    ran = tmp_path / "ran"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "toy.cpp").write_text(CPP)
    toy = library_in(tmp_path)
    library = toy.compile()
    folder = library.parent
    source = f'__attribute__((constructor)) void run() {{ fclose(fopen("{ran}", "w")); }}'
    subprocess.run(
        [jit.compiler("cpu"), "-shared", "-fPIC", "-xc++", "-", "-o", library],
        input=f"#include <cstdio>\n{source}", text=True, check=True,
    )  # fmt: skip
    digest_of(library).write_text(cache._digest(library))
    for each in (library, digest_of(library), folder):
        os.chown(each, ANOTHER, ANOTHER)
    tmp_path.chmod(0o1777)
    reason = toy.load()
    assert f"{folder} belongs to user {ANOTHER}" in (reason or "")
    assert not ran.exists()


def test_new_folders_are_the_users_own_whatever_the_umask(make: Maker) -> None:
    before = os.umask(0)
    try:
        path = make()
        assert not path.stat().st_mode & 0o022
        assert not path.parent.stat().st_mode & 0o022
        made = path.stat().st_mtime_ns
        assert make().stat().st_mtime_ns == made
    finally:
        os.umask(before)


def test_a_cache_behind_a_link_is_found(make: Maker, tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "hoconv").symlink_to(real)
    assert make().parent == real


# What its key depends on

GENERATED: dict[str, tuple[Callable[[str], Path], str | None]] = {
    "C++": (functools.partial(compile_cpp, "toy"), jit.obstacle("cpu")),
    "CUDA": (lambda text: compile_cuda("toy", text, "sm_90"), nvrtc.obstacle()),
}


@pytest.mark.parametrize("kind", GENERATED)
def test_generated_code_is_compiled_again_where_a_header_that_it_includes_changed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_text, reason = GENERATED[kind]
    if reason:
        pytest.skip(reason)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(generated, "_FOLDERS", (tmp_path,))
    (tmp_path / "outer.h").write_text('#include "another/inner.h"\n')
    (tmp_path / "another").mkdir()
    inner, unused = tmp_path / "another" / "inner.h", tmp_path / "another" / "unused.h"
    inner.write_text("#define ANSWER 42\n")
    text = '#include "outer.h"\n' + (CPP if kind == "C++" else CUDA).replace("42", "ANSWER")
    first = compile_text(text)
    unused.write_text("")
    assert compile_text(text) == first
    inner.write_text("#define ANSWER 43\n")
    assert compile_text(text) != first


# What cannot be written


def test_a_read_only_cache_serves_what_it_has(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    for module, name in ((os, "replace"), (os, "mkdir"), (Path, "mkdir"), (Path, "write_text")):
        monkeypatch.setattr(module, name, refuse)
    monkeypatch.setattr(cache, "open", refuse, raising=False)
    assert make() == path
    flip_a_bit(path)
    with pytest.raises(jit.BuildError) as refused:
        make()
    assert str(refused.value) == (
        f"cannot write the build cache {path.parent} (Read-only file system); "
        "set TORCH_EXTENSIONS_DIR to a folder that can be written"
    )


UNTIL_IT_FITS = """
import resource, signal, sys
from pathlib import Path
from hoconv import jit
from hoconv.jit.generated import compile_cpp, compile_cuda

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
kind, text, largest = sys.argv[1], sys.argv[2], int(sys.argv[3])
for size in (0, 30, largest // 2, largest - 1, 10**9):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    try:
        path = compile_cpp("toy", text) if kind == "C++" else compile_cuda("toy", text, "sm_90")
        print(size, "made", path)
    except jit.BuildError as error:
        print(size, "refused", str(error).splitlines()[0])
"""


@pytest.mark.slow
@pytest.mark.parametrize("make", ["C++", "CUDA"], indirect=True)
def test_what_finds_no_room_is_one_clear_line_and_never_used(
    make: Maker, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    path = make()
    contents = path.read_bytes()
    for file in path.parent.iterdir():
        file.unlink()
    kind = request.node.callspec.params["make"]
    text = CPP if kind == "C++" else CUDA
    done = subprocess.run(
        [sys.executable, "-c", UNTIL_IT_FITS, kind, text, str(len(contents))],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    *refused, made = done.stdout.splitlines()
    assert len(refused) == 4
    for line in refused:
        assert "cannot write the build cache" in line or "the compiler failed: " in line
    assert made.split()[1] == "made"
    assert Path(made.split()[2]).read_bytes()


# Where it is


def test_a_user_without_a_home_or_a_name_has_a_cache(tmp_path: Path) -> None:
    code = """
import pwd, tempfile
def unknown(user):
    raise KeyError("getpwuid(): uid not found")
pwd.getpwuid = unknown
import hoconv
from hoconv.jit import cache
print(cache.folder())
print(*hoconv.implementations())
def make(folder):
    (folder / "made").touch()
    return folder / "made"
print(cache.keep("file", make))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    for name in ("HOME", "TORCH_EXTENSIONS_DIR"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    folder, known, path = done.stdout.splitlines()
    assert folder == str(tmp_path / f"hoconv-{os.geteuid()}")
    assert known == "reference cpp triton cuda"
    assert path == f"{folder}/file"
