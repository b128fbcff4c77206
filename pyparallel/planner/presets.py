"""Models by name. Sizes from the papers or the published configurations named beside them."""

import re
from collections.abc import Mapping
from dataclasses import replace

from pyparallel.planner.errors import PlanError, nearest_names
from pyparallel.planner.models import Experts, LatentAttention, ModelSpec

__all__ = ["PRESETS", "known_model", "preset"]


def _gpt(name: str, layers: int, hidden: int, heads: int, vocab: int = 51200) -> ModelSpec:
    """Megatron's GPT: learned positions, LayerNorm, biases, tied output layer."""
    return ModelSpec(
        name, layers, hidden, heads, vocab, gated=False, tied=True, biases="all", norm="layer",
        positions="learned", pad_vocab_to=128,
    )  # fmt: skip


def _llama(
    name: str, layers: int, hidden: int, heads: int, kv: int, ffn: int, vocab: int, seq: int,
    tied: bool = False, biases: str = "none", head_dim: int = 0, head_norms: bool = False,
) -> ModelSpec:  # fmt: skip
    """Rotary positions, RMSNorm, gated MLP."""
    return ModelSpec(
        name, layers, hidden, heads, vocab, ffn, kv, head_dim, seq, tied=tied, biases=biases,
        head_norms=head_norms,
    )  # fmt: skip


def _moe(base: ModelSpec, experts: Experts) -> ModelSpec:
    return replace(base, experts=experts)


_MODELS = (
    # Narayanan et al., arXiv:2104.04473, table 1; Korthikanti et al., arXiv:2205.05198, table 3
    _gpt("gpt3-175b", 96, 12288, 96),
    _gpt("megatron-1.7b", 24, 2304, 24),
    _gpt("megatron-3.6b", 30, 3072, 32),
    _gpt("megatron-7.5b", 36, 4096, 32),
    _gpt("megatron-18b", 40, 6144, 48),
    _gpt("megatron-22b", 48, 6144, 64),
    _gpt("megatron-39b", 48, 8192, 64),
    _gpt("megatron-76b", 60, 10240, 80),
    _gpt("megatron-145b", 80, 12288, 96),
    _gpt("megatron-175b", 96, 12288, 96),
    _gpt("megatron-310b", 96, 16384, 128),
    _gpt("megatron-530b", 105, 20480, 128),
    _gpt("megatron-1t", 128, 25600, 160),
    # config.json of each on huggingface.co
    _llama("llama-2-7b", 32, 4096, 32, 32, 11008, 32000, 4096),
    _llama("llama-2-13b", 40, 5120, 40, 40, 13824, 32000, 4096),
    _llama("llama-2-70b", 80, 8192, 64, 8, 28672, 32000, 4096),
    _llama("llama-3-8b", 32, 4096, 32, 8, 14336, 128256, 8192),
    _llama("llama-3-70b", 80, 8192, 64, 8, 28672, 128256, 8192),
    _llama("llama-3.1-8b", 32, 4096, 32, 8, 14336, 128256, 131072),
    _llama("llama-3.1-70b", 80, 8192, 64, 8, 28672, 128256, 131072),
    _llama("llama-3.1-405b", 126, 16384, 128, 8, 53248, 128256, 131072),
    _llama("llama-3.2-1b", 16, 2048, 32, 8, 8192, 128256, 131072, tied=True),
    _llama("llama-3.2-3b", 28, 3072, 24, 8, 8192, 128256, 131072, tied=True),
    _llama("llama-3.3-70b", 80, 8192, 64, 8, 28672, 128256, 131072),
    _llama("smollm-135m", 30, 576, 9, 3, 1536, 49152, 2048, tied=True),
    _llama("smollm-360m", 32, 960, 15, 5, 2560, 49152, 2048, tied=True),
    _llama("smollm-1.7b", 24, 2048, 32, 32, 8192, 49152, 2048, tied=True),
    _llama("qwen2.5-0.5b", 24, 896, 14, 2, 4864, 151936, 32768, tied=True, biases="qkv"),
    _llama("qwen2.5-1.5b", 28, 1536, 12, 2, 8960, 151936, 131072, tied=True, biases="qkv"),
    _llama("qwen2.5-3b", 36, 2048, 16, 2, 11008, 151936, 32768, tied=True, biases="qkv"),
    _llama("qwen2.5-7b", 28, 3584, 28, 4, 18944, 152064, 131072, biases="qkv"),
    _llama("qwen2.5-14b", 48, 5120, 40, 8, 13824, 152064, 131072, biases="qkv"),
    _llama("qwen2.5-32b", 64, 5120, 40, 8, 27648, 152064, 131072, biases="qkv"),
    _llama("qwen2.5-72b", 80, 8192, 64, 8, 29568, 152064, 131072, biases="qkv"),
    _llama("qwen3-0.6b", 28, 1024, 16, 8, 3072, 151936, 40960, tied=True, head_norms=True,
           head_dim=128),
    _llama("qwen3-1.7b", 28, 2048, 16, 8, 6144, 151936, 40960, tied=True, head_norms=True,
           head_dim=128),
    _llama("qwen3-4b", 36, 2560, 32, 8, 9728, 151936, 40960, tied=True, head_norms=True,
           head_dim=128),
    _llama("qwen3-8b", 36, 4096, 32, 8, 12288, 151936, 40960, head_norms=True, head_dim=128),
    _llama("qwen3-14b", 40, 5120, 40, 8, 17408, 151936, 40960, head_norms=True, head_dim=128),
    _llama("qwen3-32b", 64, 5120, 64, 8, 25600, 151936, 40960, head_norms=True, head_dim=128),
    _moe(
        _llama("qwen3-30b-a3b", 48, 2048, 32, 4, 6144, 151936, 40960, head_norms=True,
               head_dim=128),
        Experts(128, 8, 768),
    ),
    _moe(
        _llama("qwen3-235b-a22b", 94, 4096, 64, 4, 12288, 151936, 40960, head_norms=True,
               head_dim=128),
        Experts(128, 8, 1536),
    ),
    _llama("mistral-7b", 32, 4096, 32, 8, 14336, 32000, 32768),
    _llama("mistral-nemo-12b", 40, 5120, 32, 8, 14336, 131072, 131072, head_dim=128),
    _llama("mistral-large-123b", 88, 12288, 96, 8, 28672, 32768, 131072),
    _moe(_llama("mixtral-8x7b", 32, 4096, 32, 8, 14336, 32000, 32768), Experts(8, 2, 14336)),
    _moe(_llama("mixtral-8x22b", 56, 6144, 48, 8, 16384, 32768, 65536), Experts(8, 2, 16384)),
    # BigScience, arXiv:2211.05100
    ModelSpec(
        "bloom-176b", 70, 14336, 112, 250880, gated=False, tied=True, biases="all", norm="layer",
        positions="none", embedding_norm=True,
    ),
    # DeepSeek, arXiv:2405.04434 and arXiv:2412.19437
    ModelSpec(
        "deepseek-v2", 60, 5120, 128, 102400, 12288, head_dim=192, max_seq=163840,
        experts=Experts(160, 6, 1536, 3072, 1), latent=LatentAttention(1536, 512, 128, 64, 128),
    ),
    ModelSpec(
        "deepseek-v3", 61, 7168, 128, 129280, 18432, head_dim=192, max_seq=163840,
        experts=Experts(256, 8, 2048, 2048, 3), latent=LatentAttention(1536, 512, 128, 64, 128),
    ),
)  # fmt: skip
PRESETS: Mapping[str, ModelSpec] = {model.name: model for model in _MODELS}


def preset(name: str) -> ModelSpec:
    """The model called `name`, as hubs and frameworks write it too ("meta-llama/Llama-3.1-8B-hf");
    case, underscores and a missing hyphen do not matter.

    Raises:
        PlanError: there is none; near names are listed.
    """
    found = known_model(name)
    if found is None:
        near = nearest_names(name.rsplit("/", 1)[-1], PRESETS)
        raise PlanError(
            f"no model {name!r}{'; ' + near if near else ''}. There are {', '.join(PRESETS)}; or "
            "a Hugging Face config.json, or sizes as layers=32,hidden=4096,heads=32,vocab=32000"
        )
    return found


# What publishers put around a model's name.
_AROUND = re.compile(r"^meta-(?=llama)|-(hf|instruct|chat|base|it|v\d+(\.\d+)*)$")


def known_model(name: str) -> ModelSpec | None:
    """The preset of this name, as hubs and frameworks write it; None for others."""
    by_letters = {_letters(key): model for key, model in PRESETS.items()}
    short, bare = "", name.rsplit("/", 1)[-1].lower()
    while bare != short:
        short = bare
        if _letters(short) in by_letters:
            return by_letters[_letters(short)]
        bare = _AROUND.sub("", short)
    return None


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower())
