"""What the tests of `hoconv judge` share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hoconv.tools.judging.session import Starter


@pytest.fixture(scope="session")
def starter() -> Iterator[Starter]:
    with Starter() as starter:
        yield starter
