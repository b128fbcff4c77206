"""A Llama-style language model, written for one device: what examples/train_gpt.py trains.

Nothing here knows of several devices. Modules have the names of the published Llama checkpoints, so
that its state dict is one. Attention proper is a module of its own, `CoreAttention`.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

__all__ = ["CoreAttention", "Llama", "LlamaConfig"]


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes, by the names that published configurations have."""

    vocab_size: int = 256
    hidden_size: int = 256
    intermediate_size: int = 688
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    dropout: float = 0.0  # of what attention and MLP add to the stream
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    model_type: ClassVar[str] = "llama"

    def __post_init__(self) -> None:
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if self.hidden_size % heads or self.head_dim % 2 or heads % kv_heads:
            raise ValueError(
                f"{heads} heads on {kv_heads} key heads and a hidden size of {self.hidden_size}: "
                "heads must divide the hidden size into even parts, and key heads the heads"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


class CoreAttention(nn.Module):
    """Causal attention between the projections."""

    causal = True

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[batch, rows, heads, head_dim] each, key and value with fewer heads; gives the query's
        shape."""
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        grouped = q.shape[1] != k.shape[1]
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return out.transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        hidden, heads = config.hidden_size, config.num_attention_heads
        self.q_proj = nn.Linear(hidden, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, hidden, bias=False)
        self.core_attention = CoreAttention()

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = self.core_attention(_rotated(q, rotary), _rotated(k, rotary), v)
        y: Tensor = self.o_proj(mixed.flatten(-2))
        return y


class MLP(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), rotary))
        y: Tensor = x + self.dropout(self.mlp(self.post_attention_layernorm(x)))
        return y


class Body(nn.Module):
    """All but the output layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        x = self.embed_tokens(tokens)
        if position_ids is None:
            position_ids = torch.arange(x.shape[1], device=x.device)[None]
        rotary = _rotary(position_ids, self.config)
        for layer in self.layers:
            x = layer(x, rotary)
        y: Tensor = self.norm(x)
        return y


class Llama(nn.Module):
    """Token ids [batch, rows] to logits [batch, rows, vocabulary]; `position_ids` [1, rows] are
    0, 1, ... by default."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=config.initializer_range)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        logits: Tensor = self.lm_head(self.model(tokens, position_ids))
        return logits

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


def _rotary(position_ids: Tensor, config: LlamaConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [1, rows, 1, head_dim], in float32."""
    even = torch.arange(0, config.head_dim, 2, device=position_ids.device, dtype=torch.float32)
    angles = position_ids[..., None].float() / config.rope_theta ** (even / config.head_dim)
    angles = torch.cat([angles, angles], -1)[:, :, None]
    return angles.cos(), angles.sin()


def _rotated(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = (angle.to(x.dtype) for angle in rotary)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
