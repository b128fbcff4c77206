"""Measures configurations on this machine's GPU: python -m pyparallel.triton_kernels.autotune

    python -m pyparallel.triton_kernels.autotune --world 8 --m 16 4096 --n 4096 --k 14336

Every candidate of configurations.py is checked against torch and timed as the plain GEMM, whose
tiles the other kernels use; the fastest goes into a file, for each kernel. The ops read it: rank
0's table is given to all ranks of a group, since two must never cut differently.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from .configurations import (
    ITEM_BYTES,
    Chip,
    Problem,
    candidates,
    chip_of,
    choose,
    key_of,
    with_programs,
)
from .gemm import TileConfig
from .gemm_all_reduce import problem_op
from .gemm_reduce_scatter import OP as REDUCE_SCATTER
from .gemm_then_collective import OP as THEN_COLLECTIVE

# Problem.op of the kernels, and whether their rows are cut by rank.
KERNELS = {
    "gemm": False,
    "all_gather_gemm": True,
    REDUCE_SCATTER: True,
    THEN_COLLECTIVE: True,
    problem_op("one_shot"): False,
    problem_op("two_shot"): False,
}
FORMAT = 1  # of the file; files of another are not read
ROUNDS = 5  # interleaved, so that a change of clocks meets all candidates


@dataclass(frozen=True)
class Result:
    """What a problem's measurement found. seconds: median by configuration."""

    key: str
    best: TileConfig
    seconds: "dict[TileConfig, float]"
    failed: "dict[TileConfig, str]"


def default_path() -> Path:
    """Where the table lies: under $XDG_CACHE_HOME, or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "pyparallel" / "configurations.json"


def load(path: "Path | None" = None) -> "tuple[dict[str, TileConfig], str]":
    """The measured table, and why it is empty if it is: no file, another format, damaged."""
    path = path or default_path()
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        return {}, f"nothing has been measured: there is no {path}"
    except (OSError, ValueError) as error:
        return {}, f"{path} cannot be read: {error}"
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        return {}, f"{path} is of another format than {FORMAT}"
    try:
        return from_rows(data["best"]), ""
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return {}, f"{path} is damaged: {error}"


def to_rows(best: "Mapping[str, TileConfig]") -> "dict[str, dict[str, object]]":
    """The table as plain data."""
    return {key: asdict(config) for key, config in best.items()}


def from_rows(rows: "Mapping[str, Mapping[str, object]]") -> "dict[str, TileConfig]":
    """The table from plain data, each value checked."""
    return {str(key): _config(row) for key, row in rows.items()}


def save(best: "Mapping[str, TileConfig]", path: "Path | None" = None) -> Path:
    """Adds to the table; it is whole at all times, and the user's alone."""
    path = path or default_path()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    rows = to_rows({**load(path)[0], **best})
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps({"format": FORMAT, "best": rows}, indent=1, sort_keys=True))
    draft.chmod(0o600)
    draft.replace(path)
    return path


def tune(
    problem: Problem,
    chip: Chip,
    measure: "Callable[[TileConfig], float]",
    rounds: int = ROUNDS,
) -> Result:
    """Measures every candidate `rounds` times in turn; the least median wins.

    Args:
        measure: seconds of one run with this configuration. What it raises leaves the candidate
            out, with the text; a wrong result raises too.

    Raises:
        ValueError: nothing fits the chip. RuntimeError: every candidate failed, with each reason.
    """
    choose(problem, chip)  # says why if nothing fits
    running = [c.config for c in candidates(problem, chip) if not c.excluded]
    samples: dict[TileConfig, list[float]] = {config: [] for config in running}
    failed: dict[TileConfig, str] = {}
    for _ in range(rounds):
        for config in running:
            if config not in failed:
                try:
                    samples[config].append(measure(config))
                except Exception as error:
                    failed[config] = f"{type(error).__name__}: {error}"
    medians = {
        config: sorted(times)[len(times) // 2]
        for config, times in samples.items()
        if config not in failed
    }
    if not medians:
        reasons = "; ".join(f"{config}: {text}" for config, text in failed.items())
        raise RuntimeError(f"{problem} on {chip.name}: every configuration failed: {reasons}")
    best = min(medians, key=lambda config: medians[config])
    return Result(key_of(problem, chip), best, medians, failed)


def measure_on_gpu(problem: Problem, chip: Chip) -> "Callable[[TileConfig], float]":
    """A timer of the plain GEMM on random operands, which checks each configuration first."""
    import torch

    from .gemm import gemm

    dtype = getattr(torch, problem.dtype)
    wide = torch.bfloat16 if dtype.itemsize == 1 else dtype
    a, b = (
        torch.randn(rows, problem.k, device="cuda", dtype=torch.float32).to(dtype)
        for rows in (problem.m, problem.n)
    )
    out = torch.empty(problem.m, problem.n, device="cuda", dtype=wide)
    right = a.to(wide).float() @ b.to(wide).float().T
    flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
    checked: set[TileConfig] = set()

    def measure(config: TileConfig) -> float:
        ready = with_programs(config, problem, chip)
        if config not in checked:
            out.fill_(float("nan"))
            gemm(out, a, b, ready)
            error = (out.float() - right).abs().max().item()
            allowed = right.abs().max().item() * torch.finfo(wide).eps * 4
            if not error <= allowed:
                raise ValueError(f"wrong by {error}, {allowed} is allowed")
            checked.add(config)
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        gemm(out, a, b, ready)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    return measure


def main(argv: "Sequence[str] | None" = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pyparallel.triton_kernels.autotune")
    parser.add_argument(
        "--m", type=int, nargs="+", required=True, help="rows of all ranks together"
    )
    parser.add_argument("--n", type=int, required=True)
    parser.add_argument("--k", type=int, required=True, help="of one rank")
    parser.add_argument("--dtype", choices=sorted(ITEM_BYTES), default="bfloat16")
    parser.add_argument(
        "--op", nargs="+", choices=list(KERNELS), default=list(KERNELS), help="kernels (all)"
    )
    parser.add_argument(
        "--world", type=int, default=1, help="ranks of the group, by which rows are cut (1)"
    )
    parser.add_argument("--out", type=Path, default=None, help=f"file (default: {default_path()})")
    arguments = parser.parse_args(argv)
    import torch

    if not torch.cuda.is_available():
        print(
            "autotune measures on a GPU, and torch sees none here; choose() works without: it then "
            "takes the least predicted cycles",
            file=sys.stderr,
        )
        return 2
    chip = chip_of(torch.cuda.current_device())
    problems = [
        problem_of(op, m, arguments.n, arguments.k, arguments.dtype, arguments.world)
        for m in arguments.m
        for op in arguments.op
    ]
    results = [tune(problem, chip, measure_on_gpu(problem, chip)) for problem in problems]
    print("\n".join(report(results)))
    print(f"written: {save({one.key: one.best for one in results}, arguments.out)}")
    return 0


def problem_of(op: str, m: int, n: int, k: int, dtype: str, world: int) -> Problem:
    """What a kernel of KERNELS has to do with m rows of `world` ranks, as the ops would ask."""
    if world < 1 or m < 1:
        raise ValueError(f"m = {m} rows of {world} ranks: want at least 1 of both")
    rows = tuple(m // world + (rank < m % world) for rank in range(world))
    return Problem(op, rows if KERNELS[op] else (m,), n, k, dtype)


def report(results: "Iterable[Result]") -> "list[str]":
    """What was measured, the fastest first."""
    out = []
    for result in results:
        out.append(result.key)
        for config, seconds in sorted(result.seconds.items(), key=lambda item: item[1]):
            out.append(f"  {seconds * 1e6:10.1f} us  {config}")
        out += [f"  failed  {config}: {text}" for config, text in result.failed.items()]
    return out


def _config(row: "Mapping[str, object]") -> TileConfig:
    names = {field.name: type(field.default) for field in fields(TileConfig)}
    if set(row) != set(names) or any(type(row[name]) is not names[name] for name in names):
        raise ValueError(f"{dict(row)} is no configuration")
    return TileConfig(**row)


if __name__ == "__main__":
    sys.exit(main())
