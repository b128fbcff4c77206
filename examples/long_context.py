"""Trains a small language model whose sequence is cut over ranks; its loss is that of one process.

torchrun --nproc-per-node 2 examples/long_context.py [--length 2048] [--sharding zigzag]
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import pyparallel.comm  # noqa: F401  registers the backend
from pyparallel.attention import (
    SHARDINGS,
    explain,
    position_ids,
    sequence_parallel_attention,
    shard,
    shard_labels,
)

VOCABULARY, WIDTH, HEADS, KV_HEADS, LAYERS = 64, 64, 4, 2, 2
DIM = WIDTH // HEADS


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """RoPE. The positions are those in the whole sequence, wherever a row lies."""
    angles = positions.unsqueeze(1) * 100.0 ** (-torch.arange(0, DIM, 2) / DIM)
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    a, b = x.unflatten(-1, (2, -1)).unbind(-2)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.kv = nn.Linear(WIDTH, 2 * KV_HEADS * DIM, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, positions: Tensor, attend) -> Tensor:  # type: ignore[no-untyped-def]
        normal = self.norm(x)
        q = rotated(self.q(normal).unflatten(-1, (HEADS, DIM)), positions)
        k, v = self.kv(normal).unflatten(-1, (2, KV_HEADS, DIM)).unbind(-3)
        x = x + self.out(attend(q, rotated(k, positions), v).flatten(-2))
        return x + self.down(nn.functional.gelu(self.up(self.second_norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def loss(self, ids: Tensor, labels: Tensor, positions: Tensor, attend) -> Tensor:  # type: ignore[no-untyped-def]
        """The sum over rows that have a label."""
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, positions, attend)
        logits = self.head(x)
        return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def in_one_process(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(1, 2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--sharding", default="zigzag", choices=SHARDINGS)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    if args.length < 2:
        parser.error(f"--length is {args.length}; a row and the one after it are at least 2")

    dist.init_process_group("pyparallel")
    group, rank = dist.group.WORLD, dist.get_rank()
    torch.manual_seed(0)  # the same model and text on every rank
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = (torch.arange(args.length) * torch.randint(1, 5, (1, 1)) + 3) % VOCABULARY

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sequence_parallel_attention(
            q, k, v, group=group, strategy=args.strategy, sharding=args.sharding, causal=True
        )  # type: ignore[return-value]

    # This rank's rows, their labels (shifted before cutting) and their positions.
    ids = shard(text, group, sharding=args.sharding)
    labels = shard_labels(text, group, sharding=args.sharding)
    positions = position_ids(args.length, group, sharding=args.sharding)
    if rank == 0:
        shape = (1, args.length, HEADS, DIM), (1, args.length, KV_HEADS, DIM)
        print(explain(*shape, group, causal=True, sharding=args.sharding, strategy=args.strategy))
    print(f"rank {rank} holds {ids.shape[1]} of {args.length} rows")

    for step in range(args.steps):
        with torch.no_grad():
            alone = model.loss(
                text, shard_labels(text, (0, 1)), torch.arange(args.length), in_one_process
            )
        optimizer.zero_grad()
        loss = model.loss(ids, labels, positions, attend)
        (loss / (args.length - 1)).backward()
        # Each rank has the gradients of its own rows' losses: their sum is the whole's.
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        total = loss.detach().clone()
        dist.all_reduce(total)
        optimizer.step()
        if rank == 0:
            mean, whole = total / (args.length - 1), alone / (args.length - 1)
            print(f"step {step}: loss {mean:.5f} over {dist.get_world_size()} ranks, "
                  f"{whole:.5f} in one process")  # fmt: skip
            torch.testing.assert_close(total, alone, rtol=1e-5, atol=0)


if __name__ == "__main__":
    main()
