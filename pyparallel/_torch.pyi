"""What csrc/torch/module.cpp defines."""

from collections.abc import Callable
from datetime import timedelta

import torch
from torch import Tensor
from torch._C._distributed_c10d import Backend as TorchBackend
from torch._C._distributed_c10d import Store

class GroupOptions(TorchBackend.Options):
    def __deepcopy__(self, memo: dict[int, object]) -> GroupOptions: ...

class Backend(TorchBackend):
    @property
    def options(self) -> GroupOptions: ...
    def to_capsule(self) -> object: ...
    def _abandon_coalescing(self, op: str, why: str) -> None: ...

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
    def all_gather_uneven(self, x: object, out: object, sizes: object, /) -> Tensor | None: ...
    def reduce_scatter_uneven(
        self, x: object, op: object, out: object, sizes: object, /
    ) -> Tensor | None: ...
    def all_to_all_uneven(
        self, x: object, out: object, in_sizes: object, out_sizes: object, /
    ) -> Tensor | None: ...
    def send(self, x: object, to: object, tag: object, /) -> Tensor | None: ...
    def recv(self, out: object, source: object, tag: object, /) -> Tensor | None: ...

def product(x: Tensor, weight: Tensor) -> Tensor: ...
def product_into(out: Tensor, x: Tensor, weight: Tensor) -> None: ...

class AttentionMask:
    def __init__(
        self,
        *,
        softmax_scale: float,
        before: int,
        after: int,
        softcap: float,
        alibi_slopes: Tensor | None,
        dropout_p: float,
        seed: int,
        first_head: int,
        all_heads: int,
    ) -> None: ...

def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_pieces: Tensor,
    k_pieces: Tensor,
    mask: AttentionMask,
    row_max: Tensor,
    row_sum: Tensor,
    acc: Tensor,
) -> None: ...
def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    q_pieces: Tensor,
    k_pieces: Tensor,
    mask: AttentionMask,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None: ...
def attention_kernels(dtype: torch.dtype) -> str: ...
def attention_threads() -> int: ...
def has_cuda() -> bool: ...
