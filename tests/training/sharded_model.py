"""A small model whose every tensor is hard to cut: for tests that save at one layout and load at
another. 41 tokens, padded to fours; 6 query heads that share 2 kv heads; 23 features, padded to
eights; head and embedding tied, on the first and on the last stage.
"""

import zlib
from collections import OrderedDict

import torch
from torch import Tensor, nn

from pyparallel.layers import (
    ColumnParallelLinear,
    GatedMLP,
    QKVParallelLinear,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    load_full_state_dict,
)
from pyparallel.pipeline import partition_model
from pyparallel.training import ParallelMesh

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MIDDLE = 41, 12, 6, 2, 4, 23


class Attention(nn.Module):
    def __init__(self, group: object) -> None:
        super().__init__()
        self.qkv = QKVParallelLinear(
            HIDDEN, HEADS, group, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, bias=False
        )
        self.o_proj = RowParallelLinear(
            HEADS * HEAD_DIM, HIDDEN, group, partition=self.qkv.heads.query
        )


class Layer(nn.Module):
    def __init__(self, group: object) -> None:
        super().__init__()
        self.norm = RMSNorm(HIDDEN, group)
        self.attention = Attention(group)
        self.mlp = GatedMLP(HIDDEN, MIDDLE, group, multiple_of=8)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))


def whole_shapes() -> dict[str, tuple[int, ...]]:
    """Of the model on one device, written down by hand."""
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (VOCAB, HIDDEN)}
    for layer in ("first", "second"):
        shapes |= {
            f"{layer}.norm.weight": (HIDDEN,),
            f"{layer}.attention.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.attention.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.attention.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.attention.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{layer}.attention.o_proj.bias": (HIDDEN,),
            f"{layer}.mlp.gate_proj.weight": (MIDDLE, HIDDEN),
            f"{layer}.mlp.up_proj.weight": (MIDDLE, HIDDEN),
            f"{layer}.mlp.down_proj.weight": (HIDDEN, MIDDLE),
        }
    return shapes


def whole(what: str, name: str) -> Tensor:
    """Random numbers that every rank and every layout knows by name."""
    name = "embed.weight" if name == "head.weight" else name  # they are tied
    if name.endswith(".seen"):
        return torch.full((3,), len(what) + len(name))
    generator = torch.Generator().manual_seed(zlib.crc32(f"{what} {name}".encode()))
    return torch.randn(whole_shapes()[name], generator=generator)


def stage_of(mesh: ParallelMesh) -> nn.Module:
    """This rank's part, not yet wrapped for data parallelism."""
    group = mesh.group("tp")
    embed = VocabParallelEmbedding(VOCAB, HIDDEN, group, multiple_of=4)
    head = ColumnParallelLinear(HIDDEN, VOCAB, group, bias=False, multiple_of=4)
    head.weight = embed.weight
    layers = {"first": Layer(group), "second": Layer(group)}
    model = nn.Sequential(OrderedDict(embed=embed, **layers, head=head))
    return partition_model(model, counts=[4] if mesh.size("pp") == 1 else [2, 2]).stage(
        mesh.coordinates.pp
    )


def fill(module: nn.Module, what: str) -> list[Tensor]:
    """Gives the parameters (and buffers) what `whole` says, by the layers' own state dicts; copies
    of this rank's parameters."""
    names = [key for layer in ("first", "second") for key in (f"{layer}.seen",)]
    names += [*whole_shapes(), "head.weight"]
    mine = {name.split(".")[0] for name, _ in module.named_children()}
    state = {name: whole(what, name) for name in names if name.split(".")[0] in mine}
    load_full_state_dict(module, state)
    return [parameter.detach().clone() for parameter in module.parameters()]
