"""The ratios that this project has set itself, so that a run says which rows fall short.

On two ranks with a core each: against gloo in the same run, by medians. More ranks than cores:
never slower than gloo. MPICH and DeepSpeed: never slower. The limit is a bound, not a goal.
"""

from __future__ import annotations

from bench.case import Row

KB, MB = 1 << 10, 1 << 20
_LARGE = MB  # from here on a transfer's time is its bytes

# (size, direct, torch.distributed) for the all_reduce; a row is held to the last size not above it.
_ALL_REDUCE = ((4 * KB, 40.0, 12.0), (256 * KB, 5.0, 4.0), (64 * MB, 4.0, 4.0))


def target(row: Row) -> float | None:
    """The least speed-up wanted of a row; None where none was set."""
    if row.peer == "limit" or row.busy:
        return None
    if row.peer in ("mpich", "deepspeed"):
        return 1.0
    if row.crowded:
        return 1.0
    if row.op == "all_reduce" and row.dtype == "float32":
        for size, direct, through in _ALL_REDUCE:
            if row.bytes == size:
                return direct if row.api == "direct" else through
    if row.api == "direct":
        return 1.5 if row.bytes >= _LARGE else 2.0
    return 1.5
