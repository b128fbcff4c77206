"""What all tests share."""

from collections.abc import Iterator

import pytest

from tests import launch


@pytest.fixture(scope="session", autouse=True)
def _no_process_left() -> Iterator[None]:
    yield
    launch.close_pool()
