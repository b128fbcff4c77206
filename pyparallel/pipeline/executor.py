"""Runs any valid schedule on stages of a model: over a process group, or in one process.

    plan = with_transfers(generate("zb-h1", ranks=2, microbatches=8))
    executor = PipelineExecutor({rank: stage}, loss_fn, group=dist.group.WORLD)
    result = executor.step(plan, inputs, targets)          # gradients are in the parameters

It decides nothing: every rank does what its row of the plan says, in that order.
"""

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyparallel.pipeline.agreement import Agreement, GroupAgreement, Ours, PipelineError
from pyparallel.pipeline.clock import clock_of
from pyparallel.pipeline.compiled import check_compiled
from pyparallel.pipeline.copies import sum_copies
from pyparallel.pipeline.dry_run import DryRun, MisfitError
from pyparallel.pipeline.in_place import layers_in_place
from pyparallel.pipeline.packets import Shape, from_wire, to_wire
from pyparallel.pipeline.plans import Plans, Ready
from pyparallel.pipeline.requests import Request, factors_digest, prepare
from pyparallel.pipeline.row import Job, Measured, Row
from pyparallel.pipeline.stage import Loss, Stage
from pyparallel.pipeline.transports import GroupTransport, LocalTransport
from pyparallel.schedule import Kind, Schedule

__all__ = ["PipelineExecutor", "StepResult"]


@dataclass(frozen=True)
class StepResult:
    """What a step gave.

    Attributes:
        loss: sum of weights[i] * loss of microbatch i, divided by total: the same on every rank;
            None without a loss_fn.
        losses: microbatch -> its own loss, detached, where this process has the last stage.
        outputs: microbatch -> what the last stage gave, of `evaluate`, where it is held.
        measured: per row that runs in this process, its actions in order and their times, in
            seconds of this process's clock (on CUDA: of the stream that they ran on).
        span: from when all ranks had agreed on the step until this process had ended its rows, by
            the same clock; and each REDUCE, where the plan has any. STEP comes later.
    """

    loss: float | None
    losses: dict[int, Tensor]
    outputs: dict[int, Any]
    measured: dict[int, list[Measured]]
    span: tuple[float, float]


class PipelineExecutor:
    """Stages of this process and how they reach the others.

    Args:
        stages: number -> module. With a group, those that this rank holds in the plans it will run;
            without one, all.
        loss_fn: (output, target), or (output) where no targets are given, -> a tensor of one
            element: what a microbatch contributes.
        group: the pipeline: its rank r does row r. None: all rows run in this process.
        device: where tensors from other ranks are to be.
        dry_run: before microbatches of a new kind run (the first 16), each stage is tried on
            tensors without numbers, and a stage that does not take what it would be given is
            refused on all ranks (dry_run.py says what cannot be known). False: the run will tell.
        fixed_shapes: microbatches whose inputs have the same shapes have the same shapes between
            all stages; so a description of them travels once for each. False: with every message.
        reduce: (stage number) is called for each REDUCE of a plan, after all ranks have ended their
            passes well: the reduction over replicas. Where several ranks of the pipeline hold the
            stage (DualPipe), their gradients have been summed by then.
        optimizer_step: (stage number) is called for each STEP, after all ranks have ended their
            reductions well.

    Attributes:
        stages, group: as given.
        agreement: how numbers of all ranks are gathered.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        loss_fn: Loss | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        dry_run: bool = True,
        fixed_shapes: bool = True,
        reduce: Callable[[int], None] | None = None,
        optimizer_step: Callable[[int], None] | None = None,
    ) -> None:
        if not stages:
            raise ValueError("no stages: each rank of a plan holds one or more")
        self.stages = dict(stages)
        self.group = group
        self._loss = loss_fn
        self._reduce, self._optimizer_step = reduce, optimizer_step
        self._plans = Plans()
        self._workers = {number: Stage(module, None) for number, module in stages.items()}
        where = torch.device(device)
        self._clock = clock_of(where)
        self._device = where
        self._dry_run = DryRun() if dry_run else None
        self._tried: set[tuple[int, bool]] = set()
        self._transport: GroupTransport | LocalTransport = LocalTransport()
        self.agreement: Agreement = Ours()
        if group is not None:
            self._transport = GroupTransport(group, where, fixed_shapes)
            self.agreement = GroupAgreement(group, where)

    def step(
        self,
        plan: Schedule,
        inputs: Sequence[Any] | None = None,
        targets: Sequence[Any] | None = None,
        *,
        weights: Sequence[float] | None = None,
        total: float | None = None,
        keywords: Sequence[Mapping[str, Any]] | None = None,
    ) -> StepResult:
        """Runs the plan: the gradient of the step's loss is added to the parameters' `.grad`.

        All ranks of the group call it, with equal plans. The loss is the sum of weights[i] * loss
        of microbatch i, divided by `total`; the factor is applied once, where a backward begins.

        Args:
            plan: with transfers (`with_transfers`); plans may differ from step to step.
            inputs: per microbatch what stage 0 takes: a tensor, a tuple (positional arguments) or a
                dictionary (keywords). Where stage 0 is held; others pass None. Entries of
                microbatches that enter on another rank (DualPipe) may be None.
            targets: per microbatch, where the last stage is held.
            weights: per microbatch, 1 by default; the same on all ranks. Tokens of each microbatch,
                say, where loss_fn gives means.
            total: the sum of the weights by default; tokens of the step, say, where loss_fn sums.
            keywords: per microbatch, what every stage of this rank gets besides.

        Raises:
            ValueError: what was passed, or the plan, does not fit; on all ranks, before any runs.
            PipelineError: something failed on some rank; on all ranks.
        """
        if not torch.is_grad_enabled():
            raise ValueError("step computes gradients, and they are off: evaluate runs without")
        return self._run(plan, Request(inputs, targets, weights, total, keywords, True))

    def evaluate(
        self,
        plan: Schedule,
        inputs: Sequence[Any] | None = None,
        targets: Sequence[Any] | None = None,
        *,
        weights: Sequence[float] | None = None,
        total: float | None = None,
        keywords: Sequence[Mapping[str, Any]] | None = None,
    ) -> StepResult:
        """The forward passes of a plan, without gradients; arguments and errors as of `step`.
        Without a loss_fn, or without targets, there is no loss, and outputs all the same."""
        return self._run(plan, Request(inputs, targets, weights, total, keywords, False))

    def _run(self, plan: Schedule, request: Request) -> StepResult:
        job, ready = self._agree(plan, request)
        with_loss = request.training or request.targets is not None
        for number, worker in sorted(self._workers.items()):  # alike in all replicas, who meet
            worker.begin(request.training)
            last = number == job.plan.stages - 1
            worker.loss = self._loss if last and with_loss else None
        rows = [
            Row(rank, job, self._workers, self._clock, self._transport.meet)
            for rank in self._ranks(plan)
        ]
        # The two halves of a backward are found in the graph that autograd itself has made.
        in_place = self.stages.values() if request.training and not ready.halves else ()
        begin = self._clock.stamp()
        with layers_in_place(in_place):
            _together([row.run(ready.units[row.rank]) for row in rows])
        self._transport.finish()
        end = self._clock.stamp()
        loss, reducing, stepping = self._all_ended(job, rows)
        if reducing:
            self._reduce_stages(job, rows, end)
            end = self._clock.stamp() if any(row.at_end for row in rows) else end
        if stepping:
            self._step_stages(job, rows)
        self._clock.settle()
        seconds = self._clock.seconds
        measured = {
            row.rank: [Measured(one.actions, *map(seconds, one[1:])) for one in row.measured]
            for row in rows
        }
        span = (seconds(begin), seconds(end))
        return StepResult(loss, job.losses, job.outputs, measured, span)

    def _ranks(self, plan: Schedule) -> Sequence[int]:
        return range(plan.ranks) if self.group is None else [self.group.rank()]

    def _agree(self, plan: Schedule, request: Request) -> tuple[Job, Ready]:
        """The job, once all ranks have found theirs right and all have the same plan."""
        error: ValueError | None = None
        job = None
        own = [1, 0, int(request.training), 0, 0]
        try:
            ready = self._plans.ready(plan, request.training)
            self._check_places(plan)
            if ready.halves:
                check_compiled(plan, self.stages)
            job = prepare(request, ready.plan, self._ranks(plan), self._loss)
            kinds = {kind for kind in job.kinds if kind}
            own = [0, ready.digest, int(request.training), factors_digest(job)]
            own.append(0 if not kinds else kinds.pop() if len(kinds) == 1 else -1)
        except ValueError as found:
            error = found
        every = self.agreement.numbers(own)
        if any(numbers[0] for numbers in every):
            raise ValueError(self._reasons(error)) from error
        assert job is not None
        for index, what in ((2, "calls (step, evaluate)"), (1, "plans"), (3, "weights or totals")):
            if len({numbers[index] for numbers in every}) > 1:
                names = f"{plan.name}, {plan.ranks} ranks, {plan.microbatches} microbatches"
                text = f"ranks have different {what}; this one: {names}, "
                text += "evaluate" if not request.training else "step"
                texts = self.agreement.texts(text)
                raise ValueError("; ".join(f"rank {r}: {t}" for r, t in enumerate(texts)))
        one = {numbers[4] for numbers in every} - {0}
        if len(one) == 1 and -1 not in one:
            job.kinds = [one.pop()] * plan.microbatches
        else:  # each microbatch enters on one rank: there it is not 0
            per_rank = self.agreement.numbers(job.kinds)
            job.kinds = [max(kinds) for kinds in zip(*per_rank, strict=True)]
        if self._dry_run is not None:
            self._try_new_kinds(job, self._dry_run)
        return job, ready

    def _try_new_kinds(self, job: Job, dry_run: DryRun) -> None:
        """Refuses stages that do not take what the stage before gives."""
        for microbatch, number in enumerate(job.kinds):
            kind = (number, job.training)
            if kind in self._tried or len(self._tried) >= _MOST_TRIED:
                continue
            self._tried.add(kind)
            try:
                self._try(job, microbatch, dry_run)
            except ValueError:
                self._tried.discard(kind)
                raise

    def _try(self, job: Job, microbatch: int, dry_run: DryRun) -> None:
        """One stage after the other, as long as each knows what it is given. Collective."""
        here, plan = self._ranks(job.plan), job.plan
        shape: Shape | None = None
        for stage in range(plan.stages):
            place = plan.placement[stage, microbatch]
            text = ""
            if place in here:
                if stage == 0:
                    shape = job.inputs[microbatch].shape
                assert shape is not None
                given = job.keywords.get(microbatch, {})
                module = self.stages[stage]
                try:
                    found = dry_run.stage(module, shape, given, self._device, job.training)
                    text = "" if found is None else f"+{to_wire(found).decode()}"
                except MisfitError as error:
                    source = f"what stage {stage - 1} gives" if stage else "what it is given"
                    text = (
                        f"{plan.name}: stage {stage} on rank {place} does not take {source}, "
                        f"{shape} (microbatch {microbatch}): {error}; nothing has run. If a real "
                        "step would do better than one on tensors without numbers, pass "
                        "dry_run=False"
                    )
            told = self.agreement.texts(text)[0 if self.group is None else place]
            if not told:
                return
            if not told.startswith("+"):
                raise ValueError(told)
            shape = from_wire(told[1:].encode())

    def _check_places(self, plan: Schedule) -> None:
        wanted = sorted({stage for rank in self._ranks(plan) for stage in plan.held[rank]})
        misfits = []
        if self.group is not None and plan.ranks != self.group.size():
            misfits.append(f"the plan has {plan.ranks} ranks, the group {self.group.size()}")
        if wanted != sorted(self.stages):
            misfits.append(f"stages here are {sorted(self.stages)}, in the plan {wanted}")
        if misfits:
            raise ValueError(f"{plan.name}: {'; '.join(misfits)}")

    def _all_ended(self, job: Job, rows: list[Row]) -> tuple[float | None, bool, bool]:
        """The loss, once all ranks have ended their passes well; whether any reduces, and steps."""
        failed = any(row.failed for row in rows)
        part = 0.0
        if not failed:
            part = sum(float(loss) * job.factors[m] for m, loss in sorted(job.losses.items()))
        kinds = {action.kind for row in rows for action in row.at_end}
        wrapped = job.training and any(worker.wrapped for worker in self._workers.values())
        own = [int(bool(job.losses)), *struct.unpack("q", struct.pack("d", part))]
        own += [int(wrapped or Kind.REDUCE in kinds), int(Kind.STEP in kinds)]
        errors = [(row.where, row.error) for row in rows if row.error is not None]
        every = self._well(job, failed, errors, own)
        loss = None
        if any(numbers[0] for numbers in every):
            loss = sum(float(*struct.unpack("d", struct.pack("q", n[1]))) for n in every)
        return loss, any(numbers[2] for numbers in every), any(numbers[3] for numbers in every)

    def _well(
        self, job: Job, failed: bool, errors: list[tuple[str, Exception]], own: Sequence[int] = ()
    ) -> list[list[int]]:
        """`own` of all ranks, once all have come here; raises where any has failed. Collective."""
        every = self.agreement.numbers([int(failed), *own])
        if any(numbers[0] for numbers in every):
            for worker in self._workers.values():
                worker.clear()
            text = "; ".join(f"{w}: {type(e).__name__}: {e}" for w, e in errors)
            texts = self.agreement.texts(text)
            if self.group is not None:
                texts = [f"rank {r}: {t}" for r, t in enumerate(texts) if t]
            cause = errors[0][1] if errors else None
            raise PipelineError(f"{job.plan.name}: {'; '.join(texts)}") from cause
        return [numbers[1:] for numbers in every]

    def _reasons(self, error: ValueError | None) -> str:
        texts = self.agreement.texts("" if error is None else str(error))
        if self.group is None:
            return texts[0]
        return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)

    def _reduce_stages(self, job: Job, rows: list[Row], asked: Any) -> None:
        """Over replicas and copies, of each stage here once. Collective, of replicas too."""
        planned = {a.stage: (row, a) for row in rows for a in row.at_end if a.kind is Kind.REDUCE}
        errors: list[tuple[str, Exception]] = []
        for stage, worker in sorted(self._workers.items()):
            try:
                start = self._clock.stamp()
                worker.reduce()
                if stage not in planned:
                    continue
                holders = [r for r, held in enumerate(job.plan.held) if stage in held]
                if self.group is not None and len(holders) > 1:
                    sum_copies(self.stages[stage], holders, self.group)
                if self._reduce is not None:
                    self._reduce(stage)
                row, action = planned[stage]
                end = self._clock.stamp()
                row.measured.append(Measured((action,), asked, start, end))
                asked = end
            except Exception as error:  # whatever a wrapper or a callback raises
                errors.append((f"the reduction of stage {stage}", error))
                break
        self._well(job, bool(errors), errors)

    def _step_stages(self, job: Job, rows: list[Row]) -> None:
        errors: list[tuple[str, Exception]] = []
        steps = dict.fromkeys(a.stage for row in rows for a in row.at_end if a.kind is Kind.STEP)
        for stage in steps:
            try:
                if self._optimizer_step is not None:
                    self._optimizer_step(stage)
            except Exception as error:
                errors.append((f"the optimizer step of stage {stage}", error))
                break
        self._well(job, bool(errors), errors)


def _together(running: "list[Iterator[None]]") -> None:
    """Rows of one process in turn, each as far as it comes."""
    while running:
        running = [row for row in running if next(row, _ENDED) is not _ENDED]


_ENDED = object()
_MOST_TRIED = 16
