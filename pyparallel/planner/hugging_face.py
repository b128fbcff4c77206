"""A model from its Hugging Face config.json, or from sizes on a command line."""

import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from pyparallel.planner.errors import PlanError, nearest_names, shown
from pyparallel.planner.measured import in_file, read_json
from pyparallel.planner.models import Experts, LatentAttention, ModelSpec
from pyparallel.planner.presets import preset

__all__ = ["from_config", "model_from"]

# Families whose blocks are the ones that `linears` lists. What each has beside the sizes.
_ROTARY: dict[str, Any] = {"norm": "rms", "positions": "rotary", "gated": True}
_LAYER_NORM: dict[str, Any] = {"norm": "layer", "biases": "all", "gated": False}
_FAMILIES: Mapping[str, dict[str, Any]] = {
    "llama": _ROTARY,
    "mistral": _ROTARY,
    "mixtral": _ROTARY,
    "qwen2": {**_ROTARY, "biases": "qkv"},
    "qwen2_moe": {**_ROTARY, "biases": "qkv"},
    "qwen3": {**_ROTARY, "head_norms": True},
    "qwen3_moe": {**_ROTARY, "head_norms": True},
    "deepseek_v2": _ROTARY,
    "deepseek_v3": _ROTARY,
    "olmo2": {**_ROTARY, "head_norms": True},
    "olmoe": {**_ROTARY, "head_norms": True},
    "exaone4": {**_ROTARY, "head_norms": True},
    "smollm3": {**_ROTARY, "tied": True},
    "granite": _ROTARY,
    "glm4": {**_ROTARY, "biases": "qkv"},
    "gpt_oss": {**_ROTARY, "biases": "all"},
    "gemma": {**_ROTARY, "tied": True},
    "gemma2": {**_ROTARY, "tied": True},
    "gemma3_text": {**_ROTARY, "tied": True, "head_norms": True},
    "phi3": _ROTARY,
    "starcoder2": {**_LAYER_NORM, "positions": "rotary", "tied": True},
    "nemotron": {**_LAYER_NORM, "positions": "rotary", "biases": "none"},
    "mpt": {**_LAYER_NORM, "positions": "none", "biases": "none", "tied": True},
    "gpt2": {**_LAYER_NORM, "positions": "learned", "tied": True},
    "gpt_neox": {**_LAYER_NORM, "positions": "rotary"},
    "bloom": {**_LAYER_NORM, "positions": "none", "tied": True, "embedding_norm": True},
    "opt": {**_LAYER_NORM, "positions": "learned", "tied": True},
}
# Names of the sizes, in the order in which they are looked for.
_KEYS: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocab": ("vocab_size",),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "max_seq": ("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_seq_len"),
}
# Keys that make some layers unlike the others, or the sizes other than they seem.
_UNIFORM: Mapping[str, tuple[Any, ...]] = {
    "mlp_only_layers": (None, []),
    "decoder_sparse_step": (None, 1),
    "moe_layer_freq": (None, 1),
    "interleave_moe_layer_step": (None, 1),
}
_NEEDED = ("layers", "hidden", "heads", "vocab")


def model_from(text: str) -> ModelSpec:
    """What `--model` says: a preset, the path of a config.json (or its folder), or sizes.

    Raises:
        PlanError: none of these; near names are listed, a broken file names line and key.
    """
    path = Path(text)
    try:
        folder, file = path.is_dir(), path.is_file()
    except OSError as error:  # longer than a path can be
        raise PlanError(f"model {text[:40]!r}...: {error.strerror}") from None
    if folder:
        path = path / "config.json"
    if path.suffix == ".json" or file or folder:
        config, name = read_json(path), path.parent.name or path.stem
        try:
            return from_config(config, name)
        except PlanError as error:
            text = str(error).removeprefix(f"{name}: ").removeprefix(f"model {name}: ")
            raise PlanError(in_file(path, _by_their_key(text, config))) from None
    if "=" in text:
        return _from_sizes(text)
    return preset(text)


def _by_their_key(text: str, config: Mapping[str, Any]) -> str:
    """An error that begins with one of our sizes ("kv_heads=5 ..."), with the file's key for it."""
    size = re.match(r"(\w+)=", text)
    keys = _KEYS.get(size[1], ()) if size else ()
    inner = config.get("text_config", config)
    return next((f"key {key}: {text}" for key in keys if key in inner), text)


def from_config(config: Mapping[str, Any], name: str) -> ModelSpec:
    """Of a parsed config.json.

    Raises:
        PlanError: the family is not known, a size is missing or no whole number.
    """
    config = config.get("text_config", config)
    if not isinstance(config, Mapping):
        raise PlanError(f"{name}: key text_config: {shown(config)}: keys with values are expected")
    if "model_type" not in config:
        raise PlanError(f"{name}: key model_type is missing: no config.json of a model")
    family = str(config["model_type"])
    if family not in _FAMILIES:
        near = nearest_names(family, _FAMILIES)
        raise PlanError(
            f"{name}: key model_type: {shown(family)} is not known{'; ' + near if near else ''}; "
            f"known are {', '.join(_FAMILIES)}; or give sizes as layers=32,hidden=4096,..."
        )
    given: dict[str, Any] = dict(_FAMILIES[family])
    for size, keys in _KEYS.items():
        found = [(key, config[key]) for key in keys if config.get(key) is not None]
        if found:
            given[size] = _whole(name, *found[0])
        elif size in _NEEDED:
            raise PlanError(f"{name}: key {keys[0]} is missing")
    if "tie_word_embeddings" in config:
        given["tied"] = bool(config["tie_word_embeddings"])
    if config.get("attention_bias") and given.get("biases", "none") == "none":
        given["biases"] = "qkv"
    if config.get("mlp_bias"):
        given["biases"] = "all"
    _check_uniform(name, config, given["hidden"])
    given["experts"] = _experts(name, config)
    given["latent"] = _latent(name, config)
    if given["latent"] is not None:
        given["kv_heads"] = given["heads"]
        given["head_dim"] = given["latent"].plain + given["latent"].rotary
    return ModelSpec(name, **given)


def _check_uniform(name: str, config: Mapping[str, Any], hidden: int) -> None:
    """Refuses what the sizes alone do not say."""
    for key, fine in _UNIFORM.items():
        if config.get(key) not in fine:
            raise PlanError(
                f"{name}: key {key}: {shown(config[key])}: layers that take turns are not planned; "
                f"{fine[-1]!r} is expected"
            )
    width = config.get("word_embed_proj_dim")
    if width not in (None, hidden):
        raise PlanError(
            f"{name}: key word_embed_proj_dim: {shown(width)}: an embedding narrower than the "
            f"layers is not planned; {hidden} is expected"
        )


def _whole(name: str, key: str, value: Any, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise PlanError(
            f"{name}: key {key}: {shown(value)}: a whole number from {least} is expected"
        )
    return value


def _count(name: str, config: Mapping[str, Any], key: str) -> int:
    """A size that may be missing, null or 0."""
    return _whole(name, key, config.get(key) or 0, 0)


def _experts(name: str, config: Mapping[str, Any]) -> Experts | None:
    keys = ("num_local_experts", "num_experts", "n_routed_experts")
    key = next((k for k in keys if config.get(k)), None)
    if key is None:
        return None
    active = config.get("num_experts_per_tok")
    if active is None:
        raise PlanError(f"{name}: key num_experts_per_tok is missing beside {key}")
    own = "moe_intermediate_size"
    width_key = own if config.get(own) else "intermediate_size"
    width = _whole(name, width_key, config.get(width_key))
    shared = _count(name, config, "shared_expert_intermediate_size")
    shared += width * _count(name, config, "n_shared_experts")
    return Experts(
        _whole(name, key, config[key]),
        _whole(name, "num_experts_per_tok", active),
        width,
        shared,
        _count(name, config, "first_k_dense_replace"),
    )


def _latent(name: str, config: Mapping[str, Any]) -> LatentAttention | None:
    if not config.get("kv_lora_rank"):
        return None
    keys = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    missing = [key for key in keys if key not in config]
    if missing:
        raise PlanError(f"{name}: keys {', '.join(missing)} are missing beside kv_lora_rank")
    rank, plain, rotary, value = (_whole(name, key, config[key]) for key in keys)
    return LatentAttention(_count(name, config, "q_lora_rank"), rank, plain, rotary, value)


def _from_sizes(text: str) -> ModelSpec:
    """ "layers=32,hidden=4096,heads=32,vocab=32000,ffn=11008,kv_heads=8,gated=true"."""
    kinds = {f.name: f.type for f in fields(ModelSpec)}
    kinds = {n: t for n, t in kinds.items() if t in (int, bool, str)}
    given: dict[str, Any] = {"name": "model"}
    for word in text.split(","):
        key, _, value = word.partition("=")
        key = key.strip()
        if key not in kinds:
            near = nearest_names(key, kinds)
            raise PlanError(
                f"--model: no size {shown(key)}{'; ' + near if near else ''}; there are "
                f"{', '.join(kinds)}"
            )
        if key in given and key != "name":
            raise PlanError(
                f"--model: {key} is given twice: {key}={given[key]}, then {word.strip()}"
            )
        given[key] = _value(key, value.strip(), kinds[key])
    missing = [name for name in _NEEDED if name not in given]
    if missing:
        raise PlanError(f"--model: sizes missing: {', '.join(missing)}")
    return ModelSpec(**given)


def _value(key: str, text: str, kind: Any) -> Any:
    if kind is bool:
        if text.lower() not in ("true", "false", "1", "0"):
            raise PlanError(f"--model: {key}={text}: true or false is expected")
        return text.lower() in ("true", "1")
    if kind is int:
        try:
            number = int(text)
        except ValueError:
            raise PlanError(
                f"--model: {key}={shown(text)[1:-1]}: a whole number is expected"
            ) from None
        if number < 1:
            raise PlanError(f"--model: {key}={number}: 1 or more is expected")
        return number
    return text
