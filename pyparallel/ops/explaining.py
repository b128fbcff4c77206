"""explain(): what an op would do for some shapes, why, and what each algorithm would take."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from pyparallel.errors import InvalidArgument
from pyparallel.ops.chips import machine_named
from pyparallel.ops.choosing import (
    DTYPES,
    NOISE,
    Choice,
    Chooser,
    Policy,
    algorithms,
    predicted,
)
from pyparallel.ops.device_path import unfit
from pyparallel.ops.groups import seat_of
from pyparallel.ops.model import OPS, Problem

__all__ = ["Explanation", "Timing", "explain"]


@dataclass(frozen=True)
class Timing:
    """One algorithm at these very shapes."""

    algorithm: str
    what: str  # it does
    us: float | None
    # "measured": at these shapes; "nearby": the mean over parts of the shape that the choice names;
    # "predicted"; or why there is no time. Beside measured times there are no predicted ones.
    basis: str


@dataclass(frozen=True)
class Explanation:
    """What explain() found; print it, or take its fields (`to_dict` for JSON)."""

    problem: Problem
    device: str
    choice: Choice
    timings: tuple[Timing, ...]
    known_from: str  # the file of measured times, or why there is none

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def __str__(self) -> str:
        p, choice = self.problem, self.choice
        lines = [
            f"{p.op}: [{p.m}, {p.k}] x [{p.n}, {p.k}]^T on each of {p.world} ranks, {p.dtype}, "
            f"{self.device}",
            f"  takes {choice.algorithm} ({choice.basis}): {choice.reason}",
        ]
        width = max(len(t.algorithm) for t in self.timings)
        for t in self.timings:
            mark = "->" if t.algorithm == choice.algorithm else "  "
            us = f"{t.us:10.1f} us" if t.us is not None else " " * 13
            lines.append(f"  {mark} {t.algorithm:{width}} {us}  {t.basis:9}  {t.what}")
        lines += self._faster()
        lines.append(f"  measurements: {self.known_from}")
        return "\n".join(lines)

    def _faster(self) -> list[str]:
        """Why something that is faster in this table is not taken."""
        times = {t.algorithm: t.us for t in self.timings if t.us is not None}
        mine, choice = times.get(self.choice.algorithm), self.choice
        if mine is None or choice.basis not in ("measured", "model"):
            return []
        names = [name for name, us in times.items() if us < mine * (1 - NOISE)]
        if not names:
            return []
        return [
            f"  {', '.join(names)} would be faster here; what is taken holds for every part of a "
            "weight that a rank may have, and is alike on all ranks"
        ]


def explain(
    op: str,
    shapes: Sequence[Any],
    group: Any,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    shard_sizes: Sequence[int] | None = None,
    algorithm: str | None = None,
    machine: str | None = None,
) -> Explanation:
    """What `op` does for these arguments, and why. Collective where the group is a real one.

    Args:
        op: "all_gather_matmul", "matmul_reduce_scatter" or "matmul_all_reduce".
        shapes: of x and of the weight, as this rank would pass them; tensors will do, whose dtype
            and device then count. Several weights of all_gather_matmul: a list in its place.
        group: as for the ops; or a number of ranks, for what such a group would do.
        dtype, device: of the tensors; "cpu" or "cuda".
        shard_sizes: as for all_gather_matmul, where shards of x differ.
        algorithm: as the ops take it.
        machine: with a number of ranks: a chip and its link, as "H100 NVLink", to ask the model
            about; the default is this machine.

    Returns:
        An Explanation: the choice with its reason, and the time of each algorithm at these shapes,
        measured or predicted. It prints as a table.

    Raises:
        ValueError: for shapes that do not fit, an unknown op, algorithm or machine.
    """
    if op not in OPS:
        raise InvalidArgument(f"op is {op!r}; expected one of {', '.join(OPS)}")
    x, weights, dtype, device = _arguments(shapes, dtype, device)
    if type(group) is int:
        chooser = _imagined(group, machine)
    else:
        if machine is not None:
            raise InvalidArgument("machine is for a number of ranks; a group has its own machine")
        seat = seat_of(group)
        chooser = seat.chooser
    problem = _problem(op, x, weights, dtype, chooser.world, shard_sizes)
    shared = problem.k if op == "all_gather_matmul" else problem.n
    if type(group) is not int:
        cpu = device == "cpu"
        barred = seat.barred() if cpu else seat.barred_kernels(op, shared, dtype, algorithm)
    else:
        asked = algorithm or chooser.asked(op)
        barred = {} if device == "cpu" else unfit(op, shared, dtype, asked)
    choice = chooser.choose(op, problem.m, shared, dtype, device, algorithm, barred)
    timings = tuple(
        _timing(chooser, problem, device, name, what, choice)
        for name, what in algorithms(op, device).items()
    )
    return Explanation(problem, device, choice, timings, chooser.policy.points_from)


def _arguments(
    shapes: Sequence[Any], dtype: torch.dtype, device: str
) -> tuple[list[int], list[list[int]], torch.dtype, str]:
    if len(shapes) != 2:
        raise InvalidArgument(f"shapes has {len(shapes)} entries; expected those of x and weight")
    x, weight = shapes
    several = isinstance(weight, (list, tuple)) and any(not isinstance(n, int) for n in weight)
    weights = list(weight) if several else [weight]
    for given in (x, *weights):
        if isinstance(given, torch.Tensor):
            dtype, device = given.dtype, given.device.type
    if device not in ("cpu", "cuda"):
        raise InvalidArgument(f"device is {device!r}; expected cpu or cuda")
    if dtype not in DTYPES:
        raise InvalidArgument(f"dtype is {dtype}; expected one of {', '.join(map(str, DTYPES))}")
    lists = [list(g.shape) if isinstance(g, torch.Tensor) else [int(n) for n in g] for g in
             (x, *weights)]  # fmt: skip
    return lists[0], lists[1:], dtype, device


def _problem(
    op: str,
    x: list[int],
    weights: list[list[int]],
    dtype: torch.dtype,
    world: int,
    shard_sizes: Sequence[int] | None,
) -> Problem:
    if len(x) < 1 or not weights or any(len(w) != 2 or w[1] != x[-1] for w in weights):
        raise InvalidArgument(
            f"x is {x} and weight {weights if len(weights) != 1 else weights[0]}; expected "
            "[..., K] and [N, K]"
        )
    rows = 1
    for size in x[:-1]:
        rows *= size
    if shard_sizes is not None and op != "all_gather_matmul":
        raise InvalidArgument(f"shard_sizes is for all_gather_matmul; {op} has all rows in x")
    if op == "all_gather_matmul":
        if shard_sizes is None:
            rows *= world
        else:
            if len(shard_sizes) != world or len(x) < 2:
                raise InvalidArgument(
                    f"shard_sizes has {len(shard_sizes)} entries; expected one for each of "
                    f"{world} ranks"
                )
            rows = rows // max(1, x[0]) * sum(shard_sizes)
    elif len(weights) > 1:
        raise InvalidArgument(f"{op} has one weight, not {len(weights)}")
    return Problem(op, rows, sum(w[0] for w in weights), x[-1], DTYPES[dtype], world)


def _imagined(world: int, machine: str | None) -> Chooser:
    if world < 1:
        raise InvalidArgument(
            f"group is {world}; expected a group, or how many ranks it would have"
        )
    if machine is None:
        return Chooser(None, Policy.of_this_process(), world)
    machine_named(machine)  # its error names the chips
    return Chooser(None, Policy((), f"of {machine} nothing is measured here", "", machine), world)


def _timing(
    chooser: Chooser, p: Problem, device: str, name: str, what: str, choice: Choice
) -> Timing:
    candidate = next((c for c in choice.candidates if c.algorithm == name), None)
    if candidate is not None and candidate.us is None and candidate.basis != "no prediction":
        return Timing(name, what, None, candidate.basis)
    here = (p.op, device, p.dtype, p.world, p.m, p.n, p.k)
    for point in chooser.policy.points:
        place = (point.op, point.device, point.dtype, point.world, point.m, point.n, point.k)
        if place == here and name in point.us:
            return Timing(name, what, point.us[name], "measured")
    if candidate is not None and candidate.basis == "measured":
        return Timing(name, what, candidate.us, "nearby")
    if any(c.basis == "measured" for c in choice.candidates):
        return Timing(name, what, None, "not measured with the others")
    text = chooser.policy.machine
    us = predicted(p, name, device, machine_named(text) if text else None)
    if us is None:
        why = "the link has no such transport" if text else "the model does not know this chip"
        return Timing(name, what, None, why)
    return Timing(name, what, us, "predicted")
