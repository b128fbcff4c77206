"""Models of transformers with their sequence sharded: through its public attention registry.

    from pyparallel.attention import hugging_face
    hugging_face.register("sequence_parallel", group)
    model.set_attn_implementation("sequence_parallel")
    ids = shard(input_ids, group)
    positions = position_ids(input_ids.shape[1], group)[None]
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits    # of these rows

transformers is imported by `register`, and by nothing else.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyparallel.attention.sequence_parallel import sequence_parallel_attention
from pyparallel.attention.transport import transport_of
from pyparallel.errors import InvalidArgument, Unsupported

__all__ = ["HuggingFaceAttention", "register"]

# What models pass along that says nothing of how to attend.
_BESIDE = {
    "cache_position",
    "logits_to_keep",
    "max_length_k",
    "max_length_q",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "use_cache",
}


class HuggingFaceAttention:
    """An attention function as transformers calls it, over a group. Made by `register`.

    `cu_seqlens` may be set between steps: where the documents of the packed sequence begin, and the
    last ends; None: each sequence of the batch is one.
    """

    def __init__(
        self,
        group: Any,
        *,
        sharding: str,
        strategy: str,
        deterministic: bool,
        cu_seqlens: "Tensor | Sequence[int] | None",
    ) -> None:
        self.group = group
        self.sharding = sharding
        self.strategy = strategy
        self.deterministic = deterministic
        self.cu_seqlens = cu_seqlens

    def __call__(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        s_aux: Tensor | None = None,
        position_ids: Tensor | None = None,
        **more: Any,
    ) -> tuple[Tensor, None]:
        """[batch, heads, rows, head_dim] -> ([batch, rows, heads, head_dim], None).

        Raises:
            ValueError: a mask, or another keyword that this does not know, on all ranks.
        """
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        try:
            cu_seqlens = self._documents(more)
            if sliding_window is not None and sliding_window < 1:
                raise Unsupported(
                    f"sliding_window is {sliding_window}; expected 1 or more, or None"
                )
            if attention_mask is not None:
                raise Unsupported(
                    f"attention_mask has shape {list(attention_mask.shape)}; over a sharded "
                    "sequence it must be None: pack documents (cu_seqlens) in place of padding"
                )
            asked = [
                name
                for name, value in more.items()
                if name not in _BESIDE and value is not None and value is not False
            ]
            if asked:
                raise Unsupported(f"unknown keywords: {', '.join(sorted(asked))}")
        except Exception as error:
            transport = transport_of(self.group, query.device)
            raise transport.refused("sequence_parallel_attention", error) from None
        # transformers counts the query itself: a window of W sees W - 1 keys before it, and without
        # a causal mask as many after it.
        reach = -1 if sliding_window is None else sliding_window - 1
        out = sequence_parallel_attention(
            query,
            key,
            value,
            group=self.group,
            strategy=self.strategy,
            sharding=self.sharding,
            layout="bhsd",
            causal=causal,
            window_size=(reach, reach),
            softcap=softcap or 0.0,
            sinks=s_aux,
            dropout_p=dropout,
            softmax_scale=scaling,
            cu_seqlens=cu_seqlens,
            position_ids=position_ids,
            deterministic=self.deterministic,
        )
        assert isinstance(out, Tensor)
        return out.transpose(1, 2), None

    def _documents(self, more: dict[str, Any]) -> Any:
        """cu_seqlens, or those that the model was called with: they too are of the whole."""
        q, k = more.pop("cu_seq_lens_q", None), more.pop("cu_seq_lens_k", None)
        if q is None and k is None:
            return self.cu_seqlens
        if q is None or k is None or not torch.equal(q, k):
            raise Unsupported("cu_seq_lens_q and cu_seq_lens_k differ; self attention has one")
        return q


def register(
    name: str,
    group: Any,
    *,
    sharding: str = "zigzag",
    strategy: str = "auto",
    deterministic: bool = False,
    cu_seqlens: "Tensor | Sequence[int] | None" = None,
) -> HuggingFaceAttention:
    """Registers `name` with transformers, for `model.set_attn_implementation(name)`.

    Models get this rank's rows of the sequence (`shard`), and must be told their positions
    (`position_ids`), which are compared with the sharding where the model passes them on. Window,
    softcap, sinks, scale, dropout and packed documents are honoured; a padding mask, and any
    keyword that is not known, raises.

    Args:
        name: any, also one that was registered before.
        group: as for `sequence_parallel_attention`, like the other arguments.

    Raises:
        ImportError: transformers is not installed, or has no attention registry (before 4.53).
    """
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError as error:
        raise ImportError(
            f"transformers has no attention registry here ({error}); version 4.53 or later is "
            "needed: pip install 'transformers>=4.53'"
        ) from error
    attention = HuggingFaceAttention(
        group,
        sharding=sharding,
        strategy=strategy,
        deterministic=deterministic,
        cu_seqlens=cu_seqlens,
    )
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, _no_mask)
    return attention


def _no_mask(*args: Any, attention_mask: Tensor | None = None, **more: Any) -> None:
    """The mask of a layer: none is made. Padding would be ignored, so it is refused."""
    if attention_mask is not None and not bool(attention_mask.to(torch.bool).all()):
        raise InvalidArgument(
            f"attention_mask (shape {list(attention_mask.shape)}) has padding; over a sharded "
            "sequence pack documents (cu_seqlens) in its place"
        )
