"""FLOPs of a step in the conventions that are in circulation. Every figure names its own.

The same step can be reported a factor of two apart; `CONVENTIONS` says what each counts, and who
reports in it.
"""

from collections.abc import Callable, Mapping

from pyparallel.planner.layout import Job, Layout
from pyparallel.planner.models import Linear, ModelSpec, kept_by_op, linears

__all__ = ["CONVENTIONS", "attention_flops", "flops_per_token", "matrix_flops", "step_flops"]

CONVENTIONS: Mapping[str, str] = {
    "full": "model FLOPs, attention counted whole: 3 x forward of every matmul, 12 L h s per token "
    "for attention (PaLM's MFU, arXiv:2204.02311; Korthikanti's model FLOPs; Megatron-LM of 2024)",
    "causal": "model FLOPs, attention halved as a causal mask leaves it: 6 L h s per token "
    "(Megatron-LM and Megatron-Bridge of 2025, torchtitan's FlashAttention counts)",
    "hardware": "FLOPs that run, attention counted whole: recomputed forwards are counted again "
    "(HFU; PTD-P's 96 B s L h^2 with full recompute, arXiv:2104.04473)",
    "6N": "6 x parameters without the input embedding per token, attention not counted "
    "(Kaplan et al., arXiv:2001.08361)",
}


def matrix_flops(model: ModelSpec, share: Callable[[Linear], float] = lambda _: 1.0) -> float:
    """Forward FLOPs per token of all matrices, of each a share, and the output layer; no attention
    core."""
    dense = model.layers - model.moe_layers
    per_token = 0.0
    for layer, count in ((0, dense), (model.layers - 1, model.moe_layers)):
        if count:
            per_token += count * sum(
                2.0 * w.inputs * w.outputs * w.rows * share(w) for w in linears(model, layer)
            )
    return per_token + 2.0 * model.hidden * model.padded_vocab()


def attention_flops(model: ModelSpec, seq: int) -> float:
    """Forward FLOPs per token of the attention core of all layers, whole: 4 s a d_h each."""
    if model.latent is not None:
        width = model.latent.plain + model.latent.rotary + model.latent.value
        return 2.0 * model.layers * seq * model.heads * width
    return 4.0 * model.layers * seq * model.heads * model.head_dim


def flops_per_token(model: ModelSpec, seq: int, convention: str, recompute: str = "none") -> float:
    """Forward and backward FLOPs of one token.

    For the GPT of arXiv:2104.04473 "full" is 72 L h^2 (1 + s/(6h) + V/(12 L h)), and "hardware"
    with full recompute 96 L h^2 (1 + s/(6h) + V/(16 L h)), with selective recompute
    72 L h^2 (1 + s/(3h) + V/(12 L h)) (arXiv:2205.05198, appendix A).
    """
    matrices, core = matrix_flops(model), attention_flops(model, seq)
    if convention == "6N":
        return 3.0 * matrices
    if convention == "causal":
        return 3.0 * (matrices + core / 2)
    if convention == "full":
        return 3.0 * (matrices + core)
    if convention == "hardware":
        again = 0.0
        if recompute == "selective":
            again = 3.0 * core  # as the paper has it, s/(3h); the recomputed forward alone is core
        elif recompute == "op":
            again = matrix_flops(model, lambda w: 1 - kept_by_op(model, w))
            again -= 2.0 * model.hidden * model.padded_vocab()
        elif recompute == "full":
            # The output layer is outside of the recomputed layers.
            again = matrices - 2.0 * model.hidden * model.padded_vocab() + core
        return 3.0 * (matrices + core) + again
    raise ValueError(f"convention {convention!r} is not one of {', '.join(CONVENTIONS)}")


def step_flops(job: Job, layout: Layout) -> dict[str, float]:
    """By convention, FLOPs of a step over all devices."""
    recompute = layout.recompute
    if recompute == "selective" and job.attention == "flash":
        recompute = "none"  # nothing of the core is kept, so nothing is left to recompute
    return {
        name: job.tokens * flops_per_token(job.model, job.seq, name, recompute)
        for name in CONVENTIONS
    }
