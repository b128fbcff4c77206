"""Models of transformers over simulated ranks: logits and gradients of one process.

A small random Llama and a Mistral whose window is shorter than a shard. Each rank has a copy of the
model; a parameter's gradient, summed over ranks, must be that of one process (float64: 1e-10).
"""

import copy
import importlib.util
import subprocess
import sys

import pytest
import torch

from pyparallel.attention import (
    Sharding,
    hugging_face,
    position_ids,
    shard,
    shard_labels,
    simulate,
)

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="transformers is not installed (requirements.txt; it needs Python 3.11)",
)
COMMON = {
    "vocab_size": 31,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}


def model_of(kind, **more):
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**COMMON, **more)
    return getattr(transformers, f"{kind}ForCausalLM")(config).double().eval()


def loss_of(model, ids, positions, labels, total):
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )
    (loss / total).backward()
    return logits.detach()


@needs_transformers
@pytest.mark.parametrize(("kind", "more"), [("Llama", {}), ("Mistral", {"sliding_window": 5})])
@pytest.mark.parametrize("world", [2, 4])
def test_logits_and_gradients_equal_one_process(kind, more, world):
    model = model_of(kind, **more)
    ids = torch.randint(0, 31, (2, 22))
    total = 2 * 21
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("sdpa")  # in float64, unlike "eager"
    every = torch.arange(22).expand(2, -1)
    want = loss_of(reference, ids, every, shard_labels(ids, (0, 1)), total)

    def rank(group):
        mine = copy.deepcopy(model)
        name = f"{kind}_{world}_{group.rank}"
        hugging_face.register(name, group, strategy="ring" if world == 4 else "auto")
        mine.set_attn_implementation(name)
        positions = position_ids(22, group).expand(2, -1)
        logits = loss_of(mine, shard(ids, group), positions, shard_labels(ids, group), total)
        return logits, [p.grad for p in mine.parameters()]

    found = simulate(world, rank)
    order = Sharding.of("zigzag", 22, world).order()
    got = torch.cat([logits for logits, _ in found], 1).index_select(1, order)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)
    for i, parameter in enumerate(reference.parameters()):
        total_grad = sum(grads[i] for _, grads in found)
        torch.testing.assert_close(total_grad, parameter.grad, rtol=1e-9, atol=1e-10)


@needs_transformers
def test_packed_documents_and_wrong_positions():
    model = model_of("Llama")
    ids = torch.randint(0, 31, (1, 10))
    cu = torch.tensor([0, 3, 5, 9, 10], dtype=torch.int32)  # documents of 3, 2, 4 and 1
    want = torch.cat([model(ids[:, a:b], use_cache=False).logits
                      for a, b in zip(cu.tolist(), cu.tolist()[1:], strict=False)], 1)  # fmt: skip

    def rank(group):
        mine = copy.deepcopy(model)
        attention = hugging_face.register(f"packed_{group.rank}", group, sharding="contiguous",
                                          cu_seqlens=cu)  # fmt: skip
        mine.set_attn_implementation(f"packed_{group.rank}")
        how = {"sharding": "contiguous", "cu_seqlens": cu}
        local = shard(ids, group, **how)
        positions = position_ids(10, group, **how)[None]
        logits = mine(local, position_ids=positions, use_cache=False).logits
        attention.cu_seqlens = None
        lengths = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu.clone()}
        again = mine(local, position_ids=positions, use_cache=False, **lengths).logits
        assert torch.equal(logits, again)
        with pytest.raises(ValueError, match=r"position_ids of ranks \[1\] are not those of their"):
            mine(local, use_cache=False)  # counts its rows from 0
        return logits.detach()

    torch.testing.assert_close(torch.cat(simulate(2, rank), 1), want, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("causal", [True, False])
def test_windows_without_a_causal_mask_reach_both_ways(causal):
    torch.manual_seed(3)
    q, k, v = torch.randn(3, 1, 2, 19, 4, dtype=torch.float64).unbind()
    module = torch.nn.Module()
    module.is_causal = causal

    def rank(group):
        how = {"sharding": "zigzag", "strategy": "auto", "deterministic": False}
        attend = hugging_face.HuggingFaceAttention(group, cu_seqlens=None, **how)
        return attend(module, *(shard(x, group, dim=2) for x in (q, k, v)), None, sliding_window=4)

    found = torch.cat([out for out, _ in simulate(3, rank)], 1)
    offset = torch.arange(19) - torch.arange(19).view(-1, 1)
    seen = (offset.abs() < 4) & ((offset <= 0) | (not causal))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2)
    order = Sharding.of("zigzag", 19, 3).order()
    torch.testing.assert_close(found.index_select(1, order), want, rtol=1e-12, atol=1e-12)


def test_what_a_model_asks_beyond_is_refused():
    q = torch.randn(1, 2, 4, 8)
    module = torch.nn.Module()
    faults = [
        ((q > 0,), {}, "attention_mask has shape"),
        ((None,), {"head_mask": q}, "unknown keywords: head_mask"),
        ((None,), {"output_attentions": True}, "unknown keywords: output_attentions"),
        ((None,), {"cu_seq_lens_q": torch.tensor([0, 8])}, "cu_seq_lens_q and cu_seq_lens_k"),
        ((None,), {"sliding_window": 0}, "sliding_window is 0; expected 1 or more"),
        ((None,), {"is_causal": "no"}, "causal is 'no'; expected True or False"),
    ]
    make = {"sharding": "zigzag", "strategy": "auto", "deterministic": False, "cu_seqlens": None}
    for given, more, text in faults:
        with pytest.raises(ValueError, match=text):
            simulate(2, lambda group, given=given, more=more: hugging_face.HuggingFaceAttention(
                group, **make)(module, q, q, q, *given, **more))  # fmt: skip
    with pytest.raises(ValueError, match="attention_mask .* has padding"):
        hugging_face._no_mask(batch_size=1, attention_mask=torch.tensor([[1, 0]]))
    assert hugging_face._no_mask(attention_mask=torch.ones(1, 2)) is None


def test_without_transformers_everything_else_imports():
    code = """
import sys
sys.modules["transformers"] = None
import pyparallel.attention
from pyparallel.attention import hugging_face, simulate
try:
    hugging_face.register("x", None)
except ImportError as error:
    assert "pip install" in str(error), error
else:
    raise SystemExit("no error")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
