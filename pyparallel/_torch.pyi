"""What csrc/torch/module.cpp defines."""

from collections.abc import Callable
from datetime import timedelta

from torch import Tensor
from torch._C._distributed_c10d import Backend as TorchBackend
from torch._C._distributed_c10d import Store

class GroupOptions(TorchBackend.Options):
    def __deepcopy__(self, memo: dict[int, object]) -> GroupOptions: ...

class Backend(TorchBackend):
    @property
    def options(self) -> GroupOptions: ...

def create_backend(
    store: Store,
    rank: int,
    size: int,
    group: str,
    timeout: timedelta,
    make_gloo: Callable[[Store, int, int, float], TorchBackend],
) -> Backend: ...
def join(
    store: Store,
    rank: int,
    size: int,
    group: str,
    timeout: timedelta,
    make_gloo: Callable[[Store, int, int, float], TorchBackend],
) -> object: ...

class FastCalls:
    """Each gives the result, or None where the case is not the common one."""

    def __init__(self, communicator: object) -> None: ...
    def all_reduce(self, x: object, op: object, out: object, /) -> Tensor | None: ...
    def reduce(self, x: object, op: object, root: object, out: object, /) -> Tensor | None: ...
    def broadcast(self, x: object, root: object, /) -> Tensor | None: ...
    def all_gather(self, x: object, out: object, /) -> Tensor | None: ...
    def reduce_scatter(self, x: object, op: object, out: object, /) -> Tensor | None: ...
    def all_to_all(self, x: object, out: object, /) -> Tensor | None: ...
    def scatter(self, x: object, out: object, root: object, /) -> Tensor | None: ...
    def gather(self, x: object, out: object, root: object, /) -> Tensor | None: ...

def has_cuda() -> bool: ...
