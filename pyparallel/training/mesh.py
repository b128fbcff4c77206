"""The groups of a layout: one rank's seat on its axes, for torch and for us."""

import os
import warnings
from collections.abc import Sequence
from datetime import timedelta
from itertools import combinations
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

import pyparallel.comm  # noqa: F401  (registers the backend)
from pyparallel.pipeline.agreement import GroupAgreement
from pyparallel.training.layout import AXES, Coordinates, Neighbours, ParallelConfig
from pyparallel.training.topology import Topology

__all__ = ["ParallelMesh", "build_mesh"]


class ParallelMesh:
    """One rank's groups over the axes of a layout. Made by `build_mesh`.

    Attributes:
        config: the layout.
        rank: this process, in torch.distributed's numbering.
        coordinates: of this rank.
        device_type: "cpu" or "cuda".
        device_mesh: torch's DeviceMesh of the same groups; dimensions are named as the axes and go
            from the slowest to the fastest.
    """

    def __init__(self, config: ParallelConfig, device_type: str) -> None:
        self.config = config
        self.device_type = device_type
        self.rank = dist.get_rank()
        self.coordinates: Coordinates = config.coordinates(self.rank)
        self._groups = _make_groups(config, self.rank)
        slow_first = tuple(reversed(config.fastest_first))
        self.device_mesh = DeviceMesh.from_group(
            [self.group(axis) for axis in slow_first],
            device_type,
            mesh=torch.arange(config.world_size).view([config.size(a) for a in slow_first]),
            mesh_dim_names=slow_first,
        )

    def group(self, *axes: str) -> dist.ProcessGroup:
        """This rank's group over some axes; all groups exist since the mesh was built.

        Ranks of a group are in the order of their coordinates, and the group's rank along one axis
        is the coordinate. Axes of size 1 add nothing; without others the group is this rank alone.
        """
        return self._groups[self._ranks(axes)]

    def size(self, *axes: str) -> int:
        """Ranks of `group(*axes)`."""
        return self.config.size(*axes)

    @property
    def neighbours(self) -> Neighbours:
        """Of this rank."""
        return self.config.neighbours(self.rank)

    @property
    def data_group(self) -> dist.ProcessGroup:
        """Ranks with the same parameters, which average gradients: dp x sp."""
        return self.group("dp", "sp")

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """Ranks over which fully_shard cuts parameters: `data_group`, or a replica's part of it."""
        data, shards = self.config.ranks(self.rank, "dp", "sp"), self.config.shards
        first = data.index(self.rank) // shards * shards
        return self._groups[tuple(data[first : first + shards])]

    def data_mesh(self) -> DeviceMesh:
        """What fully_shard takes: dp x sp in one dimension "shard", or with replicas in two,
        "replicate" and "shard". A shard group's ranks lie next to each other."""
        config = self.config
        if config.replicas == 1:
            group = self.data_group
            return DeviceMesh.from_group(group, self.device_type, mesh_dim_names=("shard",))
        data = torch.tensor(config.ranks(self.rank, "dp", "sp"))
        mesh = data.view(config.replicas, config.shards)
        row, column = (int(i) for i in (mesh == self.rank).nonzero()[0])
        return DeviceMesh.from_group(
            [
                self._groups[tuple(mesh[:, column].tolist())],
                self._groups[tuple(mesh[row].tolist())],
            ],
            self.device_type,
            mesh=mesh,
            mesh_dim_names=("replicate", "shard"),
        )

    def _ranks(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(self.config.ranks(self.rank, *axes))


def build_mesh(
    config: ParallelConfig,
    *,
    device_type: str = "cpu",
    topology: Topology | str | Path | Sequence[str | Path] | None = None,
    backend: str | None = None,
    timeout: timedelta | None = None,
) -> ParallelMesh:
    """The groups of a layout. All ranks of the world call it, with the same layout.

    Where torch.distributed is not initialised, it is: from the environment that torchrun sets
    (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), or without one as a world of a single rank. With a
    topology, ranks are then numbered as it places them (`Topology.place`), so that rank i of
    torch.distributed need not be the process with RANK=i. Where it is initialised, ranks stay as
    they are.

    Args:
        device_type: of the tensors that travel: "cpu" or "cuda".
        topology: where the ranks are, by RANK; or the path of its description, or those of doctor's
            reports of all hosts (`Topology.read`). Rank 0 warns, with the predicted cost, where tp
            or sp groups leave the fastest links.
        backend: of the world, if it is initialised here; by default "pyparallel" for CPU tensors,
            and for CUDA tensors too where device_type is "cuda".
        timeout: of the groups, if torch.distributed is initialised here.

    Raises:
        ValueError: the layout is not of this world; ranks have different layouts (on all ranks).
    """
    if device_type not in ("cpu", "cuda"):
        raise ValueError(f"device_type={device_type!r}: expected 'cpu' or 'cuda'")
    if topology is not None and not isinstance(topology, Topology):
        paths = [topology] if isinstance(topology, str | Path) else topology
        topology = Topology.read(*paths)
    placement = tuple(range(config.world_size))
    if not dist.is_initialized():
        if topology is not None:
            placement = topology.place(config)
        _initialise(config, device_type, backend, timeout, placement)
    elif backend is not None or timeout is not None:
        raise ValueError(
            "backend and timeout are of the world, and torch.distributed is initialised "
            f"already ({dist.get_backend()}): pass them to init_process_group"
        )
    config.check(dist.get_world_size())
    _agree(config)
    if topology is not None and dist.get_rank() == 0:
        _warn(config, topology, placement)
    return ParallelMesh(config, device_type)


def _warn(config: ParallelConfig, topology: Topology, placement: tuple[int, ...]) -> None:
    found = topology.crossings(config, placement)
    best = topology.place(config)
    text = "; ".join(map(str, found))
    if found and best != placement and topology.crossings(config, best) != found:
        text += (
            f". Ranks in the order {list(best)} would do better: let build_mesh initialise "
            "torch.distributed, with this topology"
        )
    if found:
        warnings.warn(f"layout {config.label}: {text}", stacklevel=3)


def _initialise(
    config: ParallelConfig,
    device_type: str,
    backend: str | None,
    timeout: timedelta | None,
    placement: tuple[int, ...],
) -> None:
    if backend is None:
        cuda = "cpu:pyparallel,cuda:pyparallel"
        backend = cuda if device_type == "cuda" else "pyparallel"
    if "RANK" in os.environ:
        config.check(int(os.environ.get("WORLD_SIZE", "1")))
        # The store meets by the numbers that the launcher gave; groups count by the placement.
        limit = timeout or default_pg_timeout
        store, given, _ = next(rendezvous("env://", timeout=limit))
        dist.init_process_group(
            backend,
            store=PrefixStore("pyparallel", store),
            rank=placement.index(given),
            world_size=config.world_size,
            timeout=timeout,
        )
        return
    if config.world_size != 1:
        raise ValueError(
            f"ParallelConfig of {config.world_size} ranks, and this process was started alone: no "
            f"RANK in its environment. `torchrun --nproc-per-node {config.world_size} ...` sets "
            "it, or call init_process_group first"
        )
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)


def _agree(config: ParallelConfig) -> None:
    """Collective over the world."""
    world = dist.group.WORLD
    assert world is not None
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    everyone = GroupAgreement(world, device).texts(repr(config))
    others = [rank for rank, other in enumerate(everyone) if other != everyone[0]]
    if others:
        raise ValueError(
            f"ParallelConfig differs between ranks: rank 0 has {everyone[0]}, rank {others[0]} has "
            f"{everyone[others[0]]}; ranks that differ from rank 0: {others}"
        )


def _make_groups(config: ParallelConfig, rank: int) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """This rank's groups over every set of axes, by their ranks; made on all ranks in one order."""
    world = dist.group.WORLD
    assert world is not None
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {tuple(range(config.world_size)): world}
    # Profiles name groups by their axes; those of size 1 take no part.
    world._set_group_desc("-".join(axis for axis in AXES if config.size(axis) > 1) or "alone")
    for number in range(len(AXES) + 1):
        for axes in combinations(AXES, number):
            _add(groups, config.ranks(rank, *axes), "-".join(axes) or "alone")
    if config.replicas > 1:
        data = config.ranks(rank, "dp", "sp")
        index, shards = data.index(rank), config.shards
        _add(groups, data[index // shards * shards :][:shards], "shard")
        _add(groups, data[index % shards :: shards], "replicate")
    return groups


def _add(groups: dict[tuple[int, ...], dist.ProcessGroup], ranks: list[int], name: str) -> None:
    """Groups meet in the order of their making; each rank is in one group per name."""
    if tuple(ranks) not in groups:
        made = dist.new_group(ranks, use_local_synchronization=True, group_desc=name)
        assert isinstance(made, dist.ProcessGroup)
        groups[tuple(ranks)] = made
