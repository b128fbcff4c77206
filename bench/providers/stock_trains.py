"""Contestant of suite `train`: the same layouts of what PyTorch has, on gloo (NCCL on CUDA).

dp   DistributedDataParallel; zero3: fully_shard, layer by layer
tp   parallelize_module: ColwiseParallel and RowwiseParallel, as torch's tutorial shards a Llama
pp   torch.distributed.pipelining, Schedule1F1B
sp   rows in contiguous parts, keys and values gathered, scaled_dot_product_attention with the
     mask that a part needs (torch's context_parallel has CUDA kernels only), gradients joined
     by DistributedDataParallel with dp
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from bench.providers.base import Setup
from bench.providers.torch_distributed import (
    TorchDistributed,
    all_gather_flat,
    reduce_scatter_flat,
)
from bench.train_case import AXES, Output, TrainCase

_ORDER = ("tp", "sp", "pp", "dp")  # fastest first, as ours by default


class StockTrain(TorchDistributed):
    stock = True

    def __init__(self, setup: Setup) -> None:
        self.backend = "nccl" if setup.device.type == "cuda" else "gloo"
        self.name = f"torch+{self.backend}"
        super().__init__(setup)

    def prepare(self, case: TrainCase, inputs: Tensor) -> Callable[[], Output]:  # type: ignore[override]
        device = self.setup.device
        groups = {axes: self._group(case, axes) for axes in (*((a,) for a in AXES), ("dp", "sp"))}
        at = self._coordinates(case, self.setup.rank)
        module: Any = case.whole().to(device)
        mine = inputs.chunk(case.axis("dp"))[at["dp"]]
        tokens, labels = mine[:, :-1].contiguous(), mine[:, 1:].contiguous()
        keywords: dict[str, Tensor] = {}
        if case.axis("sp") > 1:
            rows = torch.arange(case.sizes.rows, device=device).chunk(case.axis("sp"))[at["sp"]]
            for layer in module.model.layers:
                layer.self_attn.core_attention = _Gathered(groups["sp",], rows, case.sizes.rows)
            tokens, labels = (x[:, rows].contiguous() for x in (tokens, labels))
            keywords = {"position_ids": rows[None]}
        if case.axis("tp") > 1:
            _shard(module, DeviceMesh.from_group(groups["tp",], device.type))
        stage = _stage(module, case, at["pp"])
        wrapped = self._replicated(stage, case, groups)
        run = _Stepper(case, wrapped, groups, device, at["pp"], keywords)
        optimizer = torch.optim.AdamW(stage.parameters(), lr=0.0)
        joined = groups["dp", "sp"]
        told = torch.zeros(1, device=device)

        def call() -> Output:
            optimizer.zero_grad()
            told.fill_(run.step(tokens, labels))
            optimizer.step()
            if joined.size() > 1:  # what a training shows is the mean
                dist.all_reduce(told, group=joined)
            if case.axis("pp") > 1:
                dist.broadcast(told, group=groups["pp",], group_src=case.axis("pp") - 1)
            return Output(float(told) / joined.size(), lambda: _gradients(stage))

        return call

    def _coordinates(self, case: TrainCase, rank: int) -> dict[str, int]:
        found = {}
        for axis in _ORDER:
            rank, found[axis] = divmod(rank, case.axis(axis))
        return found

    def _group(self, case: TrainCase, axes: tuple[str, ...]) -> dist.ProcessGroup:
        """This rank's, over these axes; all ranks make all of them, in one order."""
        every: dict[tuple[int, ...], list[int]] = {}
        for rank in range(case.world):
            at = self._coordinates(case, rank)
            every.setdefault(tuple(at[a] for a in AXES if a not in axes), []).append(rank)
        mine = None
        for ranks in every.values():
            group = dist.new_group(ranks, backend=self.backend)
            mine = group if self.setup.rank in ranks else mine
        assert isinstance(mine, dist.ProcessGroup)
        return mine

    def _replicated(
        self, stage: nn.Module, case: TrainCase, groups: Mapping[tuple[str, ...], dist.ProcessGroup]
    ) -> nn.Module:
        group = groups["dp", "sp"]
        if group.size() == 1:
            return stage
        if case.zero == 3:
            from torch.distributed.fsdp import fully_shard

            mesh = DeviceMesh.from_group(group, self.setup.device.type)
            layers: Any = stage.get_submodule("model.layers")
            for layer in layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(stage, mesh=mesh)
            return stage
        if case.axis("tp") > 1:  # DDP knows no DTensors; torch's own way around it
            from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

            _pre_dp_module_transform(stage)
        return DistributedDataParallel(stage, process_group=group, gradient_as_bucket_view=True)


class _Stepper:
    """Forward and backward of a batch: in one pass, or by torch's pipeline."""

    def __init__(
        self,
        case: TrainCase,
        module: nn.Module,
        groups: Mapping[tuple[str, ...], dist.ProcessGroup],
        device: torch.device,
        stage: int,
        keywords: dict[str, Tensor],
    ) -> None:
        self.module, self.keywords = module, keywords
        self.first, self.last = stage == 0, stage == case.axis("pp") - 1
        self.schedule: Any = None
        if case.axis("pp") > 1:
            from torch.distributed.pipelining import PipelineStage, Schedule1F1B

            made = PipelineStage(module, stage, case.axis("pp"), device, group=groups["pp",])
            self.schedule = Schedule1F1B(made, case.microbatches, loss_fn=_loss)

    def step(self, tokens: Tensor, labels: Tensor) -> float:
        if self.schedule is None:
            loss = _loss(self.module(tokens, **self.keywords), labels)
            loss.backward()
            return float(loss.detach())
        given = (tokens,) if self.first else ()
        if not self.last:
            self.schedule.step(*given, **self.keywords)
            return 0.0
        losses: list[Tensor] = []
        self.schedule.step(*given, target=labels, losses=losses, **self.keywords)
        return float(torch.stack(losses).mean().detach())


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def _shard(module: nn.Module, mesh: DeviceMesh) -> None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for name in ("q_proj", "k_proj", "v_proj"):
        plan[f"model.layers.*.self_attn.{name}"] = ColwiseParallel()
    plan["model.layers.*.self_attn.o_proj"] = RowwiseParallel()
    for name in ("gate_proj", "up_proj"):
        plan[f"model.layers.*.mlp.{name}"] = ColwiseParallel()
    plan["model.layers.*.mlp.down_proj"] = RowwiseParallel()
    parallelize_module(module, mesh, plan)


def _stage(module: Any, case: TrainCase, stage: int) -> nn.Module:
    """The layers of a stage, and what is before the first and behind the last."""
    stages = case.axis("pp")
    if stages == 1:
        whole: nn.Module = module
        return whole
    bounds = [len(module.model.layers) * s // stages for s in range(stages + 1)]
    kept = range(bounds[stage], bounds[stage + 1])
    layers = nn.ModuleList()
    for number in kept:
        layers._modules[str(number)] = module.model.layers[number]
    module.model.layers = layers
    if stage > 0:
        module.model.embed_tokens = nn.Identity()
    if stage < stages - 1:
        module.model.norm, module.lm_head = nn.Identity(), nn.Identity()
    cut: nn.Module = module
    return cut


class _Gathered(nn.Module):
    """Attention on this rank's rows: keys and values of all, in one gather."""

    def __init__(self, group: dist.ProcessGroup, rows: Tensor, total: int) -> None:
        super().__init__()
        self.group = group
        # No buffer: DistributedDataParallel would give all ranks the first one's.
        self.mask = rows[:, None] >= torch.arange(total, device=rows.device)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        both: Tensor = _GatherRows.apply(torch.stack([key, value]), self.group)  # type: ignore[no-untyped-call]
        k, v = both.unbind(0)
        heads = (x.transpose(1, 2) for x in (query, k, v))
        out = scaled_dot_product_attention(*heads, attn_mask=self.mask, enable_gqa=True)
        return out.transpose(1, 2)


class _GatherRows(torch.autograd.Function):
    """[2, batch, rows, ...] of each rank to [2, batch, all rows, ...]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        every = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
        all_gather_flat(every, x.contiguous(), group=group)
        every = every.view(group.size(), *x.shape)
        return every.permute(1, 2, 0, *range(3, every.dim())).flatten(2, 3)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        size = ctx.group.size()
        parts = dy.unflatten(2, (size, -1))
        parts = parts.permute(2, 0, 1, *range(3, parts.dim())).contiguous()
        own = torch.empty_like(parts[0])
        reduce_scatter_flat(own, parts.flatten(0, 1), group=ctx.group)
        return own, None


def _gradients(stage: nn.Module) -> dict[str, Tensor]:
    """Whole. Collective where they are DTensors."""
    found: dict[str, Tensor] = {}
    for name, parameter in stage.named_parameters():
        grad: Any = parameter.grad
        found[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return found
