"""`CoreAttention`: a torch module with the calls of Megatron's core attention."""

from typing import Any

import torch
from torch import Tensor

from pyparallel.attention.sequence_parallel import sequence_parallel_attention
from pyparallel.attention.transport import transport_of
from pyparallel.errors import Unsupported

__all__ = ["CoreAttention"]

_CAUSAL = {"causal": True, "padding_causal": True, "no_mask": False, "padding": False}


class CoreAttention(torch.nn.Module):
    """Attention between projections, over a context parallel group.

    Called as Megatron-LM's DotProductAttention and TransformerEngine's are: tensors are
    [rows, batch, heads, head_dim], or [tokens, heads, head_dim] with `packed_seq_params`; the
    result has its last two dims joined. Rows lie on ranks as Megatron cuts them: zigzag, each
    document of a packed sequence by itself.
    """

    def __init__(
        self,
        group: Any,
        *,
        causal: bool = True,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        sinks: int | None = None,
        strategy: str = "auto",
        sharding: str = "zigzag",
        deterministic: bool = False,
    ) -> None:
        """See `sequence_parallel_attention` for the arguments.

        Args:
            causal: where a call names no attn_mask_type.
            attention_dropout: in training mode only.
            sinks: heads of this rank's attention that have a learnable sink each, all of them;
                None: none has.
        """
        super().__init__()
        self.group = group
        self.causal = causal
        self.window_size = window_size
        self.softcap = softcap
        self.softmax_scale = softmax_scale
        self.attention_dropout = attention_dropout
        self.strategy = strategy
        self.sharding = sharding
        self.deterministic = deterministic
        self.sinks = None if sinks is None else torch.nn.Parameter(torch.zeros(sinks))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """This rank's rows of the result, [rows, batch, heads * head_dim].

        Args:
            query, key, value: [rows, batch, heads, head_dim]; packed: [tokens, heads, head_dim].
            attention_mask, attention_bias: None; masks are told by type.
            attn_mask_type: an enum or its name: causal, no_mask, padding_causal or padding (the
                last two with packed_seq_params); None: as the module was made.
            packed_seq_params: has cu_seqlens_q and cu_seqlens_kv of the whole packed sequence (or
                cu_seqlens_q_padded and cu_seqlens_kv_padded, equal to them), qkv_format "thd".

        Raises:
            ValueError: what this cannot honour, on all ranks.
        """
        try:
            causal = self._causal(attention_mask, attn_mask_type, attention_bias, packed_seq_params)
            lengths, lengths_k = _lengths(packed_seq_params)
        except Exception as error:
            transport = transport_of(self.group, query.device)
            raise transport.refused("CoreAttention", error) from None
        packed = packed_seq_params is not None
        if not packed:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        sinks = self.sinks
        out = sequence_parallel_attention(
            query,
            key,
            value,
            group=self.group,
            strategy=self.strategy,
            sharding=self.sharding,
            layout="thd" if packed else "bshd",
            causal=causal,
            window_size=self.window_size,
            softcap=self.softcap,
            sinks=None if sinks is None else sinks.to(query.dtype),
            dropout_p=self.attention_dropout if self.training else 0.0,
            softmax_scale=self.softmax_scale,
            cu_seqlens=lengths,
            cu_seqlens_k=lengths_k,
            per_document=packed,
            deterministic=self.deterministic,
        )
        assert isinstance(out, Tensor)
        out = out.flatten(-2)
        return out if packed else out.transpose(0, 1).contiguous()

    def _causal(self, mask: Any, mask_type: Any, bias: Any, packed: Any) -> bool:
        if mask is not None or bias is not None:
            name = "attention_mask" if mask is not None else "attention_bias"
            raise Unsupported(
                f"{name} is a tensor; over a sharded sequence a mask is told by attn_mask_type, "
                "window_size and packed_seq_params"
            )
        if mask_type is None:
            return self.causal
        name = str(getattr(mask_type, "name", mask_type))
        if name not in _CAUSAL or (name.startswith("padding") and packed is None):
            raise Unsupported(
                f"attn_mask_type is {name!r}; expected one of {', '.join(_CAUSAL)} (padding only "
                "with packed_seq_params)"
            )
        return _CAUSAL[name]


def _lengths(packed: Any) -> tuple[Any, Any]:
    if packed is None:
        return None, None
    layout = getattr(packed, "qkv_format", "thd")
    if layout != "thd":
        raise Unsupported(f"packed_seq_params.qkv_format is {layout!r}; expected 'thd'")
    for name in ("cp_group", "local_cp_size"):
        if getattr(packed, name, None) is not None:
            raise Unsupported(f"packed_seq_params.{name} is set; the group is this module's own")
    found = []
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):
        lengths, padded = getattr(packed, name, None), getattr(packed, f"{name}_padded", None)
        if lengths is None:
            raise Unsupported(f"packed_seq_params has no {name}")
        if padded is not None and not torch.equal(lengths, padded):
            raise Unsupported(
                f"packed_seq_params.{name}_padded differs from {name}: padding between documents "
                "is not taken; documents may have any length here, so none is needed"
            )
        found.append(lengths)
    return found[0], found[1]
