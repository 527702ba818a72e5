"""A shared library of C++ or CUDA code, brought by a wheel or compiled on first use into the cache.

Every source is compiled to an object of its own, whose key is the source, the headers that it
includes, the flags and the compiler: after a change, only what includes it is compiled again. The
key of the library is that of all its objects.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import math
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from hoconv.jit import cache, compilers, headers, prebuilt
from hoconv.jit.cache import BuildError

# Options that name headers, or files of options.
_HEADER_FLAGS = (
    "-I", "-iquote", "-isystem", "-idirafter", "-include", "-imacros", "-Wp,", "-Xpreprocessor",
    "--include-path", "--system-include", "--pre-include", "@",
)  # fmt: skip
# How many times as long as `compilers.PROBE` one source takes, for one architecture. Those of
# hoconv take 4 to 14 times as long.
_PROBES = {"cpu": 14, "cuda": 35}
_LINK = (
    "where the checkout made a text file of the symbolic link hoconv/csrc, clone again with "
    "git clone -c core.symlinks=true"
)
_loading = threading.Lock()


@dataclass(frozen=True)
class Library:
    """C++ or CUDA code of an operator, for one device.

    It is compiled against the LibTorch stable ABI (``torch/csrc/stable/``, ``torch/headeronly/``),
    so that one file serves every version of torch from 2.11 on. The public headers of hoconv
    (``#include "hoconv/tensor.h"``) are found without being named. CONTRIBUTING names the folders
    of hoconv's own code; docs/extend/compiled_code.md describes the use from another package.

    Args:
        name: up to 100 letters, digits, ``_``, ``-`` and ``.``; names files of the cache, and
            messages.
        sources: files of C++ for ``"cpu"``, of C++ and CUDA for ``"cuda"``.
        device: whose compiler compiles it: ``"cpu"`` or ``"cuda"``.
        include: the folders of headers that its sources include.
        flags: further options of the compiler, when it compiles and when it links.

    Raises:
        ValueError: a name with other characters or too many, no source, a device that is neither,
            or flags that name headers.
    """

    name: str
    sources: Sequence[str | Path]
    device: Literal["cpu", "cuda"] = "cpu"
    include: Sequence[str | Path] = ()
    flags: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.-]{1,100}", self.name, re.ASCII):
            raise ValueError(
                f"name: expected up to 100 letters, digits, _, - and ., got {self.name!r}"
            )
        if self.device not in _PROBES:
            raise ValueError(f"device: expected cpu or cuda, got {self.device!r}")
        for name, of in (("sources", Path), ("include", Path), ("flags", str)):
            given = getattr(self, name)
            if isinstance(given, str | Path):
                raise ValueError(f"{name}: expected a list, got {given!r}")
            object.__setattr__(self, name, tuple(map(of, given)))
        if not self.sources:
            raise ValueError("sources: expected at least one file, got none")
        for flag in self.flags:
            if flag.startswith(_HEADER_FLAGS):
                raise ValueError(
                    f"flags: got {flag!r}; name folders of headers in include=, so that a change "
                    "of a header is seen"
                )

    def load(self) -> str | None:
        """Loads the library, compiled first if neither a wheel nor the cache has it. Once, from any
        thread.

        Its functions that are registered with ``STABLE_TORCH_LIBRARY_IMPL`` become ops.

        Returns:
            None, or why its ops cannot be used, with the fix. Where :meth:`obstacle` finds
            nothing, the library is broken.
        """
        with _loading:
            return _load_once(self)

    def functions(self) -> ctypes.CDLL:
        """Returns the library's functions that are no ops, by their C names.

        Raises:
            BuildError: the library cannot be used.
        """
        if reason := self.load():
            raise BuildError(reason)
        return ctypes.CDLL(str(self.compile()))

    def obstacle(self) -> str | None:
        """Returns what is missing to compile or run the library, with the fix, or None.

        It compiles nothing. A library that a wheel brings or that is in the cache needs no
        compiler.
        """
        missing = compilers.obstacle(self.device)
        if not missing or (self.device == "cuda" and not torch.cuda.is_available()):
            return missing
        try:
            if self.find():
                return None
            brought = self._find_brought()
            misfit = brought and prebuilt.misfit(brought)
            return f"{misfit}; {missing}" if misfit else missing
        except BuildError as error:
            return f"{missing}; {error}"

    def compile(self, architectures: Sequence[str] | None = None) -> Path:
        """Compiles what changed of the library into the cache, unless a wheel brings it.

        Args:
            architectures: CUDA compute capabilities to generate code for, such as ``"9.0"`` or
                ``"8.0+PTX"``, or a level of x86-64, such as ``"x86-64-v3"``; by default those of
                this machine.

        Returns:
            The path of the shared library.

        Raises:
            BuildError: there is no compiler, or it failed; a source cannot be read; the cache may
                not be trusted, or cannot be written.
        """
        if architectures is None and (found := self.prebuilt()):
            return found
        try:
            command = compilers.compiler(self.device)
        except BuildError:
            if found := self.find(architectures):
                return found
            raise
        flags = self._flags(architectures)
        objects = self._object_keys(flags, compilers.identity(command))

        def make(folder: Path) -> Path:
            return self._build(command, flags, objects, folder / "library.so")

        return cache.keep(self._key(objects, compilers.identity(command)), make)

    def find(self, architectures: Sequence[str] | None = None) -> Path | None:
        """Finds the library of a wheel for this machine, or that in the cache, of this machine's
        compiler; without one, of any compiler.

        Args:
            architectures: as for :meth:`compile`; a wheel's library is for the default.

        Returns:
            The path of the shared library, or None.

        Raises:
            BuildError: a source cannot be read; the cache may not be trusted.
        """
        if architectures is None and (found := self.prebuilt()):
            return found
        try:
            identity = compilers.identity(compilers.compiler(self.device))
        except BuildError:
            identity = "*"
        objects = self._object_keys(self._flags(architectures), identity)
        return cache.find(self._key(objects, identity))

    def prebuilt(self) -> Path | None:
        """Finds the library that a wheel brings, if it is of these sources and for this machine.

        Raises:
            BuildError: a source cannot be read.
        """
        brought = self._find_brought()
        return None if brought is None or prebuilt.misfit(brought) else brought

    def place(self, folder: Path) -> None:
        """Compiles the library for other machines and copies it to where :meth:`prebuilt` finds it.

        Args:
            folder: where a wheel has the folder of the first source.

        Raises:
            BuildError: as of :meth:`compile`.
        """
        identity = prebuilt.identity(self.device, compilers.compiler(self.device))
        (folder / prebuilt.FOLDER).mkdir(exist_ok=True)
        for architectures in prebuilt.targets(self.device):
            name = self._key(self._object_keys(self._flags(architectures), identity), identity)
            shutil.copyfile(self.compile(architectures), folder / prebuilt.FOLDER / name)

    def _find_brought(self) -> Path | None:
        """Finds the library of these sources that a wheel brings, whatever this machine's GPUs."""
        folder = Path(self.sources[0]).parent / prebuilt.FOLDER
        if not folder.is_dir():
            return None  # as in a checkout
        objects = self._object_keys(self._flags(prebuilt.target(self.device)), "*")
        return next(folder.glob(self._key(objects, "*")), None)

    def _flags(self, architectures: Sequence[str] | None) -> list[str]:
        if architectures is None:
            architectures = compilers.machine(self.device)
        return [*compilers.flags(self.device, architectures), *self.flags]

    def _folders(self) -> list[Path]:
        return [*map(Path, self.include), headers.PUBLIC]

    def _object_keys(self, flags: list[str], identity: str) -> dict[str, Path]:
        """Returns the source of each object, by the object's name in the cache."""
        keys = {}
        for source in map(Path, self.sources):
            try:
                text = source.read_bytes()
            except OSError as error:
                why = f"{self.name}: cannot read the source {source} ({error.strerror})"
                raise BuildError(why if headers.CSRC.is_dir() else f"{why}; {_LINK}") from None
            contents = headers.digest(text, source.parent, self._folders())
            digest = hashlib.sha256(repr((flags, source.name, contents)).encode()).hexdigest()[:16]
            keys[f"{self.name}-{digest}-{identity}.o"] = source
        return keys

    def _key(self, objects: Iterable[str], identity: str) -> str:
        """Returns the library's name in the cache."""
        # Where there is no compiler, `identity` is a pattern: the digest must not depend on it.
        parts = [name.removesuffix(f"-{identity}.o") for name in objects]
        parts += [self.device, *compilers.link_flags(self.device)[1:], *self._digest_linked()]
        digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
        return f"{self.name}-{self.device}-{digest}-{identity}.so"

    def _digest_linked(self) -> list[str]:
        """Returns a digest of each file among the flags: an archive, say, that is linked."""
        files = (Path(flag) for flag in self.flags)
        return [hashlib.sha256(f.read_bytes()).hexdigest() for f in files if f.is_file()]

    def _build(
        self, command: str, flags: list[str], objects: Mapping[str, Path], shared: Path
    ) -> Path:
        what = f"{self.name} for {self.device}"
        if changed := sum(cache.find(key) is None for key in objects):
            architectures = sum(flag.startswith("-gencode") for flag in flags) or 1
            rounds = _PROBES[self.device] * architectures * math.ceil(changed / compilers.CORES)
            files = f"{changed} of {len(objects)} files"
            said = f"hoconv: compiling {what}, once ({files}{_estimate(rounds)})"
            print(said, file=sys.stderr, flush=True)
        start = time.monotonic()
        options = [*flags, *compilers.include_flags(self._folders())]

        finished = itertools.count(1)  # files, in the threads that compile

        def compile_one(key: str, source: Path) -> str:
            def make(folder: Path) -> Path:
                made = folder / "object.o"
                compilers.run([command, *options, "-c", str(source), "-o", str(made)])
                if (done := next(finished)) < changed:
                    # As if no other file were half done: the most, while the load stays.
                    left = (time.monotonic() - start) / done * (changed - done)
                    said = (
                        f"hoconv: {done} of {changed} files of {what}, up to {_seconds(left)} left"
                    )
                    print(said, file=sys.stderr, flush=True)
                return made

            return str(cache.keep(key, make))

        with ThreadPoolExecutor(compilers.CORES) as pool:
            compiled = [pool.submit(compile_one, *each) for each in objects.items()]
            done, _ = wait(compiled, return_when=FIRST_EXCEPTION)
            pool.shutdown(wait=False, cancel_futures=True)  # what has not begun where one failed
            for each in done:
                each.result()
        linked = [*(each.result() for each in compiled), *compilers.link_flags(self.device)]
        compilers.run([command, "-shared", *linked, *self.flags, "-o", str(shared)])
        print(f"hoconv: compiled {what} in {time.monotonic() - start:.0f} s", file=sys.stderr)
        return shared


def _estimate(probes: int) -> str:
    """Says how long so many times the compilation of a small file takes on this machine, as busy as
    it is."""
    probe = compilers.probe_seconds()
    if probe is None:
        return ""
    return f", {_seconds(probes * probe)} if it stays as busy"


def _seconds(seconds: float) -> str:
    return f"about {seconds:.0f} s" if seconds < 100 else f"about {seconds / 60:.0f} minutes"


@functools.cache
def _load_once(library: Library) -> str | None:
    try:
        if library.device == "cuda" and not torch.cuda.is_available():
            return compilers.no_gpu()
        torch.ops.load_library(str(library.compile()))
    except (BuildError, OSError) as error:
        return f"{error} ({error.__cause__})" if error.__cause__ else str(error)
    return None
