"""What all tests share: the same random numbers every time, and no test that cannot run here."""

import os
from collections.abc import Iterator

# Threads that wait must not spin: the tests share their cores with other processes. OpenMP reads
# this when it is loaded, and so do the processes that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import hypothesis
import pytest
import torch

from hoconv import build
from tests.support import Place

hypothesis.settings.register_profile(
    "same every time",
    derandomize=True,
    deadline=None,
    # `place` does not change from example to example.
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("same every time")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason=build.no_gpu())
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _float32_is_float32() -> Iterator[None]:
    with torch.backends.cudnn.flags(allow_tf32=False):
        yield


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Place:
    """An implementation on a device, parametrised with `tests.support.places`."""
    place: Place = request.param
    if reason := place.obstacle():
        pytest.skip(reason)
    return place
