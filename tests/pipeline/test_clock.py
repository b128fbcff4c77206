"""When actions ran: stamps in a stream become seconds of the host's clock. One process, events made
up; on a GPU the same class has the runtime's."""

import time

import torch

from pyparallel.pipeline.clock import HostClock, StreamClock, clock_of


class Stream:
    """Runs what it is given later: an event's time is known once the stream has come to it."""

    def __init__(self):
        self.queued, self.now = [], 100.0  # milliseconds

    def event(self):
        return Event(self)

    def work(self, milliseconds):
        self.queued.append(milliseconds)

    def come_to(self, event):
        while self.queued and event.at is None:
            done = self.queued.pop(0)
            if isinstance(done, Event):
                done.at = self.now
            else:
                self.now += done


class Event:
    def __init__(self, stream):
        self.stream, self.at = stream, None

    def record(self):
        self.stream.queued.append(self)

    def synchronize(self):
        self.stream.come_to(self)

    def elapsed_time(self, other):
        assert other.at is not None, "nobody has waited for it"
        return other.at - self.at


def test_stamps_of_a_stream_are_when_it_came_by():
    stream = Stream()
    before = time.perf_counter()
    clock = StreamClock(stream.event)
    after = time.perf_counter()
    stamps = [clock.stamp()]
    for takes in (5, 0, 20):
        stream.work(takes)
        stamps.append(clock.stamp())
    assert stamps[-1].at is None, "nothing waits in the middle of a step"
    clock.settle()
    first, *rest = [clock.seconds(stamp) for stamp in stamps]
    assert before <= first <= after
    assert [round((one - first) * 1e3) for one in rest] == [5, 5, 25]


def test_the_host_needs_no_events():
    clock = clock_of(torch.device("cpu"))
    assert isinstance(clock, HostClock)
    stamp = clock.stamp()
    clock.settle()
    assert clock.seconds(stamp) == stamp
    assert 0 <= time.perf_counter() - stamp < 60
