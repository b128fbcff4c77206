"""`python -m pyparallel simulate`: which rank does what, when, and what a step takes, on paper.

Needs neither torch nor the native core: any layout can be tried on any machine.
"""

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from pyparallel.help_text import Paragraphs
from pyparallel.schedule import (
    FAMILIES,
    Costs,
    Kind,
    Schedule,
    ScheduleError,
    Simulation,
    auto_schedule,
    generate,
    simulate,
    validate,
    with_transfers,
)

__all__ = ["main"]

_AXES = ("dp", "pp", "tp")
MOST_RANKS = 1 << 14
MOST_PASSES = 1 << 20  # forwards that are simulated; a minute or more from 1 << 17 on
MOST_AUTO = 1 << 13  # the same where --schedule auto plays them in 24 orders; ten seconds
_DESCRIPTION = """
Plays the step of a pipeline on paper: which ranks there are, the ranks each reduces gradients with
and sends activations to; which ranks are active at each forward time step; what the step takes, how
long each rank idles, what it keeps, and which passes decide the time. Needs no GPU.
"""
_EXAMPLES = """
examples:

  pyparallel simulate --pp 4 --microbatches 8
  pyparallel simulate --pp 4 --microbatches 8 --schedule zb-h1 --svg step.svg
  pyparallel simulate --pp 4 --microbatches 8 --schedule auto --times 1,1.2,0.8
  pyparallel simulate --dp 2 --pp 2 --tp 2 --microbatches 4

The unit of time is that of --times. docs/schedules.md draws and compares the schedules. Exit
status: 0 played; 2 what is asked cannot be.
"""


def main(arguments: Sequence[str]) -> int:
    """Runs the command with these arguments and gives its exit status: 2 for what cannot be
    done."""
    options = _parser().parse_args(arguments)
    try:
        layout = _Layout.of(options)
        _check_files(options)
        costs = _costs(options.times)
        schedule = _schedule(options, costs)
        validate(schedule)
        result = simulate(with_transfers(schedule, costs), costs)
        for path, content in _drawings(options, result):
            try:
                path.write_bytes(content)
            except OSError as error:
                raise ScheduleError(f"{path}: cannot be written: {error.strerror}") from None
    except (ScheduleError, OSError, ImportError) as error:
        print(f"pyparallel simulate: {error}", file=sys.stderr)
        return 2
    document = _document(layout, result)
    print(json.dumps(document, indent=1) if options.json else _text(document))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pyparallel simulate",
        usage="pyparallel simulate --pp N --microbatches N [OPTION ...]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=Paragraphs,
    )
    add = parser.add_argument
    for axis, meaning in zip(_AXES, ("data", "pipeline", "tensor"), strict=True):
        add(f"--{axis}", type=int, default=1, metavar="N", help=f"{meaning}-parallel size (1)")
    add("--microbatches", type=int, required=True, metavar="N", help="of a step and replica")
    add(
        "--schedule",
        default="1f1b",
        metavar="NAME",
        help=f"{', '.join(FAMILIES)}; or auto: made for --times (default 1f1b)",
    )
    add("--chunks", type=int, metavar="N", help="stages per pipeline rank, where there is a choice")
    add("--group-size", type=int, metavar="N", help="for interleaved-1f1b: microbatches in a round")
    add("--memory-limit", type=float, metavar="BYTES", help="for auto: what each rank has")
    add(
        "--times",
        metavar="F,I,W|FILE",
        help="times of a stage's forward and of its backward's two halves, for inputs and for "
        "weights (default 1,1,1); or a JSON file with any of "
        f"{', '.join(field.name for field in fields(Costs))}",
    )
    add(
        "--order",
        default="tp,pp,dp",
        metavar="AXES",
        help="how ranks are numbered, fastest axis first (default tp,pp,dp)",
    )
    add("--json", action="store_true", help="all of it as JSON")
    add("--trace", type=Path, metavar="FILE", help="write a trace for Perfetto, in seconds")
    add("--svg", type=Path, metavar="FILE", help="write a timeline")
    add("--png", type=Path, metavar="FILE", help="write a timeline, by matplotlib")
    return parser


def _check_files(options: argparse.Namespace) -> None:
    """What cannot be written is said before the work."""
    misfits = []
    for name in ("trace", "svg", "png"):
        path: Path | None = getattr(options, name)
        if path is None:
            continue
        if not path.parent.is_dir():
            misfits.append(f"--{name} {path}: there is no folder {path.parent}")
        elif path.is_dir():
            misfits.append(f"--{name} {path} is a folder: a file is expected")
        elif not os.access(path if path.exists() else path.parent, os.W_OK):
            misfits.append(f"--{name} {path}: it may not be written here")
        if name == "png" and importlib.util.find_spec("matplotlib") is None:
            misfits.append(f"--png {path} needs matplotlib; --svg does without")
    if misfits:
        raise ScheduleError("; ".join(misfits))


@dataclass(frozen=True)
class _Layout:
    """Sizes of the axes, and the order in which ranks are numbered, fastest axis first."""

    sizes: dict[str, int]
    order: tuple[str, ...]

    @classmethod
    def of(cls, options: argparse.Namespace) -> "_Layout":
        sizes = {axis: getattr(options, axis) for axis in _AXES}
        misfits = [f"--{axis} {size}" for axis, size in sizes.items() if size < 1]
        if misfits:
            raise ScheduleError(f"{', '.join(misfits)}: allowed are 1, 2, 3, ...; nearest 1.")
        world = sizes["dp"] * sizes["pp"] * sizes["tp"]
        if world > MOST_RANKS:
            raise ScheduleError(
                f"{' x '.join(f'{axis} {size}' for axis, size in sizes.items())}: at most "
                f"{MOST_RANKS} ranks are listed; dp 1 has the same pipeline"
            )
        order = tuple(options.order.split(","))
        if sorted(order) != sorted(_AXES):
            raise ScheduleError(f"--order {options.order}: it names each of tp, pp, dp once.")
        return cls(sizes, order)

    @property
    def world(self) -> int:
        return self.sizes["dp"] * self.sizes["pp"] * self.sizes["tp"]

    def coordinate(self, rank: int) -> dict[str, int]:
        found = {}
        for axis in self.order:
            rank, found[axis] = divmod(rank, self.sizes[axis])
        return found

    def ranks(self, **fixed: Iterable[int]) -> list[int]:
        """The ranks whose coordinates are among these."""
        ranks, stride = [0], 1
        for axis in self.order:
            values = sorted(fixed.get(axis, range(self.sizes[axis])))
            ranks = [stride * value + below for value in values for below in ranks]
            stride *= self.sizes[axis]
        return ranks


def _costs(times: str | None) -> Costs:
    if times is None:
        return Costs()
    words = times.split(",")
    if len(words) == 3:
        try:
            forward, backward_input, backward_weight = map(float, words)
        except ValueError:
            raise ScheduleError(f"--times {times}: three numbers are expected") from None
        return Costs(forward, backward_input, backward_weight)
    try:
        document = json.loads(Path(times).read_text())
    except (FileNotFoundError, IsADirectoryError):
        raise ScheduleError(f"--times {times}: neither three numbers nor a file") from None
    except OSError as error:
        raise ScheduleError(f"--times {times[:40]}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ScheduleError(f"--times {times}: no JSON: {error}") from None
    known = {field.name for field in fields(Costs)}
    if not isinstance(document, dict) or not set(document) <= known:
        unknown = str(sorted(set(document) - known) if isinstance(document, dict) else [document])
        unknown = unknown if len(unknown) <= 80 else f"{unknown[:80]}..."
        raise ScheduleError(
            f"--times {times}: {unknown} unknown; allowed are {', '.join(sorted(known))}"
        )
    return Costs(**document)


def _schedule(options: argparse.Namespace, costs: Costs) -> Schedule:
    chunks = max(1, options.chunks or 1)
    automatic = options.schedule == "auto"
    most = MOST_AUTO if automatic else MOST_PASSES
    if options.pp * chunks * options.microbatches > most:
        fitting = most // (options.pp * chunks)
        raise ScheduleError(
            f"pp {options.pp} x {chunks} chunks x {options.microbatches} microbatches: at most "
            f"{most} passes are played{' with --schedule auto' if automatic else ''}, here "
            + (f"{fitting} microbatches" if fitting else f"pp {most // chunks} or fewer chunks")
            + ("; a named schedule takes more" if automatic else "")
        )
    if options.memory_limit is not None and options.memory_limit != options.memory_limit:
        raise ScheduleError("--memory-limit nan: a number is expected")
    if not automatic:
        if options.memory_limit is not None:
            raise ScheduleError("--memory-limit has no effect: only --schedule auto takes one.")
        return generate(
            options.schedule,
            options.pp,
            options.microbatches,
            chunks=options.chunks,
            group_size=options.group_size,
        )
    if options.group_size is not None:
        raise ScheduleError("--group-size has no effect: only interleaved-1f1b takes one.")
    return auto_schedule(
        options.pp,
        options.microbatches,
        costs,
        chunks=1 if options.chunks is None else options.chunks,
        memory_limit=options.memory_limit,
    )


def _drawings(options: argparse.Namespace, result: Simulation) -> Iterable[tuple[Path, bytes]]:
    if options.trace or options.svg or options.png:
        from pyparallel import viz

        if options.trace:
            yield options.trace, json.dumps(viz.chrome_trace(result)).encode()
        if options.svg:
            yield options.svg, viz.timeline_svg(result).encode()
        if options.png:
            yield options.png, viz.timeline_png(result)


def _document(layout: _Layout, result: Simulation) -> dict[str, Any]:
    """Everything that is said, as data."""
    schedule = result.schedule
    targets = _downstream(schedule)
    ranks = []
    for rank in range(layout.world):
        at = layout.coordinate(rank)
        # Ranks that hold the same stages reduce together (DualPipe holds every stage twice).
        held = schedule.held[at["pp"]]
        same = [pp for pp, other in enumerate(schedule.held) if other == held]
        ranks.append(
            {
                "rank": rank,
                **{axis: at[axis] for axis in _AXES},
                "stages": list(held),
                "gradient_group": layout.ranks(pp=same, tp=[at["tp"]]),
                "downstream": layout.ranks(dp=[at["dp"]], pp=targets[at["pp"]], tp=[at["tp"]]),
            }
        )
    return {
        "world": layout.world,
        "sizes": layout.sizes,
        "order": list(layout.order),
        "schedule": schedule.name,
        "stages": schedule.stages,
        "microbatches": schedule.microbatches,
        "ranks": ranks,
        "forward_steps": [layout.ranks(pp=active) for active in _forward_steps(schedule)],
        "step_time": float(result.step_time),
        "idle_share": float(result.bubble_share),
        "pipeline_ranks": [
            {"pp": pp, "busy": float(busy), "idle": float(idle), "peak_bytes": float(peak)}
            for pp, (busy, idle, peak) in enumerate(
                zip(result.busy, result.bubble, result.peak_bytes, strict=True)
            )
        ],
        "critical_path": [
            {
                "pp": span.action.rank,
                "action": str(span.action).rstrip("+"),
                "start": float(span.start),
                "end": float(span.end),
            }
            for span in result.critical_path
        ],
    }


def _downstream(schedule: Schedule) -> list[set[int]]:
    """Per pipeline rank, the other ranks that its activations go to."""
    targets: list[set[int]] = [set() for _ in schedule.rows]
    for (stage, microbatch), rank in schedule.placement.items():
        target = schedule.placement.get((stage + 1, microbatch), rank)
        if target != rank:
            targets[rank].add(target)
    return targets


def _forward_steps(schedule: Schedule) -> list[list[int]]:
    """The pipeline ranks active at each step if there were only forwards, each of one step."""
    forwards = tuple(
        tuple(a._replace(with_next=False) for a in row if a.kind is Kind.FORWARD)
        for row in schedule.rows
    )
    result = simulate(replace(schedule, rows=forwards))
    steps: list[list[int]] = [[] for _ in range(int(result.step_time))]
    for rank, starts in enumerate(result.starts):
        for start in starts:
            steps[int(start)].append(rank)
    return steps


def _text(document: dict[str, Any]) -> str:
    sizes, order = document["sizes"], document["order"]
    shape = " x ".join(f"{axis} {sizes[axis]}" for axis in _AXES)
    lines = [
        f"{document['world']} ranks: {shape}; numbered {order[0]} fastest, then {order[1]}, "
        f"{order[2]} outermost",
        "",
    ]
    table = [("rank", "(dp, pp, tp)", "gradient group", "downstream")]
    for entry in document["ranks"]:
        table.append(
            (
                str(entry["rank"]),
                f"({entry['dp']}, {entry['pp']}, {entry['tp']})",
                _joined(entry["gradient_group"]),
                _joined(entry["downstream"]),
            )
        )
    lines += _columns(table)
    steps = document["forward_steps"]
    m, p = document["microbatches"], sizes["pp"]
    count = f"{len(steps)} forward time steps"
    if len(steps) == m + p - 1:
        count += f" (m + p - 1 = {m} + {p} - 1)"
    lines += [
        "",
        f"{document['schedule']}, {document['stages']} stages, {m} microbatches: {count}",
    ]
    lines += _columns(
        [("step", "active ranks"), *((str(i), _joined(active)) for i, active in enumerate(steps))]
    )
    lines += [
        "",
        f"a step takes {document['step_time']:.6g}; idle {100 * document['idle_share']:.1f} %",
    ]
    lines += _columns(
        [
            ("pp", "busy", "idle", "peak kept"),
            *(
                (str(r["pp"]), f"{r['busy']:.6g}", f"{r['idle']:.6g}", f"{r['peak_bytes']:.6g}")
                for r in document["pipeline_ranks"]
            ),
        ]
    )
    path = [f"{step['action']}@{step['pp']}" for step in document["critical_path"]]
    shown = path if len(path) <= 16 else [*path[:8], f"... {len(path) - 16} more ...", *path[-8:]]
    lines += ["", f"critical path (action@pp): {' '.join(shown)}"]
    return "\n".join(lines)


def _joined(ranks: Sequence[int]) -> str:
    return " ".join(map(str, ranks)) or "-"


def _columns(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
