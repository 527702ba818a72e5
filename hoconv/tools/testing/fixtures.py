"""A plugin of pytest for tests of operators: fixed random seeds, exact float32, a skip for what
cannot run here, and failures in the words of a test rather than in its code."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch

from hoconv import jit
from hoconv.tools.testing.variants import Variant

_TESTS = Path(__file__).parent / "test_operators.py"  # of every operator


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU")
    config.addinivalue_line("markers", "slow: takes more than about 4 seconds")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason=jit.no_gpu())
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Says what a test of every operator found. Its code, which ``--tb=short`` shows, is not that
    of the operator's author."""
    report = yield
    own = item.path == _TESTS and item.config.getoption("tbstyle") == "auto"
    if own and report.failed and call.excinfo:
        report.longrepr = _describe(call.excinfo) or report.longrepr
    return report


def _describe(error: pytest.ExceptionInfo[BaseException]) -> str | None:
    """Returns what an error says, after the lines of the operator's package that raised it; None if
    it tells by itself, or the test raised it."""
    if error.errisinstance(pytest.fail.Exception):
        return None
    frames = itertools.dropwhile(lambda frame: frame.path != _TESTS, error.traceback)
    others = _TESTS.parent, Path(torch.__file__).parent
    lines = [
        f"{frame.path}:{frame.lineno + 1}: {str(frame.statement).strip().splitlines()[0]}"
        for frame in frames
        if not any(Path(frame.path).is_relative_to(folder) for folder in others)
    ]
    if not error.errisinstance(AssertionError):
        return "\n".join((*lines, error.exconly())) if lines else None
    said = str(error.value).splitlines()
    # A list that should be empty is in words already.
    words = itertools.takewhile(lambda line: not line.startswith("assert not ["), said)
    return "\n".join((*lines, *words)).strip()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _float32_is_float32() -> Iterator[None]:
    with torch.backends.cudnn.flags(allow_tf32=False):
        yield


@pytest.fixture
def variant(request: pytest.FixtureRequest) -> Variant:
    """An implementation on a device, parametrised with `hoconv.tools.testing.variants.variants`."""
    variant: Variant = request.param
    if reason := variant.obstacle():
        pytest.skip(reason)
    return variant
