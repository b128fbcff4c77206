"""Threads as ranks: cheap groups of any size, all in this process."""

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from pyparallel.comm import Communicator

T = TypeVar("T")


def run_threads(
    world_size: int,
    fn: Callable[[Communicator], T],
    *,
    timeout: float = 30.0,
    name: str = "threads",
    run_timeout: float = 60.0,
) -> list[T]:
    """Calls fn(communicator) on one thread per rank; results in rank order, or the first error."""
    id = Communicator.unique_id()

    def rank(number: int) -> T:
        with Communicator.from_id(id, number, world_size, name=name, timeout=timeout) as comm:
            return fn(comm)

    return in_threads(
        [lambda number=number: rank(number) for number in range(world_size)], run_timeout
    )


def in_threads(calls: list[Callable[[], T]], run_timeout: float = 60.0) -> list[T]:
    """Runs the calls at once; their results, or the first exception (by time)."""
    results: list[Any] = [None] * len(calls)
    failures: list[BaseException] = []

    def body(number: int) -> None:
        try:
            results[number] = calls[number]()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=body, args=(n,), daemon=True) for n in range(len(calls))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + run_timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    stuck = [n for n, thread in enumerate(threads) if thread.is_alive()]
    assert not stuck, f"threads {stuck} still run after {run_timeout} s; failures: {failures}"
    if failures:
        raise failures[0]
    return results
