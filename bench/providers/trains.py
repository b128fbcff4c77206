"""Contestant of suite `train`: `ParallelModel` on the backend "pyparallel"."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.providers.base import Setup
from bench.providers.torch_distributed import Ours
from bench.train_case import Output, TrainCase


class Train(Ours):
    """The composition, as docs/training.md shows it. To be opened first: its world is ours."""

    name = "training"

    def __init__(self, setup: Setup) -> None:
        import pyparallel.comm  # noqa: F401  registers the backend

        if not dist.is_initialized():
            dist.init_process_group(
                "pyparallel",
                store=dist.FileStore(str(setup.scratch / "store"), setup.world),
                rank=setup.rank,
                world_size=setup.world,
                timeout=timedelta(seconds=setup.timeout),
            )
        super().__init__(setup)

    def prepare(self, case: TrainCase, inputs: Tensor) -> Callable[[], Output]:  # type: ignore[override]
        from pyparallel.training import ParallelConfig, ParallelModel, build_mesh

        config = ParallelConfig(**case.axes, zero=case.zero)
        mesh = build_mesh(config, device_type=self.setup.device.type)
        module = case.whole().to(self.setup.device)
        model = ParallelModel(module, mesh, microbatches=case.microbatches)
        optimizer = model.optimizer(lambda params: torch.optim.AdamW(params, lr=0.0))
        mine = inputs.chunk(case.axis("dp"))[mesh.coordinates.dp]
        tokens, labels = mine[:, :-1].contiguous(), mine[:, 1:].contiguous()

        def whole() -> Mapping[str, Tensor]:
            return _gradients(model, mesh)

        def call() -> Output:
            optimizer.zero_grad()
            loss = model.forward_backward(tokens, labels)
            optimizer.step()
            return Output(loss, whole)

        return call


def _gradients(model: Any, mesh: Any) -> dict[str, Tensor]:
    """Those of this rank's stages, whole. Collective."""
    from pyparallel.layers import full_state_dict

    found: dict[str, Tensor] = {}
    for stage in model.stages.values():
        parameters = list(stage.parameters())
        if parameters and hasattr(parameters[0], "full_tensor"):
            found |= {n: p.grad.full_tensor() for n, p in stage.named_parameters()}
            continue
        values = [p.data for p in parameters]
        try:  # shards are joined as a state dict's are
            for parameter in parameters:
                assert parameter.grad is not None
                parameter.data = parameter.grad
            found |= full_state_dict(stage)
        finally:
            for parameter, value in zip(parameters, values, strict=True):
                parameter.data = value
    return found
