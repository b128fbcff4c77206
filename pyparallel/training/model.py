"""`ParallelModel`: a plain model, trained over every axis of a mesh at once.

    mesh = build_mesh(ParallelConfig(dp=2, tp=2))
    model = ParallelModel(module, mesh)
    optimizer = model.optimizer(lambda parameters: torch.optim.AdamW(parameters, lr=3e-4))
    loss = model.forward_backward(tokens, labels)

In this order a module becomes this rank's part of it: its attention is one over the sequence's
ranks (sp), its layers are shards (tp), its layers lie in stages (pp), and each stage is replicated
over what is left (dp and sp). Each of these is a part of the library that works alone; here they
are put together, and nothing more.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyparallel.attention import unshard
from pyparallel.errors import InvalidArgument
from pyparallel.layers import SequenceSharding, parallelize
from pyparallel.pipeline import Partition, partition_model
from pyparallel.pipeline.agreement import GroupAgreement
from pyparallel.schedule import FAMILIES, generate
from pyparallel.training.batches import Batch, agree_on_batch
from pyparallel.training.clipping import clip_grad_norm_, tied_copies
from pyparallel.training.compression import Compression
from pyparallel.training.cut_attention import cut_attention
from pyparallel.training.data_parallelism import DataParallel, data_parallel
from pyparallel.training.layout import AXES
from pyparallel.training.logits import from_rank, sharded_head, whole_classes
from pyparallel.training.mesh import ParallelMesh
from pyparallel.training.meta import Waiting, compute_buffers
from pyparallel.training.passes import Loop, Passes, Pipeline, check_schedule
from pyparallel.training.passing import pass_through
from pyparallel.training.plans import plan_of
from pyparallel.training.precision import Precision
from pyparallel.training.random import RandomStreams, place_dropouts
from pyparallel.training.recompute import HostOffload, apply_recompute
from pyparallel.training.run_state import RunState
from pyparallel.training.ties import Ties
from pyparallel.training.token_loss import CrossEntropy, Loss
from pyparallel.training.whole_state import WholeState

__all__ = ["ParallelModel"]


class ParallelModel:
    """This rank's part of a model, and how its steps run.

    Args:
        module: the whole model, alike on all ranks (one seed, one checkpoint), or on meta: then
            each rank allocates its part only, which is to be loaded before the first step. Of token
            ids [batch, rows], and `position_ids` [1, rows] where it has such an argument, logits
            [batch, rows, classes] are made. With sp, its attention is as cut_attention.py says;
            with pp, its structure as `partition_model` knows it. It becomes this rank's part in
            place: use the `ParallelModel` in its stead.
        mesh: from `build_mesh`.
        loss: (logits, labels) -> the sum of the losses of all tokens whose label is not -100, a
            tensor of one element. None: cross entropy, over logits that tensor parallel ranks do
            not gather.
        microbatches: into how many of one size a rank's batch is cut.
        schedule: of the pipeline, by its name in `pyparallel.schedule`.
        plan: styles of the tensor parallel layers, as `layers.parallelize` takes them. None: by the
            model's structure.
        counts, layout: how the model is cut into stages, as `partition_model` takes them. Neither:
            balanced by floating point operations.
        precision: "fp32" (what the parameters have), or 16-bit passes over float32 parameters,
            "bf16" or "fp16" (precision.py). With fp16 take steps by `step`, which knows the loss
            scale.
        recompute: "none", "full" (layers) or "selective" (attention) runs again in backward.
        recompute_every: with full, of so many layers one.
        recompute_modules: with selective, patterns of names in place of the attentions.
        offload: `HostOffload(device)`: what a forward keeps for backward goes to the host.
        zero: what is sharded over dp x sp, 0 to 3; by default as the layout says.
        compression: of gradients, as `data_parallel` takes it.
        seed: of the model's dropouts, alike on all ranks. Masks are functions of it, the step, and
            the element's place: every layout drops the same elements.
        strategy: of attention over the sequence, as `sequence_parallel_attention` takes it.

    Attributes:
        mesh: as given.
        stages: number -> module, those that this rank holds. Parameters have the names that they
            have in the whole model.
        partition: of the pipeline; None without one.
        microbatches: as given.
        streams: random numbers of the model (`RandomStreams`), for checkpoints.
        run_state: what else checkpoints need: the number of steps, and the loss scale.
        scaler: of fp16; else None.

    Raises:
        ValueError: on all ranks, for what does not fit.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: ParallelMesh,
        *,
        loss: Loss | None = None,
        microbatches: int = 1,
        schedule: str = "1f1b",
        plan: Mapping[str, str] | None = None,
        counts: "list[int] | None" = None,
        layout: str | None = None,
        precision: str = "fp32",
        recompute: str = "none",
        recompute_every: int = 1,
        recompute_modules: "Sequence[str] | None" = None,
        offload: HostOffload | None = None,
        zero: int | None = None,
        compression: "Compression | str | None" = None,
        seed: int = 0,
        strategy: str = "auto",
    ) -> None:
        check_schedule(schedule)
        if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
            raise InvalidArgument(f"microbatches is {microbatches!r}; expected 1 or more")
        self.mesh, self.microbatches = mesh, microbatches
        self._positions = "position_ids" in inspect.signature(module.forward).parameters
        if mesh.size("sp") > 1 and not self._positions:
            raise InvalidArgument(
                f"{type(module).__name__}.forward takes no position_ids: with sp each rank holds "
                "rows from anywhere in the sequence, and must be told which; give it a parameter "
                "position_ids, of [1, rows], for its positions' embedding (examples/llama.py)"
            )
        self.precision = Precision(precision, device_type=mesh.device_type)
        self.precision.check(module.named_parameters())
        self.scaler = self.precision.scaler(mesh)
        self.streams = RandomStreams(seed, mesh, device=mesh.device_type)
        self.run_state = RunState(self.scaler)
        self._state = WholeState(module)
        self._offload = offload
        on_meta = compute_buffers(module)
        if mesh.size("sp") > 1:
            cut_attention(module, mesh.group("sp"), strategy)
        contexts: list[Any] = [self.streams.recompute]
        if mesh.size("tp") > 1:
            styles = plan_of(module, whole_logits=loss is not None) if plan is None else plan
            sequence = SequenceSharding(dim=1) if mesh.config.tp_sequence_parallel else False
            self.report = parallelize(module, mesh.group("tp"), styles, sequence_parallel=sequence)
            if isinstance(sequence, SequenceSharding):
                contexts.append(sequence.recompute)
        elif plan is not None:
            raise InvalidArgument("plan is of tensor parallel layers, and tp is 1")
        place_dropouts(module, self.streams)
        apply_recompute(
            module,
            recompute,
            every=recompute_every,
            modules=recompute_modules,
            contexts=contexts,
        )
        self._head = sharded_head(module)
        self._cut(module, schedule, counts, layout)
        self._waiting = Waiting(self.stages.values(), mesh.device_type) if on_meta else None
        criterion = loss or CrossEntropy(self._head)
        self._passes = self._wrapped(criterion, schedule, zero, compression)

    def _placement(self, schedule: str) -> dict[int, int]:
        """Stage -> the pipeline's rank that holds it."""
        if self.mesh.size("pp") == 1:
            return {0: 0}
        plan = generate(schedule, self.mesh.size("pp"), self.microbatches)
        return {stage: plan.placement[stage, 0] for stage in range(plan.stages)}

    def _cut(
        self, module: nn.Module, schedule: str, counts: "list[int] | None", layout: str | None
    ) -> None:
        ranks, placement = self.mesh.size("pp"), self._placement(schedule)
        asked: Any = module
        self.partition: Partition | None = None
        self._ties = Ties((), {}, self.mesh.group("pp"))
        if ranks == 1 and (counts is not None or layout is not None):
            raise InvalidArgument("counts and layout are of a pipeline's stages, and pp is 1")
        if counts is not None or layout is not None:
            self.partition = partition_model(module, counts=counts, layout=layout)
        elif ranks > 1:
            self.partition = partition_model(module, len(placement), by="flops")
        elif getattr(asked, "base_model_prefix", ""):  # of transformers: logits and nothing else
            self.partition = partition_model(module, 1)
        every = {0: module}
        if self.partition is not None:
            if self.partition.stages != len(placement):
                chunks = FAMILIES[schedule].default_chunks()
                raise InvalidArgument(
                    f"{self.partition.stages} stages are given; {schedule} on {ranks} ranks, "
                    f"{chunks} a rank, has {len(placement)}"
                )
            every = {number: self.partition.stage(number) for number in placement}
            self._ties = Ties(self.partition.tied, placement, self.mesh.group("pp"))
        for number, rank in placement.items():
            self._state.own(number, every[number], rank)
        self._last = placement[len(placement) - 1]
        here = self.mesh.coordinates.pp
        self.stages = {number: every[number] for number, rank in placement.items() if rank == here}

    def _wrapped(
        self,
        loss: Loss,
        schedule: str,
        zero: int | None,
        compression: "Compression | str | None",
    ) -> Passes:
        mesh = self.mesh
        self.replicas: dict[int, DataParallel] = {}
        modules = dict(self.stages)
        for number, stage in self.stages.items():
            pass_through(stage, self.streams, self.precision)
            if any(p.requires_grad for p in stage.parameters()):
                self.replicas[number] = data_parallel(
                    stage, mesh, zero=zero, compression=compression
                )
                modules[number] = self.replicas[number].module
        if mesh.size("pp") > 1:
            device = torch.device(mesh.device_type)
            return Pipeline(modules, loss, mesh.group("pp"), schedule, device)
        if not self.replicas:
            raise InvalidArgument("no parameter of the model requires gradients")
        return Loop(modules[0], loss, self.replicas[0].accumulate)

    # --- steps

    def forward_backward(self, tokens: Tensor, labels: Tensor) -> float:
        """All microbatches of a step: gradients of its mean loss are added to the parameters'
        `.grad`, alike on all ranks that hold the same parameters. All ranks call it.

        Args:
            tokens: int64 [batch, rows] of this rank's dp coordinate: the same on the ranks that
                share it. The sequence is cut here.
            labels: the same shape: the token that is to follow each, -100 where none counts.

        Returns:
            the mean of the loss over all counted tokens of all ranks, the same on every rank.

        Raises:
            ValueError: tokens and labels do not fit, on all ranks, before anything runs.
        """
        batch = self._batch("forward_backward", tokens, labels, self.microbatches)
        total = batch.total / self.mesh.size("dp", "sp")
        scale = 1.0 if self.scaler is None else self.scaler.scale_factor
        self.train()
        with self._offload or nullcontext():
            loss = self._passes.step(batch.tokens, batch.labels, batch.keywords, total, scale)
        self.run_state.steps += 1
        self._ties.sum(self.stages)
        return self._mean(loss)

    def evaluate(self, tokens: Tensor, labels: Tensor) -> float:
        """The loss of `forward_backward`, without gradients and without dropout. All ranks call."""
        several = self.microbatches if len(tokens) % self.microbatches == 0 else 1
        batch = self._batch("evaluate", tokens, labels, several)
        total = batch.total / self.mesh.size("dp", "sp")
        with self._evaluating():
            found = self._passes.evaluate(batch.tokens, batch.labels, batch.keywords, total)
        return self._mean(found)

    def logits(self, tokens: Tensor) -> Tensor:
        """[batch, rows, classes] of tokens [batch, rows], on every rank. All ranks call, those of
        one dp coordinate with the same tokens."""
        batch = self._batch("logits", tokens, tokens, 1)
        with self._evaluating():
            found = self._passes.outputs(batch.tokens[0], batch.keywords)
        if found is not None:
            with torch.no_grad():
                if self._head is not None:
                    found = whole_classes(self._head, found)
                if self.mesh.size("sp") > 1:
                    found = unshard(found, self.mesh.group("sp"))
        return from_rank(found, self._last, self.mesh.group("pp"), self.mesh.device_type)

    @cached_property
    def _agreement(self) -> GroupAgreement:
        """Of all ranks."""
        return GroupAgreement(self.mesh.group(*AXES), torch.device(self.mesh.device_type))

    def _batch(self, op: str, tokens: Tensor, labels: Tensor, microbatches: int) -> Batch:
        if self._waiting is not None:
            self._waiting.refuse_unloaded(self.named_parameters(), self._agreement)
            self._waiting = None
        return agree_on_batch(
            op,
            self.mesh,
            tokens,
            labels,
            microbatches,
            step=self.run_state.steps,
            positions=self._positions,
            agreement=self._agreement,
        )

    def _mean(self, loss: float) -> float:
        """The mean over dp and sp, whose ranks have each a part."""
        if self.mesh.size("dp", "sp") == 1:
            return loss
        found = torch.tensor([loss], dtype=torch.float64, device=self.mesh.device_type)
        dist.all_reduce(found, group=self.mesh.group("dp", "sp"))
        return float(found) / self.mesh.size("dp", "sp")

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scales the gradients so that the norm of the whole model's is at most `max_norm`; gives
        the norm before. All ranks call it, after `forward_backward`."""
        if self.scaler is not None:
            self.scaler.unscale_(self.parameters())
        norm = clip_grad_norm_(self.stages.values(), max_norm, self.mesh, copies=self._copies())
        return float(norm)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """The optimizer's step; with fp16 by the loss scale, which leaves it out where gradients of
        some rank have overflowed. Whether it was taken, the same on all ranks, which all call."""
        if self.scaler is None:
            optimizer.step()
            return True
        self.scaler.unscale_(self.parameters())
        taken = self.scaler.step(optimizer)
        self.scaler.update()
        return taken

    def _copies(self) -> list[nn.Parameter]:
        tied = self._ties.tied
        every = [tied_copies(stage, number, tied) for number, stage in self.stages.items()]
        return [parameter for copies in every for parameter in copies]

    # --- parameters

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Of this rank's stages, by their names in the whole model; each once."""
        seen: set[int] = set()
        for number in sorted(self.stages):
            for name, parameter in self.stages[number].named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """Of this rank's stages; each once."""
        return (parameter for _, parameter in self.named_parameters())

    def optimizer(
        self, factory: "Callable[[list[nn.Parameter]], torch.optim.Optimizer]"
    ) -> torch.optim.Optimizer:
        """What `factory` makes of this rank's parameters; with ZeRO-1, of its part of them.

        Raises:
            ValueError: ZeRO-1 with several stages on a rank: it shards one module's.
        """
        if not self.replicas:
            raise InvalidArgument("this rank's stages have nothing to train")
        first = next(iter(self.replicas.values()))
        optimizer = first.optimizer(factory, [p for p in self.parameters() if p.requires_grad])
        if self.scaler is not None:
            optimizer.register_step_pre_hook(self._scale_is_known)
        return optimizer

    def _scale_is_known(self, *_: Any) -> None:
        assert self.scaler is not None
        if self.scaler._finite is None:
            raise RuntimeError(
                "gradients are still multiplied by the loss scale of fp16: call "
                "ParallelModel.step(optimizer) in place of optimizer.step()"
            )

    def state_dict(self) -> dict[str, Tensor]:
        """The whole model's, with its names and shapes, on every rank. All ranks call it."""
        pipeline, device = self.mesh.group("pp"), self.mesh.device_type
        return self._state.get(self.stages, pipeline, self.mesh.shard_group, device)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes this rank's part of a state dict of the whole model. All ranks call it.

        Raises:
            ValueError: on all ranks: names or shapes are not the model's.
        """
        self._state.load(self.stages, self.mesh.shard_group, state)

    def checkpoint_modules(self) -> list[nn.Module]:
        """What a `Checkpointer` saves of the model: this rank's stages."""
        return [self.stages[number] for number in sorted(self.stages)]

    def train(self, mode: bool = True) -> "ParallelModel":
        """As of a module. Steps and evaluation set it themselves."""
        if any(stage.training is not mode for stage in self.stages.values()):
            for stage in self.stages.values():
                stage.train(mode)
        return self

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        before = any(stage.training for stage in self.stages.values())
        self.train(False)
        try:
            yield
        finally:
            self.train(before)
            for stage in self.stages.values():
                inner: Any
                for inner in stage.modules():
                    reshard: Any = getattr(inner, "reshard", None)
                    if reshard is not None:  # a forward alone leaves them gathered
                        reshard()
