"""A rank as a bare process, for faults: the native core alone, ready in a fraction of a second.

    python -m tests.comm.bare_rank ID RANK SIZE OP COUNT JOIN_MS CALL_MS

joins the group of the id, makes the call once, prints "ready", then makes it again and again until
it raises; then prints {"error", "text", "at"} as JSON, `at` being CLOCK_MONOTONIC in seconds.
"""

import ctypes
import json
import sys
import time
from collections.abc import Callable

from pyparallel import _core
from pyparallel.errors import CommError

FLOAT32, SUM = 1, 0
COLLECTIVES = (
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "broadcast",
    "scatter",
    "gather",
    "barrier",
)
OPS = (*COLLECTIVES, "send_recv")
_arrays: list[object] = []  # the core knows addresses only: this keeps them valid


def call_of(core: _core.Communicator, op: str, count: int, ms: int) -> Callable[[], object]:
    """The call of one op: `count` float32 for each rank, root 0."""
    size, me = core.size, core.rank
    small, large = (ctypes.c_float * count)(), (ctypes.c_float * (count * size))()
    other = (ctypes.c_float * (count * size))()
    s, x, y = (ctypes.addressof(array) for array in (small, large, other))
    _arrays.extend((small, large, other))

    def ring() -> None:
        sending = core.isend(x, count, FLOAT32, (me + 1) % size, 0)
        core.recv(y, count, FLOAT32, (me - 1) % size, 0, ms)
        sending.wait(ms)

    t, f = FLOAT32, False
    return {
        "all_reduce": lambda: core.all_reduce(s, s, count, t, SUM, 1.0, ms, f),
        "reduce": lambda: core.reduce(s, s, count, t, SUM, 1.0, 0, ms, f),
        "reduce_scatter": lambda: core.reduce_scatter(t, x, count, s, SUM, 1.0, ms, f),
        "all_gather": lambda: core.all_gather(t, s, x, count, ms, f),
        "all_to_all": lambda: core.all_to_all(t, x, count, y, count, ms, f),
        "broadcast": lambda: core.broadcast(s, count, t, 0, ms, f),
        "scatter": lambda: core.scatter(t, 0, x if me == 0 else [], count, s, count, ms, f),
        "gather": lambda: core.gather(t, 0, s, count, x if me == 0 else [], count, ms, f),
        "barrier": lambda: core.barrier(ms, f),
        "send_recv": ring,
        "split": lambda: core.split(0, 0, "part", ms),
    }[op]


def main(id: str, rank: str, size: str, op: str, count: str, join_ms: str, call_ms: str) -> None:
    try:
        seat = (bytes.fromhex(id), int(rank), int(size), "faults", int(join_ms))
        core = _core.Communicator.join(*seat)
        core.barrier(int(join_ms), False)
        call = call_of(core, op, int(count), int(call_ms))
        call()
        print("ready", flush=True)
        while True:
            call()
    except CommError as error:
        end = {"error": type(error).__name__, "text": str(error), "at": time.monotonic()}
        print(json.dumps(end), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
