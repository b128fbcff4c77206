"""A small Llama, batches for it, and what one process makes of them."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from examples.llama import Llama, LlamaConfig

VOCAB = 61  # divides by nothing


def llama(seed: int = 0, **sizes: object) -> Llama:
    """In float64; sizes as in LlamaConfig."""
    torch.manual_seed(seed)
    given = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return Llama(LlamaConfig(**{**given, **sizes})).double()  # type: ignore[arg-type]


def batch(samples: int, rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and labels, some of which do not count, unevenly over the samples."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (samples, rows), generator=generator)
    labels = torch.randint(VOCAB, (samples, rows), generator=generator)
    labels[:, -1] = -100
    labels[: samples // 2, : rows // 3] = -100
    return tokens, labels


def mean_loss(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """Of one process: the mean over all tokens that count."""
    return cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
