"""Several ranks in one process on one device: a seat, a workspace and a stream for each.

On a GPU the streams are CUDA streams. On the CPU they are those of a stand-in library that runs
the kernels as host threads (PYPARALLEL_CUDA_LIB; built by tests/cuda): the same code is tested so.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Callable

import torch

from pyparallel import _core
from pyparallel.comm.cuda_kernels import CudaCollectives, WorkspaceLayout, new_status_page

_next_stream = itertools.count(1)


class VirtualRanks:
    """`world` ranks; `streams[r]` is what to pass as `stream=` to calls of `seats[r]`.

    All grids together must fit the device at once: the ranks wait for each other.
    """

    def __init__(
        self,
        layout: WorkspaceLayout,
        *,
        device: str,
        timeout: float = 10.0,
        name: str = "virtual",
    ) -> None:
        self.world = layout.world
        self.layout = layout
        self.device = torch.device(device)
        align = _core.CUDA_WORKSPACE_ALIGNMENT
        self._memory = [
            torch.zeros(layout.nbytes + align, dtype=torch.uint8, device=self.device)
            for _ in range(self.world)
        ]
        addresses = [-(-memory.data_ptr() // align) * align for memory in self._memory]
        self._statuses = [new_status_page() for _ in range(self.world)]
        self.seats = [
            CudaCollectives(
                rank,
                addresses,
                layout,
                self._statuses[rank],
                device=self.device,
                name=name,
                timeout=timeout,
            )
            for rank in range(self.world)
        ]
        if self.device.type == "cuda":
            self.cuda_streams = [torch.cuda.Stream(self.device) for _ in range(self.world)]
            self.streams = [stream.cuda_stream for stream in self.cuda_streams]
            torch.cuda.synchronize(self.device)  # the workspaces are zero before any kernel looks
        else:
            self.streams = [next(_next_stream) for _ in range(self.world)]
            self._stand_in = ctypes.CDLL(os.environ["PYPARALLEL_CUDA_LIB"])

    def on_all(self, call: Callable[[CudaCollectives, int, int], None]) -> None:
        """call(seat, rank, stream) for every rank; the calls only start kernels."""
        for rank, seat in enumerate(self.seats):
            call(seat, rank, self.streams[rank])

    def synchronize(self) -> None:
        """Waits for all streams; raises what any rank's wait ended with."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        else:
            for stream in self.streams:
                self._stand_in.stand_in_synchronize(ctypes.c_void_p(stream))
        for seat in self.seats:
            seat.check()


def rank_order_sum(inputs: list[torch.Tensor]) -> torch.Tensor:
    """The sum in rank order in fp32, rounded once: the bits that the kernels promise."""
    total = inputs[0].float()
    for x in inputs[1:]:
        total = total + x.float()
    return total.to(inputs[0].dtype)
