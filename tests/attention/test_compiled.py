"""torch.compile takes the attention as one op: no break in the graph, the values of eager calls."""

import pytest
import torch

from tests.launch import run_ranks


def attend(q, k, v, sinks, group, options):
    from pyparallel.attention import sequence_parallel_attention

    out, lse = sequence_parallel_attention(
        q * 2, k, v, group=group, sinks=sinks, return_lse=True, **options
    )
    return out.square().sum() + lse.sin().sum()


def both_ways(rank):
    import torch._dynamo
    import torch.distributed as dist

    from pyparallel.attention import shard

    torch.set_num_threads(1)
    store = dist.PrefixStore("world", rank.store())
    dist.init_process_group("gloo", store=store, rank=rank.rank, world_size=rank.world_size)
    group = dist.group.WORLD
    torch.manual_seed(0)
    whole = [torch.randn(1, 12, heads, 8) for heads in (4, 2, 2)]
    found = []
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    cases = (
        {"strategy": "ring", "causal": True, "window_size": (5, 0)},
        {"strategy": "ulysses", "dropout_p": 0.25, "dropout_seed": 2**64 - 7},
        {"cu_seqlens": torch.tensor([0, 5, 12]), "causal": True, "softcap": 2.0},
        {"cu_seqlens": [0, 5, 12], "per_document": True, "deterministic": True},
    )
    # Compiling takes seconds: of two ranks, those that communicate most.
    for options in cases if rank.world_size == 1 else cases[:2]:
        results = []
        for function in (attend, compiled):
            leaves = [shard(x, group).requires_grad_() for x in whole]
            sinks = torch.full((4,), 0.5, requires_grad=True)
            value = function(*leaves, sinks, group, options)
            value.backward()
            results.append([value.detach(), *(x.grad for x in (*leaves, sinks))])
        found.append(all(torch.equal(a, b) for a, b in zip(*results, strict=True)))
    if rank.world_size == 1:  # what is no layout is not taken for one
        with pytest.raises(Exception, match="layout is 'sbhd'; expected one of bshd, bhsd, thd"):
            compiled(*whole, None, group, {"layout": "sbhd"})
        for flag in ("causal", "per_document", "padded", "deterministic"):
            with pytest.raises(Exception, match=f"{flag} is 1; expected True or False"):
                compiled(*whole, None, group, {flag: 1})
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_a_graph_does_not_break_at_it(world):
    assert run_ranks(both_ways, world) == [[True] * (4 if world == 1 else 2)] * world


def opcheck(rank):
    import torch.distributed as dist

    import pyparallel.attention  # noqa: F401

    store = dist.PrefixStore("world", rank.store())
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    name = dist.group.WORLD.group_name
    q = torch.randn(1, 6, 4, 8, requires_grad=True)
    k, v = (torch.randn(1, 6, 2, n, requires_grad=True) for n in (8, 4))
    options = ("auto", "zigzag", True, [-1, -1], 0.0, None, 0.0, False, False, False, None, None)
    for sinks in (None, torch.randn(4, requires_grad=True)):
        torch.library.opcheck(
            torch.ops.pyparallel.sequence_parallel_attention.default,
            (q, k, v, name, None, None, sinks, None, None, None, None, None, *options),
        )


def test_the_op_passes_torch_s_checks():
    run_ranks(opcheck, 1)
