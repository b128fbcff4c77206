"""State dicts of the whole model, and how layers begin.

Layers of proof: N processes on a CPU, world sizes 1 to 4, all bit for bit: what goes out is what
the unsharded model has (names, order, values), what comes in is the shards of it, and a layer that
begins is the slice of the unsharded one that begins after the same seed. What does not fit raises
on every rank, and changes nothing. All of it runs in CI.
"""

import copy
import pickle

import pytest
import torch
from torch import nn

from tests.launch import run_ranks
from tests.layers.whole import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    MIDDLE,
    VOCAB,
    Sharded,
    Whole,
    batch_of,
    whole_model,
)

WORLDS = [1, 2, 3, 4]


def same(state, expected):
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert state[name].dtype is value.dtype, name
        assert torch.equal(state[name], value), name


def differing(state, other):
    return [name for name in other if not torch.equal(state[name], other[name])]


class Configured(nn.Module):
    """The model of tests/layers/whole.py from sizes, its modules in the same order."""

    def __init__(self, group, **options) -> None:
        from pyparallel import layers

        super().__init__()
        self.embed = layers.VocabParallelEmbedding(VOCAB, HIDDEN, group, multiple_of=8, **options)
        self.norm1 = layers.RMSNorm(HIDDEN, group, **options)
        self.qkv = layers.QKVParallelLinear(
            HIDDEN, HEADS, group, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, **options
        )
        self.o_proj = layers.RowParallelLinear(
            HEADS * HEAD_DIM, HIDDEN, group, partition=self.qkv.heads.query, **options
        )
        self.norm2 = layers.LayerNorm(HIDDEN, group, **options)
        self.mlp = layers.GatedMLP(HIDDEN, MIDDLE, group, bias=True, multiple_of=4, **options)
        self.norm3 = layers.RMSNorm(HIDDEN, group, **options)
        self.head = layers.ColumnParallelLinear(HIDDEN, VOCAB, group, bias=False, **options)


def states(rank):
    from pyparallel import layers
    from pyparallel.comm import Communicator

    me, world = rank.rank, rank.world_size
    with Communicator.from_file(rank.rendezvous, me, world) as group:
        for tied in (False, True):
            whole = whole_model(0, torch.bfloat16, tied)
            model = Sharded(whole, group, parallel=False, multiple_of=8)
            state = layers.full_state_dict(model)
            same(state, whole.state_dict())
            if tied:
                assert state["head.weight"] is state["embed.weight"]

            # into a model with other values, from another dtype
            other = Sharded(whole_model(1, torch.bfloat16, tied), group, parallel=True)
            assert len(differing(layers.full_state_dict(other), state)) == len(state)
            wide = {name: value.double() for name, value in state.items()}
            assert layers.load_full_state_dict(other, wide) == ([], [])
            same(layers.full_state_dict(other), state)
            assert not tied or other.head.weight is other.embed.weight

            # into a model on meta: shards only, tied parameters once
            with torch.device("meta"):
                empty = Whole(tied).bfloat16()
            empty.embed.weight.requires_grad_(False)
            waiting = Sharded(empty, group, parallel=False, multiple_of=8)
            assert all(p.is_meta for p in waiting.parameters())
            with pytest.raises(ValueError, match="on meta; materialize"):
                layers.full_state_dict(waiting)
            layers.load_full_state_dict(waiting, state)
            same(layers.full_state_dict(waiting), state)
            assert not waiting.embed.weight.requires_grad
            assert not tied or waiting.head.weight is waiting.embed.weight
            ids = batch_of(3).ids
            assert torch.equal(waiting(ids), model(ids))

            # this rank's own: shards, without padding
            local = model.state_dict()
            assert local["embed.weight"].shape[0] == model.embed.partition.real_size(me)
            twin = Sharded(whole_model(2, torch.bfloat16, tied), group, parallel=False)
            if world == 1 or not tied:
                padded = Sharded(
                    whole_model(2, torch.bfloat16, tied), group, parallel=False, multiple_of=8
                )
                padded.load_state_dict(pickle.loads(pickle.dumps(local)))
                same(layers.full_state_dict(padded), state)
            del twin

            copied = copy.deepcopy(model)  # computes in the same group, with weights of its own
            assert torch.equal(copied(ids), model(ids))
            with torch.no_grad():
                copied.norm3.weight.add_(1)
            assert differing(layers.full_state_dict(copied), state) == ["norm3.weight"]
            with pytest.raises(TypeError, match="cannot be pickled"):
                pickle.dumps(model)
    return True


@pytest.mark.parametrize("world", WORLDS)
def test_states_are_those_of_the_whole(world):
    run_ranks(states, world)


def beginnings(rank):
    from pyparallel import layers
    from pyparallel.comm import Communicator

    me, world = rank.rank, rank.world_size
    with Communicator.from_file(rank.rendezvous, me, world) as group:
        torch.manual_seed(11)
        expected, after = Whole().state_dict(), torch.rand(1)
        torch.manual_seed(11)
        same(layers.full_state_dict(Configured(group)), expected)
        assert torch.equal(torch.rand(1), after)  # the generators of all ranks stay alike

        waiting = Configured(group, device="meta")
        torch.manual_seed(11)
        assert layers.materialize(waiting) is waiting
        same(layers.full_state_dict(waiting), expected)

        waiting = Configured(group, device="meta")
        waiting.head = layers.ColumnParallelLinear(
            HIDDEN, VOCAB, group, bias=False, multiple_of=8, device="meta"
        )
        layers.tie(waiting.embed, waiting.head)
        layers.materialize(waiting)
        assert waiting.head.weight is waiting.embed.weight
        assert not waiting.head.weight.is_meta

        filled = layers.ColumnParallelLinear(
            6, 7, group, init_method=lambda w: nn.init.constant_(w, 2.0)
        )
        state = layers.full_state_dict(filled)
        assert torch.equal(state["weight"], torch.full((7, 6), 2.0))
        assert not state["bias"].any()

        # GPT-2's Conv1D: the whole is [in, out]
        whole = nn.Linear(6, 7)
        for cls in (layers.ColumnParallelLinear, layers.RowParallelLinear):
            layer = cls.from_linear(whole, group, transposed=True)
            state = layers.full_state_dict(layer)
            assert state["weight"].is_contiguous()
            assert torch.equal(state["weight"], whole.weight.detach().t())
            layers.load_full_state_dict(layer, {**state, "weight": state["weight"] * 2})
            assert torch.equal(
                layers.full_state_dict(layer)["weight"], whole.weight.detach().t() * 2
            )

        with torch.device("meta"):
            unable = nn.Sequential(nn.Linear(2, 2), nn.MultiheadAttention(2, 1))
        with pytest.raises(ValueError, match=r"\['MultiheadAttention'\].*no reset_parameters"):
            layers.materialize(unable)
        assert unable[0].weight.is_meta
    return True


@pytest.mark.parametrize("world", WORLDS)
def test_layers_begin_as_slices_of_the_whole(world):
    run_ranks(beginnings, world)


def misfits(rank):
    from pyparallel import layers
    from pyparallel.comm import Communicator

    me, world = rank.rank, rank.world_size
    texts = {}
    with Communicator.from_file(rank.rendezvous, me, world, timeout=20) as group:
        whole = whole_model(0, torch.float32)
        model = Sharded(whole, group, parallel=False)
        good = whole.state_dict()
        before = layers.full_state_dict(model)

        def refused(what, call):
            with pytest.raises(ValueError, match="full_state_dict") as caught:
                call()
            texts[what] = str(caught.value)

        wrong = {
            "missing": {k: v for k, v in good.items() if k != "k_proj.weight"},
            "unexpected": {**good, "other": torch.ones(1)},
            "shape": {**good, "norm1.weight": torch.ones(HIDDEN + 1)},
        }
        for what, state in wrong.items():
            one_rank = state if me == world - 1 else good
            refused(what, lambda s=one_rank: layers.load_full_state_dict(model, s))
        same(layers.full_state_dict(model), before)

        partial = {k: v * 2 for k, v in good.items() if k != "norm1.weight"} | {"x": torch.ones(1)}
        found = layers.load_full_state_dict(model, partial, strict=False)
        assert found == (["norm1.weight"], ["x"])
        assert differing(layers.full_state_dict(model), before) == [
            k for k in before if k != "norm1.weight" and before[k].any()
        ]

        uneven = layers.ColumnParallelLinear(4, 5 + (me == world - 1), group)
        refused("differ", lambda: layers.full_state_dict(uneven))
        heads = layers.QKVParallelLinear(12, 6, group, num_kv_heads=1)
        with torch.no_grad():
            if me == world - 1:
                heads.weight[-1, 0] += 1
        refused("copies", lambda: layers.full_state_dict(heads))
    return texts


def test_what_does_not_fit_raises_on_all_ranks():
    first, *_, last = run_ranks(misfits, 3)
    assert "missing: ['k_proj.weight']" in last["missing"]
    assert "of the fused" in last["missing"]
    assert "unexpected: ['other']" in last["unexpected"]
    assert "norm1.weight has shape [21]; expected [20]" in last["shape"]
    for what in ("missing", "unexpected", "shape"):
        assert "rank 2" in first[what]
    assert "only ranks [0, 1] agree with this one" in first["differ"]
    assert "only ranks [2] agree with this one" in last["differ"]
    assert "rank 2's copy of q_proj.weight, k_proj.weight, v_proj.weight" in first["copies"]
