"""A plugin of pytest for tests of operators: fixed random seeds, exact float32, and a skip for what
cannot run here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hoconv import jit
from hoconv.tools.testing.variants import Variant


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU")
    config.addinivalue_line("markers", "slow: takes more than about 4 seconds")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason=jit.no_gpu())
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
def variant(request: pytest.FixtureRequest) -> Variant:
    """An implementation on a device, parametrised with `hoconv.tools.testing.variants.variants`."""
    variant: Variant = request.param
    if reason := variant.obstacle():
        pytest.skip(reason)
    return variant
