"""Published times of fused GEMMs, and the designs that made them, for the model to be checked on.

Rows: bench/data/fused_gemm_published.csv, with its source on top. Designs: how the libraries that
made the rows overlap, in the model's terms. Their costs are one set per library and op, never per
row. FITTED costs were chosen on the rows of the file by a search over a grid (least squares of the
logarithm of the ratio), so for them the comparison is in-sample; OTHER has rows that took no part.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from pyparallel.ops.chips import Machine, machine_named
from pyparallel.ops.designs import DESIGNS, Design
from pyparallel.ops.model import MEMORY_SHARE, Prediction, Problem, gemm_time, predict

TABLE = Path(__file__).parent / "data" / "fused_gemm_published.csv"
READING_ERROR = 0.03  # of a ratio that was read off a chart
GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
FITTED = {
    "triton-distributed all_gather_matmul": "piece_us, fixed_us, gemm_share: on its 5 rows",
    "triton-distributed matmul_reduce_scatter": "piece_us, fixed_us, gemm_share: on its 5 rows on "
    "H800; host_us, host_rank_us: on the row of PR #166 and, outside of the file, its other ranks",
    "flux all_gather_matmul": "piece_us, fixed_us, gemm_share: on its 5 rows on H800",
    "flux matmul_reduce_scatter": "fixed_us, gemm_share: on its 5 rows on H800",
    "link NVLink": "share of copies and stores: on the same rows",
}
# What the MLP of Qwen3-32B is, which the row without sizes ran: its configuration's hidden_size and
# intermediate_size; the document that has the row names the model.
QWEN3_32B = (5120, 25600)

LIBRARIES: dict[tuple[str, str], Design] = {
    ("triton-distributed", GATHER): Design(
        "copy engine, rank chunks", (GATHER,),
        "copy engines pull the shards one rank after the other on a stream of their own; a "
        "persistent Triton GEMM waits for the flag of the shard that a tile reads, its own first",
        "ByteDance-Seed/Triton-distributed README and arXiv 2504.19442, overlapped AllGather GEMM",
        "copies", "ranks", piece_us=3.0, fixed_us=8.0, meetings=2, gemm_share=0.87,
        host_us=230.0, host_rank_us=11.0,
    ),
    ("triton-distributed", SCATTER): Design(
        "copy engine, rank chunks", (SCATTER,),
        "a persistent GEMM flags each rank's rows; streams wait for the flags, copy engines send "
        "them, and a last kernel adds the slots",
        "arXiv 2504.19442, overlapped GEMM ReduceScatter; PR #166 on its fixed overhead",
        "copies", "ranks", piece_us=3.0, fixed_us=30.0, meetings=2, gemm_share=0.85,
        reduces_after=True, host_us=230.0, host_rank_us=11.0,
    ),
    ("triton-distributed", REDUCE): Design(
        "two-shot multimem after the GEMM", (REDUCE,),
        "the GEMM, then an all-reduce in which the switch adds",
        "Triton-distributed docs, e2e_dense.md: two_shot_multimem; costs assumed",
        "multimem", "whole", fixed_us=10.0, meetings=2,
    ),
    ("flux", GATHER): Design(
        "copy engine into a waiting CUTLASS kernel", (GATHER,),
        "copies fill the gathered input while one GEMM runs, whose tiles wait for their rows",
        "flux paper, arXiv 2406.06858, AllGather: host-side transfers, signals polled by tiles",
        "copies", "ranks", piece_us=8.0, fixed_us=40.0, meetings=2, gemm_share=0.90,
    ),
    ("flux", SCATTER): Design(
        "stores from the epilogue", (SCATTER,),
        "the GEMM's epilogue stores each tile to the rank that owns it; a kernel adds what arrived",
        "flux paper, arXiv 2406.06858, ReduceScatter: epilogue with remote stores, reduction apart",
        "stores", "waves", fixed_us=220.0, meetings=2, gemm_share=1.0, reduces_after=True,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Published:
    """One row of the table."""

    library: str
    hardware: str
    world: int
    op: str
    dtype: str
    m: int
    n: int | None
    k: int | None
    unfused_ms: float | None
    fused_ms: float | None
    ratio: float
    provenance: str

    @property
    def machine(self) -> Machine:
        return machine_named(self.hardware)

    @property
    def label(self) -> str:
        sizes = " x ".join(str(s) for s in (self.m, self.n, self.k) if s is not None)
        return f"{self.library} {self.hardware} x{self.world} {self.op} {sizes}"


@dataclass(frozen=True)
class Compared:
    """A published row and what the model makes of it."""

    row: Published
    unfused: Prediction
    fused: Prediction
    beside_us: float = 0.0  # other kernels, alike on both sides

    @property
    def ratio(self) -> float:
        return (self.unfused.us + self.beside_us) / (self.fused.us + self.beside_us)

    @property
    def agrees(self) -> bool:
        """Win or lose is right; a published ratio within reading error of 1 is either."""
        if abs(self.row.ratio - 1) <= READING_ERROR:
            return True
        return (self.ratio > 1) == (self.row.ratio > 1)

    @property
    def why(self) -> str:
        """What decides, in words."""
        u, f = self.unfused, self.fused
        saved = u.us - u.gemm_us - f.exposed_us
        text = f"hides {max(0.0, saved):.0f} of {u.us - u.gemm_us:.0f} us beside the GEMM"
        if self.ratio >= 1:
            return text
        if f.waits_for_host_us > 0:
            return (
                f"loses: its fixed cost (streams, waits, copies and flags for {self.row.world} "
                f"ranks) is {f.us:.0f} us of issue, while GEMM and transfer together take "
                f"{u.us:.0f} us unfused; only {f.hidden_us:.0f} us could be hidden"
            )
        parts = {
            "launches and meetings": f.fixed_us,
            "pieces": f.pieces_us,
            "the reduction afterwards": f.reduce_us,
            "a slower transfer": f.transfer_us - u.transfer_us,
            "a slower GEMM": f.gemm_us - u.gemm_us,
        }
        worst = max(parts, key=lambda name: parts[name])
        return (
            f"loses: hides {f.hidden_us:.0f} us, but pays {parts[worst]:.0f} us for {worst} "
            f"({u.us:.0f} us unfused)"
        )


def rows(path: Path = TABLE) -> list[Published]:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return [_row(fields) for fields in csv.DictReader(lines)]


def _row(fields: dict[str, str]) -> Published:
    def number(name: str) -> float | None:
        return float(fields[name]) if fields[name] else None

    n, k = number("N"), number("K")
    return Published(
        library=fields["library"],
        hardware=fields["hardware"],
        world=int(fields["world_size"]),
        op=fields["op"],
        dtype=fields["dtype"],
        m=int(fields["M"]),
        n=None if n is None else int(n),
        k=None if k is None else int(k),
        unfused_ms=number("unfused_ms"),
        fused_ms=number("fused_ms"),
        ratio=float(fields["ratio"]),
        provenance=fields["provenance"],
    )


def compared(row: Published) -> Compared:
    """The model's prediction of a row, with the design of the library that made it."""
    machine, op, beside = row.machine, row.op, 0.0
    if op == "mlp matmul_all_reduce":
        hidden, inner = QWEN3_32B
        columns = inner // row.world
        op = REDUCE
        beside = gemm_time(machine.chip, row.m, 2 * columns, hidden, row.dtype).us
        beside += 3 * row.m * columns * 2 / (machine.chip.memory_gbps * 1e3 * MEMORY_SHARE)
        problem = Problem(op, row.m, hidden, columns, row.dtype, row.world)
    else:
        if row.n is None or row.k is None:
            raise ValueError(f"{row.label}: no sizes")
        problem = Problem.of_whole(op, row.m, row.n, row.k, row.dtype, row.world)
    design = LIBRARIES[row.library, op]
    plain = DESIGNS["plain"]
    return Compared(
        row, predict(problem, plain, machine), predict(problem, design, machine), beside
    )


def rank_correlation(a: list[float], b: list[float]) -> float:
    """Spearman's, with the mean rank for ties. 1.0 for a single pair."""

    def ranks(values: list[float]) -> list[float]:
        return [sum(x < v for x in values) + (values.count(v) - 1) / 2 for v in values]

    x, y = ranks(a), ranks(b)
    mean = (len(x) - 1) / 2
    cov = sum((p - mean) * (q - mean) for p, q in zip(x, y, strict=True))
    norm = (sum((p - mean) ** 2 for p in x) * sum((q - mean) ** 2 for q in y)) ** 0.5
    return cov / norm if norm else 1.0


def misordered(group: list[Compared], error: float = READING_ERROR) -> list[tuple[str, str]]:
    """Pairs whose published ratios differ by more than `error`, and that the model turns round."""
    return [
        (a.row.label, b.row.label)
        for a in group
        for b in group
        if a.row.ratio - b.row.ratio > error + 1e-9 and a.ratio <= b.ratio
    ]


# Measurements that are not in the table: (library, hardware, world, op, m, n, k, unfused ms, fused
# ms, source). Nothing was fitted on them but what FITTED says.
TRITON, FLUX_DOC = "triton-distributed", "performance_report.md"
OTHER = tuple(
    Published(lib, hw, w, op, "bf16", m, n, k, u, f, round(u / f, 3), source)
    for lib, hw, w, op, m, n, k, u, f, source in (
        (TRITON, "H100 NVLink", 2, SCATTER, 4096, 4096, 8192, 0.275, 0.259, "PR #166"),
        (TRITON, "H100 NVLink", 4, SCATTER, 4096, 4096, 8192, 0.205, 0.286, "PR #166"),
        (TRITON, "H100 NVLink", 2, SCATTER, 8192, 8192, 29568, 3.077, 2.886, "PR #166"),
        (TRITON, "H100 NVLink", 4, SCATTER, 8192, 8192, 29568, 1.707, 1.548, "PR #166"),
        (TRITON, "H100 NVLink", 8, SCATTER, 8192, 8192, 29568, 1.045, 0.855, "PR #166"),
        ("flux", "A800 NVLink", 8, GATHER, 4096, 49152, 12288, 3.099, 2.469, FLUX_DOC),
        ("flux", "A800 NVLink", 8, SCATTER, 4096, 12288, 49152, 3.100, 2.508, FLUX_DOC),
        ("flux", "H800 NVLink", 8, GATHER, 4096, 49152, 12288, 1.429, 0.957, FLUX_DOC),
        ("flux", "H800 NVLink", 8, SCATTER, 4096, 12288, 49152, 1.408, 0.932, FLUX_DOC),
    )
)  # fmt: skip
