"""How long collectives take between ranks of a layout, and what they send.

Alpha-beta over the real placement: a group's ranks have a stride, so many of them sit in one node.
Inside a node a ring; across nodes reduce-scatter inside, all-reduce of a part across, all-gather
inside; large ones go in pieces, so that the two levels run beside each other.
"""

from dataclasses import dataclass, replace

from pyparallel.planner.clusters import ClusterSpec, Link
from pyparallel.planner.layout import Layout

__all__ = ["Group", "group_of"]

PIECE_BYTES = 32e6


@dataclass(frozen=True)
class Group:
    """Ranks that communicate, and their links.

    Attributes:
        size: how many.
        local: of them, in one node.
        stride: distance between neighbours' ranks.
    """

    axis: str
    size: int
    local: int
    stride: int
    intra: Link
    inter: Link

    @property
    def nodes(self) -> int:
        return -(-self.size // self.local)

    @property
    def crosses(self) -> bool:
        return self.nodes > 1

    @property
    def sm_share(self) -> float:
        """Of a device's compute, what a collective beside it takes."""
        return (self.inter if self.crosses else self.intra).sm_share

    def gather(self, whole: float) -> float:
        """All-gather to, or reduce-scatter of, `whole` bytes on each rank."""
        return self._ring(whole, 1)

    def reduce(self, whole: float) -> float:
        """All-reduce of `whole` bytes: twice a reduce-scatter."""
        return self._ring(whole, 2)

    def sent(self, whole: float) -> float:
        """Bytes that a rank sends of `whole` ones in a gather."""
        return (self.size - 1) / self.size * whole

    def _ring(self, whole: float, rounds: int) -> float:
        n = self.size
        if n == 1 or whole <= 0:
            return 0.0
        link = self.inter if self.crosses else self.intra
        inside = (self.local - 1) / self.local * whole / self.intra.rate
        across = (self.nodes - 1) / self.nodes * whole / self.local / self.inter.rate
        steps = (self.local - 1) * self.intra.latency_us
        steps += (self.nodes - 1) * self.inter.latency_us if self.crosses else 0.0
        if self.crosses and self.nodes > 4:
            # NCCL takes trees where a ring across nodes would be mostly latency.
            steps = min(steps, self._tree_steps())
        moving = rounds * (max(inside, across) + min(inside, across) / _pieces(whole))
        return moving + (link.call_us + rounds * steps) * 1e-6

    def _tree_steps(self) -> float:
        depth = (self.nodes - 1).bit_length()
        return (self.local - 1) * self.intra.latency_us + 2 * depth * self.inter.latency_us

    def exchange(self, held: float) -> float:
        """All-to-all of `held` bytes on each rank."""
        n = self.size
        if n == 1 or held <= 0:
            return 0.0
        inside = (self.local - 1) / n * held / self.intra.rate
        across = (n - self.local) / n * held / self.inter.rate
        link = self.inter if self.crosses else self.intra
        return max(inside, across) + (link.call_us + (n - 1) * link.latency_us * 0.25) * 1e-6

    def hop(self, count: float) -> float:
        """One message to the next rank of the group, which lies in another node if any does."""
        if self.size == 1 or count <= 0:
            return 0.0
        link = self.inter if self.crosses else self.intra
        return count / link.rate + link.latency_us * 1e-6


def group_of(layout: Layout, cluster: ClusterSpec, axis: str) -> Group:
    """The group of one axis: tp has stride 1, then cp, dp and pp outermost. "data" is dp x cp, what
    reduces gradients: neighbours of it are "shards", those with the same shard "replicas", those
    that share a second copy of the weights "secondary". ep lies inside of the shards, so that
    experts' shards and replicas are dp cp / ep ranks."""
    tp, cp, dp = layout.tp, layout.cp, layout.dp
    sizes = {"tp": (tp, 1), "cp": (cp, tp), "dp": (dp, tp * cp), "data": (dp * cp, tp),
             "ep": (layout.ep, tp), "pp": (layout.pp, tp * cp * dp),
             "shards": (layout.shards, tp), "replicas": (layout.replicas, tp * layout.shards),
             "secondary": (layout.secondary, tp),
             "expert shards": (layout.shards // layout.ep, tp * layout.ep),
             "expert secondary": (layout.secondary // layout.ep, tp * layout.ep)}  # fmt: skip
    size, stride = max(sizes[axis][0], 1), sizes[axis][1]
    local = max(1, min(size, cluster.node_size // stride)) if stride else 1
    inter = cluster.inter
    if layout.one_adapter and axis in ("dp", "data", "shards", "replicas", "secondary"):
        inter = replace(inter, gbps=inter.gbps / local)
    return Group(axis, size, local, stride, cluster.intra, inter)


def _pieces(whole: float) -> float:
    """In how many pieces a collective of two levels goes: of 32 MB, eight at most. Assumed."""
    return max(1.0, min(8.0, whole / PIECE_BYTES))
