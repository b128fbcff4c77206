"""A started call, and what keeps its memory alive until it is over."""

import contextlib
import threading
from datetime import timedelta
from typing import Any, Generic, TypeVar

from pyparallel import _core
from pyparallel.errors import CommError, InvalidArgument, Timeout

__all__ = ["Work"]

T = TypeVar("T")

# As good as never; a call ends by its own deadline.
_NEVER_MS = 10**12


def milliseconds(timeout: "float | timedelta") -> int:
    """A timeout in seconds (or a timedelta) as the whole milliseconds that the core takes."""
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if not seconds >= 0:
        raise InvalidArgument(f"timeout is {timeout!r}; expected seconds, at least 0")
    return int(min(seconds * 1000, _NEVER_MS))


class Work(Generic[T]):
    """One started call. Its tensors are kept alive until it is over, whether or not anyone waits.

    Results are valid once `wait()` has returned.
    """

    def __init__(
        self,
        core: _core.Work,
        result: T,
        *,
        owner: object,
        tensors: Any,
        limit_ms: int = _NEVER_MS,
    ) -> None:
        self._core = core
        self._result = result
        self._limit_ms = limit_ms
        self._kept: tuple[object, Any] | None = (owner, tensors)
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        _in_flight.add(self)

    def done(self) -> bool:
        """Whether the call is over, well or badly."""
        return self._core.done()

    def wait(self, timeout: "float | timedelta | None" = None) -> T:
        """The call's result when it is over; raises what the call raised.

        A collective ends by its own timeout; one given here ends this wait only: `Timeout` leaves
        the call going, and it may be waited for again. A message has no other deadline than that of
        its wait (by default the communicator's), and passing it breaks the group.
        """
        limit = self._limit_ms if timeout is None else milliseconds(timeout)
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._kept is not None:
                self._wait_for_core(limit)
                self._finish()
                self._kept = None
                _in_flight.discard(self)
        return self._result

    def _wait_for_core(self, limit_ms: int) -> None:
        try:
            self._core.wait(limit_ms)
        except Timeout as error:
            if self._core.done():
                self._fail(error)
            raise
        except CommError as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._kept = None
        _in_flight.discard(self)

    def _finish(self) -> None:
        """What is left to do with a result that has come."""

    def exception(self) -> BaseException | None:
        """What the call raised, or None when it went well; waits for its end."""
        try:
            self.wait()
        except CommError as error:
            return error
        return None


class ReceiveWork(Work["int"]):
    """A started receive; its result is the rank that sent."""

    def __init__(
        self, core: _core.Work, *, owner: object, staging: Any, out: Any, limit_ms: int
    ) -> None:
        self._staging = staging
        self._out = out
        super().__init__(core, -1, owner=owner, tensors=(staging, out), limit_ms=limit_ms)

    def _finish(self) -> None:
        from pyparallel.comm.tensors import give_back

        give_back(self._staging, self._out)
        self._result = self._core.source()


class _InFlight:
    """The works nobody has waited for yet: their memory may still be in use by the core."""

    def __init__(self) -> None:
        self._works: set[Work[Any]] = set()
        self._lock = threading.Lock()
        self._sweep_at = 16

    def add(self, work: Work[Any]) -> None:
        with self._lock:
            self._works.add(work)
            if len(self._works) >= self._sweep_at:
                self._works = {w for w in self._works if not w.done()}
                self._sweep_at = max(16, 2 * len(self._works))

    def discard(self, work: Work[Any]) -> None:
        with self._lock:
            self._works.discard(work)

    def settle(self, seconds: float) -> None:
        """Waits a little for each: at exit, after their communicators were closed."""
        with self._lock:
            works = list(self._works)
        for work in works:
            with contextlib.suppress(CommError):
                work.wait(seconds)


_in_flight = _InFlight()
settle_all = _in_flight.settle
