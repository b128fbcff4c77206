"""What has been measured on this machine: times of each algorithm at some shapes, in one file.

The file is in the user's cache folder, private, JSON, and says on which machine and with which
versions it was made. `python -m pyparallel calibrate` writes it; no op call ever measures. A file
that is missing, damaged, foreign or open to others is not used, and the reason is kept for
explain().

A point is one shape, timed on all ranks, the slowest counting, all algorithms in turns.
"""

import json
import math
import os
import platform
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import pyparallel
from pyparallel.errors import InvalidArgument
from pyparallel.ops.model import ITEM_BYTES, OPS

__all__ = ["Point", "Rule", "default_path", "load", "machine_facts", "save"]

FORMAT = 1
LARGEST = 1 << 20  # bytes of a file that is read at all
ENVIRONMENT = "PYPARALLEL_RULE"


@dataclass(frozen=True)
class Point:
    """Median microseconds of one call by each algorithm; `m`, `n`, `k` as in model.Problem."""

    op: str
    device: str  # "cpu" or "cuda"
    dtype: str
    world: int
    m: int
    n: int
    k: int
    us: Mapping[str, float]

    def __post_init__(self) -> None:
        problems = []
        if self.op not in OPS:
            problems.append(f"op {self.op!r}")
        if self.device not in ("cpu", "cuda"):
            problems.append(f"device {self.device!r}")
        if self.dtype not in ITEM_BYTES:
            problems.append(f"dtype {self.dtype!r}")
        for name in ("world", "m", "n", "k"):
            value = getattr(self, name)
            if type(value) is not int or not 0 < value < 1 << 40:
                problems.append(f"{name} {value!r}")
        if "plain" not in self.us:
            problems.append("no time of plain")
        for name, us in self.us.items():
            if not isinstance(us, (int, float)) or not math.isfinite(us) or us <= 0:
                problems.append(f"time of {name} {us!r}")
        if problems:
            raise InvalidArgument(f"a measured point has {', '.join(problems)}")

    @property
    def shared(self) -> int:
        """The size beside m that all ranks share."""
        return self.k if self.op == "all_gather_matmul" else self.n


@dataclass(frozen=True)
class Rule:
    """All points of one file, and what they were measured on."""

    points: tuple[Point, ...]
    facts: Mapping[str, str] = field(default_factory=dict)

    def to_text(self) -> str:
        body = {
            "format": FORMAT,
            "facts": dict(self.facts),
            "points": [asdict(point) for point in self.points],
        }
        return json.dumps(body, indent=1, sort_keys=True)

    @staticmethod
    def from_text(text: str) -> "Rule":
        """Raises ValueError saying what is wrong; nothing in the text is trusted."""
        try:
            body = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"no JSON: {error}") from None
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            found = body.get("format") if isinstance(body, dict) else type(body).__name__
            raise InvalidArgument(f"format {found!r}, want {FORMAT}")
        facts, points = body.get("facts"), body.get("points")
        if not isinstance(facts, dict) or not isinstance(points, list):
            raise InvalidArgument("no facts or no list of points")
        return Rule(tuple(_point(p) for p in points), {str(k): str(v) for k, v in facts.items()})


def _point(body: Any) -> Point:
    names = ("op", "device", "dtype", "world", "m", "n", "k", "us")
    if not isinstance(body, dict) or set(body) != set(names) or not isinstance(body["us"], dict):
        raise InvalidArgument(f"a point is {str(body)[:80]}; want {', '.join(names)}")
    return Point(**body)


def machine_facts() -> dict[str, str]:
    """What a measurement depends on; a file with other facts is not used."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in _lines("/proc/cpuinfo")
            if line.startswith("model name")
        ),
        platform.processor() or platform.machine(),
    )
    facts = {
        "cpu": cpu,
        "cores": str(len(os.sched_getaffinity(0))),
        "pyparallel": pyparallel.__version__,
        "torch": str(torch.__version__),
    }
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        facts["gpus"] = f"{count} x {torch.cuda.get_device_name(0)}"
    return facts


def default_path() -> "Path | None":
    """Where the file is: PYPARALLEL_RULE, else the user's cache folder; None where it is "none"."""
    named = os.environ.get("PYPARALLEL_RULE", "")
    if named == "none":
        return None
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(base) if os.path.isabs(base) else Path.home() / ".cache"  # noqa: PTH117
    return folder / "pyparallel" / "rule.json"


def load(path: "Path | None") -> "tuple[Rule | None, str]":
    """The rule of this machine, or None, and why: never an error, so that no op fails for it."""
    if path is None:
        return None, f"{ENVIRONMENT} is none"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None, f"nothing measured yet ({path}; python -m pyparallel calibrate)"
    except OSError as error:
        return None, f"{path} is ignored: {error.strerror}"
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            return None, f"{path} is ignored: no plain file"
        if state.st_uid not in (os.getuid(), 0) or state.st_mode & 0o022:
            return None, f"{path} is ignored: others may write it (mode {state.st_mode & 0o777:o})"
        raw = _read(descriptor)
    finally:
        os.close(descriptor)
    if len(raw) > LARGEST:
        return None, f"{path} is ignored: more than {LARGEST} bytes"
    try:
        rule = Rule.from_text(raw.decode())
    except ValueError as error:
        return None, f"{path} is ignored: {error}"
    here, there = machine_facts(), rule.facts
    other = [f"{name} {there.get(name)!r}" for name in here if there.get(name) != here[name]]
    if other or set(there) != set(here):
        differing = ", ".join(other) or ", ".join(sorted(set(there) ^ set(here)))
        return None, f"{path} is ignored: measured with {differing}; here {here}"
    return rule, f"{len(rule.points)} points of {path}"


def _read(descriptor: int) -> bytes:
    """The file, or one byte more than is allowed of it."""
    parts, left = [], LARGEST + 1
    while left > 0 and (part := os.read(descriptor, left)):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def save(points: Iterable[Point], path: Path) -> Path:
    """Adds points to the file of this machine, replacing those of the same shapes.

    The file is whole or not there at all, mode 600 in a folder of mode 700 where that is made.
    """
    old, _ = load(path)
    merged = {_key(p): p for p in (old.points if old else ())}
    merged.update({_key(p): p for p in points})
    text = Rule(tuple(merged.values()), machine_facts()).to_text()
    if len(text) > LARGEST:
        raise InvalidArgument(f"{len(merged)} points make {len(text)} bytes; at most {LARGEST}")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(text)
    partial.replace(path)
    return path


def _key(p: Point) -> tuple[object, ...]:
    return p.op, p.device, p.dtype, p.world, p.m, p.n, p.k


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
