"""Contestants of suite `pipeline`: our executor on our backend, and torch.distributed.pipelining on
gloo (NCCL on CUDA) and on our backend. All run the same stages of the same model, in one step of
the same schedule; gradients are new in each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bench.live_bytes import peak_bytes
from bench.pipeline_case import CHUNKS, PipelineCase, loss_fn
from bench.providers.base import Setup, Unsupported
from bench.providers.torch_distributed import Ours, TorchDistributed

Call = Callable[[], dict[str, Tensor]]
_TORCH = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved-1f1b": "ScheduleInterleaved1F1B",
    "looped-bfs": "ScheduleLoopedBFS",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}


class _Pipelines(TorchDistributed):
    """Makes calls of a case's step, of a model of their own; the last case's is kept."""

    def __init__(self, setup: Setup) -> None:
        import pyparallel.comm  # noqa: F401  registers the backend

        super().__init__(setup)

    def prepare(self, case: PipelineCase, inputs: Tensor) -> Call:  # type: ignore[override]
        from pyparallel.pipeline import partition_model
        from pyparallel.schedule import generate, with_transfers

        rank = self.setup.rank
        self.plan = with_transfers(generate(case.op, case.world, case.sizes.microbatches))
        whole = case.whole().to(self.setup.device)
        partition = partition_model(whole, counts=case.counts())
        stages = {s: partition.stage(s) for s in self.plan.held[rank]}
        ids, targets = inputs[:, :-1], inputs[:, 1:]
        last = case.stages - 1 in stages
        run = self.stepper(case, stages, ids if 0 in stages else None, targets if last else None)
        names = {n: p for stage in stages.values() for n, p in stage.named_parameters()}
        parameters = list(names.items())

        def call() -> dict[str, Tensor]:
            for _, parameter in parameters:
                parameter.grad = None
            loss = run()
            found = {n: p.grad for n, p in parameters if p.grad is not None}
            return {"loss": loss.detach(), **found} if last else found

        self.last_call = call
        return call

    def stepper(
        self,
        case: PipelineCase,
        stages: dict[int, nn.Module],
        ids: Tensor | None,
        targets: Tensor | None,
    ) -> Callable[[], Tensor]:
        raise NotImplementedError

    def peak_bytes(self) -> int:
        """Of a step, on this rank."""
        return peak_bytes(self.last_call, self.setup.device)


class Pipeline(_Pipelines):
    """pyparallel.pipeline.PipelineExecutor on the backend "pyparallel"."""

    name = "pipeline"
    backend = Ours.backend

    def stepper(
        self,
        case: PipelineCase,
        stages: dict[int, nn.Module],
        ids: Tensor | None,
        targets: Tensor | None,
    ) -> Callable[[], Tensor]:
        from pyparallel.pipeline import PipelineExecutor

        size, device = case.sizes.batch, self.setup.device
        plan = self.plan
        executor = PipelineExecutor(stages, loss_fn, group=self.group, device=device)
        inputs, wanted = (None if x is None else list(x.split(size)) for x in (ids, targets))

        def run() -> Tensor:
            self.result = executor.step(plan, inputs, wanted)
            return torch.tensor(self.result.loss)

        self.executor = executor
        return run

    def profile(self) -> Any:
        """Of some steps; all ranks call it."""
        from pyparallel.pipeline import profile

        def step() -> Any:
            self.last_call()
            return self.result

        return profile(self.executor, self.plan, step, steps=5)


class StockPipeline(_Pipelines):
    """torch.distributed.pipelining."""

    stock = True

    def __init__(self, setup: Setup) -> None:
        self.backend = self.backend or ("nccl" if setup.device.type == "cuda" else "gloo")
        self.name = f"torch.pipelining+{self.backend}"
        super().__init__(setup)

    def stepper(
        self,
        case: PipelineCase,
        stages: dict[int, nn.Module],
        ids: Tensor | None,
        targets: Tensor | None,
    ) -> Callable[[], Tensor]:
        from torch.distributed import pipelining
        from torch.distributed.pipelining import schedules

        kind = getattr(schedules, _TORCH[case.op], None)
        if kind is None:
            raise Unsupported(f"torch {torch.__version__} has no {_TORCH[case.op]}")
        made = [
            pipelining.PipelineStage(
                module, stage, case.stages, self.setup.device, group=self.group
            )
            for stage, module in stages.items()
        ]
        several = CHUNKS[case.op] > 1
        schedule = kind(made if several else made[0], case.sizes.microbatches, loss_fn=loss_fn)
        given = () if ids is None else (ids,)

        def run() -> Tensor:
            if targets is None:
                schedule.step(*given)
                return torch.empty(0)
            losses: list[Tensor] = []
            schedule.step(*given, target=targets, losses=losses)
            return torch.stack(losses).mean()

        return run


class StockPipelineOurs(StockPipeline):
    """The same on the backend "pyparallel"."""

    backend = Ours.backend
