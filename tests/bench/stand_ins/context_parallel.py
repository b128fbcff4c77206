"""Stands in for torch's context_parallel, which has no kernel for CPU memory: by its rules."""

from contextlib import contextmanager

from torch.distributed.tensor import experimental
from torch.nn import functional

from bench.providers import attention_peers
from pyparallel.attention import sequence_parallel_attention


class ContextParallel(attention_peers.ContextParallel):
    """The bench's own contestant; torch's function is not."""

    def __init__(self, setup):
        super().__init__(setup)
        experimental.context_parallel = _context_parallel


@contextmanager
def _context_parallel(mesh, *, buffers, buffer_seq_dims):
    """Of torch 2.13: zigzag where the first buffer divides by twice the ranks, and then causal
    only; functional.scaled_dot_product_attention is another as long as this lasts."""
    zigzag = buffers[0].shape[buffer_seq_dims[0]] % (2 * mesh.size()) == 0

    def attention(query, key, value, *, is_causal):
        assert query.shape[1] == key.shape[1], "grouped heads"
        if zigzag and not is_causal:
            raise RuntimeError("Load balancing requires `is_causal=True`.")
        return sequence_parallel_attention(
            query, key, value, group=mesh.get_group(), layout="bhsd", causal=is_causal,
            sharding="zigzag" if zigzag else "contiguous",
        )  # fmt: skip

    torch_s = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = torch_s
