"""Puts and signals of `NcclCommunicator`: the peer takes no part in a put but by waiting for it.

    window = comm.window(memory)                     # collective; memory alike on every rank
    comm.put_signal(x, peer, window, offset=4096)    # x into the peer's part, then a signal
    comm.wait_signals([SignalWait(peer)])            # the stream waits for one signal of the peer

Needs NCCL 2.29.2 (`nccl_info()["features"]["ncclPutSignal"]`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pyparallel.comm.nccl_arrays import stream_handle
from pyparallel.comm.nccl_calls import Calls, _Call
from pyparallel.comm.nccl_memory import Window
from pyparallel.errors import InvalidArgument

__all__ = ["OneSided", "SignalWait"]


@dataclass(frozen=True)
class SignalWait:
    """`count` signals with this number from rank `peer`, in one of NCCL's contexts."""

    peer: int
    count: int = 1
    signal: int = 0
    context: int = 0


class OneSided(Calls):
    """Signals count up per (sender, signal, context); a wait takes as many as it names."""

    def put_signal(
        self,
        x: Any,
        peer: int,
        window: Window,
        offset: int = 0,
        *,
        signal: int = 0,
        context: int = 0,
        stream: Any = None,
    ) -> None:
        """Writes `x` into rank `peer`'s part of the window, `offset` bytes in; then signals it."""
        call = _Call(self, "put_signal", stream, x, None)
        if not isinstance(offset, int) or offset < 0:
            raise call.error(f"offset is {offset!r}; expected bytes, at least 0")
        view = call.views[0]
        self._core.put_signal(
            *(view.pointer, view.count, view.element, peer, window._core),
            *(offset, signal, context, call.stream),
        )

    def signal(self, peer: int, *, signal: int = 0, context: int = 0, stream: Any = None) -> None:
        """Signals rank `peer`, without data."""
        self._core.signal(peer, signal, context, self._stream("signal", stream))

    def wait_signals(self, waits: Sequence[SignalWait], *, stream: Any = None) -> None:
        """The stream goes on when all of these have come, and what was put before them is there."""
        asked = [(wait.count, wait.peer, wait.signal, wait.context) for wait in waits]
        self._core.wait_signals(asked, self._stream("wait_signals", stream))

    def _stream(self, op: str, stream: Any) -> int:
        if stream is not None:
            return stream_handle(stream)
        if not torch.cuda.is_available():
            raise InvalidArgument(
                f"communicator {self._core.name}: {op}: no array names a stream; pass stream= "
                "(0 is the default stream)"
            )
        return int(torch.cuda.current_stream(self._core.device).cuda_stream)
