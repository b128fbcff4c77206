"""Written forms of a schedule, readable back: text for people, CSV for tables, JSON for programs.

What is read may come from anywhere: sizes are bounded by the text itself, numbers by nine digits,
and what is no schedule is refused with the place of the fault. torch.distributed.pipelining's own
CSV is in torch_csv.py.
"""

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pyparallel.schedule.actions import NO_MICROBATCH, Action, Kind
from pyparallel.schedule.errors import ScheduleError
from pyparallel.schedule.schedule import Schedule
from pyparallel.schedule.torch_csv import from_torch_csv, to_torch_csv
from pyparallel.schedule.validate import validate

__all__ = ["FORMS", "dumps", "loads"]

_TITLE = "pyparallel schedule 1"
_NUMBER = "[0-9]{1,9}"
_CELL = re.compile(
    rf"({_NUMBER})({'|'.join(sorted((kind.code for kind in Kind), key=len, reverse=True))})"
    rf"({_NUMBER})?(\+)?"
)
_COLUMNS = ("rank", "kind", "stage", "microbatch", "chunk", "with_next")


def dumps(schedule: Schedule, form: str = "text") -> str:
    """A schedule as text.

    Args:
        form: "text" (a line per rank), "csv" (a line per action), "json", or "torch" (the CSV of
            torch.distributed.pipelining, a line per rank, compute only or with transfers as the
            schedule is).

    Raises:
        ScheduleError: no such form, or one that cannot hold this schedule.
    """
    return _form(form)[0](schedule)


def loads(text: str, form: str = "text", check: bool = True) -> Schedule:
    """The schedule in a text that `dumps`, torch or a hand wrote.

    Args:
        check: `validate` it. False gives also a schedule that cannot run, to be drawn.

    Raises:
        ScheduleError: it is none, and where; or it cannot run, and why.
    """
    schedule = _form(form)[1](text)
    if check:
        validate(schedule)
    return schedule


def _form(form: str) -> tuple[Callable[[Schedule], str], Callable[[str], Schedule]]:
    if form not in FORMS:
        raise ScheduleError(f"no form {form!r}; there are {', '.join(FORMS)}")
    return FORMS[form]


def _to_text(schedule: Schedule) -> str:
    lines = [
        f"# {_TITLE}",
        f"name: {json.dumps(schedule.name)}",
        f"stages: {schedule.stages}",
        f"microbatches: {schedule.microbatches}",
    ]
    for rank, (row, held) in enumerate(zip(schedule.rows, schedule.held, strict=True)):
        lines.append(f"rank {rank} holds {' '.join(map(str, held))}: {' '.join(map(str, row))}")
    return "\n".join(lines) + "\n"


def _from_text(text: str) -> Schedule:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    head = dict(enumerate(lines[:4]))
    _expect(head.get(0) == f"# {_TITLE}", f"line 1 is {_short(head.get(0))}, not '# {_TITLE}'")
    name = _named(_after(head.get(1), "name"))
    stages = _count(_after(head.get(2), "stages"), "stages")
    microbatches = _count(_after(head.get(3), "microbatches"), "microbatches")
    rows, all_held = [], []
    for rank, line in enumerate(lines[4:]):
        match = re.fullmatch(rf"rank ({_NUMBER}) holds ([0-9 ]*):(.*)", line)
        if match is None or int(match[1]) != rank:
            raise ScheduleError(f"{_short(line)}: expected is 'rank {rank} holds STAGES: ACTIONS'")
        held = tuple(_count(word, "stage", least=0) for word in match[2].split())
        rows.append(_row(rank, held, match[3].split()))
        all_held.append(held)
    return Schedule(name, tuple(rows), stages, microbatches, tuple(all_held))


def _to_json(schedule: Schedule) -> str:
    document = {
        "format": _TITLE,
        "name": schedule.name,
        "stages": schedule.stages,
        "microbatches": schedule.microbatches,
        "held": schedule.held,
        "rows": [[str(action) for action in row] for row in schedule.rows],
    }
    return json.dumps(document)


def _from_json(text: str) -> Schedule:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ScheduleError(f"no JSON: {error}") from None
    _expect(isinstance(document, dict), f"the JSON is {_short(document)}, not an object")
    _expect(document.get("format") == _TITLE, f"its format is {_short(document.get('format'))}")
    held = _lists(document.get("held"), "held", int)
    rows = _lists(document.get("rows"), "rows", str)
    _expect(len(held) == len(rows), f"held has {len(held)} ranks, rows {len(rows)}")
    _expect(isinstance(document.get("name"), str), "name is no text")
    return Schedule(
        document["name"],
        tuple(_row(rank, held[rank], cells) for rank, cells in enumerate(rows)),
        _count(document.get("stages"), "stages"),
        _count(document.get("microbatches"), "microbatches"),
        tuple(held),
    )


def _to_csv(schedule: Schedule) -> str:
    out = io.StringIO()
    out.write(f"# {_TITLE}\n# name: {json.dumps(schedule.name)}\n")
    out.write(f"# stages: {schedule.stages}\n# microbatches: {schedule.microbatches}\n")
    for rank, held in enumerate(schedule.held):
        out.write(f"# rank {rank} holds {' '.join(map(str, held))}\n")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for row in schedule.rows:
        for rank, kind, stage, microbatch, chunk, joined in row:
            of = microbatch if kind.is_of_a_microbatch else ""
            writer.writerow((rank, kind.code, stage, of, chunk, int(joined)))
    return out.getvalue()


def _from_csv(text: str) -> Schedule:
    """The comments say what the text form's head says; then a line per action, ranks in order."""
    lines = text.splitlines()
    comments = [line[2:] for line in lines if line.startswith("# ")]
    try:
        table = list(csv.reader(line for line in lines if line and not line.startswith("#")))
    except csv.Error as error:
        raise ScheduleError(f"no CSV: {error}") from None
    if not table or tuple(table[0]) != _COLUMNS:
        raise ScheduleError(f"the first line without # is not {','.join(_COLUMNS)}")
    cells: dict[int, list[str]] = {}
    chunks: dict[int, list[str]] = {}
    for number, fields in enumerate(table[1:]):
        if len(fields) != len(_COLUMNS):
            raise ScheduleError(f"action {number} has {len(fields)} columns: {_short(fields)}")
        rank = _count(fields[0], "rank", least=0)
        joined = {"0": "", "1": "+"}.get(fields[5])
        _expect(
            joined is not None, f"action {number}: with_next is {_short(fields[5])}, not 0 or 1"
        )
        cells.setdefault(rank, []).append(f"{fields[2]}{fields[1]}{fields[3]}{joined}")
        chunks.setdefault(rank, []).append(fields[4])
    head = [f"# {comments[0]}" if comments else "", *comments[1:4]]
    ranks = [f"{held}: {' '.join(cells.pop(r, []))}" for r, held in enumerate(comments[4:])]
    _expect(
        not cells, f"actions of rank {min(cells, default=0)}, but comments for {len(ranks)} ranks"
    )
    schedule = _from_text("\n".join([*head, *ranks]))
    for rank, row in enumerate(schedule.rows):
        for action, chunk in zip(row, chunks.get(rank, []), strict=True):
            _expect(
                str(action.chunk) == chunk, f"{action} on rank {rank} has chunk {_short(chunk)}"
            )
    return schedule


def _row(rank: int, held: Sequence[int], cells: Iterable[str]) -> tuple[Action, ...]:
    kinds = {kind.code: kind for kind in Kind}
    chunk_of = {stage: chunk for chunk, stage in enumerate(held)}
    row = []
    for position, cell in enumerate(cells):
        match = _CELL.fullmatch(cell)
        where = f"rank {rank}, position {position}: {_short(cell)}"
        if match is None:
            raise ScheduleError(f"{where} is no action such as 2F0", rank, position)
        kind, stage = kinds[match[2]], int(match[1])
        if kind.is_of_a_microbatch != (match[3] is not None):
            needs = "needs a microbatch" if kind.is_of_a_microbatch else "is of no microbatch"
            raise ScheduleError(f"{where}: {kind.code} {needs}", rank, position)
        if stage not in chunk_of:
            raise ScheduleError(f"{where}: the rank holds stages {list(held)}", rank, position)
        microbatch = NO_MICROBATCH if match[3] is None else int(match[3])
        row.append(Action(rank, kind, stage, microbatch, chunk_of[stage], match[4] is not None))
    return tuple(row)


def _lists(value: Any, name: str, kind: type) -> list[tuple[Any, ...]]:
    _expect(isinstance(value, list), f"{name} is {_short(value)}, not a list per rank")
    for rank, inner in enumerate(value):
        fits = isinstance(inner, list) and all(type(item) is kind for item in inner)
        _expect(fits, f"{name} of rank {rank} is {_short(inner)}, not a list of {kind.__name__}")
    return [tuple(inner) for inner in value]


def _after(line: str | None, key: str) -> str:
    if line is None or not line.startswith(f"{key}: "):
        raise ScheduleError(f"{_short(line)}: expected is '{key}: ...'")
    return line[len(key) + 2 :]


def _named(text: str) -> str:
    try:
        name = json.loads(text)
    except (ValueError, RecursionError):
        name = None
    if not isinstance(name, str):
        raise ScheduleError(f"name {_short(text)} is no text in double quotes")
    return name


def _count(value: Any, name: str, least: int = 1) -> int:
    text = str(value) if type(value) is int else value
    if not isinstance(text, str) or not re.fullmatch(_NUMBER, text) or int(text) < least:
        raise ScheduleError(f"{name} {_short(value)} is no number from {least} to 999999999")
    return int(text)


def _expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ScheduleError(otherwise)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


FORMS: dict[str, tuple[Callable[[Schedule], str], Callable[[str], Schedule]]] = {
    "text": (_to_text, _from_text),
    "csv": (_to_csv, _from_csv),
    "json": (_to_json, _from_json),
    "torch": (to_torch_csv, from_torch_csv),
}
