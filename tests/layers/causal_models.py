"""Small random Hugging Face models whose sizes divide by nothing; imported by ranks only.

53 tokens; query heads that do not go up on 3 or 4 ranks, kv heads fewer than ranks, 29 features in
the middle. Float64, and attention by torch's own kernel, so that both models compute the same.
"""

from typing import Any

import torch
from torch import Tensor

VOCAB = 53
IGNORED = -100
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
ROTARY = {
    **COMMON,
    "hidden_size": 24,
    "intermediate_size": 29,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
# name: (class, config). Each name is one case of the tests.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**ROTARY, "head_dim": 4, "attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("Llama", {**ROTARY, "tie_word_embeddings": True, "num_attention_heads": 2}),
    "qwen2": ("Qwen2", ROTARY),
    "qwen3": ("Qwen3", {**ROTARY, "head_dim": 6, "num_attention_heads": 8}),
    "mistral": ("Mistral", {**ROTARY, "sliding_window": 3, "head_dim": 4}),
    "gemma": ("Gemma", {**ROTARY, "num_key_value_heads": 1, "head_dim": 6}),
    "gpt-neox": ("GPTNeoX", {**ROTARY, "num_attention_heads": 3, "hidden_dropout": 0.0}),
    "gpt2": (
        "GPT2",
        {
            **COMMON,
            "n_embd": 20,
            "n_head": 5,
            "n_positions": 64,
            "n_inner": 29,
            **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
        },
    ),
    "mixtral": (
        "Mixtral",
        {
            **ROTARY,
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
            "output_router_logits": True,
            "experts_implementation": "eager",
        },
    ),
}


def configured(name: str, **changes: Any) -> Any:
    import transformers

    kind, config = MODELS[name]
    config = {**config, **changes}
    return getattr(transformers, f"{kind}Config")(**config)


def class_of(name: str) -> Any:
    import transformers

    kind, _ = MODELS[name]
    return getattr(transformers, kind + ("LMHeadModel" if kind == "GPT2" else "ForCausalLM"))


def made(name: str, device: str = "cpu", **changes: Any) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device(device):
            return class_of(name)(configured(name, **changes))
    finally:
        torch.set_default_dtype(before)


def built(name: str, seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    torch.manual_seed(seed)
    model = made(name, **changes)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases that do something
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.to(dtype)


def batch_of(seed: int, size: int = 2, length: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(3, VOCAB, (2, size, length), generator=generator)
    labels[0, 2] = IGNORED
    return ids, labels
