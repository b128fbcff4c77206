# torchrun --nproc-per-node 2 examples/two_ranks.py
import torch
import torch.distributed as dist

import pyparallel.comm  # noqa: F401  registers the backend

dist.init_process_group("pyparallel")
x = torch.full((3,), 1.0 + dist.get_rank())
dist.all_reduce(x)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {x.tolist()}")
dist.destroy_process_group()
