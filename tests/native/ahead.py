"""Compiles what the C++ tests will need, ahead of them, in time that nobody else wants.

A run of all tests starts it (tests/conftest.py). Tests between processes leave a core idle now and
then; under SCHED_IDLE this takes those moments and no others. Objects are kept by their content
(build.py), so a test that comes before its objects are ready compiles them itself.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.native import build
from tests.native.test_native import REDUCE, SHM
from tests.nccl.test_native import files as nccl_files
from tests.symmetric.test_native import SOURCES as SYMMETRIC


def jobs() -> Iterator[tuple[Path, str]]:
    """Sources and modes in the order in which the tests come."""
    programs = (
        ("test_reduce", REDUCE, ("plain", "address")),
        ("test_communicator", SHM, ("plain", "address", "thread")),
    )
    for program, sources, modes in programs:
        for mode in modes:
            yield from ((file, mode) for file in build.files_of(program, sources, mode))
    for mode in ("address", "thread"):
        yield from ((file, mode) for file in nccl_files())
    for mode in ("plain", "address", "thread"):
        yield from ((file, mode) for file in build.files_of("test_symmetric", SYMMETRIC, mode))


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # compilers are ended, folders removed
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    starter = os.getppid()
    for source, mode in jobs():
        if os.getppid() != starter:
            return
        with contextlib.suppress(AssertionError):  # the test itself will say what is wrong
            build.object_of(source, build.MODES[mode])


if __name__ == "__main__":
    main()
