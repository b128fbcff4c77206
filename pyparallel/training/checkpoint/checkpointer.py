"""`Checkpointer`: a training's state on disk, for any layout, whole or not at all.

    with Checkpointer("checkpoints", mesh) as checkpointer:
        start = checkpointer.load(model=model, optimizer=optimizer, random=streams) or 0
        for step in range(start + 1, steps + 1):
            ...
            if step % 100 == 0:
                checkpointer.save(step, model=model, optimizer=optimizer, random=streams)

writing.py says how a save goes, restore.py how a load does, manifest.py what lies on the disk.
"""

import logging
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from pyparallel.training.checkpoint.errors import CheckpointError
from pyparallel.training.checkpoint.manifest import MANIFEST, checkpoints_in, damage, read_sums
from pyparallel.training.checkpoint.ranks import Ranks, reasons
from pyparallel.training.checkpoint.restore import restore
from pyparallel.training.checkpoint.storage import Reader
from pyparallel.training.checkpoint.writing import Saver, SaveResult

__all__ = ["Checkpointer", "PendingSave"]

_log = logging.getLogger("pyparallel.training")


class PendingSave:
    """A save that may still be going on."""

    def __init__(self, future: "Future[SaveResult]") -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def result(self) -> SaveResult:
        """Waits for its end. That it failed is a result, no exception."""
        return self._future.result()


class Checkpointer:
    """Saves and loads the checkpoints of one job. To be made, and called, by all its ranks alike.

    Args:
        directory: shared by the hosts of the job; made if it is not there.
        mesh: the ParallelMesh; None: state that differs between ranks is kept by rank.
        keep: so many whole checkpoints stay, the newest; None: all.
        asynchronous: files are written while training goes on, from a copy in host memory. At most
            one save is being written: the next waits for its end first, so that there is one copy,
            and checkpoints appear in order.
        deadline: seconds until a rank that does not come, or does not finish its file, has failed
            a save.
    """

    def __init__(
        self,
        directory: "str | os.PathLike[str]",
        mesh: Any = None,
        *,
        keep: "int | None" = 3,
        asynchronous: bool = True,
        deadline: float = 1800.0,
    ) -> None:
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ValueError(f"keep is {keep!r}; expected 1 or more, or None for all")
        self.directory = Path(directory)
        self._ranks = Ranks(mesh, deadline)
        self._saver = Saver(self.directory, self._ranks, keep, copies=asynchronous)
        self._thread = ThreadPoolExecutor(1, "pyparallel-checkpoint") if asynchronous else None
        self._pending: PendingSave | None = None

    def save(self, step: int, *, model: Any, optimizer: Any = None, **state: Any) -> PendingSave:
        """Begins to save. Collective; returns once all that will be written has been copied.

        A save that fails (a full disk, a lost file server) does not end the training: its
        `result()` says so, it is logged, and what was saved before stays.

        Args:
            step: after which the state is as it is.
            model: an nn.Module (wrapped or not), a list of them (this rank's stages), or an object
                with `checkpoint_modules()`.
            optimizer: a torch Optimizer over the model's parameters, ZeRO-1's included.
            state: by name, objects with state_dict() and load_state_dict(), or dictionaries, of
                plain data: None, bool, int, float, str, bytes, list, tuple, dict, tensors.

        Raises:
            CheckpointError: on all ranks: something cannot be saved, or ranks differ in what.
        """
        self.wait()
        job = self._saver.agree(step, model, optimizer, state)
        if self._thread is not None:
            pending = PendingSave(self._thread.submit(self._saver.write, job))
            self._pending = pending
            return pending
        done: Future[SaveResult] = Future()
        done.set_result(self._saver.write(job))
        return PendingSave(done)

    def wait(self) -> "SaveResult | None":
        """Waits for the save that is going on; None if there is none."""
        pending, self._pending = self._pending, None
        return pending.result() if pending is not None else None

    def load(
        self, *, model: Any, optimizer: Any = None, step: "int | None" = None, **state: Any
    ) -> "int | None":
        """Takes the newest whole checkpoint, whatever layout it was saved at. Collective.

        One that is damaged is named in the log, with what is wrong, and the one before it is taken.
        The state of this job's ranks is then, bit for bit, that of the ranks that saved.

        Args:
            model, optimizer, state: as in `save`; those that are left out are not loaded.
            step: only a checkpoint of this step (its newest) will do.

        Returns:
            the step, or None where the directory has no checkpoint.

        Raises:
            CheckpointError: on all ranks: no checkpoint is whole; none is of that step; or it holds
                something else than is asked for. Nothing was changed, unless the error says so.
        """
        self.wait()
        listed = self._ranks.gather([str(name) for name in checkpoints_in(self.directory)])[0]
        names = [name for name in listed if step is None or name.endswith(f"-step-{step}")]
        if not names and step is None:
            return None
        if not names:
            raise CheckpointError(f"{self.directory} has no checkpoint of step {step}: {listed}")
        found: list[str] = []
        for name in names:
            reader, problem = self._opened(name)
            if reader is not None:
                restore(reader, self._ranks, model, optimizer, state)
                if found and self._ranks.is_first:
                    _log.warning("loaded %s instead", name)
                return int(reader.manifest["step"])
            found.append(problem)
            self._saver.damaged.add(name)
            if self._ranks.is_first:
                _log.warning("checkpoint %s is damaged: %s", name, problem)
        raise CheckpointError(f"{self.directory} has no whole checkpoint: {'; '.join(found)}")

    def _opened(self, name: str) -> "tuple[Reader | None, str]":
        """A checkpoint, if all its files are as they were written: each is read by one rank."""
        ranks, folder = self._ranks, self.directory / name
        reader, problem, seen = None, "", ""
        try:
            reader = Reader(folder, verify=False)
            seen = reader.sums[MANIFEST]
        except CheckpointError as error:
            problem = str(error)
        told = ranks.gather([problem, seen])
        problem = reasons([one[0] for one in told])
        if not problem and len({one[1] for one in told}) > 1:
            problem = f"ranks see different manifests of {folder}: is the directory shared?"
        if not problem:
            sums = read_sums(folder)
            mine = sorted(sums)[ranks.rank :: ranks.size]
            wrong = [damage(folder, file, sums[file]) for file in mine]
            problem = reasons(ranks.gather("; ".join(filter(None, wrong))))
        return (None if problem else reader), problem

    def close(self) -> None:
        """Waits for the save that is going on. Before the process group is destroyed."""
        self.wait()
        if self._thread is not None:
            self._thread.shutdown()
        self._saver.close()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(
        self,
        kind: "type[BaseException] | None",
        error: "BaseException | None",
        trace: "TracebackType | None",
    ) -> None:
        self.close()
