"""`python -m pyparallel profile RUN`: where the time of a traced run went, and what to change.

RUN is a folder of traces or the files themselves: what torch.profiler's `export_chrome_trace`
wrote, one per rank (.json or .json.gz), or what `simulate --trace` wrote. A rank's time has three
parts:

    compute    some kernel (on a CPU: some aten operator or kernel of ours) runs
    exposed    a collective or message runs and no compute does: what overlap would hide
    idle       neither: a pipeline's bubble, a slow host, input

and exposed time is told per process group, by the names that `build_mesh` gives to groups: dp, tp,
sp, pp. Intervals are united before they are added, so that nothing counts twice. Advice names the
figures it rests on. Nothing here needs torch.
"""

import argparse
import gzip
import json
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pyparallel.help_text import Paragraphs

__all__ = ["RankTime", "advice", "main", "read_traces"]

Interval = tuple[float, float]
BACKENDS = ("gloo:", "nccl:", "pyparallel:", "mpi:", "ucc:", "xccl:")
COMPUTE = ("aten::", "mkldnn::", "onednn::", "pyparallel::kernels::")  # on a CPU
NOT_TOLD = "group not told"
_END = 1e20  # microseconds: what clocks show lies far below
# Shares of the step from which an experienced engineer would act.
EXPOSED, IDLE, UNEVEN = 0.15, 0.15, 0.10
TENSOR_PARALLEL = 0.30  # communication that no overlap has hidden: fewer ranks share a layer
# What to do about communication over an axis that nothing hides.
_MENDS = {
    "dp": "more samples per step and rank (gradients travel once a step), or 16-bit or compressed "
    "gradients",
    "tp": "activations cut along the sequence (tp_sequence_parallel), or fewer ranks that share a "
    "layer",
    "sp": "longer sequences, another strategy of attention, or fewer ranks that share a sequence",
    "pp": "ranks wait for their neighbours: more microbatches, stages of equal time, or an "
    "interleaved or zero-bubble schedule (simulate compares them)",
}


@dataclass(frozen=True)
class RankTime:
    """One rank's time, in seconds, from its first to its last event."""

    rank: int
    span: float
    compute: float
    exposed: float
    idle: float
    hidden: float  # communication under compute
    exposed_by_group: dict[str, float]
    peak_bytes: int | None  # None: the trace has no memory events (profile_memory=True)


def read_traces(paths: Sequence[Path]) -> list[RankTime]:
    """What each rank did, in rank order.

    Raises:
        ValueError: a file is no trace, no trace is found, or two are of one rank.
    """
    found: dict[int, RankTime] = {}
    origin: dict[int, Path] = {}
    for path in _files(paths):
        for time in _read(path):
            if time.rank in found:
                raise ValueError(
                    f"{path} is of rank {time.rank}, and so is {origin[time.rank]}: give the "
                    "traces of one run, one per rank"
                )
            found[time.rank], origin[time.rank] = time, path
    return [found[rank] for rank in sorted(found)]


def _files(paths: Sequence[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        try:
            folder, there = path.is_dir(), path.exists()
        except OSError as error:  # longer than a path can be
            raise ValueError(f"{str(path)[:40]}...: {error.strerror}") from None
        if folder:
            inside = sorted({*path.glob("*.json"), *path.glob("*.json.gz")})
            if not inside:
                raise ValueError(f"{path} has no trace: no file ends in .json or .json.gz")
            files += inside
        elif there:
            files.append(path)
        else:
            raise ValueError(f"{path} does not exist")
    return files


def _read(path: Path) -> list[RankTime]:
    try:
        raw = path.read_bytes()
        trace = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
        return list(_parse(trace))
    except (
        OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, RecursionError,
        OverflowError, zlib.error,
    ) as error:  # fmt: skip
        why = f"{type(error).__name__}: {error}"
        why = why if len(why) <= 200 else f"{why[:200]}..."
        raise ValueError(
            f"{path} is no trace in the Chrome format ({why}); write one "
            "with torch.profiler's export_chrome_trace, or with simulate --trace"
        ) from None


def _parse(trace: dict[str, Any]) -> Iterator[RankTime]:
    events = [event for event in trace["traceEvents"] if event.get("ph") in ("X", "i")]
    spans = [event for event in events if event["ph"] == "X"]
    for event in spans:
        start, end = _interval(event)
        if not 0 <= start <= end < _END:
            raise ValueError("an event has no time")
    if "distributedInfo" in trace or any(event.get("cat") == "cpu_op" for event in spans):
        told = trace.get("distributedInfo", {})
        groups = told.get("pg_config", [])
        names = {str(group.get("pg_name")): group.get("pg_desc") for group in groups}
        if groups:  # torch tells of all ranks' group first; ours says which it is
            names["world"] = groups[0].get("pg_desc")
        yield _of_torch(int(told.get("rank", 0)), events, names)
        return
    if not spans:
        raise ValueError("no event has a duration")
    start, end = _hull(spans)  # of one clock: what a rank waits for the others is its own
    by_rank: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in spans:
        by_rank[int(event["pid"])].append(event)
    for rank, own in sorted(by_rank.items()):
        compute = [_interval(event) for event in own if event.get("cat") != "message"]
        messages = {"pipeline": [_interval(e) for e in own if e.get("cat") == "message"]}
        yield _rank_time(rank, end - start, compute, messages, None)


def _of_torch(rank: int, events: list[dict[str, Any]], names: dict[str, "str | None"]) -> RankTime:
    """`names`: what the groups of the run are called."""
    only_group = names["world"] if len(names) == 2 else None
    spans = [event for event in events if event["ph"] == "X" and event.get("cat") != "Trace"]
    on_device = any(event.get("cat") == "kernel" for event in spans)
    compute: list[Interval] = []
    waits: dict[str, list[Interval]] = defaultdict(list)
    for event in spans:
        name, category = str(event.get("name", "")), event.get("cat")
        if on_device:
            if category not in ("kernel", "gpu_memcpy", "gpu_memset"):
                continue
            messages = name.startswith("nccl")
        else:
            messages = category == "user_annotation" and name.startswith(BACKENDS)
            if not messages and not (category == "cpu_op" and name.startswith(COMPUTE)):
                continue
        if messages:
            called = name.partition(", group ")[2]  # "0 (global ranks 0-3)"
            group = event.get("args", {}).get("Process Group Description")
            group = group or names.get(called.partition(" (")[0]) or called
            waits[str(group or only_group or NOT_TOLD)].append(_interval(event))
        else:
            compute.append(_interval(event))
    peaks = [
        int(event["args"]["Total Allocated"])
        for event in events
        if event.get("name") == "[memory]" and "Total Allocated" in event.get("args", {})
    ]
    start, end = _hull(spans) if spans else (0.0, 0.0)
    return _rank_time(rank, end - start, compute, waits, max(peaks, default=None))


def _rank_time(
    rank: int,
    span: float,
    compute: list[Interval],
    waits: dict[str, list[Interval]],
    peak: int | None,
) -> RankTime:
    busy = _union(compute)
    every = _union([interval for group in waits.values() for interval in group])
    exposed = _without(every, busy)
    second = 1e-6  # traces count in microseconds
    by_group = {
        group: second * _length(_without(_union(intervals), busy))
        for group, intervals in sorted(waits.items())
        if intervals
    }
    return RankTime(
        rank=rank,
        span=second * span,
        compute=second * _length(busy),
        exposed=second * _length(exposed),
        idle=second * max(0.0, span - _length(busy) - _length(exposed)),
        hidden=second * (_length(every) - _length(exposed)),
        exposed_by_group=by_group,
        peak_bytes=peak,
    )


def _interval(event: dict[str, Any]) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _hull(events: list[dict[str, Any]]) -> Interval:
    intervals = [_interval(event) for event in events]
    return min(start for start, _ in intervals), max(end for _, end in intervals)


def _union(intervals: Sequence[Interval]) -> list[Interval]:
    united: list[Interval] = []
    for start, end in sorted(intervals):
        if united and start <= united[-1][1]:
            united[-1] = united[-1][0], max(end, united[-1][1])
        else:
            united.append((start, end))
    return united


def _without(intervals: list[Interval], others: list[Interval]) -> list[Interval]:
    """Both in order and without overlaps: the parts of the first that no other covers."""
    left: list[Interval] = []
    position = 0
    for start, end in intervals:
        while position < len(others) and others[position][1] <= start:
            position += 1
        at = position
        while at < len(others) and others[at][0] < end:
            if others[at][0] > start:
                left.append((start, others[at][0]))
            start = max(start, others[at][1])
            at += 1
        if start < end:
            left.append((start, end))
    return left


def _length(intervals: Sequence[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def advice(times: Sequence[RankTime]) -> list[str]:
    """What an experienced engineer would change, each with its figure; empty if nothing does."""
    span = sum(time.span for time in times) or 1.0
    said: list[str] = []
    groups: dict[str, float] = defaultdict(float)
    for time in times:
        for group, seconds in time.exposed_by_group.items():
            groups[group] += seconds / span
    for group, share in sorted(groups.items(), key=lambda item: -item[1]):
        if share < EXPOSED:
            continue
        what = f"{group}: {100 * share:.0f} % of the time is communication that nothing hides"
        axis = _axis_of(group)
        if axis == "tp" and share >= TENSOR_PARALLEL:
            said.append(f"{what} (from 30 %): use fewer tensor parallel ranks, or faster links")
        elif group == "pipeline":
            said.append(f"{what}: larger microbatches, or fewer stages per rank")
        else:
            mend = "overlap it with compute, send less (16 bits), or use fewer ranks"
            said.append(f"{what}: {_MENDS.get(axis, mend)}")
    idle = sum(time.idle for time in times) / span
    if idle >= IDLE:
        said.append(
            f"idle: {100 * idle:.0f} % of the time no rank's work runs: in a pipeline more "
            "microbatches or a zero-bubble schedule (simulate compares them), else the host or "
            "the input is late"
        )
    mean = sum(time.compute for time in times) / max(1, len(times))
    most = max(times, key=lambda time: time.compute)
    if len(times) > 1 and mean > 0 and most.compute > (1 + UNEVEN) * mean:
        said.append(
            f"uneven: rank {most.rank} computes {most.compute / mean:.2f}x the mean, and the "
            "others wait for it: cut the model by measured time (partition_model), or look at "
            "that device"
        )
    return said


def _axis_of(group: str) -> str:
    """The axis of a layout that a group's name is of; gradients go over dp and sp together."""
    found = {axis for axis in _MENDS if axis in group.lower().replace("-", "_").split("_")}
    return "dp" if found == {"dp", "sp"} else found.pop() if len(found) == 1 else ""


def _table(times: Sequence[RankTime]) -> Iterator[str]:
    yield "rank     span s  compute  exposed    idle  hidden  peak GiB"
    for time in times:
        parts = [time.compute, time.exposed, time.idle, time.hidden]
        shares = [f"{100 * part / time.span if time.span else 0.0:.1f} %" for part in parts]
        peak = "not told" if time.peak_bytes is None else f"{time.peak_bytes / 2**30:.2f}"
        yield (
            f"{time.rank:4} {time.span:10.4g} {shares[0]:>8} {shares[1]:>8} {shares[2]:>7} "
            f"{shares[3]:>7}  {peak}"
        )
    groups = {group for time in times for group, took in time.exposed_by_group.items() if took}
    for group in sorted(groups):
        most = max(times, key=lambda time: time.exposed_by_group.get(group, 0.0))
        seconds = most.exposed_by_group[group]
        yield f"exposed in {group}: at most {seconds:.4g} s, on rank {most.rank}"


_DESCRIPTION = """
Says where the time of a traced run went, rank by rank: compute, communication that nothing hides,
idle; and what to change.
"""
_EXAMPLES = """
examples:

  pyparallel profile run/
  pyparallel simulate --pp 4 --microbatches 8 --trace step.json
  pyparallel profile step.json

A trace of a run is made with torch.profiler.profile(...) around some steps, then
export_chrome_trace('run/rank0.json') on each rank; one of a plan on paper by simulate. Exit status:
0 read; 2 no trace.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """The command: prints the table and the advice, or JSON; 2 for what is no trace."""
    parser = argparse.ArgumentParser(
        prog="pyparallel profile",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=Paragraphs,
    )
    parser.add_argument(
        "run",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="a folder of traces, or trace files, one for each rank",
    )
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    options = parser.parse_args(argv)
    try:
        times = read_traces(options.run)
    except ValueError as error:
        print(f"pyparallel profile: {error}", file=sys.stderr)
        return 2
    said = advice(times)
    if options.json:
        print(json.dumps({"ranks": [asdict(time) for time in times], "advice": said}, indent=1))
        return 0
    print("\n".join(_table(times)))
    print("\n".join(said) if said else "nothing stands out")
    return 0
