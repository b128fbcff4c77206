"""Low-latency collectives of CUDA tensors over a workspace in symmetric memory.

`CudaCollectives` is one rank's seat. Calls start kernels on the current stream and return; they
never allocate, wait or synchronise, so they may be captured in a CUDA graph. `check()` raises what
a wait on the device ended with. How the kernels work: docs/cuda_kernels.md.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch

from pyparallel import _core
from pyparallel.comm.reductions import DTYPES
from pyparallel.comm.symmetric_memory import SymmetricMemory, _device
from pyparallel.errors import InvalidArgument, Unsupported

__all__ = ["CudaCollectives", "WorkspaceLayout", "choose", "new_status_page"]

# Values of csrc/cuda/calls.h.
_OPS: Final = {
    "barrier": 0,
    "one_shot": 1,
    "two_shot": 2,
    "multimem": 3,
    "all_gather": 4,
    "reduce_scatter": 5,
    "put_signal": 6,
    "wait_signal": 7,
}
ALGORITHMS: Final = ("one_shot", "two_shot", "multimem")
_COLLECTIVES: Final = {"all_reduce": 0, "all_gather": 1, "reduce_scatter": 2}


@dataclass(frozen=True)
class WorkspaceLayout:
    """What lies where in a workspace; equal on all ranks.

    Args:
        world: ranks.
        max_blocks: the largest grid that may be used (1 to 128); the workspace has flags for it.
        signals: how many signals `put_signal` and `wait_signal` can name.
        slot_bytes: what one rank can send another in one launch, a multiple of 128. Larger messages
            take several launches. The workspace has 4 * world of these.
    """

    world: int
    max_blocks: int = 32
    signals: int = 32
    slot_bytes: int = 1 << 20

    def core(self) -> Any:
        return _core.CudaWorkspaceLayout(self.world, self.max_blocks, self.signals, self.slot_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of a workspace, to be allocated at a multiple of 128 and zeroed on every rank."""
        return int(self.core().bytes)


def new_status_page() -> torch.Tensor:
    """Memory for one rank's status page, readable while kernels run: pinned where there is CUDA."""
    page = torch.zeros(_core.CUDA_STATUS_BYTES, dtype=torch.uint8)
    return page.pin_memory() if torch.cuda.is_available() else page


def choose(
    collective: str,
    dtype: torch.dtype,
    count: int,
    layout: WorkspaceLayout,
    *,
    multicast: bool = False,
    rank_order: bool = True,
    nccl: bool = False,
) -> dict[str, Any]:
    """Which algorithm for this message, its grid, the reason, and every candidate.

    A pure function of what all ranks share. `count` is the elements of the whole message for
    all_reduce, of one rank's share otherwise. Predicted times are predictions.
    """
    if collective not in _COLLECTIVES:
        raise InvalidArgument(f"collective {collective!r}; expected one of {[*_COLLECTIVES]}")
    code = _COLLECTIVES[collective]
    found: dict[str, Any] = _core.cuda_choose(
        code, DTYPES[dtype], count, layout.core(), multicast, rank_order, nccl
    )
    return found


class CudaCollectives:
    """One rank's seat at a workspace. All ranks make the same calls in the same order.

    The calls of one seat must be ordered among themselves: one stream, or events. Two groups have
    two workspaces and may run side by side. After a failure (a rank that did not come, or that
    called something else) the seat does nothing any more and `check()` raises why; make a new
    workspace.

    Sums are accumulated in fp32 in rank order and rounded once: the same bits on every rank and in
    every run, whichever of one_shot and two_shot is used. multimem adds in the switch's order.

    Args:
        rank: this rank.
        workspaces: the address of every rank's workspace, as this process sees it.
        layout: equal on all ranks.
        status: this rank's own page, from `new_status_page()`.
        device: where this rank's workspace lies and its kernels run; by default the current one.
        multicast: the multicast address of the workspaces, 0 where there is none.
        name: of the group, for messages.
        timeout: seconds that a wait on the device may take.
        keep: what owns the workspaces; kept alive with the seat.
    """

    def __init__(
        self,
        rank: int,
        workspaces: Sequence[int],
        layout: WorkspaceLayout,
        status: torch.Tensor,
        *,
        device: "torch.device | str | None" = None,
        multicast: int = 0,
        name: str = "world",
        timeout: float = 30.0,
        keep: object = None,
    ) -> None:
        if status.dtype != torch.uint8 or status.numel() < _core.CUDA_STATUS_BYTES:
            raise InvalidArgument(
                f"status page {status.dtype} x {status.numel()}; "
                "expected what new_status_page() gives"
            )
        self.rank = rank
        self.layout = layout
        self.name = name
        self.device = _device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._timeout_ns = round(timeout * 1e9)
        self._multicast = multicast != 0
        self._keep = (keep, status)
        self._core = _core.CudaSeat(
            rank, list(workspaces), layout.core(), status.data_ptr(), multicast
        )
        with self._on_device():
            _core.cuda_prepare()  # no launch may have to load a kernel: see csrc/cuda/loader.h

    @classmethod
    def over(
        cls,
        memory: SymmetricMemory,
        *,
        max_blocks: int = 32,
        signals: int = 32,
        slot_bytes: int = 1 << 20,
        timeout: float = 30.0,
    ) -> "CudaCollectives":
        """Collective over the memory's group: a workspace cut from `memory`, zeroed on all ranks.

        The other arguments are those of `WorkspaceLayout`, equal on all ranks, and the seat's
        timeout. The seat keeps the memory mapped.
        """
        layout = WorkspaceLayout(memory.world_size, max_blocks, signals, slot_bytes)
        alignment = int(_core.CUDA_WORKSPACE_ALIGNMENT)
        workspace = memory.empty(layout.nbytes, dtype=torch.uint8, alignment=alignment)
        workspace.zero_()
        memory.barrier()  # no kernel looks before all of it is zero
        addresses = [address % 2**64 for address in memory.pointers(workspace).tolist()]
        return cls(
            memory.rank,
            addresses,
            layout,
            new_status_page(),
            device=memory.device,
            multicast=memory.multicast_pointer(workspace),
            name=memory._core.name,
            timeout=timeout,
            keep=(memory, workspace),
        )

    # --- collectives

    def all_reduce(
        self,
        x: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        algorithm: str | None = None,
        grid: tuple[int, int] | None = None,
        stream: int | None = None,
    ) -> torch.Tensor:
        """The sum of all ranks' `x`, into `out` (by default `x` itself), which is returned.

        `algorithm` is one_shot, two_shot or multimem; by default the choice for the size.
        """
        out = x if out is None else out
        self._check("all_reduce", x, x.numel(), out, x.numel())
        if algorithm is None:
            found = self._choose("all_reduce", x, x.numel())
            algorithm = next(name for name, code in _OPS.items() if code == found["op"])
            grid = grid or (found["blocks"], found["threads"])
        elif algorithm not in ALGORITHMS:
            raise InvalidArgument(f"algorithm {algorithm!r}; expected one of {[*ALGORITHMS]}")
        self._launch(algorithm, x, out, x.numel(), grid, stream)
        return out

    def all_gather(
        self,
        x: torch.Tensor,
        *,
        out: torch.Tensor,
        grid: tuple[int, int] | None = None,
        stream: int | None = None,
    ) -> torch.Tensor:
        """All ranks' `x` side by side in `out`, which has world times as many elements."""
        self._check("all_gather", x, x.numel(), out, x.numel() * self.layout.world)
        self._launch("all_gather", x, out, x.numel(), grid, stream)
        return out

    def reduce_scatter(
        self,
        x: torch.Tensor,
        *,
        out: torch.Tensor,
        grid: tuple[int, int] | None = None,
        stream: int | None = None,
    ) -> torch.Tensor:
        """The sum of all ranks' share number `rank` of `x`, into `out`."""
        self._check("reduce_scatter", x, out.numel() * self.layout.world, out, out.numel())
        self._launch("reduce_scatter", x, out, out.numel(), grid, stream)
        return out

    def barrier(self, *, stream: int | None = None) -> None:
        """What any rank's stream did before it, every rank's stream sees after it."""
        self._start("barrier", 1, 0, 0, 0, (1, 64), stream=stream)

    # --- signals

    def put_signal(
        self, peer: int, index: int, amount: int = 1, *, stream: int | None = None
    ) -> None:
        """Adds to a signal of `peer`, after all that the stream did before."""
        self._start("put_signal", 1, 0, 0, amount, (1, 32), index, peer, stream=stream)

    def wait_signal(self, index: int, amount: int = 1, *, stream: int | None = None) -> None:
        """Lets the stream go on when `amount` more were put to this rank's signal."""
        self._start("wait_signal", 1, 0, 0, amount, (1, 32), index, stream=stream)

    # --- failures

    def check(self) -> None:
        """Raises Timeout, Mismatch or Aborted if a wait on the device has ended so; never waits."""
        self._core.raise_failure(self.name)

    def abort(self) -> None:
        """Ends every wait of this seat's kernels."""
        self._core.abort()

    # --- inner

    def _check(
        self, op: str, x: torch.Tensor, x_count: int, out: torch.Tensor, out_count: int
    ) -> None:
        where = f"{op}, group {self.name}, rank {self.rank}"
        for what, tensor, count in (("input", x, x_count), ("out", out, out_count)):
            if tensor.numel() != count:
                raise InvalidArgument(
                    f"{where}: {what} has {tensor.numel()} elements; expected {count}"
                )
            if not tensor.is_contiguous():
                raise InvalidArgument(
                    f"{where}: {what} has shape {tuple(tensor.shape)} and strides "
                    f"{tensor.stride()}; expected a contiguous tensor, as .contiguous() gives"
                )
            if tensor.device != self.device:
                raise InvalidArgument(
                    f"{where}: {what} is on {tensor.device}; this seat is on {self.device}"
                )
        if out.dtype != x.dtype:
            raise InvalidArgument(f"{where}: input is {x.dtype}, out is {out.dtype}")
        if x.dtype not in DTYPES:
            raise InvalidArgument(f"{where}: dtype {x.dtype} is not supported")

    def _choose(self, collective: str, x: torch.Tensor, count: int) -> dict[str, Any]:
        return choose(collective, x.dtype, count, self.layout, multicast=self._multicast)

    def _launch(
        self,
        op: str,
        x: torch.Tensor,
        out: torch.Tensor,
        count: int,
        grid: tuple[int, int] | None,
        stream: int | None,
    ) -> None:
        if grid is None:
            collective = "all_reduce" if op in ALGORITHMS else op
            found = self._choose(collective, x, count)
            grid = (found["blocks"], found["threads"])
        self._start(op, DTYPES[x.dtype], x.data_ptr(), out.data_ptr(), count, grid, stream=stream)

    def _start(
        self,
        op: str,
        dtype: int,
        x: int,
        out: int,
        count: int,
        grid: tuple[int, int],
        index: int = 0,
        peer: int = 0,
        *,
        stream: int | None,
    ) -> None:
        if stream is None:
            if self.device.type != "cuda":
                raise Unsupported(f"{op}: no CUDA device, hence no current stream; pass stream=")
            stream = torch.cuda.current_stream(self.device).cuda_stream
        with self._on_device():
            self._core.launch(
                *(_OPS[op], dtype, x, out, count, *grid, index, peer, self._timeout_ns, stream)
            )

    def _on_device(self) -> AbstractContextManager[Any]:
        """CUDA works on the calling thread's current device, which may be another one."""
        if self.device.type == "cuda" and self.device.index != torch.cuda.current_device():
            return torch.cuda.device(self.device)
        return nullcontext()
