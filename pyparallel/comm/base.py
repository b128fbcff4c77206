"""What both halves of `Communicator` stand on: its seat in the core, refusing, starting a call."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor

from pyparallel import _core, _torch
from pyparallel.comm.tensors import (
    any_overlap,
    contiguous,
    disjoint,
    give_back,
    is_array,
    staging_for,
    written,
)
from pyparallel.comm.work import Work, milliseconds
from pyparallel.errors import InvalidArgument, Unsupported

# A call of the core: addresses of its plain inputs and outputs, and whether it is only queued.
CoreCall = Callable[[list[int], list[int], bool], "_core.Work | None"]


class Base:
    """A seat in the core's group."""

    def __init__(self, core: _core.Communicator) -> None:
        self._core = core
        self._fast = _torch.FastCalls(core.to_capsule())
        self._rank = core.rank
        self._world_size = core.size
        self._timeout_ms = core.timeout_ms

    def _ms(self, timeout: "float | timedelta | None") -> int:
        return self._timeout_ms if timeout is None else milliseconds(timeout)

    def _check_root(self, root: int) -> None:
        if not isinstance(root, int) or not 0 <= root < self._world_size:
            raise InvalidArgument(
                f"root is {root!r}; expected a rank of this group: 0 to {self._world_size - 1}"
            )

    def note(self, text: str) -> None:
        """Says more about this thread's next collective: of which larger call it is a part.

        The text is compared between ranks like the collective's own sizes, at no further message:
        where it differs all ranks raise `Mismatch`, which shows it. For libraries on top, whose
        shapes and flags this one does not see.
        """
        self._core.note(text)

    def _refused(self, op: str, error: Exception) -> Exception:
        """Tells the other ranks, so that they raise and do not wait; gives what to raise here."""
        self._core.refuse(op, str(error))
        where = f"{op} #{self._core.sequence}, group {self._core.name}, rank {self._rank}"
        kept = isinstance(error, (TypeError, ValueError, Unsupported))
        told = type(error) if kept else InvalidArgument
        return told(f"{where}: {error}")

    def _start(
        self,
        call: CoreCall,
        sources: Sequence[Tensor],
        targets: Sequence[Tensor],
        result: Any,
        async_op: bool,
        own: int | None = None,
    ) -> Any:
        """Runs or queues the core's call; through copies where tensors are not plain or overlap.

        One source may lie `own` bytes after the start of the one target (before it, if negative):
        this rank's own shard of the larger one, which the core works on in place.

        Queued calls copy when their turn comes, so that they see what earlier ones wrote.
        """
        if len(sources) == 1 and len(targets) == 1:
            source, target = sources[0], targets[0]
            direct = is_array(source) and is_array(target) and disjoint(source, target, own)
            if direct and not async_op:
                call([source.data_ptr()], [target.data_ptr()], False)
                written(targets)
                return result
        else:
            direct = (
                all(map(is_array, sources))
                and all(map(is_array, targets))
                and not any_overlap(sources, targets)
            )

        def run(queued: bool) -> "_core.Work | None":
            if direct:
                work = call(_addresses(sources), _addresses(targets), queued)
                written(targets)
                return work
            arrays = [contiguous(x) for x in sources]
            stagings = [staging_for(x, avoid=arrays) for x in targets]
            call(_addresses(arrays), _addresses(stagings), False)
            for staging, target in zip(stagings, targets, strict=True):
                give_back(staging, target)
            return None

        return self._launch(run, direct, result, (sources, targets), async_op)

    def _start_in_place(
        self,
        call: "Callable[[int, bool], _core.Work | None]",
        x: Tensor,
        async_op: bool,
        writes: bool = True,
    ) -> Any:
        """As `_start`, for a call that reads and writes one array."""
        direct = is_array(x)

        def run(queued: bool) -> "_core.Work | None":
            array = x if direct else contiguous(x)
            work = call(array.data_ptr(), queued)
            if writes:
                give_back(array, x)
                written([x])
            return work

        return self._launch(run, direct, x, x, async_op)

    def _launch(
        self,
        run: "Callable[[bool], _core.Work | None]",
        direct: bool,
        result: Any,
        tensors: Any,
        async_op: bool,
    ) -> Any:
        if not async_op:
            run(False)
            return result
        work = run(True) if direct else self._core.enqueue(lambda: run(False))
        assert work is not None
        return Work(work, result, owner=self._core, tensors=tensors)


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    return [x.data_ptr() for x in tensors]
