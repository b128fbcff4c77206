"""csrc/symmetric in C++: integers, registry, choice, and threads as ranks under the sanitizers."""

import re

import pytest

from tests.native import build

pytestmark = pytest.mark.skipif(
    build.compiler() is None, reason="needs a C++ compiler (g++ or CXX)"
)

SOURCES = ["base/*.cpp", "shm/*.cpp", "symmetric/*.cpp"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["plain", "address", "thread"])
def test_symmetric(mode: str) -> None:
    text = build.run(build.build("test_symmetric", SOURCES, mode))
    done = re.search(r"symmetric: (\d+) checks, 0 failed", text)
    assert done, text
    assert int(done[1]) > 20_000, "a test that checks little passes easily"
