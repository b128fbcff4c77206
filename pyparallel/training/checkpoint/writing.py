"""A save: agreed on by all ranks while training waits, written and published while it goes on.

    agree      who writes what; copies of it              training's thread, over the ranks' group
    write      each rank one file, synced                 the checkpointer's thread
    publish    manifest, checksums, the folder's name     the first rank, once all have written
    prune      older checkpoints                          the first rank, once it has published

The folder gets its name by one rename, when everything in it is on the disk: a job that dies before
leaves a folder that nobody reads, and that the next save of the directory's job removes.
"""

import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyparallel.training.checkpoint.files import dtype_name, write_tensors
from pyparallel.training.checkpoint.manifest import (
    FORMAT,
    WRITING,
    Name,
    checkpoints_in,
    publish,
    remove,
)
from pyparallel.training.checkpoint.optimizer_state import OptimizerState
from pyparallel.training.checkpoint.pieces import Piece, held_by, modules_of
from pyparallel.training.checkpoint.ranks import Ranks, reasons
from pyparallel.training.checkpoint.restore import MODEL
from pyparallel.training.checkpoint.saving import Staging, assign, described, digest, file_name
from pyparallel.training.checkpoint.states import classes, snapshot, tensor_pieces

__all__ = ["Job", "SaveResult", "Saver"]

_log = logging.getLogger("pyparallel.training")
PATIENCE = 10.0  # seconds for a job that was killed just now, to be gone


@dataclass(frozen=True)
class SaveResult:
    """How a save ended; the same on all ranks.

    Attributes:
        step: that was saved.
        path: of the checkpoint; None where it failed.
        error: why it failed, and on which ranks; empty where it did not.
        bytes: of all ranks' files.
        seconds: from the call to its end.
    """

    step: int
    path: "Path | None"
    error: str
    bytes: int
    seconds: float

    @property
    def ok(self) -> bool:
        return not self.error


@dataclass(frozen=True)
class Job:
    """What a rank writes of a save."""

    step: int
    begun: float
    pieces: list[Piece]
    part: dict[str, Any]  # of the manifest: what this rank knows


class Saver:
    """The saves of one job, one after another.

    Attributes:
        damaged: folders that were found not to be whole: they do not count among those kept.
    """

    def __init__(self, directory: Path, ranks: Ranks, keep: "int | None", copies: bool) -> None:
        self.directory, self._ranks, self._keep = directory, ranks, keep
        self.damaged: set[str] = set()
        self._staging = Staging() if copies else None
        self._plans: list[str] = []  # every rank's digest when the roles were assigned
        self._role: list[int] = []  # which of its pieces this rank writes
        self._lock: int | None = None

    # --- agree: training's thread

    def agree(self, step: int, model: Any, optimizer: Any, state: "Mapping[str, Any]") -> Job:
        """Collective.

        Raises:
            CheckpointError: on all ranks.
        """
        begun, ranks = time.monotonic(), self._ranks
        problem: Exception | None = None
        pieces: list[Piece] = []
        part: dict[str, Any] = {"aliases": {}, "optimizer": [], "state": {}}
        described_here: Any = []
        states = {}
        try:
            if type(step) is not int or step < 0:
                raise ValueError(f"step is {step!r}; a whole number from 0 on is expected")
            held = held_by(modules_of(model))
            pieces = [
                piece for h in held for piece in h.pieces(h.tensor, counted=True, prefix=MODEL)
            ]
            for h in held:
                for names in h.names[1:]:
                    part["aliases"].update(zip(names, h.keys, strict=True))
            if optimizer is not None:
                of_optimizer = OptimizerState(optimizer, held)
                pieces += of_optimizer.pieces()
                part["optimizer"] = of_optimizer.options()
            states = {name: snapshot(name, target) for name, target in sorted(state.items())}
            described_here = described(pieces)
        except (TypeError, ValueError) as error:
            problem = error
        told = ranks.gather(
            {
                "problem": "" if problem is None else str(problem),
                "step": step if problem is None else -1,
                "plan": digest(described_here),
                "states": {name: one.digest for name, one in states.items()},
            }
        )
        ranks.refuse(f"save of step {step}", [one["problem"] for one in told], problem)
        for what in ("step", "states"):
            found = [one[what] if what == "step" else sorted(one[what]) for one in told]
            if any(value != found[0] for value in found):
                ranks.refuse("save", [f"{what} {value}" for value in found], None)
        plans = [one["plan"] for one in told]
        if plans != self._plans:
            every = ranks.gather(described_here)
            try:
                self._role = assign(every)[ranks.rank]
            except ValueError as error:  # the same on all ranks
                ranks.refuse(f"save of step {step}", [str(error)] * ranks.size, error)
            self._plans = plans
        mine = [pieces[number] for number in self._role]
        if self._staging is not None:
            copies = self._staging.copy(mine)
            mine = [Piece(p.key, p.shape, p.offsets, c) for p, c in zip(mine, copies, strict=True)]
        for name, one in states.items():
            axes, first = classes([other["states"][name] for other in told], ranks.places)
            if ranks.rank in first:
                number = first.index(ranks.rank)
                mine += tensor_pieces(name, number, one.tensors)
                at = [ranks.place[axis] for axis in axes]
                part["state"][name] = {"axes": axes, "number": number, "at": at, "value": one.value}
        return Job(step, begun, mine, part)

    # --- write and publish: the checkpointer's thread

    def write(self, job: Job) -> SaveResult:
        """Collective. Gives how it ended, and raises nothing."""
        try:
            path, size, error = self._write(job)
        except Exception as failure:
            path, size, error = None, 0, f"{type(failure).__name__}: {failure}"
        result = SaveResult(job.step, path, error, size, time.monotonic() - job.begun)
        if error and (self._ranks.is_first or not path):
            newest = checkpoints_in(self.directory)[:1]
            _log.error(
                "step %d was not saved, training goes on: %s; the newest checkpoint is %s",
                job.step,
                error,
                newest[0] if newest else "none",
            )
        return result

    def _write(self, job: Job) -> "tuple[Path | None, int, str]":
        ranks = self._ranks
        opened: list[str] = ["", ""]  # folder, problem
        name = Name(0, job.step)
        if ranks.is_first:
            try:
                name, folder = self._open(job.step)
                opened[0] = folder.name
            except OSError as error:
                opened[1] = f"{self.directory}: {error}"
        opened = ranks.gather(opened)[0]
        if opened[1]:
            return None, 0, opened[1]
        folder = self.directory / opened[0]
        problem = ""
        try:
            self._write_file(folder, job)
        except OSError as error:
            problem = self._told(error)
        told = ranks.gather({"problem": problem, "part": job.part if not problem else None})
        problem = reasons([one["problem"] for one in told])
        outcome: list[Any] = ["", 0, problem]
        if ranks.is_first:
            if not problem:
                outcome = self._publish(folder, name, job.step, [one["part"] for one in told])
            if outcome[2]:
                shutil.rmtree(folder, ignore_errors=True)
        final, size, problem = ranks.gather(outcome)[0]
        return (self.directory / final if final else None), size, problem

    def _open(self, step: int) -> tuple[Name, Path]:
        """A folder to write into."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if self._lock is None:
            self._lock = _locked(self.directory)
            for entry in self.directory.iterdir():  # of jobs that died
                if entry.name.startswith(WRITING):
                    shutil.rmtree(entry, ignore_errors=True)
        before = checkpoints_in(self.directory)
        name = Name(before[0].sequence + 1 if before else 1, step)
        folder = self.directory / f"{WRITING}{name}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return name, folder

    def _write_file(self, folder: Path, job: Job) -> None:
        job.part["files"], job.part["tensors"] = {}, []
        if not job.pieces:
            return
        pieces = sorted(job.pieces, key=lambda p: -p.view.dtype.itemsize)  # so all are aligned
        names = [_title(piece) for piece in pieces]
        file = file_name(self._ranks.rank)
        placed, size, sha = write_tensors(
            folder / file,
            [(n, p.view.dtype, tuple(p.view.shape)) for n, p in zip(names, pieces, strict=True)],
            (piece.view for piece in pieces),
            {"step": str(job.step)},
        )
        job.part["files"][file] = [size, sha]
        job.part["tensors"] = [
            [
                p.key,
                dtype_name(p.view.dtype),
                list(p.shape),
                [file, placed[n].begin, list(p.offsets), list(p.view.shape)],
            ]
            for n, p in zip(names, pieces, strict=True)
        ]

    def _publish(self, folder: Path, name: Name, step: int, parts: "list[Any]") -> "list[Any]":
        manifest = _merged(parts)
        files = {file: sum_ for part in parts for file, sum_ in part["files"].items()}
        manifest = {"format": FORMAT, "step": step, "layout": self._ranks.sizes, **manifest}
        try:
            publish(
                folder, self.directory / str(name), manifest, {f: s[1] for f, s in files.items()}
            )
        except OSError as error:
            return ["", 0, self._told(error)]
        _log.info("step %d is saved in %s", step, self.directory / str(name))
        self._prune()
        return [str(name), sum(size for size, _ in files.values()), ""]

    def _prune(self) -> None:
        """Deletes all but the newest. The first of them was published a moment ago: it is whole."""
        if self._keep is None:
            return
        names = [str(name) for name in checkpoints_in(self.directory)]
        whole = [name for name in names if name not in self.damaged]
        try:
            remove(self.directory, whole[self._keep :] + [n for n in names if n in self.damaged])
        except OSError as error:
            _log.warning("old checkpoints in %s stay: %s", self.directory, error)

    def _told(self, error: OSError) -> str:
        free = ""
        try:
            found = os.statvfs(self.directory)
            free = f" ({found.f_bavail * found.f_frsize} bytes are free)"
        except OSError:
            pass
        return f"{self.directory}: {error.strerror or error}{free}"

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _locked(directory: Path) -> int:
    """Takes the directory for this job, until the descriptor is closed or the process ends.

    Raises:
        BlockingIOError: another job has it.
    """
    descriptor = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    until = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError as error:
            if time.monotonic() > until:
                os.close(descriptor)
                text = (
                    "another job saves its checkpoints here; give each job a directory of its own"
                )
                raise BlockingIOError(error.errno, text) from None
            time.sleep(0.2)


def _title(piece: Piece) -> str:
    """The name of a piece in its file: its key, and which part of the tensor it is."""
    if piece.shape == tuple(piece.view.shape):
        return piece.key
    spans = zip(piece.offsets, piece.view.shape, strict=True)
    return f"{piece.key}[{','.join(f'{o}:{o + n}' for o, n in spans)}]"


def _merged(parts: "list[Any]") -> dict[str, Any]:
    """The manifest's contents, of what all ranks know."""
    tensors: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    options: dict[str, dict[str, Any]] = {}
    state: dict[str, Any] = {}
    for part in parts:
        aliases.update(part["aliases"])
        for key, dtype, shape, box in part["tensors"]:
            tensors.setdefault(key, {"dtype": dtype, "shape": shape, "boxes": []})["boxes"].append(
                box
            )
        for group in part["optimizer"]:
            text = json.dumps(group["options"], sort_keys=True)
            known = options.setdefault(text, {"options": group["options"], "parameters": []})
            known["parameters"] += [k for k in group["parameters"] if k not in known["parameters"]]
        for name, one in part["state"].items():
            entry = state.setdefault(name, {"axes": one["axes"], "values": []})
            entry["values"].append([one["number"], {"at": one["at"], "value": one["value"]}])
    for entry in state.values():
        entry["values"] = [value for _, value in sorted(entry["values"], key=lambda v: v[0])]
    return {
        "aliases": aliases,
        "optimizer": list(options.values()),
        "state": state,
        "tensors": tensors,
    }
