# torchrun --nproc-per-node 4 examples/four_ranks.py
import torch
from llama import Llama, LlamaConfig

from pyparallel.training import ParallelConfig, ParallelModel, build_mesh

mesh = build_mesh(ParallelConfig(dp=2, tp=2))  # or tp=2, pp=2; or sp=4, zero=3
torch.manual_seed(0)  # the same model on every rank
model = ParallelModel(Llama(LlamaConfig()), mesh)  # written for one device
optimizer = model.optimizer(lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
tokens = torch.arange(64).repeat(4, 1)  # [batch, rows], of this rank's dp coordinate
for _ in range(5):
    loss = model.forward_backward(tokens, tokens.roll(-1, 1))
    model.step(optimizer)
    optimizer.zero_grad()
print(f"rank {mesh.rank}: loss {loss:.4f}, {sum(p.numel() for p in model.parameters())} parameters")
torch.distributed.destroy_process_group()
