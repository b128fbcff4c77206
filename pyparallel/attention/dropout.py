"""Which weights dropout keeps: a function of the seed and of what the weight belongs to, no more.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011). Key: the 64-bit
seed, low word first. Counter: (k_pos, q_pos, document, batch * all_heads + head), each modulo 2^32.
A weight is kept where the first of the four words of the result is at least
`threshold(dropout_p)`. So the mask does not depend on shards, tiles, strategy or engine.
"""

import torch
from torch import Tensor

__all__ = ["keep", "philox", "threshold"]

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_INCREMENTS = (0x9E3779B9, 0xBB67AE85)


def threshold(dropout_p: float) -> int:
    """The smallest word that is kept."""
    return round(dropout_p * 2**32)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: int) -> Tensor:
    """The first word, 0 .. 2^32 - 1, for int64 counter words that broadcast to one shape."""
    c0, c1, c2, c3 = (word & _WORD for word in counter)
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(10):
        # The 64 bits of a product are right although int64 reads them as signed.
        high = c0 * _MULTIPLIERS[0]
        low = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((low >> 32) & _WORD) ^ c1 ^ k0,
            low & _WORD,
            ((high >> 32) & _WORD) ^ c3 ^ k1,
            high & _WORD,
        )
        k0, k1 = (k0 + _INCREMENTS[0]) & _WORD, (k1 + _INCREMENTS[1]) & _WORD
    return c0


def keep(
    dropout_p: float, seed: int, plane: Tensor, document: Tensor, q_pos: Tensor, k_pos: Tensor
) -> Tensor:
    """bool: what is kept. `plane` is batch * all_heads + head; int64, of shapes that broadcast."""
    return philox((k_pos, q_pos, document, plane), seed) >= threshold(dropout_p)


def keep_planes(batch: int, heads: int, first_head: int, all_heads: int) -> Tensor:
    """int64 [batch, heads]: batch * all_heads + head, for some of the heads."""
    return (
        torch.arange(batch).view(-1, 1) * (all_heads or heads)
        + torch.arange(heads).view(1, -1)
        + first_head
    )
