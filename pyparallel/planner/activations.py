"""Bytes that a forward keeps for its backward, and those that live inside a backward.

Counted tensor by tensor. For the GPT of arXiv:2205.05198 the sum is its equations 1 to 6
(34 s b h + 5 a s^2 b and their parallel forms); tests hold both equal.
"""

from pyparallel.planner.layout import Job, Layout
from pyparallel.planner.models import kept_by_op, linears
from pyparallel.planner.stages import local_linear

__all__ = [
    "layer_activations",
    "layer_transient",
    "local_tokens",
    "logits_bytes",
    "weight_gradients",
]


def local_tokens(job: Job, layout: Layout) -> float:
    """Tokens of a microbatch on one device: s b / c."""
    return job.seq * layout.micro_batch / layout.cp


def layer_activations(job: Job, layout: Layout, layer: int) -> float:
    """Bytes of one layer and microbatch on one device.

    With full recompute only the layer's input, 2 s b h (over tp with sequence parallelism).
    """
    if layout.recompute == "full":
        return _whole(job, layout) * job.bytes.activation * job.model.hidden
    return kept_bytes(job, layout, layer)


def _whole(job: Job, layout: Layout) -> float:
    """Tokens of what is outside of the GEMMs: sequence parallelism shards them over tp."""
    return local_tokens(job, layout) / (layout.tp if layout.sequence_parallel else 1)


def kept_bytes(job: Job, layout: Layout, layer: int) -> float:
    """The same without regard to full recompute: what a recomputed layer has for a while."""
    if layout.recompute == "op":
        return _kept_by_op(job, layout, layer)
    model, e, g = job.model, job.bytes.activation, job.bytes.gemm_input
    h = model.hidden
    # Two norms' inputs, and what the norms give to the first GEMM of attention and MLP.
    per_whole = 2 * e * h + 2 * g * h
    if job.dropout:
        per_whole += h  # the mask after attention; the MLP's is counted there
    inner = _attention_core(job, layout)
    if g != e:  # flash attention keeps its output as it was; the projection its own copy
        width = model.head_dim if model.latent is None else model.latent.value
        inner += g * model.heads * width / layout.tp
    if model.latent is None:
        keys = model.kv_heads * max(1.0, layout.tp / model.kv_heads)
        inner += e * (2 * model.heads + 2 * keys) * model.head_dim / layout.tp
        if model.head_norms:  # q and k as they were before their norms
            inner += e * (model.heads + keys) * model.head_dim / layout.tp
    else:
        wide = model.latent
        head = wide.plain + wide.rotary
        # Before and after the norms of the low ranks, which tp does not shard; q and k with their
        # positions; what v is a part of; the core's output.
        per_whole += e * 2 * (wide.query_rank + wide.key_value_rank) + e * wide.rotary
        per_head = 2 * head + (wide.plain + wide.value) + wide.value
        inner += e * model.heads * per_head / layout.tp
    inner += _mlp(job, layout, layer)
    if job.dropout:
        per_whole += h
    return per_whole * _whole(job, layout) + inner * local_tokens(job, layout)


def _kept_by_op(job: Job, layout: Layout, layer: int) -> float:
    """Bytes of the layer's input, of attention's output, of every second product; of tensor
    parallelism also of the two sums."""
    model, e = job.model, job.bytes.activation
    sums = 2 if layout.tp > 1 else 0
    width = model.head_dim if model.latent is None else model.latent.value
    inner = e * model.heads * width / layout.tp + _attention_core(job, layout)
    for linear in linears(model, layer):
        rows = linear.rows / (layout.tp if linear.shard == "whole" else 1)
        outputs = local_linear(linear, model, layout).outputs
        inner += e * kept_by_op(model, linear) * outputs * rows
    whole = e * (1 + sums) * model.hidden * _whole(job, layout)
    return whole + inner * local_tokens(job, layout)


def _attention_core(job: Job, layout: Layout) -> float:
    """Bytes per token of scores (softmax, its dropout's mask and output: 5 a s), or of the
    log-sum-exp that flash attention keeps."""
    a = job.model.heads / layout.tp
    if job.attention == "flash":
        return 4 * a
    if layout.recompute == "selective":
        return 0.0
    return (5 if job.dropout else 2) * a * job.seq


def _mlp(job: Job, layout: Layout, layer: int) -> float:
    """Bytes per token: inputs of the activation function and of the last GEMM; with experts also
    each copy of the token, the router's scores and the output that its weight multiplies."""
    model, e, g, t = job.model, job.bytes.activation, job.bytes.gemm_input, layout.tp
    per_unit = (2 if model.gated else 1) * e + g  # gate and up; what goes into the last GEMM
    if not model.is_moe(layer):
        return per_unit * model.ffn / t
    x = model.experts
    assert x is not None
    # Of a token's copies every tp rank needs the whole input; outputs are summed into shards.
    routed = x.active * ((per_unit * x.ffn + e * model.hidden) / t + g * model.hidden)
    return routed + per_unit * x.shared_ffn / t + 2 * 4 * x.count


def logits_bytes(job: Job, layout: Layout) -> float:
    """Bytes of one microbatch's logits on a device of the last stage: 16-bit, and the float32 ones
    that the loss keeps; a plain one has three of these at its peak."""
    model = job.model
    vocabulary = model.padded_vocab(layout.tp) / layout.tp
    copies = 1 if job.loss == "fused" else 3
    return (4 * copies + job.bytes.activation) * vocabulary * local_tokens(job, layout)


def weight_gradients(job: Job, layout: Layout, layer: int) -> float:
    """Bytes of the gradients in the weights' own dtype that autograd hands on, one of every shape
    of a layer: they are added to the float32 ones, and their memory is used again."""
    shapes = {
        (local.inputs, local.outputs)
        for local in (local_linear(w, job.model, layout) for w in linears(job.model, layer))
    }
    return job.bytes.weight * sum(inputs * outputs for inputs, outputs in shapes)


def layer_transient(job: Job, layout: Layout, layer: int) -> float:
    """Bytes that live inside the backward of one layer: gradients of the MLP's intermediates, and
    what is computed again: the whole layer's activations, or attention's scores (selective)."""
    model = job.model
    wide = 3 if model.gated else 2
    width = model.ffn
    if model.is_moe(layer) and model.experts is not None:
        width = model.experts.active * model.experts.ffn + model.experts.shared_ffn
    tokens = local_tokens(job, layout)
    gradients = job.bytes.activation * wide * width / layout.tp * tokens
    again, kept_whole = 0.0, layout.with_(recompute="none")
    if layout.recompute in ("op", "full"):
        again = kept_bytes(job, kept_whole, layer)
    elif layout.recompute == "selective":
        again = (_attention_core(job, kept_whole) - _attention_core(job, layout)) * tokens
    return gradients + again
