"""The table of all shipped Triton kernels: compiled, read, compared with what they were.

baseline.json beside this file has rows as the Triton of constraints.txt compiles them. Another
Triton compiles otherwise: rows are then held to what no kernel may have (spills, too much shared
memory), not to the baseline; and so are kernels that the baseline does not have yet.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path

from bench import machine
from bench.static.compiling import compile_for
from bench.static.order import misfits
from bench.static.reading import Row, faults, read, worse
from bench.static.shipped import Entry, everything
from bench.static.units import TENSOR, UNITS, shares

BASELINE = Path(__file__).parent / "baseline.json"
# Instruction that multiplies in the main loop, by architecture and bytes of an element.
WANTED = {
    (80, 2): "HMMA",
    (90, 2): "HGMMA",
    (90, 1): "QGMMA",
    (100, 2): "UTCHMMA",
    (100, 1): "UTCQMMA",
}
HEAD = (
    "kernel",
    "regs",
    "spills",
    "shared",
    "fit",
    *UNITS,
    "binding",
    "share",
    "serial",
    "overlap",
)


def read_entry(entry: Entry) -> tuple[Row, list[str]]:
    """The row of an entry, and what no shipped kernel may have."""
    compiled = compile_for(entry.description, entry.arch)
    row = read(compiled, entry.tile)
    wrong = faults(row) + [f"{row.key}: {text}" for text in misfits(compiled.ptx)]
    wanted = entry.tile and WANTED.get((entry.arch, entry.tile.itemsize))
    if wanted and entry.rows < 64:
        wanted = "HMMA"
    if wanted and wanted not in row.tensor_instructions:
        wrong.append(f"{row.key}: no {wanted}, but {row.tensor_instructions or 'no tensor cores'}")
    lost = [name for name in entry.wants if not compiled.listing.count(name)]
    if lost:
        wrong.append(f"{row.key}: no {', '.join(lost)}")
    by_bulk = entry.bulk or (entry.config and entry.config.descriptors)
    if by_bulk and not row.bulk_loads:
        wrong.append(f"{row.key}: operands are not loaded by bulk copies")
    return row, wrong


def _read_key(key: str) -> tuple[Row, list[str]]:
    """In a process of its own: descriptions hold kernels, which are not pickled."""
    return read_entry(_entries()[key])


def _entries() -> dict[str, Entry]:
    if not _known:
        _known.update((entry.key, entry) for entry in everything())
    return _known


_known: dict[str, Entry] = {}


def read_all(keys: Sequence[str], workers: int) -> Iterator[tuple[Row, list[str]]]:
    """Rows in the order of keys; one process each for `workers`."""
    if workers < 2:
        yield from map(_read_key, keys)
        return
    with machine.processes(workers) as pool:
        yield from pool.map(_read_key, keys)


def load_baseline(path: Path = BASELINE) -> tuple[str, dict[str, Row]]:
    """The Triton version that made the baseline, and its rows by key."""
    data = json.loads(path.read_text())
    rows = [row_from(row) for row in data["rows"]]
    return data["triton"], {row.key: row for row in rows}


def save_baseline(rows: Sequence[Row], triton_version: str, path: Path = BASELINE) -> None:
    lines = ",\n".join(json.dumps(row.to_json()) for row in sorted(rows, key=lambda r: r.key))
    path.write_text(f'{{"triton": "{triton_version}", "rows": [\n{lines}\n]}}\n')


def row_from(data: dict[str, object]) -> Row:
    """A row of JSON. A field too many or too few is a ValueError."""
    names = {field.name for field in fields(Row)}
    if set(data) != names:
        raise ValueError(f"a row has {sorted(data)}; expected {sorted(names)}")
    row = Row(**data)  # type: ignore[arg-type]
    return Row(**{**data, "tensor_instructions": tuple(row.tensor_instructions)})  # type: ignore[arg-type]


def accept(rows: Sequence[Row], triton_version: str, path: Path = BASELINE) -> None:
    """Puts rows into the baseline; those of another Triton, or not shipped any more, go."""
    kept: dict[str, Row] = {}
    if path.exists():
        version, before = load_baseline(path)
        if version == triton_version:
            kept = {key: row for key, row in before.items() if key in _entries()}
    save_baseline(list({**kept, **{row.key: row for row in rows}}.values()), triton_version, path)


def compare(rows: Sequence[Row], baseline: dict[str, Row]) -> list[str]:
    """What got worse, of rows that the baseline has."""
    return [text for row in rows if row.key in baseline for text in worse(row, baseline[row.key])]


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """The table as text: cycles of one turn of the main loop by unit, the longest one first."""
    yield f"{HEAD[0]:<62}" + "".join(f"{name:>8}" for name in HEAD[1:])
    for row in rows:
        cycles = "".join(f"{row.cycles.get(unit, 0):>8.0f}" for unit in UNITS)
        name = f"sm_{row.arch} {row.kernel}"
        usage = f"{row.registers:>8}{row.spills:>8}{row.shared_bytes:>8}{row.resident:>8}"
        yield f"{name:<62}{usage}" + (
            f"{cycles}{row.binding:>8}{row.margin:>8.2f}" + _bounds(row) if row.cycles else ""
        )


def _bounds(row: Row) -> str:
    return "".join(f"{100 * share:>7.0f}%" for share in shares(row.cycles))


def tensor_bound(row: Row) -> bool:
    """Whether no other unit needs more cycles than the tensor cores."""
    return bool(set(row.tensor_instructions) & set(TENSOR)) and row.binding == "tensor"
