"""What all tests share."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import launch

# A shell's background job starts with SIGINT ignored, and all its children would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _no_process_left() -> Iterator[None]:
    yield
    launch.close_pool()


def pytest_collection_finish(session: pytest.Session) -> None:
    """A run of everything has collected every test file: one left out unseen proves nothing."""
    if session.config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    if session.config.option.keyword or session.config.option.markexpr:
        return
    collected = {item.path for item in session.items}
    files = set(Path(__file__).resolve().parent.rglob("test_*.py"))
    if files - collected:
        raise pytest.UsageError(f"no test was collected from {sorted(map(str, files - collected))}")
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0":  # once, however many workers
        _start_compiling(session.config)


def _start_compiling(config: pytest.Config) -> None:
    """What the C++ tests need, in idle time, until the session ends."""
    command = [sys.executable, "-m", "tests.native.ahead"]
    path = os.pathsep.join(filter(None, [str(launch.ROOT), os.environ.get("PYTHONPATH", "")]))
    ahead = subprocess.Popen(
        command,
        cwd=launch.ROOT,
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )

    def end() -> None:
        with contextlib.suppress(ProcessLookupError):  # it was through
            os.killpg(ahead.pid, signal.SIGTERM)  # with the compiler and its parts
        ahead.wait()

    config.add_cleanup(end)
