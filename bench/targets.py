"""The ratios that this project has set itself, so that a run says which rows fall short.

On two ranks with a core each, by medians of the same run. More ranks than cores: never slower than
gloo. MPICH and DeepSpeed: never slower. The limit is a bound, not a goal. Some goals are of a group
of rows together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.case import Row
from bench.stats import geometric_mean

KB, MB = 1 << 10, 1 << 20
_LARGE = MB  # from here on a transfer's time is its bytes

# (size, direct, torch.distributed) for the all_reduce; a row is held to the last size not above it.
_ALL_REDUCE = ((4 * KB, 40.0, 12.0), (256 * KB, 5.0, 4.0), (64 * MB, 4.0, 4.0))
_DECODE_ROWS = 16
# Balance alone gives 1.5 at the limit; a mask that is not computed, more.
_ATTENTION = {
    "causal_forward": 1.3,
    "causal_train": 1.25,
    "documents_forward": 2.0,
    "documents_train": 2.0,
}
_HEAVY = [1024, 32]  # hidden, microbatches: a layer a stage, much communication for little work


def target(row: Row) -> float | None:
    """The least speed-up wanted of a row; None where none was set."""
    if row.peer == "limit" or row.busy:
        return None
    if row.peer in ("mpich", "deepspeed"):
        return 1.0
    if row.suite == "pipeline" and row.world_size == 2 and row.shape[1:3] == _HEAVY:
        return 1.5
    if row.suite == "attention" and row.world_size == 2 and not row.crowded:
        return _ATTENTION.get(row.op, 1.0)
    if row.suite == "train" and row.op in ("tp2", "sp2") and not row.crowded:
        return 1.1
    if row.crowded or row.suite in ("gemm", "pipeline", "attention", "train"):
        return 1.0
    if row.suite == "layers":
        return 1.1
    if row.op == "all_reduce" and row.dtype == "float32":
        for size, direct, through in _ALL_REDUCE:
            if row.bytes == size:
                return direct if row.api == "direct" else through
    if row.api == "direct":
        return 1.5 if row.bytes >= _LARGE else 2.0
    return 1.5


def missed(row: Row) -> bool:
    """Timed, and short of its goal."""
    goal = target(row)
    return row.speedup is not None and goal is not None and row.speedup < goal


@dataclass(frozen=True)
class GroupGoal:
    """A geometric mean of speed-ups that some rows should reach together."""

    name: str
    suite: str
    least: float
    holds: Callable[[Row], bool]

    def found(self, rows: Sequence[Row]) -> float | None:
        """What they reach; None where there are none of them."""
        values = [
            row.speedup
            for row in rows
            if row.suite == self.suite and not (row.busy or row.crowded)
            if row.speedup and self.holds(row)
        ]
        return geometric_mean(values) if values else None


GROUP_GOALS = (
    GroupGoal(
        f"matmul_all_reduce of up to {_DECODE_ROWS} rows (decode)",
        "gemm",
        1.3,
        lambda row: row.op == "matmul_all_reduce" and row.shape[0] <= _DECODE_ROWS,
    ),
    GroupGoal(
        f"blocks of layers on up to {_DECODE_ROWS} tokens (decode)",
        "layers",
        2.0,
        lambda row: row.shape[0] <= _DECODE_ROWS,
    ),
)
