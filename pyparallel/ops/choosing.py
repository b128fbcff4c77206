"""Which algorithm a call takes. Every rank of a group always chooses alike.

In order: the call's own `algorithm=`, PYPARALLEL_ALGORITHM, what was measured on this machine
(rule.py), the model (model.py, host.py). Rank 0's environment and measurements are broadcast when a
group first needs them; from then on a choice is a pure function of them and of sizes that all ranks
share. So of a weight that ranks may hold unequal parts of, the choice sees no size: an algorithm
other than plain is chosen only where it is no slower than plain by more than NOISE at every one of
the sizes that such a part may have.
"""

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, log2
from typing import Any, Protocol

import torch

from pyparallel.errors import InvalidArgument
from pyparallel.ops.chips import Machine, chip_named, machine_named
from pyparallel.ops.designs import DESIGNS, designs_of
from pyparallel.ops.host import ALGORITHMS, predict_host
from pyparallel.ops.model import OPS, Problem, predict
from pyparallel.ops.rule import Point, Rule, default_path, load

__all__ = ["DTYPES", "Candidate", "Choice", "Chooser", "Policy", "algorithms"]

NOISE = 0.03  # a difference that two measurements of the same thing may have
REACH = 3.0  # octaves, both shared sizes together, from a measured shape to one it speaks for
WHOLES = (4096, 16384, 57344)  # sizes of a weight, of whose parts the model is asked
DTYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
}  # fmt: skip


class Broadcaster(Protocol):
    """What a group needs for its ranks to choose alike: a `pyparallel.comm.Communicator` has it."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def broadcast(self, x: torch.Tensor, root: int = 0) -> Any: ...


@dataclass(frozen=True)
class Candidate:
    """One algorithm, with what its time was taken to be."""

    algorithm: str
    us: float | None  # None where it cannot run here
    basis: str  # "measured", "predicted", or why it cannot run
    ratio: float | None = None  # to plain, the worst over the sizes of a part


@dataclass(frozen=True)
class Choice:
    """What a call does, and why; the same on every rank."""

    algorithm: str
    reason: str
    basis: str  # "argument", "environment", "measured", "model", "only"
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class Policy:
    """What rank 0 knows: measured points, the environment's override, the chips and their link."""

    points: tuple[Point, ...]
    points_from: str
    override: str  # the text of PYPARALLEL_ALGORITHM
    machine: str  # as machine_named takes it; "" where the chip is not known
    tiles: str = ""  # what autotune has measured on rank 0's GPU: JSON of its rows, "" if nothing

    @staticmethod
    def of_this_process() -> "Policy":
        rule, why = load(default_path())
        override = os.environ.get("PYPARALLEL_ALGORITHM", "")
        return Policy(rule.points if rule else (), why, override, _machine(), _tiles())

    def to_bytes(self) -> bytes:
        body = {
            "rule": json.loads(Rule(self.points).to_text()),
            "points_from": self.points_from,
            "override": self.override,
            "machine": self.machine,
            "tiles": self.tiles,
        }
        return json.dumps(body).encode()

    @staticmethod
    def from_bytes(raw: bytes) -> "Policy":
        body = json.loads(raw)
        rule = Rule.from_text(json.dumps(body["rule"]))
        texts = [str(body[name]) for name in ("points_from", "override", "machine", "tiles")]
        return Policy(rule.points, *texts)


def _machine() -> str:
    if not torch.cuda.is_available():
        return ""
    chip = chip_named(torch.cuda.get_device_name())
    if chip is None:
        return ""
    several = torch.cuda.device_count() > 1
    peers = not several or torch.cuda.can_device_access_peer(0, 1)
    if peers and "PCIE" not in torch.cuda.get_device_name().upper():
        return chip.name  # with the link that this chip is sold with
    return f"{chip.name} PCIe"


def _tiles() -> str:
    if not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"):
        return ""
    from pyparallel.triton_kernels import autotune

    measured, why = autotune.load()
    if why and autotune.default_path().exists():
        warnings.warn(f"tiles are predicted, not measured: {why}", RuntimeWarning, stacklevel=2)
    return json.dumps(autotune.to_rows(measured), sort_keys=True) if measured else ""


def algorithms(op: str, device: str) -> Mapping[str, str]:
    """The names that an op knows on a device, each with what it does; plain is the first."""
    if op not in OPS:
        raise InvalidArgument(f"op {op!r} is not one of {', '.join(OPS)}")
    if device == "cpu":
        return ALGORITHMS
    return {design.name: design.summary for design in designs_of(op)}


class Chooser:
    """The choices of one group. Made without communication; the first choice is collective."""

    def __init__(
        self,
        communicator: "Broadcaster | None",
        policy: "Policy | None" = None,
        world: int | None = None,
    ) -> None:
        """`communicator` None: a group of `world` ranks (1) with nothing to broadcast through."""
        self._communicator = communicator
        self._policy = policy
        self.world = world or (communicator.world_size if communicator is not None else 1)
        self._memo: dict[tuple[object, ...], Choice] = {}

    @property
    def policy(self) -> Policy:
        """Rank 0's. Collective where the group has not needed it yet."""
        if self._policy is None:
            self._policy = _agreed(self._communicator)
        return self._policy

    def asked(self, op: str) -> str | None:
        """What PYPARALLEL_ALGORITHM of rank 0 names for an op. Collective as `policy` is."""
        return _override(self.policy.override, op)

    def choose(
        self,
        op: str,
        m: int,
        shared: int,
        dtype: torch.dtype,
        device: str,
        algorithm: str | None = None,
        barred: Mapping[str, str] | None = None,
    ) -> Choice:
        """The algorithm for one call. Collective at the group's first call, then local and cached.

        Args:
            op: of OPS.
            m: rows of the product before they are scattered, of x after it is gathered.
            shared: K for all_gather_matmul, N for the others: what all ranks share beside m.
            dtype: of x.
            device: "cpu" or "cuda".
            algorithm: the caller's own choice, alike on all ranks.
            barred: algorithms that this group cannot run, with the reason, alike on all ranks.

        Raises:
            ValueError: for a name that the op does not know or that is barred, given here or in
                PYPARALLEL_ALGORITHM, with those that would do.
        """
        policy = self.policy
        key = (op, m, shared, dtype, device, algorithm, tuple(barred.items()) if barred else None)
        found = self._memo.get(key)
        if found is None:
            if len(self._memo) > 4096:  # of shapes that never come back
                self._memo.clear()
            found = self._memo[key] = _decide(
                policy, self.world, op, m, shared, dtype, device, algorithm, dict(barred or {})
            )
        return found


def _agreed(communicator: "Broadcaster | None") -> Policy:
    mine = Policy.of_this_process()
    if communicator is None or communicator.world_size == 1:
        return mine
    raw = mine.to_bytes() if communicator.rank == 0 else b""
    size = torch.tensor([len(raw)])
    communicator.broadcast(size, root=0)
    data = torch.zeros(int(size), dtype=torch.uint8)
    if communicator.rank == 0:
        data.copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
    communicator.broadcast(data, root=0)
    agreed = Policy.from_bytes(data.numpy().tobytes())
    if agreed.override != mine.override:
        warnings.warn(
            f"PYPARALLEL_ALGORITHM is {mine.override!r} on rank {communicator.rank} and "
            f"{agreed.override!r} on rank 0 of the group: all ranks follow rank 0",
            RuntimeWarning,
            stacklevel=2,
        )
    return agreed


def _decide(
    policy: Policy,
    world: int,
    op: str,
    m: int,
    shared: int,
    dtype: torch.dtype,
    device: str,
    algorithm: str | None,
    barred: dict[str, str],
) -> Choice:
    known = algorithms(op, device)
    name = DTYPES.get(dtype)
    if algorithm is not None:
        _check(op, device, algorithm, known, barred, "algorithm")
    override = _override(policy.override, op)
    if override is not None:
        _check(op, device, override, known, barred, "PYPARALLEL_ALGORITHM")
    usable = [a for a in known if a not in barred]
    measured = _measured(policy.points, op, device, name, world, m, shared, usable)
    if measured is not None:
        candidates, where = measured
        basis = "measured"
    else:
        candidates = _modelled(policy, op, device, name or "fp32", world, m, shared, usable)
        where, basis = _modelled_where(policy, device), "model"
    candidates += tuple(Candidate(a, None, why) for a, why in barred.items() if a in known)
    if algorithm is not None:
        return Choice(algorithm, "the call asked for it", "argument", candidates)
    if override is not None:
        return Choice(override, "PYPARALLEL_ALGORITHM of rank 0", "environment", candidates)
    if len(usable) == 1:
        return Choice(usable[0], "nothing else can run here", "only", candidates)
    if world == 1:
        return Choice("plain", "one rank has nothing to communicate", "only", candidates)
    return _best(candidates, where, basis)


def _best(candidates: Sequence[Candidate], where: str, basis: str) -> Choice:
    """The fastest of those that are nowhere slower than plain by more than noise."""
    able = [c for c in candidates if c.us is not None and c.ratio is not None]
    plain = next((c for c in able if c.algorithm == "plain"), None)
    if plain is None:
        return Choice("plain", f"no time of it is known ({where})", basis, tuple(candidates))
    safe = [c for c in able if c.ratio is not None and c.ratio <= 1 + NOISE]
    best = min(safe, key=lambda c: c.us or 0.0)
    if best is plain or (best.us or 0.0) > (plain.us or 0.0) * (1 - NOISE):
        others = [c for c in able if c is not plain]
        text = "nothing is faster by more than noise"
        if others:
            near = min(others, key=lambda c: c.us or 0.0)
            text += f": {_against(near, plain, basis)}"
            if near not in safe and near.us is not None and near.us < (plain.us or 0.0):
                text += f", but {near.ratio:.2f} of plain's time at one of the sizes of a part"
        return Choice("plain", f"{text} ({where})", basis, tuple(candidates))
    text = f"{_against(best, plain, basis)} ({where})"
    return Choice(best.algorithm, text, basis, tuple(candidates))


def _against(one: Candidate, plain: Candidate, basis: str) -> str:
    if basis == "measured":
        return f"{one.algorithm} {one.us:.5g} us, plain {plain.us:.5g} us"
    # Predicted times are means over parts of weights that this call does not have.
    ratio = (one.us or 0.0) / (plain.us or 1.0)
    return f"{one.algorithm} takes {ratio:.2f} of plain's time over parts of all sizes"


def _check(
    op: str, device: str, name: str, known: Mapping[str, str], barred: Mapping[str, str], what: str
) -> None:
    usable = ", ".join(a for a in known if a not in barred)
    if name not in known:
        raise InvalidArgument(f"{what} is {name!r}; {op} on {device} has {usable}")
    if name in barred:
        raise InvalidArgument(f"{what} is {name!r}, which cannot run: {barred[name]}; use {usable}")


def _override(text: str, op: str) -> str | None:
    """ "plain", or "matmul_all_reduce=one_shot,all_gather_matmul=plain" -> the name for an op."""
    found = None
    for part in filter(None, (p.strip() for p in text.split(","))):
        which, equals, name = (p.strip() for p in part.rpartition("="))
        if equals and which not in OPS:
            raise InvalidArgument(
                f"PYPARALLEL_ALGORITHM has {part!r}; want ALGORITHM or OP=ALGORITHM with OP of "
                f"{', '.join(OPS)}"
            )
        if not equals or which == op:
            found = name
    return found


def _measured(
    points: Sequence[Point],
    op: str,
    device: str,
    dtype: str | None,
    world: int,
    m: int,
    shared: int,
    usable: Sequence[str],
) -> tuple[tuple[Candidate, ...], str] | None:
    """Times at the nearest measured (m, shared), over all sizes of a part measured there."""
    mine = [p for p in points if (p.op, p.device, p.dtype, p.world) == (op, device, dtype, world)]
    if not mine or m < 1 or shared < 1:
        return None

    def distance(p: Point) -> float:
        return abs(log2(p.m / m)) + abs(log2(p.shared / shared))

    least = min(map(distance, mine))
    if least > REACH:
        return None
    near = min((p for p in mine if distance(p) == least), key=lambda p: (p.m, p.shared))
    here = [p for p in mine if (p.m, p.shared) == (near.m, near.shared)]
    found = []
    for name in usable:
        if all(name in p.us for p in here):
            us = _mean([p.us[name] for p in here])
            worst = max(p.us[name] / p.us["plain"] for p in here)
            found.append(Candidate(name, us, "measured", worst))
    size = "K" if op == "all_gather_matmul" else "N"
    return tuple(found), f"measured here at M = {near.m}, {size} = {near.shared}"


def _modelled(
    policy: Policy,
    op: str,
    device: str,
    dtype: str,
    world: int,
    m: int,
    shared: int,
    usable: Sequence[str],
) -> tuple[Candidate, ...]:
    def problem(part: int) -> Problem:
        n, k = (part, shared) if op == "all_gather_matmul" else (shared, part)
        return Problem(op, m, n, k, dtype, world)

    machine = machine_named(policy.machine) if policy.machine else None
    parts = [max(1, whole // world) for whole in WHOLES]
    found = []
    for name in usable:
        times = [predicted(problem(part), name, device, machine) for part in parts]
        plain = [predicted(problem(part), "plain", device, machine) for part in parts]
        known = [(t, p) for t, p in zip(times, plain, strict=True) if t is not None and p]
        if len(known) < len(parts):
            found.append(Candidate(name, None, "no prediction"))
            continue
        us = _mean([t for t, _ in known])
        found.append(Candidate(name, us, "predicted", max(t / p for t, p in known)))
    return tuple(found)


def predicted(
    problem: Problem, algorithm: str, device: str, machine: "Machine | None"
) -> float | None:
    """The model's time; None where it has none: an unknown chip, a transport the link lacks."""
    if device == "cpu":
        return predict_host(problem, algorithm).us
    design = DESIGNS[algorithm]
    if machine is None or design.transport not in machine.link.share:
        return None
    return predict(problem, design, machine).us


def _modelled_where(policy: Policy, device: str) -> str:
    if device == "cpu":
        return "predicted, not measured here"
    if not policy.machine:
        return "the model does not know this chip"
    return f"predicted for {policy.machine}"


def _mean(values: Sequence[float]) -> float:
    """Geometric."""
    return exp(sum(map(log, values)) / len(values))
