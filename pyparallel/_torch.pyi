"""What csrc/torch/module.cpp defines."""

from collections.abc import Callable
from datetime import timedelta

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
def has_cuda() -> bool: ...
