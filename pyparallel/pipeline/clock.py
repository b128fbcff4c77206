"""When things happen on a rank: on the host, or on the device's stream that its passes run on.

A stamp is taken in the middle of a step and must cost next to nothing; it is turned into seconds
when the step is over.
"""

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

__all__ = ["Clock", "HostClock", "StreamClock", "clock_of"]


class Clock(Protocol):
    """Stamps, and the seconds that they stand for: of one clock per rank."""

    def stamp(self) -> Any: ...

    def seconds(self, stamp: Any) -> float: ...

    def settle(self) -> None:
        """Called once before the stamps of a step are turned into seconds."""


class HostClock:
    """What runs on the CPU runs when it is called."""

    stamp = staticmethod(time.perf_counter)

    def seconds(self, stamp: float) -> float:
        return stamp

    def settle(self) -> None:
        pass


class StreamClock:
    """What runs on a device runs later than it is called: an event in the current stream notes
    when. Waits of the stream for a message lie between two events, as waits of a thread do.

    Args:
        event: makes an event that can tell times.
    """

    def __init__(self, event: Callable[[], Any]) -> None:
        self._event = event
        self._origin = self.stamp()
        self._origin.synchronize()
        self._begin = time.perf_counter()
        self._last = self._origin

    def stamp(self) -> Any:
        self._last = self._event()
        self._last.record()
        return self._last

    def seconds(self, stamp: Any) -> float:
        return self._begin + float(self._origin.elapsed_time(stamp)) / 1e3

    def settle(self) -> None:
        self._last.synchronize()


def clock_of(device: torch.device) -> Clock:
    if device.type == "cuda":
        return StreamClock(lambda: torch.cuda.Event(enable_timing=True))
    return HostClock()
