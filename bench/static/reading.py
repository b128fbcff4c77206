"""One compiled kernel in a row: registers, spills, shared memory, and its main loop's bound."""

from dataclasses import asdict, dataclass, field

from bench.static.compiling import Compiled
from bench.static.units import BULK_LOADS, RATES, TENSOR, Tile, Turn, turn

LANE_PRODUCTS = ("FFMA", "FFMA2")
MARGIN_STEP = 0.005
REGISTERS = 65536  # of a multiprocessor; a thread gets them in steps
REGISTER_STEP = 8
MOST_THREADS = 2048
MOST_PROGRAMS = 32
RESERVED_SHARED = 1024  # for each program


@dataclass(frozen=True)
class Row:
    """What the table shows and the baseline keeps.

    resident: programs that a multiprocessor holds at once. cycles: of one turn, by unit.
    """

    kernel: str
    arch: int
    registers: int
    spills: int
    shared_bytes: int
    resident: int
    tensor_instructions: tuple[str, ...]
    bulk_loads: int
    binding: str
    margin: float
    cycles: dict[str, float] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"sm_{self.arch} {self.kernel}"

    def to_json(self) -> dict[str, object]:
        out = asdict(self)
        out["tensor_instructions"] = list(self.tensor_instructions)
        return out


def main_loop(compiled: Compiled, tile: Tile) -> "Turn | None":
    """The loop that multiplies most; None for a kernel that multiplies nothing."""
    tensor = compiled.listing.innermost(TENSOR)
    loops = tensor or compiled.listing.innermost(LANE_PRODUCTS)
    if not loops:
        return None
    turns = [turn(loop.code, tile, compiled.arch) for loop in loops]
    return max(turns, key=lambda one: (one.multiply_adds, one.cycles["fma"]))


def read(compiled: Compiled, tile: "Tile | None") -> Row:
    """The row of a kernel; tile: the blocks it multiplies, None if it does not."""
    loop = main_loop(compiled, tile) if tile else None
    names = {one.name for one in compiled.listing.code}
    return Row(
        compiled.description.name,
        compiled.arch,
        compiled.registers,
        compiled.spills,
        compiled.shared_bytes,
        resident_programs(compiled),
        tuple(sorted(names & set(TENSOR))),
        compiled.listing.count(*BULK_LOADS),
        loop.binding if loop else "",
        round(loop.margin, 3) if loop else 0.0,
        {unit: round(cycles, 1) for unit, cycles in loop.cycles.items()} if loop else {},
    )


def resident_programs(compiled: Compiled) -> int:
    """Programs that fit one multiprocessor, by registers, shared memory and threads."""
    rates, threads = RATES[compiled.arch], 32 * compiled.warps
    registers = -(-compiled.registers // REGISTER_STEP) * REGISTER_STEP * threads
    shared = compiled.shared_bytes + RESERVED_SHARED
    whole = rates.shared_bytes + RESERVED_SHARED
    return min(REGISTERS // registers, whole // shared, MOST_THREADS // threads, MOST_PROGRAMS)


def faults(row: Row) -> list[str]:
    """What no shipped kernel may have, whatever it was before."""
    wrong = []
    if row.spills:
        wrong.append(f"{row.key}: {row.spills} bytes spilled")
    if row.shared_bytes > RATES[row.arch].shared_bytes:
        limit = RATES[row.arch].shared_bytes
        wrong.append(f"{row.key}: {row.shared_bytes} bytes of shared memory, {limit} are there")
    return wrong


def worse(row: Row, before: Row) -> list[str]:
    """What got worse than it was."""
    wrong = []
    if row.resident < before.resident:
        usage, was = (f"{r.registers} registers, {r.shared_bytes} bytes" for r in (row, before))
        change = f"{row.resident} programs at once ({usage}), {before.resident} before ({was})"
        wrong.append(f"{row.key}: {change}")
    if set(before.tensor_instructions) - set(row.tensor_instructions):
        lost = ", ".join(sorted(set(before.tensor_instructions) - set(row.tensor_instructions)))
        wrong.append(f"{row.key}: no {lost} any more")
    if row.bulk_loads < before.bulk_loads:
        wrong.append(f"{row.key}: {row.bulk_loads} bulk loads, {before.bulk_loads} before")
    if before.binding == "tensor" and row.binding != "tensor":
        wrong.append(f"{row.key}: bound by {row.binding}, by the tensor cores before")
    if row.margin < before.margin - MARGIN_STEP:
        wrong.append(f"{row.key}: tensor share {row.margin}, {before.margin} before")
    return wrong
