"""Inputs that cannot be: a ValueError that says what was given and what fits, on every rank.

Layers of proof: 2 processes on a CPU. Rank 0 alone makes each mistake; rank 1, whose input is
right, raises too, in the same call where that communicates, in the next one where it does not; and
the group goes on. What the constructors refuse needs no communication. Runs in CI.
"""

import re
import warnings

import pytest
import torch
from torch import nn

from tests.launch import run_ranks

K, N, VOCAB = 6, 8, 11
# layer, what rank 0 gives, what its message says
CALLS = [
    ("column", (3, K + 1), r"shape \[3, 7\]; expected \[\.\.\., 6\]"),
    ("column", (3, 2 * K), r"shape \[3, 12\]; expected \[\.\.\., 6\]"),
    ("column", (), r"shape \[\]; expected \[\.\.\., 6\]"),
    ("column", torch.float64, "dtype torch.float64, weight torch.float32"),
    ("column", "meta", "input is on meta, weight on cpu"),
    ("row", (3, N), r"x has K = 8.*expected \[N, 8\]"),
    ("row", torch.float16, "dtype"),
    ("split row", (3, N // 2), r"shape \[3, 4\]; expected \[\.\.\., 8\]"),
    ("parallel column", (3, 2, K), r"differ|shard_sizes|\[3"),
    ("parallel column", (4, K + 1), r"expected \[N, 7\]"),
    ("parallel column", (K,), r"the sequence is dim 0, but the activations have shape \[6\]"),
    ("parallel row", (N // 2,), r"the sequence is dim 0, but the activations have shape \[4\]"),
    ("norm", (3, K - 1), r"shape \[3, 5\]; expected \[\.\.\., 6\]"),
    ("norm", torch.bfloat16, "input is torch.bfloat16 on cpu, weight torch.float32"),
    ("embedding", torch.tensor([0, VOCAB]), "id 11 is none of 0 to 10"),
    ("embedding", torch.tensor([-1, 0]), "id -1 is none of 0 to 10"),
    ("embedding", torch.tensor([0.5]), "ids have dtype torch.float32; expected torch.int64"),
]


def made(group):
    from pyparallel import layers

    return {
        "column": (layers.ColumnParallelLinear(K, N, group), (3, K)),
        "row": (layers.RowParallelLinear(N, K, group), (3, N // 2)),
        "split row": (layers.RowParallelLinear(N, K, group, input_is_parallel=False), (3, N)),
        "parallel column": (
            layers.ColumnParallelLinear(K, N, group, sequence_parallel=True),
            (4, K),
        ),
        "parallel row": (
            layers.RowParallelLinear(N, K, group, sequence_parallel=True),
            (4, N // 2),
        ),
        "norm": (layers.RMSNorm(K, group), (3, K)),
        "embedding": (layers.VocabParallelEmbedding(VOCAB, K, group), None),
    }


def calls(rank):
    from pyparallel.comm import Communicator

    texts = []
    with Communicator.from_file(rank.rendezvous, rank.rank, 2, timeout=30) as group:
        layers = made(group)
        for name, wrong, _ in CALLS:
            layer, shape = layers[name]
            x = torch.tensor([0, VOCAB - 1]) if shape is None else torch.randn(shape)
            if rank.rank == 0:
                if isinstance(wrong, torch.Tensor):
                    x = wrong
                elif isinstance(wrong, tuple):
                    x = torch.randn(wrong)
                else:
                    x = x.to(wrong)
            try:
                layer(x)
                group.barrier()  # a layer that communicates nothing has told the group all the same
            except ValueError as error:
                texts.append(str(error))
            else:
                texts.append("nothing was raised")
        x = layers["parallel row"][0](layers["parallel column"][0](torch.randn(4, K)))
        assert x.shape == (4, K)
        group.barrier()
    return texts


def test_a_mistake_of_one_rank_raises_on_all():
    mine, other = run_ranks(calls, 2)
    for (name, wrong, says), text, told in zip(CALLS, mine, other, strict=True):
        assert re.search(says, text), (name, wrong, text)
        assert "rank 0" in told, (name, wrong, told)


def alone(rank):
    """A group of one rank: torch's own layer, without a word, and with the same checks."""
    from pyparallel import layers
    from pyparallel.comm import Communicator

    with (
        Communicator.from_file(rank.rendezvous, 0, 1) as group,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        whole, x = nn.Linear(K, N), torch.randn(4, K)
        for cls in (layers.ColumnParallelLinear, layers.RowParallelLinear):
            for parallel in (False, True):
                layer = cls.from_linear(whole, group, sequence_parallel=parallel)
                torch.testing.assert_close(layer(x), whole(x))
                with pytest.raises(ValueError, match=r"7"):
                    layer(torch.randn(4, K + 1))
    return True


def test_a_group_of_one_is_silent_and_checks():
    run_ranks(alone, 1)


def sizes(rank):
    from pyparallel import layers
    from pyparallel.comm import Communicator
    from pyparallel.layers import Partition

    with Communicator.from_file(rank.rendezvous, rank.rank, rank.world_size) as group:
        column, row = layers.ColumnParallelLinear, layers.RowParallelLinear
        three = Partition.even(N, 3)
        runs = Partition.joined([Partition.even(4, 2), Partition.even(4, 2)])
        linear, embedding = nn.Linear(K, N), nn.Embedding(VOCAB, K, max_norm=1.0)
        cases = [
            (lambda: column(0, N, group), "in_features is 0"),
            (lambda: row(K, 2.0, group), "out_features is 2.0"),
            (lambda: column(K, N, None), "group is None"),
            (lambda: column(K, N, group, partition=three), "expected out_features=8 over the 2"),
            (lambda: row(N, K, group, partition=Partition.even(K, 2)), "in_features=8 over the 2"),
            (lambda: row(N, K, group, partition=runs, multiple_of=2), "either partition or"),
            (lambda: row(N, K, group, partition=runs, input_is_parallel=False), "several runs"),
            (lambda: column(K, N, group, parts=(("a", 3),)), "do not add up to out_features=8"),
            (lambda: column(K, N, group, sequence_parallel=1), "expected True, False or a Seq"),
            (lambda: column.from_linear(nn.LayerNorm(3), group), "expected a torch.nn.Linear"),
            (lambda: layers.QKVParallelLinear(24, 6, group, num_kv_heads=4), r"\[1, 2, 3, 6\]"),
            (lambda: layers.QKVParallelLinear(25, 6, group), "pass head_dim"),
            (
                lambda: layers.QKVParallelLinear.from_linears(
                    linear, linear, linear, group, num_heads=3
                ),
                "no whole heads",
            ),
            (lambda: layers.GatedMLP(K, N, group, activation="tanh"), "one of silu, gelu"),
            (
                lambda: layers.GatedMLP.from_linears(linear, linear, linear, group),
                r"down has shape \[8, 6\]; expected \[6, 8\]",
            ),
            (
                lambda: layers.GatedMLP.from_linears(
                    linear, nn.Linear(K, N, bias=False), nn.Linear(N, K), group
                ),
                "some have none",
            ),
            (
                lambda: layers.GatedMLP.from_linears(
                    linear, nn.Linear(K, N + 1), nn.Linear(N, K), group
                ),
                r"have shapes .*expected",
            ),
            (lambda: layers.FusedColumnParallelLinear(K, {}, group), "partitions is empty"),
            (lambda: layers.VocabParallelEmbedding(0, K, group), "num_embeddings is 0"),
            (
                lambda: layers.VocabParallelEmbedding(4, K, group, padding_idx=4),
                "padding_idx is 4; expected -4 to 3",
            ),
            (
                lambda: layers.VocabParallelEmbedding.from_embedding(embedding, group),
                "max_norm=1.0",
            ),
            (
                lambda: layers.tie(
                    layers.VocabParallelEmbedding(VOCAB, K, group),
                    column(K, VOCAB, group, multiple_of=8),
                ),
                "same multiple_of",
            ),
            (lambda: layers.RMSNorm(0, group), "size is 0"),
            (
                lambda: layers.RMSNorm.from_norm(nn.RMSNorm((2, 3)), group),
                "no weight over one dimension",
            ),
            (lambda: layers.gradient_norm(nn.Linear(1, 1), 0), "norm_type is 0"),
        ]
        for make, says in cases:
            with pytest.raises(ValueError, match=says):
                make()
    return True


def test_sizes_that_cannot_be():
    run_ranks(sizes, 2)
