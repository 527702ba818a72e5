"""scripts/sanitize.py: what a compiled library does wrong is found, and told with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import has_sanitizers

LIBRARY = """
extern "C" float sum(const float* x, int n) {
  float total = 0;
  for (int i = 0; i < n; ++i) total += x[i];
  return total;
}
extern "C" int twice(int n) { return n * 2; }
"""

SCRIPT = """
import ctypes, os, subprocess, sys
import numpy
library = sys.argv[1] + "/library.so"
subprocess.run(
    [os.environ["CXX"], "-shared", "-fPIC", sys.argv[1] + "/library.cpp", "-o", library], check=True
)
made = ctypes.CDLL(library)
numbers = numpy.ones(100, numpy.float32)
made.sum(ctypes.c_void_p(numbers.ctypes.data), int(sys.argv[2]))
made.twice(int(sys.argv[3]))
"""


@pytest.mark.skipif(not has_sanitizers(), reason="needs g++ and its libasan.so; install them")
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("100", "4"), 0, ", 0 findings"),
        (("101", "4"), 1, "heap-buffer-overflow"),
        (("100", str(2**30)), 1, "signed integer overflow"),
    ],
)
def test_it_finds_what_a_library_does_wrong(
    script, monkeypatch, tmp_path: Path, capfd, arguments: tuple[str, str], code: int, said: str
) -> None:
    monkeypatch.setattr(script("sanitize"), "FOLDER", tmp_path)
    monkeypatch.setenv("CXX", "g++")
    script("hoconv.jit").compiler.cache_clear()
    (tmp_path / "library.cpp").write_text(LIBRARY)
    (tmp_path / "script.py").write_text(SCRIPT)
    given = [str(tmp_path / "script.py"), str(tmp_path), *arguments]
    try:
        assert script("sanitize").main(given) == code
    finally:
        script("hoconv.jit").compiler.cache_clear()
    out = capfd.readouterr().out
    assert said in out
    assert code == 0 or "library.cpp:" in out
