"""A model of plain torch modules, of no library, for `parallelize` with a plan of name patterns.

Batch first; 41 tokens, 5 query heads of 4 features that share one kv head, 23 features in the
middle. Head and embedding are tied if asked.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCAB, HIDDEN, HEADS, HEAD_DIM, MIDDLE = 41, 12, 5, 4, 23


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim = HEAD_DIM
        self.num_heads = HEADS
        self.num_key_value_groups = HEADS
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM)
        self.k_proj = nn.Linear(HIDDEN, HEAD_DIM)
        self.v_proj = nn.Linear(HIDDEN, HEAD_DIM)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        batch, length = x.shape[:2]
        q = self.q_proj(x).view(batch, length, self.num_heads, HEAD_DIM).transpose(1, 2)
        k, v = (
            project(x).view(batch, length, -1, HEAD_DIM).transpose(1, 2)
            for project in (self.k_proj, self.v_proj)
        )
        k, v = (t.repeat_interleave(self.num_key_value_groups, 1) for t in (k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.attention = Attention()
        self.mlp = nn.Sequential(
            nn.Linear(HIDDEN, MIDDLE),
            nn.GELU(),
            nn.Dropout(p),
            nn.Linear(MIDDLE, HIDDEN),
            nn.Dropout(p),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Plain(nn.Module):
    def __init__(self, p: float = 0.0, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList([Block(p) for _ in range(2)])
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


PLAN = {
    "embed": "vocab",
    "blocks.*.attention.[qkv]_proj": "colwise",
    "**.o_proj": "rowwise",
    "blocks.*.mlp.0": "colwise",
    "blocks.*.mlp.3": "rowwise",
    "head": "colwise_gather_output",
}
SEQUENCE = {**PLAN, "**.norm*": "sequence", "norm": "sequence"}
# The same in the styles that gather and split within a layer: nothing is left on parts.
ALONE = {"blocks.*.mlp.0": "colwise_rep", "blocks.*.mlp.3": "rowwise_rep", "head": "colwise_rep"}


def plain(seed: int = 0, p: float = 0.0, tied: bool = False) -> Plain:
    torch.manual_seed(seed)
    model = Plain(p, tied).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def batch_of(seed: int, size: int = 2, length: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids, target = torch.randint(VOCAB, (2, size, length), generator=generator)
    return ids, target
