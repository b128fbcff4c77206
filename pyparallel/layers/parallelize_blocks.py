"""Blocks that are known by their structure: attentions, gated MLPs, stacked experts.

    attention   q_proj, k_proj, v_proj and o_proj    whole heads; kv heads copied if they must be
                query_key_value and dense            GPT-NeoX: [head, (q, k, v), head_dim]
                c_attn and c_proj                    GPT-2: [(q, k, v), head, head_dim], [in, out]
    gated MLP   gate_proj, up_proj and down_proj     one input for both, so that it comes once
    experts     parameters gate_up_proj, down_proj   [E, 2 I, H], [E, H, I]

How a fused projection orders its features is not to be seen from the module: it is known for these
model types only, and elsewhere said to be unknown.
"""

from typing import Any, NamedTuple

from torch import Tensor, nn

from pyparallel.layers.partition import HeadSplit, Partition, Run, split_heads

__all__ = ["MLPS", "Attention", "attention_of", "experts_misfit", "linear_size", "padded_heads"]

# Column-parallel layers of one input, and the row-parallel one after them.
MLPS = [
    (("gate_proj", "up_proj"), "down_proj"),
    (("w1", "w3"), "w2"),
    (("c_fc",), "c_proj"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("fc1",), "fc2"),
    (("fc_in",), "fc_out"),
    (("up_proj",), "down_proj"),
]
SEPARATE = ("q_proj", "k_proj", "v_proj")
OUTPUTS = ("o_proj", "out_proj", "dense")
FUSED = {  # model type: column, row, how features of q, k, v follow one another
    "gpt_neox": ("query_key_value", "dense", "interleaved"),
    "gpt2": ("c_attn", "c_proj", "stacked"),
}
# What attentions keep of their numbers of heads; set to this rank's.
QUERY_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
QUERIES_PER_KV = ("num_key_value_groups", "num_queries_per_kv", "n_rep")


def linear_size(module: Any) -> "tuple[int, int] | None":
    """(out, in) features of a plain linear layer, also one that keeps [in, out]; None of others."""
    if not isinstance(module, nn.Module) or not isinstance(
        module._parameters.get("weight"), Tensor
    ):
        return None
    if isinstance(module, nn.Linear):
        known = type(module).forward is nn.Linear.forward
        return (module.out_features, module.in_features) if known else None
    weight = module._parameters["weight"]
    assert weight is not None
    if is_transposed(module) and weight.dim() == 2:
        return weight.shape[1], weight.shape[0]
    return None


def is_transposed(module: nn.Module) -> bool:
    """Whether a linear layer keeps its weight as [in, out]: GPT-2's Conv1D."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


class Attention(NamedTuple):
    """An attention whose projections fall onto ranks by heads."""

    columns: tuple[str, ...]
    row: str
    form: str  # separate, interleaved or stacked
    heads: int
    kv_heads: int
    head_dim: int
    norms: tuple[str, ...]  # over one head each; shared by all heads

    def split(self, ranks: int) -> HeadSplit:
        return padded_heads(split_heads(self.heads, self.kv_heads, self.head_dim, ranks), ranks)

    def column_partitions(self, split: HeadSplit) -> list[Partition]:
        """How the output features of each of `columns` fall onto the ranks."""
        if self.form == "separate":
            return [split.query, split.kv, split.kv]
        if self.form == "stacked":
            return [Partition.joined([split.query, split.kv, split.kv])]
        whole = split.query
        return [
            Partition(
                3 * whole.size,
                tuple(
                    tuple(Run(3 * run.start, 3 * run.length, 3 * run.padding) for run in runs)
                    for runs in whole.runs
                ),
            )
        ]

    def set_heads(self, module: nn.Module, split: HeadSplit, rank: int) -> None:
        """Makes the module's own numbers of heads those of this rank."""
        numbers = dict.fromkeys(QUERY_HEADS, split.query_heads(rank))
        numbers |= dict.fromkeys(KV_HEADS, split.kv_heads(rank))
        numbers |= dict.fromkeys(QUERIES_PER_KV, split.queries_per_kv)
        numbers["split_size"] = split.query.local_size(rank)  # GPT-2
        for name, value in numbers.items():
            if isinstance(getattr(module, name, None), int):
                setattr(module, name, value)


def attention_of(module: nn.Module, config: Any) -> "Attention | str | None":
    """What is known of an attention; why it cannot be sharded; None if it is none."""
    children = dict(module.named_children())
    columns: tuple[str, ...] = SEPARATE
    row, form = next((n for n in OUTPUTS if n in children), ""), "separate"
    if not set(SEPARATE) <= set(children):
        fused = [n for n, _, _ in FUSED.values() if n in children]
        if not fused or (not hasattr(module, "head_dim") and not hasattr(module, "head_size")):
            return None
        kind = getattr(config, "model_type", "")
        if kind not in FUSED:
            return f"how {fused[0]} orders q, k and v is not known for model type {kind!r}"
        column, row, form = FUSED[kind]
        columns = (column,)
    head_dim = getattr(module, "head_dim", getattr(module, "head_size", None))
    if not isinstance(head_dim, int):
        return None
    if getattr(module, "is_cross_attention", False):
        return "it is a cross attention"
    misfits = _misfits(module, children, [*columns, row], head_dim)
    if misfits:
        return misfits
    sizes = [linear_size(children[name]) for name in columns]
    out = linear_size(children[row])
    assert out is not None
    given = [size[0] for size in sizes if size is not None]
    heads = given[0] // head_dim // (1 if form == "separate" else 3)
    kv_heads = given[1] // head_dim if form == "separate" else heads
    if form == "separate" and given[1] != given[2]:
        return f"k_proj gives {given[1]} features and v_proj {given[2]}"
    widths = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    whole = widths if form == "separate" else [sum(widths)]
    expected = getattr(getattr(module, "config", config), "num_attention_heads", heads)
    if given != whole or out[1] != heads * head_dim or heads != expected or heads % kv_heads:
        return (
            f"its projections give {given} features and {row} takes {out[1]}, which are no "
            f"{expected} heads of {head_dim}"
        )
    norms = tuple(n for n in ("q_norm", "k_norm") if n in children)
    return Attention(tuple(columns), row, form, heads, kv_heads, head_dim, norms)


def _misfits(
    module: nn.Module, children: "dict[str, nn.Module]", linears: "list[str]", head_dim: int
) -> str:
    """Why an attention's parts are not what is known of one; empty if they are."""
    if any(parameter is not None for parameter in module._parameters.values()):
        return f"it has parameters of its own, {sorted(module._parameters)}"
    for name in linears:
        if linear_size(children.get(name)) is None:
            found = type(children[name]).__name__ if name in children else "not there"
            return f"{name or 'its output projection'} is {found}; expected a linear layer"
    for name, child in children.items():
        if name in linears or not any(True for _ in child.parameters()):
            continue
        shapes = [tuple(parameter.shape) for parameter in child.parameters()]
        if name not in ("q_norm", "k_norm") or any(shape != (head_dim,) for shape in shapes):
            return f"{name} has parameters of shapes {shapes}, which may concern all heads together"
    return ""


def padded_heads(split: HeadSplit, ranks: int) -> HeadSplit:
    """The same, but ranks without a head hold one that is all padding.

    Attentions of other libraries cannot run without a head. A head of zeros gives zero, is never
    trained, and no state dict has it.
    """
    dim, per_kv = split.head_dim, split.queries_per_kv
    idle = [split.query.local_size(rank) == 0 for rank in range(ranks)]

    def padded(partition: Partition, size: int) -> Partition:
        empty = (Run(0, 0, size),)
        runs = (empty if nothing else r for nothing, r in zip(idle, partition.runs, strict=True))
        return Partition(partition.size, tuple(runs))

    if not any(idle):
        return split
    return HeadSplit(padded(split.query, per_kv * dim), padded(split.kv, dim), per_kv, dim)


def experts_misfit(module: nn.Module) -> "str | None":
    """Why stacked experts cannot be sharded; empty if they can; None if they are none."""
    up, down = (module._parameters.get(name) for name in ("gate_up_proj", "down_proj"))
    if up is None or down is None or up.dim() != 3 or down.dim() != 3:
        return None
    others = sorted(set(module._parameters) - {"gate_up_proj", "down_proj"})
    if others:
        return f"it has the parameters {others} too"
    if getattr(module, "is_transposed", False) or not getattr(module, "is_concatenated", True):
        return "its gate and up features are interleaved, or its weights transposed"
    experts, both, hidden = up.shape
    if both % 2 or tuple(down.shape) != (experts, hidden, both // 2):
        return (
            f"gate_up_proj has shape {list(up.shape)} and down_proj {list(down.shape)}; expected "
            "[E, 2 I, H] and [E, H, I]"
        )
    return ""
