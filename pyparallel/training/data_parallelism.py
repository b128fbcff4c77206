"""Data parallelism of a module, or of one stage of a pipeline: one setting from whole copies to
ZeRO-3, by torch's own parts over this mesh's groups.

    zero  torch's part               sharded over dp x sp
    0     DistributedDataParallel    nothing
    1     + ZeroRedundancyOptimizer  optimizer states, by whole parameters
    2     fully_shard, weights kept  optimizer states and reduced gradients
          from forward to backward
    3     fully_shard                weights as well

Gradients are averaged over dp x sp. So each rank's loss must be scaled such that the mean of all
ranks' losses is the loss: where ranks have different numbers of tokens, (sum over own tokens) x
dp sp / (all tokens).
"""

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from pyparallel.training.compressed_sums import CompressedSums, Traffic
from pyparallel.training.compression import Compression, codec_of, compression_of
from pyparallel.training.compression_hooks import BucketHook, Feedback, UnitHooks
from pyparallel.training.host_optimizer import HostOptimizer
from pyparallel.training.layout import why_refused
from pyparallel.training.mesh import ParallelMesh

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

__all__ = ["DataParallel", "OptimizerFactory", "data_parallel"]

# Takes what torch's optimizers take: parameters, or dictionaries of parameter groups.
OptimizerFactory = Callable[[Any], Optimizer]


class DataParallel:
    """A module whose gradients are averaged over the mesh's dp x sp ranks. Made by `data_parallel`.

    Attributes:
        module: to be called in the original's place, also as a stage of a PipelineExecutor.
        original: the module that was given; with zero 2 and 3 the same as `module`.
        mesh, zero, offload: as given.
        traffic: with compression, the bytes that this rank has sent for gradients.
        feedback: with compression, what it has lost and not yet fed back: for a checkpoint, an
            object with state_dict and load_state_dict, which differ by rank.
    """

    def __init__(
        self,
        module: nn.Module,
        original: nn.Module,
        mesh: ParallelMesh,
        zero: int,
        offload: bool = False,
        traffic: Traffic | None = None,
        feedback: Feedback | None = None,
    ) -> None:
        self.module, self.original = module, original
        self.mesh, self.zero, self.offload = mesh, zero, offload
        self.traffic, self.feedback = traffic, feedback

    @contextlib.contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        """Around forward and backward of one microbatch: gradients add up, and are averaged over
        the ranks in that of the last microbatch only.

        A stage of a pipeline needs none of this: the executor does it. With zero 3 weights travel
        in every microbatch; with zero 2 once per step.
        """
        if isinstance(self.module, DistributedDataParallel) and not last:
            with self.module.no_sync():
                yield
        elif self.zero >= 2 and self.mesh.size("dp", "sp") > 1:
            module: Any = self.module  # an FSDPModule
            module.set_requires_gradient_sync(last)
            module.set_is_last_backward(last)
            module.set_reshard_after_backward(last or self.zero == 3)
            try:
                yield
            finally:  # what runs outside of this block is a step of its own
                module.set_requires_gradient_sync(True)
                module.set_is_last_backward(True)
                module.set_reshard_after_backward(True)
        else:
            yield

    def optimizer(
        self,
        factory: OptimizerFactory,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | None = None,
    ) -> Optimizer:
        """The optimizer that `factory` makes, over what this rank holds the states of.

        Args:
            factory: from parameters, or dictionaries of parameter groups, to an optimizer: what
                torch's optimizers take. To keep master weights, wrap here and not around the
                result: with zero 1 it then gets this rank's parameters only.
            params: of the wrapped module; by default all that require gradients.
        """
        chosen: Any = list(params) if params is not None else self.parameters()
        if self.offload and self.zero < 2:
            plain = factory

            def factory(groups: Any) -> Optimizer:
                return HostOptimizer(groups, plain)

        if self.zero != 1 or self.mesh.size("dp", "sp") == 1:
            return factory(chosen)
        from torch.distributed.optim import ZeroRedundancyOptimizer  # takes a second to import

        return ZeroRedundancyOptimizer(
            chosen,
            optimizer_class=cast("type[Optimizer]", _without_keywords(factory)),
            process_group=self.mesh.data_group,
        )

    def checkpoint_modules(self) -> list[nn.Module]:
        """What a Checkpointer saves of it."""
        return [self.module]

    def parameters(self) -> list[nn.Parameter]:
        """Of the wrapped module, those that require gradients."""
        return [p for p in self.module.parameters() if p.requires_grad]


def data_parallel(
    module: nn.Module,
    mesh: ParallelMesh,
    *,
    zero: int | None = None,
    offload: bool | None = None,
    units: Sequence[str] | None = None,
    compression: Compression | str | None = None,
    policy: "MixedPrecisionPolicy | None" = None,
) -> DataParallel:
    """Averages a module's gradients over dp x sp. Collective over these ranks.

    All ranks start from the parameters and buffers of the first, unless they are on the meta device
    (zero 2 and 3: materialise and load them afterwards).

    Args:
        module: whole, or this rank's shards of tensor parallelism, or a stage of a pipeline.
        zero: 0 to 3, see above; by default the layout's.
        offload: optimizer states live in host memory, and the optimizer works there; with zero 2
            and 3 the shards of weights and gradients live there too. By default the layout's
            `offload_optimizer`.
        units: with zero 2 and 3: names of the submodules whose weights are gathered together; by
            default the elements of the outermost ModuleLists and Sequentials that hold parameters.
        compression: gradients travel in fewer bytes: "fp16", "bf16", "int8", "fp8", with zero 0 and
            1 also "topk" and "powersgd", or a `Compression` with their options. Costs a float32
            copy of the gradients for what is fed back.
        policy: with zero 2 and 3: the dtypes that fully_shard gathers and reduces in.

    Raises:
        ValueError: zero is not 0 to 3; units or policy with zero 0 or 1, where they have no effect;
            a unit's name is not known; there is nothing to train; zero 2 or 3 of a stage where the
            layout says microbatch_gathers="refuse".
    """
    zero = mesh.config.zero if zero is None else zero
    offload = mesh.config.offload_optimizer if offload is None else offload
    _check(module, zero, units, policy)
    sums = None if compression is None else _sums(compression_of(compression), mesh, zero)
    if offload and mesh.device_type == "cpu" and mesh.rank == 0:
        warnings.warn(
            "data_parallel: offload on device_type='cpu': states are in host memory anyway; this "
            "costs a copy of the weights and saves nothing",
            stacklevel=2,
        )
    if mesh.size("dp", "sp") == 1:
        return DataParallel(module, module, mesh, zero, offload)
    if zero >= 2 and mesh.size("pp") > 1:
        _price(module, mesh, zero)
    feedback: Feedback | None = None
    if zero < 2:
        replicated = _replicated(module, mesh)
        if sums is not None:
            hook = BucketHook(sums, dict(module.named_parameters()))
            replicated.register_comm_hook(None, _as_function(hook))
            feedback = hook
        wrapped: nn.Module = replicated
    else:
        wrapped = _sharded(module, mesh, zero, offload, units, policy)
        if sums is not None:
            feedback = UnitHooks(wrapped, sums)
    traffic = None if sums is None else sums.traffic
    return DataParallel(wrapped, module, mesh, zero, offload, traffic, feedback)


def _sums(compression: Compression, mesh: ParallelMesh, zero: int) -> CompressedSums:
    """On a group of their own with zero 0 and 1, where a thread makes the calls."""
    if zero >= 2 and codec_of(compression) is None:
        raise ValueError(
            f"data_parallel: zero={zero} scatters gradients, and compression {compression.kind} "
            "cannot; fp16, bf16, int8 and fp8 can, and zero=0 and 1 take every kind"
        )
    if zero >= 2 and mesh.config.replicas > 1:
        raise ValueError(
            f"data_parallel: compression with replicas={mesh.config.replicas}: what replicas add "
            "could not be compressed; replicas=1 can"
        )
    ranks = mesh.config.ranks(mesh.rank, "dp", "sp")
    group = mesh.data_group
    if zero < 2 and len(ranks) > 1:
        made = dist.new_group(ranks, use_local_synchronization=True, group_desc="compression")
        assert isinstance(made, dist.ProcessGroup)
        group = made
    return CompressedSums(compression, group)


def _as_function(hook: BucketHook) -> Callable[[object, GradBucket], Future[Tensor]]:
    # DDP asks for a function with these annotations.
    def compressed(state: object, bucket: GradBucket) -> Future[Tensor]:
        return hook(state, bucket)

    return compressed


def _sharded(
    module: nn.Module,
    mesh: ParallelMesh,
    zero: int,
    offload: bool,
    units: Sequence[str] | None,
    policy: "MixedPrecisionPolicy | None",
) -> nn.Module:
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    _same_start(module, mesh)
    pinned = mesh.device_type == "cuda"
    options: dict[str, Any] = {
        "mesh": mesh.data_mesh(),
        "reshard_after_forward": zero == 3,
        "offload_policy": CPUOffloadPolicy(pin_memory=pinned) if offload else OffloadPolicy(),
        "mp_policy": policy or MixedPrecisionPolicy(),
    }
    for unit in _units(module, units):
        fully_shard(unit, **options)
    fully_shard(module, **options)
    return module


def _check(module: nn.Module, zero: int, units: Sequence[str] | None, policy: object) -> None:
    misfits = []
    if isinstance(zero, bool) or zero not in (0, 1, 2, 3):
        misfits.append(f"zero={zero!r}: 0, 1, 2 or 3 is expected")
    elif zero < 2:
        if policy is not None:
            misfits.append(f"policy has no effect with zero={zero}; it is fully_shard's")
        if units is not None:
            misfits.append(f"units has no effect with zero={zero}; zero=2 and 3 gather by units")
    if not any(p.requires_grad for p in module.parameters()):
        misfits.append(f"no parameter of {type(module).__name__} requires gradients")
    if units is not None:
        known = {name for name, _ in module.named_modules()}
        unknown = [name for name in units if name not in known]
        if unknown:
            some = ", ".join(sorted(known - {""})[:8])
            misfits.append(f"units {unknown} are no submodules; there are {some}, ...")
    if misfits:
        raise ValueError("data_parallel: " + "; ".join(misfits))


def _price(module: nn.Module, mesh: ParallelMesh, zero: int) -> None:
    """What fully_shard costs under a schedule that goes from microbatch to microbatch all the time:
    gradients of all of them add up whole, and with zero 3 each gathers the weights twice."""
    config = mesh.config
    if config.microbatch_gathers == "refuse":
        raise ValueError(
            f"data_parallel: zero={zero} of a stage of pp={config.pp}: {why_refused(zero)}; zero=0 "
            "and 1 do not, and ParallelConfig(microbatch_gathers='price') allows it"
        )
    if config.microbatch_gathers == "allow" or mesh.rank:
        return
    weights = sum(p.nbytes for p in module.parameters())
    once = weights * (config.shards - 1) // config.shards
    text = f"gradients ({mib(weights)}) stay whole until the last microbatch"
    if zero == 3:
        text += (
            f", and every microbatch receives up to {mib(2 * once)} of weights, in forward "
            f"and backward; zero=2 receives {mib(once)} once a step"
        )
    warnings.warn(
        f"data_parallel: zero={zero} of a stage of pp={config.pp}, sharded over {config.shards} "
        f"ranks: {text}. ParallelConfig(microbatch_gathers='refuse') refuses this, 'allow' is "
        "silent",
        stacklevel=3,
    )


def mib(count: int) -> str:
    return f"{count / 2**20:.3g} MiB"


def _replicated(module: nn.Module, mesh: ParallelMesh) -> DistributedDataParallel:
    """Buffers are broadcast in each step's first forward only where training may change them: those
    of a state dict (running statistics), not constants such as rotary frequencies."""
    persistent = module.state_dict(keep_vars=True).keys() & {n for n, _ in module.named_buffers()}
    known = inspect.signature(DistributedDataParallel).parameters
    option = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: Any = {option: bool(persistent)}  # torch 2.13 has renamed it
    return DistributedDataParallel(
        module, process_group=mesh.data_group, gradient_as_bucket_view=True, **options
    )


def _same_start(module: nn.Module, mesh: ParallelMesh) -> None:
    """fully_shard cuts what each rank has: ranks that started from different weights would train a
    patchwork, and replicas of different weights would never meet."""
    source = mesh.config.ranks(mesh.rank, "dp", "sp")[0]
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            if not tensor.is_meta:
                dist.broadcast(tensor, source, group=mesh.data_group)


def _units(module: nn.Module, names: Sequence[str] | None) -> list[nn.Module]:
    """Modules to be gathered as one, inner ones first."""
    if names is not None:
        chosen = [(name, module.get_submodule(name)) for name in names]
        chosen.sort(key=lambda item: -item[0].count("."))
        return [unit for name, unit in chosen if name]
    found: list[nn.Module] = []
    lists = [module] if isinstance(module, nn.Sequential | nn.ModuleList) else []
    pending = [] if lists else list(module.children())
    while pending:
        inner = pending.pop(0)
        if isinstance(inner, nn.Sequential | nn.ModuleList):
            lists.append(inner)
        else:
            pending += inner.children()
    for one in lists:
        found += [unit for unit in one if any(True for _ in unit.parameters())]
    uses: dict[int, int] = {}
    for unit in found:
        for parameter in {id(p) for p in unit.parameters()}:
            uses[parameter] = uses.get(parameter, 0) + 1
    inside = {id(m) for unit in found for m in unit.modules()}
    outside = {
        id(p) for m in module.modules() if id(m) not in inside for p in m._parameters.values()
    }
    # What shares a parameter with the rest is gathered with the rest.
    return [
        unit
        for unit in dict.fromkeys(found)
        if not any(uses[id(p)] > 1 or id(p) in outside for p in unit.parameters())
    ]


def _without_keywords(factory: OptimizerFactory) -> Callable[..., Optimizer]:
    def make(groups: Any, **_: Any) -> Optimizer:
        return factory(groups)

    return make
