"""A model of transformers through `ParallelModel`, along each axis: one process's loss and norm."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from pyparallel.training import ParallelConfig, ParallelModel, build_mesh
from tests.launch import Rank, run_ranks

pytest.importorskip("transformers", reason="transformers is not installed")
LIMIT = 1e-12  # float64
LAYOUTS = [
    ({"sp": 2}, {}),
    ({"tp": 2}, {"precision": "fp32"}),
    ({"tp": 2, "tp_sequence_parallel": True}, {"recompute": "full"}),
    ({"pp": 2}, {"microbatches": 2}),
    ({"dp": 2}, {"recompute": "selective"}),
]


def steps(rank: Rank) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    dist.init_process_group(
        "pyparallel", store=rank.store(), rank=rank.rank, world_size=rank.world_size
    )
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    for layout, options in LAYOUTS:
        torch.manual_seed(0)
        single = LlamaForCausalLM(config).double()
        mesh = build_mesh(ParallelConfig(**layout))
        model = ParallelModel(copy.deepcopy(single), mesh, **options)
        generator = torch.Generator().manual_seed(1)
        tokens, labels = torch.randint(61, (2, 4, 14), generator=generator)
        each = 4 // mesh.size("dp")
        mine = slice(each * mesh.coordinates.dp, each * (mesh.coordinates.dp + 1))
        loss = cross_entropy(single(tokens).logits.flatten(0, 1), labels.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(single.parameters(), 1.0)
        found = model.forward_backward(tokens[mine], labels[mine])
        assert abs(found - float(loss)) < LIMIT, layout
        assert abs(model.clip_grad_norm_(1.0) - float(norm)) < LIMIT, layout
        assert list(model.state_dict()) == list(single.state_dict()), layout


@pytest.mark.timeout(600)  # idle: 6 s
def test_a_model_of_transformers_along_each_axis():
    run_ranks(steps, 2, timeout=500)
