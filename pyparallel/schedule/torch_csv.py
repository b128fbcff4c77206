"""The CSV of torch.distributed.pipelining: a line per rank, a cell per action.

Its two formats differ in what the cells are: "compute_only", with empty cells where a rank idles,
and "compute_comms", with sends and receives. Most cells are ours (`2F0`, `1SEND_B3`); a pair that
runs together is one cell there, `(2F1;0B0)OVERLAP_F_B`, and a reduction is `2REDUCE_GRAD`.
Sharding (`2UNSHARD`, `2RESHARD`) is not part of a schedule here: it is left out when read, and
torch inserts its own.
"""

import csv
import io
import re

from pyparallel.schedule.actions import NO_MICROBATCH, Action, Kind
from pyparallel.schedule.errors import ScheduleError
from pyparallel.schedule.schedule import Schedule

__all__ = ["from_torch_csv", "to_torch_csv"]

_CELL = re.compile(
    "([0-9]{1,9})(SEND_F|RECV_F|SEND_B|RECV_B|REDUCE_GRAD|UNSHARD|RESHARD|F|B|I|W)([0-9]{0,9})"
)
_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
_LEFT_OUT = ("UNSHARD", "RESHARD")


def to_torch_csv(schedule: Schedule) -> str:
    """For torch's `_load_csv`, with format "compute_comms" if the schedule has transfers, else
    "compute_only".

    Raises:
        ScheduleError: a stage that two ranks hold, an optimizer step, or reductions without
            transfers: torch's form has no place for them.
    """
    owner: dict[int, int] = {}
    for rank, held in enumerate(schedule.held):
        for stage in held:
            if owner.setdefault(stage, rank) != rank:
                raise ScheduleError(
                    f"{schedule.name}: ranks {owner[stage]} and {rank} both hold stage {stage}: "
                    "in torch's form each stage has one rank (dualpipev is the form of DualPipe "
                    "that fits)"
                )
    out = io.StringIO()
    writer = csv.writer(out)
    for rank, row in enumerate(schedule.rows):
        cells: list[str] = []
        joined = False
        for position, action in enumerate(row):
            cell = _cell(schedule, rank, position, action)
            if joined:
                cells[-1] = f"({cells[-1]};{cell})OVERLAP_F_B"
            else:
                cells.append(cell)
            joined = action.with_next
        writer.writerow(cells)
    return out.getvalue()


def _cell(schedule: Schedule, rank: int, position: int, action: Action) -> str:
    if action.kind is Kind.STEP:
        raise ScheduleError(
            f"{schedule.name}: {action} on rank {rank}: torch's form has no optimizer step; "
            "write the schedule before with_steps()",
            rank,
            position,
        )
    if action.kind is Kind.REDUCE and not schedule.has_transfers:
        raise ScheduleError(
            f"{schedule.name}: {action} on rank {rank}: torch's form has reductions only beside "
            "transfers; it inserts both itself into a schedule of passes, see compute_only()",
            rank,
            position,
        )
    if action.kind is Kind.REDUCE:
        return f"{action.stage}REDUCE_GRAD"
    return f"{action.stage}{action.kind.code}{action.microbatch}"


def from_torch_csv(text: str) -> Schedule:
    """The schedule in a CSV of torch, of either format, called "torch". It is as many stages and
    microbatches as occur in it, and chunks are a rank's stages in order."""
    try:
        lines = list(csv.reader(io.StringIO(text, newline="")))
    except csv.Error as error:
        raise ScheduleError(f"no CSV: {error}") from None
    rows = [
        [action for position, cell in enumerate(line)
         for action in _actions(rank, position, cell.strip())]
        for rank, line in enumerate(lines)
    ]  # fmt: skip
    bare = Schedule.from_rows("torch", rows)
    return Schedule.from_rows(
        "torch",
        (
            [a._replace(chunk=held.index(a.stage) if a.stage in held else 0) for a in row]
            for row, held in zip(bare.rows, bare.held, strict=True)
        ),
    )


def _actions(rank: int, position: int, cell: str) -> list[Action]:
    if not cell:
        return []
    if pair := _PAIR.fullmatch(cell):
        both = [_action(rank, position, inner.strip()) for inner in pair.groups()]
        first, second = both
        if first is None or second is None:
            where = f"rank {rank}, position {position}"
            raise ScheduleError(f"{where}: {cell[:60]!r} is no pair of passes", rank, position)
        return [first._replace(with_next=True), second]
    action = _action(rank, position, cell)
    return [] if action is None else [action]


def _action(rank: int, position: int, cell: str) -> Action | None:
    match = _CELL.fullmatch(cell)
    if match is None:
        raise ScheduleError(
            f"rank {rank}, position {position}: {cell[:60]!r} is no action such as 2F0, "
            "1SEND_B3 or (2F1;0B0)OVERLAP_F_B",
            rank,
            position,
        )
    stage, code, microbatch = match.groups()
    if code in _LEFT_OUT:
        return None
    if code == "REDUCE_GRAD":
        return Action(rank, Kind.REDUCE, int(stage), NO_MICROBATCH, 0)
    if not microbatch:
        raise ScheduleError(
            f"rank {rank}, position {position}: {cell!r} has no microbatch", rank, position
        )
    return Action(rank, Kind(code), int(stage), int(microbatch), 0)
