"""Errors from C++ to Python: every class of base/error.h has its namesake, and no other."""

import re
from pathlib import Path

import pytest

from pyparallel import _core, errors

ROOT = Path(__file__).resolve().parents[1]
# Status code -> the exception, and the built-in class that other code would catch.
EXPECTED = {
    1: (errors.InvalidArgument, ValueError),
    2: (errors.Mismatch, ValueError),
    3: (errors.Timeout, TimeoutError),
    4: (errors.PeerLost, ConnectionError),
    5: (errors.Aborted, RuntimeError),
    6: (errors.Closed, RuntimeError),
    7: (errors.NoMemory, MemoryError),
    8: (errors.SystemCallError, OSError),
    9: (errors.NcclError, RuntimeError),
    10: (errors.CudaError, RuntimeError),
    11: (errors.Unsupported, NotImplementedError),
    12: (errors.Interrupted, InterruptedError),
    13: (errors.CommError, RuntimeError),
}


@pytest.mark.parametrize("status", sorted(EXPECTED))
def test_a_status_becomes_its_class(status):
    expected, builtin = EXPECTED[status]
    with pytest.raises(errors.CommError) as caught:
        _core._throw(status, "rank 2 is absent (errno 5)")
    assert type(caught.value) is expected
    assert isinstance(caught.value, builtin)
    assert isinstance(caught.value, RuntimeError)
    assert str(caught.value) == "rank 2 is absent (errno 5)"


def test_every_status_of_the_core_is_covered():
    header = (ROOT / "csrc/base/error.h").read_text()
    enum = header[header.index("enum class Status") :].partition("};")[0]
    codes = {int(code) for code in re.findall(r"= (\d+),", enum)}
    assert codes == {0, *EXPECTED}


def test_every_class_is_used():
    used = {expected.__name__ for expected, _ in EXPECTED.values()}
    assert used == set(errors.__all__)
