"""What a model is to the planner: its sizes, and the matrices that follow from them.

`linears` is the one list of a layer's matrices: parameters, FLOPs, GEMM times and sharding all
come from it. Presets are in presets.py, Hugging Face configurations in hugging_face.py.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from math import ceil
from typing import Any, NamedTuple

from pyparallel.planner.errors import PlanError, named, shown

__all__ = ["Experts", "LatentAttention", "Linear", "ModelSpec", "linears"]


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP.

    Attributes:
        count: routed experts of a layer (E).
        active: of these, how many a token goes through (top k).
        ffn: width of one routed expert.
        shared_ffn: width of the expert that every token goes through; 0 if there is none.
        dense_layers: how many layers, from the first, have a plain MLP of width `ModelSpec.ffn`.
    """

    count: int
    active: int
    ffn: int
    shared_ffn: int = 0
    dense_layers: int = 0


@dataclass(frozen=True)
class LatentAttention:
    """DeepSeek's multi-head latent attention (arXiv:2405.04434, section 2.1): ranks and widths of
    a head; `query_rank` 0 where queries are projected at once."""

    query_rank: int
    key_value_rank: int
    plain: int  # of a head of q and k, without position
    rotary: int  # of a head of q and k, with position; one key for all heads
    value: int  # of a head of v


class Linear(NamedTuple):
    """A matrix of a layer.

    Attributes:
        name: for messages.
        inputs, outputs: of the whole matrix, K and N of its GEMM.
        shard: "column" (outputs over TP), "row" (inputs over TP), "whole" (on every TP rank).
        copies: how many there are; experts, divided over EP.
        rows: rows of its GEMM per token: how many of the copies a token meets.
        bias: whether it has one.
    """

    name: str
    inputs: int
    outputs: int
    shard: str
    copies: int = 1
    rows: float = 1.0
    bias: bool = False

    @property
    def weights(self) -> int:
        """Of all copies, without biases."""
        return self.inputs * self.outputs * self.copies


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer by its sizes.

    Attributes:
        layers, hidden, heads, vocab: L, h, a, V (V as published, before padding).
        ffn: f, width of the MLP; default 4 h.
        kv_heads: k; default `heads`.
        head_dim: d_h; default hidden / heads.
        max_seq: s of the learned position embedding, and the default sequence length.
        gated: the MLP has a gate beside its up projection (SwiGLU, GeGLU).
        tied: the output layer shares the embedding's weights.
        biases: which matrices have one: "all", "qkv" or "none".
        norm: "layer" (weight and bias) or "rms" (weight).
        positions: "learned" (a table of max_seq rows), "rotary" or "none" (ALiBi).
        embedding_norm: a norm after the embedding (BLOOM).
        head_norms: a norm over each head of q and of k (Qwen 3).
        experts, latent: mixture of experts, latent attention; None without.
        pad_vocab_to: V is padded to a multiple of this times TP (Megatron: 128).
    """

    name: str
    layers: int
    hidden: int
    heads: int
    vocab: int
    ffn: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    max_seq: int = 2048
    gated: bool = True
    tied: bool = False
    biases: str = "none"
    norm: str = "rms"
    positions: str = "rotary"
    embedding_norm: bool = False
    head_norms: bool = False
    experts: Experts | None = None
    latent: LatentAttention | None = None
    pad_vocab_to: int = 1

    def __post_init__(self) -> None:
        uneven = self.head_dim == 0 and self.heads > 0 and self.hidden % self.heads
        if uneven and self.hidden > 0:
            low = self.hidden - uneven
            near = " and ".join(str(n) for n in (low, low + self.heads) if n)
            raise PlanError(
                f"{self._called}: hidden={self.hidden} over heads={self.heads} leaves {uneven}; "
                f"nearest hidden {near}, or give head_dim"
            )
        derived = {
            "ffn": 4 * self.hidden,
            "kv_heads": self.heads,
            "head_dim": self.hidden // max(self.heads, 1),
        }
        for name, value in derived.items():
            if getattr(self, name) == 0:
                object.__setattr__(self, name, value)
        misfits = list(self._misfits())
        if misfits:
            raise PlanError(f"{self._called}: " + "; ".join(misfits))

    @property
    def _called(self) -> str:
        return "model" if self.name == "model" else f"model {self.name}"

    def _misfits(self) -> list[str]:
        found = []
        for field in ("layers", "hidden", "heads", "vocab", "ffn", "kv_heads", "head_dim",
                      "max_seq", "pad_vocab_to"):  # fmt: skip
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                found.append(f"{field}={shown(value)}: 1 or more is expected")
            most = {"layers": MOST_LAYERS, "heads": MOST_HEADS}.get(field, MOST_OTHERS)
            if not found and value > most:
                found.append(f"{field}={shown(value)}: at most {most} are expected")
        if found:
            return found
        if self.heads % self.kv_heads:
            near = [k for k in range(1, self.heads + 1) if self.heads % k == 0]
            near.sort(key=lambda k: abs(k - self.kv_heads))
            found.append(
                f"kv_heads={self.kv_heads} does not divide heads={self.heads}; "
                f"nearest {' and '.join(map(str, sorted(near[:2])))}"
            )
        for field, allowed in _CHOICES.items():
            if getattr(self, field) not in allowed:
                found.append(f"{field}={getattr(self, field)!r} is not one of {', '.join(allowed)}")
        if self.experts is not None:
            e = self.experts
            if not 1 <= e.active <= e.count:
                found.append(f"experts.active={e.active} of experts.count={e.count}")
            if e.ffn < 1 or e.shared_ffn < 0 or not 0 <= e.dense_layers <= self.layers:
                found.append(f"experts={e}: widths and layers that cannot be")
        return found

    @property
    def moe_layers(self) -> int:
        return 0 if self.experts is None else self.layers - self.experts.dense_layers

    def is_moe(self, layer: int) -> bool:
        """Whether layer number `layer`, from 0, has experts."""
        return self.experts is not None and layer >= self.experts.dense_layers

    def padded_vocab(self, tp: int = 1) -> int:
        """V, padded so that every TP rank holds as many rows."""
        step = self.pad_vocab_to * tp
        return ceil(self.vocab / step) * step

    @property
    def norm_width(self) -> int:
        """Numbers of a norm per hidden unit."""
        return 2 if self.norm == "layer" else 1

    def layer_parameters(self, layer: int) -> int:
        """Of one layer, on all ranks together."""
        count = sum(w.weights + w.bias * w.outputs * w.copies for w in linears(self, layer))
        return count + self.norm_parameters()

    def norm_parameters(self) -> int:
        """Of one layer's norms: two over h, and those inside attention."""
        count = 2 * self.norm_width * self.hidden
        if self.head_norms:
            count += 2 * self.head_dim
        if self.latent is not None:
            count += self.latent.query_rank + self.latent.key_value_rank
        return count

    def embedding_parameters(self, tp: int = 1) -> int:
        """Of the vocabulary's table (padded for TP), the positions' and its norm."""
        count = self.padded_vocab(tp) * self.hidden
        if self.positions == "learned":
            count += self.max_seq * self.hidden
        if self.embedding_norm:
            count += self.norm_width * self.hidden
        return count

    def head_parameters(self, tp: int = 1) -> int:
        """Of the last norm and the output layer's own weights (none where they are tied)."""
        own = 0 if self.tied else self.padded_vocab(tp) * self.hidden
        return own + self.norm_width * self.hidden

    def parameters(self, tp: int = 1) -> int:
        """Of the whole model; `tp` pads the vocabulary as that many TP ranks would."""
        dense = self.layers - self.moe_layers
        count = dense * self.layer_parameters(0) if dense else 0
        if self.moe_layers:
            count += self.moe_layers * self.layer_parameters(self.layers - 1)
        return count + self.embedding_parameters(tp) + self.head_parameters(tp)

    def active_parameters(self) -> int:
        """Those that one token meets: of the routed experts the `active` ones."""
        idle = 0
        if self.experts is not None:
            idle = self.moe_layers * sum(
                round(w.inputs * w.outputs * (w.copies - w.rows))
                for w in linears(self, self.layers - 1)
                if w.copies > 1
            )
        return self.parameters() - idle

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "parameters": self.parameters()}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "ModelSpec":
        """Of the form that `to_json` gives.

        Raises:
            PlanError: unknown or missing keys, or sizes that cannot be.
        """
        known = {f.name for f in fields(cls)}
        given = {k: v for k, v in document.items() if k != "parameters"}
        unknown = sorted(set(given) - known)
        missing = sorted({"name", "layers", "hidden", "heads", "vocab"} - set(given))
        if unknown or missing:
            raise PlanError(
                f"model: unknown keys {list(map(named, unknown))}, missing keys {missing}"
            )
        for name, kind in (("experts", Experts), ("latent", LatentAttention)):
            if isinstance(given.get(name), Mapping):
                try:
                    given[name] = kind(**given[name])
                except TypeError as error:
                    raise PlanError(f"model: {name}: {error}") from None
        return cls(**given)


MOST_LAYERS = 10_000  # a plan lists every layer of every stage
MOST_HEADS = 1 << 16  # every divisor of theirs is looked at
MOST_OTHERS = 1 << 40  # no figure of theirs outgrows a float
_CHOICES = {
    "biases": ("all", "qkv", "none"),
    "norm": ("layer", "rms"),
    "positions": ("learned", "rotary", "none"),
}


def kept_by_op(model: ModelSpec, linear: Linear) -> float:
    """Of a matrix's outputs, what recompute "op" keeps: of query, key, value, projection, gate, up
    and down every second product is computed again; of experts and low ranks half is taken."""
    a, k = model.heads, model.kv_heads
    gated = model.gated
    return {"qkv": (a + k) / (a + 2 * k), "projection": 0.0, "up": 0.5 if gated else 1.0,
            "down": 1.0 if gated else 0.0}.get(linear.name, 0.5)  # fmt: skip


def linears(model: ModelSpec, layer: int) -> tuple[Linear, ...]:
    """The matrices of layer number `layer`, from 0, in the order of the forward."""
    every, qkv = model.biases == "all", model.biases in ("all", "qkv")
    h, a, d = model.hidden, model.heads, model.head_dim
    if model.latent is not None:
        attention = _latent(model, model.latent)
    else:
        outputs = (a + 2 * model.kv_heads) * d
        attention = (
            Linear("qkv", h, outputs, "column", bias=qkv),
            Linear("projection", a * d, h, "row", bias=every),
        )
    wide = 2 if model.gated else 1
    if not model.is_moe(layer):
        return (
            *attention,
            Linear("up", h, wide * model.ffn, "column", bias=every),
            Linear("down", model.ffn, h, "row", bias=every),
        )
    e = model.experts
    assert e is not None
    mlp = [
        Linear("router", h, e.count, "whole"),
        Linear("expert up", h, wide * e.ffn, "column", e.count, e.active, bias=every),
        Linear("expert down", e.ffn, h, "row", e.count, e.active, bias=every),
    ]
    if e.shared_ffn:
        mlp.append(Linear("shared up", h, wide * e.shared_ffn, "column", bias=every))
        mlp.append(Linear("shared down", e.shared_ffn, h, "row", bias=every))
    return (*attention, *mlp)


def _latent(model: ModelSpec, latent: LatentAttention) -> tuple[Linear, ...]:
    h, a = model.hidden, model.heads
    head = latent.plain + latent.rotary
    if latent.query_rank:
        query: tuple[Linear, ...] = (
            Linear("query down", h, latent.query_rank, "whole"),
            Linear("query up", latent.query_rank, a * head, "column"),
        )
    else:
        query = (Linear("query", h, a * head, "column"),)
    keys = latent.key_value_rank
    return (
        *query,
        Linear("key-value down", h, keys + latent.rotary, "whole"),
        Linear("key-value up", keys, a * (latent.plain + latent.value), "column"),
        Linear("projection", a * latent.value, h, "row"),
    )
