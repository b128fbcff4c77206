# torchrun --nproc-per-node 2 examples/tensor_parallel_hf.py
"""A small Llama, sharded over the ranks: logits, loss and tokens of the unsharded model."""

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import pyparallel.comm  # noqa: F401  registers the backend
from pyparallel.layers import clip_gradient_norm_, parallelize


def small_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)  # alike on all ranks; as a checkpoint would be
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=96,
        intermediate_size=250,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    dist.init_process_group("pyparallel")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ids = torch.randint(1, 1000, (2, 13), generator=torch.Generator().manual_seed(1))

    whole = small_llama()
    expected = whole(ids, labels=ids)

    model = small_llama()
    report = parallelize(model, dist.group.WORLD, sequence_parallel=True)
    if rank == 0:
        print(report)
    found = model(ids, labels=ids)
    found.loss.backward()
    norm = clip_gradient_norm_(model, 1.0)

    error = (found.logits - expected.logits).abs().max() / expected.logits.abs().max()
    own = sum(parameter.numel() for parameter in model.parameters())
    of = sum(parameter.numel() for parameter in whole.parameters())
    tokens = model.generate(ids, max_new_tokens=5, do_sample=False)
    alike = torch.equal(tokens, whole.generate(ids, max_new_tokens=5, do_sample=False))
    print(
        f"rank {rank} of {ranks}: {own} of {of} parameters, loss {found.loss:.4f} "
        f"(unsharded {expected.loss:.4f}), logits differ by {error:.0e}, norm {norm:.3f}, "
        f"tokens {'alike' if alike else 'differ'}"
    )
    assert error < 1e-5
    assert alike
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
