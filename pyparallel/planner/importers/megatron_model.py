"""The model that Megatron-LM's flags describe."""

import re

from pyparallel.planner.errors import PlanError
from pyparallel.planner.importers.reader import Reader
from pyparallel.planner.importers.settings import Settings, nearest_divisors
from pyparallel.planner.models import Experts, LatentAttention, ModelSpec

__all__ = ["read_model"]

_POSITIONS = {"learned_absolute": "learned", "none": "none"}


def read_model(reader: Reader, s: Settings) -> ModelSpec | None:
    layers = reader.whole("num-layers") or reader.whole("encoder-num-layers")
    hidden, heads = reader.whole("hidden-size"), reader.whole("num-attention-heads")
    gated = reader.truth("swiglu")
    s.sequence = reader.whole("seq-length") or reader.whole("encoder-seq-length")
    positions = reader.whole("max-position-embeddings") or s.sequence
    vocab = reader.whole("vocab-size") or reader.whole("padded-vocab-size")
    multiple = reader.whole("make-vocab-size-divisible-by", 128) or 128
    tied = not reader.truth("untie-embeddings-and-output-weights")
    kind = reader.word("position-embedding-type", "learned_absolute") or "learned_absolute"
    norm = reader.word("normalization", "LayerNorm", ("LayerNorm", "RMSNorm"))
    bias = not reader.truth("disable-bias-linear")
    qkv_bias = reader.truth("add-qkv-bias")
    head_norms = reader.truth("qk-layernorm")
    channels = reader.whole("kv-channels")
    grouped = reader.truth("group-query-attention")
    query_groups = reader.whole("num-query-groups", 1 if grouped else None) or 1
    required = {"num-layers": layers, "hidden-size": hidden, "num-attention-heads": heads}
    missing = [key for key, value in required.items() if value is None]
    if layers is None or hidden is None or heads is None:
        given = len(required) - len(missing)
        if given:
            for key in missing:
                reader.lacks(key, f"add --{key}")
        return None
    wide = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
    ffn = reader.whole("ffn-hidden-size", wide)
    if channels is None and hidden % heads:
        reader.breaks(
            "num-attention-heads",
            "heads divide the hidden size, or --kv-channels is given",
            f"{heads} heads, hidden {hidden}",
            f"take {nearest_divisors(heads, hidden)} heads",
        )
        return None
    kv = query_groups if grouped else heads
    if kv % s.tp and s.tp % kv:
        reader.breaks(
            "num-query-groups",
            "query groups and tp divide one or the other",
            f"{kv} groups, tp {s.tp}",
            f"take tp {nearest_divisors(s.tp, kv)}",
        )
    if heads % s.tp:
        reader.breaks(
            "tensor-model-parallel-size",
            "tp divides the heads",
            f"tp {s.tp}, {heads} heads",
            f"take tp {nearest_divisors(s.tp, heads)}",
        )
    if s.sequence and positions and positions < s.sequence:
        reader.breaks(
            "max-position-embeddings",
            "positions reach to the sequence length",
            f"{positions}, and --seq-length {s.sequence}",
            f"take --max-position-embeddings {s.sequence}",
        )
    if vocab is None:
        vocab = 50257
        reader.assumptions.append(
            "a vocabulary of 50257: the flags do not hold it (the tokenizer does); add "
            "--vocab-size for another"
        )
    try:
        return ModelSpec(
            "of the flags",
            layers,
            hidden,
            heads,
            vocab,
            ffn=ffn or 0,
            kv_heads=kv,
            head_dim=channels or 0,
            max_seq=max(positions or 0, s.sequence or 0) or 2048,
            gated=gated,
            tied=tied,
            biases="all" if bias else "qkv" if qkv_bias else "none",
            norm="rms" if norm == "RMSNorm" else "layer",
            positions=_POSITIONS.get(kind, "rotary"),
            head_norms=head_norms,
            experts=_experts(reader, s, layers, ffn or 0),
            latent=_latent(reader),
            pad_vocab_to=multiple,
        )
    except PlanError as error:
        raise reader.source.fail(("num-layers",), str(error)) from None


def _experts(reader: Reader, s: Settings, layers: int, ffn: int) -> Experts | None:
    count = reader.whole("num-experts", least=0)
    if not count:
        if s.ep > 1:
            reader.breaks(
                "expert-model-parallel-size",
                "experts are spread only where there are some",
                f"{s.ep} without --num-experts",
                "remove it",
            )
        return None
    if count % s.ep:
        reader.breaks(
            "expert-model-parallel-size",
            "it divides the experts",
            f"{s.ep}, {count} experts",
            f"take {nearest_divisors(s.ep, count)}",
        )
    pattern = reader.word("moe-layer-freq", "1") or "1"
    dense = 0
    if pattern != "1":
        counts = [int(part or 0) for part in _dense_first(pattern)]
        if counts and sum(counts) == layers:
            dense = counts[0]
        else:
            reader.assumptions.append(
                f"--moe-layer-freq {pattern}: experts in every layer are assumed; the planner "
                "knows dense layers at the beginning only"
            )
    return Experts(
        count,
        reader.whole("moe-router-topk", 2) or 2,
        reader.whole("moe-ffn-hidden-size", ffn) or ffn,
        reader.whole("moe-shared-expert-intermediate-size", least=0) or 0,
        dense,
    )


def _dense_first(pattern: str) -> list[str]:
    """([0]*3+[1]*58) -> 3, 58: dense layers first, then those with experts."""
    found = re.fullmatch(r"\(?\[0\](?:\*(\d+))?\+\[1\](?:\*(\d+))?\)?", pattern.replace(" ", ""))
    return [found[1] or "1", found[2] or "1"] if found else []


def _latent(reader: Reader) -> LatentAttention | None:
    if not reader.truth("multi-latent-attention"):
        return None
    return LatentAttention(
        reader.whole("q-lora-rank", least=0) or 0,
        reader.whole("kv-lora-rank", 32) or 32,
        reader.whole("qk-head-dim", 128) or 128,
        reader.whole("qk-pos-emb-head-dim", 64) or 64,
        reader.whole("v-head-dim", 128) or 128,
    )
