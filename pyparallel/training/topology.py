"""What connects the ranks of a world, which rank should sit where in a layout, and what it costs
when an axis that talks much leaves the fastest links. No torch.

Levels go from the fastest links to the slowest: ranks of one domain of a level reach each other by
that level's link; the last level is the network, and all ranks are in it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pyparallel.planner.clusters import ClusterSpec, Link
from pyparallel.planner.collectives import Group
from pyparallel.planner.hardware import CLUSTERS
from pyparallel.planner.measured import cluster_from_doctor, read_json
from pyparallel.training.layout import ParallelConfig

__all__ = ["Crossing", "Topology"]

MESSAGE = 64 * 2**20  # bytes of the all-reduce whose time is told
_WATCHED = ("tp", "sp")  # axes that talk in every layer


@dataclass(frozen=True)
class Crossing:
    """An axis whose groups leave the fastest links.

    Attributes:
        axis: its name.
        group: ranks, in the layout's numbers, of the group that reaches farthest.
        level: name of the links that it reaches over.
        seconds, inside: predicted of one all-reduce of 64 MiB, and if it stayed inside.
    """

    axis: str
    group: tuple[int, ...]
    level: str
    seconds: float
    inside: float

    def __str__(self) -> str:
        return (
            f"{self.axis} groups such as {list(self.group)} reach over {self.level}: an all-reduce "
            f"of 64 MiB is predicted to take {_ms(self.seconds)}, and {_ms(self.inside)} inside "
            f"the fastest links ({self.seconds / self.inside:.1f} times)"
        )


@dataclass(frozen=True)
class Topology:
    """Where each rank is.

    Attributes:
        levels: names, fastest first; the last is the network.
        links: of each level, as the planner describes them.
        seats: of each rank its domain at every level but the last. Domains lie inside one another.

    Raises:
        ValueError: at construction, for what is no such nesting.
    """

    levels: tuple[str, ...]
    links: tuple[Link, ...]
    seats: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        misfits = []
        if not self.levels or len(self.levels) != len(self.links):
            misfits.append(f"{len(self.levels)} levels and {len(self.links)} links: one each")
        if not self.seats:
            misfits.append("no ranks")
        depth = len(self.levels) - 1
        wrong = [rank for rank, seat in enumerate(self.seats) if len(seat) != depth]
        if wrong:
            misfits.append(
                f"rank {wrong[0]} has {len(self.seats[wrong[0]])} domains, {len(self.levels)} "
                f"levels need {depth}: the last level holds all ranks"
            )
        else:
            misfits += self._not_nested()
        if misfits:
            raise ValueError("Topology: " + "; ".join(misfits))

    def _not_nested(self) -> Iterable[str]:
        for level in range(len(self.levels) - 2):
            above: dict[str, str] = {}
            for rank, seat in enumerate(self.seats):
                if above.setdefault(seat[level], seat[level + 1]) != seat[level + 1]:
                    yield (
                        f"{self.levels[level]} domain {seat[level]!r} lies in "
                        f"{above[seat[level]]!r} and (rank {rank}) in {seat[level + 1]!r}"
                    )
                    return

    @property
    def world_size(self) -> int:
        return len(self.seats)

    @classmethod
    def from_description(cls, document: Mapping[str, Any]) -> "Topology":
        """Of a document with `levels`, fastest first, and `ranks`, nested as the levels are.

            {"levels": [{"name": "NVLink", "like": "h100"},
                        {"name": "hosts", "gbps": 50, "share": 0.8, "latency_us": 10,
                         "call_us": 20, "sm_share": 0.15}],
             "ranks": [[0, 1, 2, 3], [4, 5, 6, 7]]}

        A level is a planner `Link` or, with `like`, the link of a device that the planner knows:
        inside its node, or between nodes for the last level. With n levels, ranks are nested n
        lists deep.

        Raises:
            ValueError: unknown or missing keys, wrong depth, ranks that are not 0 to n - 1.
        """
        unknown = sorted(set(document) - {"levels", "ranks"})
        if unknown or set(document) != {"levels", "ranks"}:
            raise ValueError(
                f"topology: keys {sorted(map(str, document))}: 'levels' and 'ranks' are expected"
            )
        levels = document["levels"]
        if not isinstance(levels, list) or not levels:
            raise ValueError(f"topology: levels={levels!r}: a list of links is expected")
        links = [_link(level, number, len(levels)) for number, level in enumerate(levels)]
        seats: dict[int, tuple[str, ...]] = {}
        _sit(document["ranks"], len(levels) - 1, (), seats)
        if sorted(seats) != list(range(len(seats))):
            raise ValueError(
                f"topology: ranks {sorted(seats)}: each of 0 to {len(seats) - 1} is expected once"
            )
        return cls(
            tuple(link.name for link in links),
            tuple(links),
            tuple(seats[rank] for rank in range(len(seats))),
        )

    @classmethod
    def from_doctor(
        cls, reports: Sequence[Mapping[str, Any]], ranks_per_host: int | None = None
    ) -> "Topology":
        """Of what `python -m pyparallel doctor --json` wrote on each host, in the order of their
        ranks: a host's ranks are numbered together, as torchrun does.

        GPUs that NVLinks connect are one domain; those of one NUMA node (every link but SYS) are
        the next, then comes the host. Ranks of a host without GPUs are taken to be spread evenly
        over its NUMA nodes, in their order, as binding them does.

        Args:
            ranks_per_host: by default a rank for every GPU; without GPUs it must be given.

        Raises:
            ValueError: no such reports; more ranks than GPUs.
            PlanError: a GPU that the planner does not know.
        """
        if not reports:
            raise ValueError("topology: no reports")
        cluster = cluster_from_doctor(_fastest_links_only(reports[0]))
        seats: list[tuple[str, ...]] = []
        for host, report in enumerate(reports):
            gpus = [device["index"] for device in report["gpus"]["devices"]]
            count = len(gpus) if ranks_per_host is None else ranks_per_host
            if count < 1 or (gpus and count > len(gpus)):
                raise ValueError(
                    f"topology: host {host} has {len(gpus)} GPUs, and ranks_per_host="
                    f"{ranks_per_host}: a number of ranks is needed, without GPUs by ranks_per_host"
                )
            links = report["gpus"].get("links") or ()
            near = _components(gpus, [x for x in links if str(x["link"]).startswith("NV")])
            node = _components(gpus, [x for x in links if x["link"] != "SYS"])
            numa = max(1, len(report["cpu"].get("numa_nodes") or ()))
            for local in range(count):
                if gpus:
                    names = (f"nvlink {near[gpus[local]]}", f"numa {node[gpus[local]]}")
                else:
                    names = (f"numa {local * numa // count}",) * 2
                seats.append((*(f"host {host} {name}" for name in names), f"host {host}"))
        return cls._of_levels(cluster, seats)

    @classmethod
    def _of_levels(cls, cluster: ClusterSpec, seats: list[tuple[str, ...]]) -> "Topology":
        """Without the levels whose domains are those of the next."""
        pcie = CLUSTERS["a100-pcie"].intra
        cuda = cluster.gpu.name != "cpu"
        links = [cluster.intra, pcie if cuda else cluster.intra, pcie if cuda else cluster.intra]
        names = [cluster.intra.name, "links of a NUMA node", "links of a host"]
        kept = []
        for level in range(3):
            above = level + 1
            if level == 2 or len({s[level] for s in seats}) != len({s[above] for s in seats}):
                kept.append(level)
        # The fastest domains keep their link, whichever name of the equal ones stays.
        levels = [names[0] if i == 0 else names[level] for i, level in enumerate(kept)]
        kinds = [links[0] if i == 0 else links[level] for i, level in enumerate(kept)]
        return cls(
            (*levels, cluster.inter.name),
            (*kinds, cluster.inter),
            tuple(tuple(seat[level] for level in kept) for seat in seats),
        )

    @classmethod
    def read(cls, *paths: str | Path, ranks_per_host: int | None = None) -> "Topology":
        """Of one description file, or of what doctor wrote on each host.

        Raises:
            ValueError: as `from_description` and `from_doctor`; a file that is no JSON.
        """
        documents = [read_json(Path(path)) for path in paths]
        described = [path for path, d in zip(paths, documents, strict=True) if "levels" in d]
        if not described:
            return cls.from_doctor(documents, ranks_per_host)
        if len(paths) > 1 or ranks_per_host is not None:
            raise ValueError(
                f"topology: {described[0]} describes all ranks: no other file, and no "
                "ranks_per_host, goes with it"
            )
        return cls.from_description(documents[0])

    def place(self, config: ParallelConfig) -> tuple[int, ...]:
        """The ranks in the order in which the layout should number them: `place(config)[i]` becomes
        rank i.

        Axis by axis, the fastest first, groups are filled from one domain of the fastest level,
        then what is left from one of the next: in the default order TP stays inside the fastest
        domains, then SP, PP, and DP outermost. Domains need not be equal.
        """
        config.check(self.world_size)
        units: list[tuple[int, ...]] = [(rank,) for rank in range(self.world_size)]
        for axis in config.fastest_first:
            units = self._grouped(units, getattr(config, axis))
        return units[0]

    def _grouped(self, units: list[tuple[int, ...]], size: int) -> list[tuple[int, ...]]:
        if size == 1:
            return units
        made: list[tuple[int, ...]] = []
        left = units
        for level in range(len(self.levels)):
            by_domain: dict[str, list[tuple[int, ...]]] = {}
            later = []
            for unit in left:
                if self.level(unit) <= level:
                    by_domain.setdefault(self._domain(unit[0], level), []).append(unit)
                else:
                    later.append(unit)
            for found in by_domain.values():
                whole = len(found) // size * size
                made += [
                    tuple(rank for unit in found[i : i + size] for rank in unit)
                    for i in range(0, whole, size)
                ]
                later += found[whole:]
            left = sorted(later)
        return sorted(made)

    def level(self, ranks: Iterable[int]) -> int:
        """The fastest level in one domain of which all of the ranks are."""
        ranks = list(ranks)
        for level in range(len(self.levels) - 1):
            if len({self.seats[rank][level] for rank in ranks}) == 1:
                return level
        return len(self.levels) - 1

    def _domain(self, rank: int, level: int) -> str:
        return self.seats[rank][level] if level < len(self.levels) - 1 else ""

    def all_reduce_seconds(self, ranks: Sequence[int], count: float = MESSAGE) -> float:
        """Predicted of an all-reduce of `count` bytes among ranks, by the planner's formulas: a
        ring inside the domains of the level below, and across them."""
        level = self.level(ranks)
        local = len(ranks)
        if level:
            domains = [self._domain(rank, level - 1) for rank in ranks]
            local = max(domains.count(domain) for domain in domains)
        inner = self.links[max(0, level - 1)]
        return Group("", len(ranks), local, 1, inner, self.links[level]).reduce(count)

    def crossings(
        self, config: ParallelConfig, placement: Sequence[int] | None = None
    ) -> list[Crossing]:
        """Of the axes that talk in every layer, tp and sp, those that leave the fastest domains.

        Args:
            placement: as `place` gives it; by default ranks stay as they are.
        """
        config.check(self.world_size)
        placement = range(self.world_size) if placement is None else placement
        found = []
        for axis in _WATCHED:
            if config.size(axis) == 1 or len(self.levels) == 1:
                continue
            groups = [(g, [placement[r] for r in g]) for g in config.groups(axis)]
            numbers, ranks = max(groups, key=lambda item: self.all_reduce_seconds(item[1]))
            if self.level(ranks) > 0:
                inside = Group("", len(ranks), len(ranks), 1, self.links[0], self.links[0])
                found.append(
                    Crossing(
                        axis,
                        tuple(numbers),
                        self.levels[self.level(ranks)],
                        self.all_reduce_seconds(ranks),
                        inside.reduce(MESSAGE),
                    )
                )
        return found


def _link(level: Any, number: int, count: int) -> Link:
    known = {f.name for f in fields(Link)}
    if not isinstance(level, Mapping) or "name" not in level:
        raise ValueError(f"topology: level {level!r}: an object with a name is expected")
    figures = {key: value for key, value in level.items() if key != "like"}
    unknown = sorted(set(figures) - known)
    if unknown:
        raise ValueError(f"topology: level {level['name']}: unknown keys {', '.join(unknown)}")
    if "like" in level:
        if level["like"] not in CLUSTERS:
            raise ValueError(f"topology: like={level['like']!r}: known are {', '.join(CLUSTERS)}")
        cluster = CLUSTERS[level["like"]]
        base = cluster.inter if number == count - 1 and count > 1 else cluster.intra
        figures = {**{f: getattr(base, f) for f in known}, **figures}
    missing = sorted(known - {"source"} - set(figures))
    if missing:
        raise ValueError(
            f"topology: level {level['name']}: {', '.join(missing)} missing; or like=NAME of a "
            "device that the planner knows"
        )
    numbers = {f: figures[f] for f in known - {"name", "source"}}
    for key, value in numbers.items():
        real = isinstance(value, int | float) and not isinstance(value, bool)
        if not real or value < 0 or (value == 0 and key in ("gbps", "share")):
            raise ValueError(f"topology: level {level['name']}: {key}={value!r}: a number expected")
    return Link(name=str(figures["name"]), source=str(figures.get("source", "")), **numbers)


def _sit(
    nested: Any, depth: int, above: tuple[str, ...], seats: dict[int, tuple[str, ...]]
) -> None:
    """Domains are named by their places: "1", and inside of it "1.0"."""
    if not isinstance(nested, list):
        raise ValueError(f"topology: ranks: {nested!r} where a list of {depth + 1} levels belongs")
    for number, inner in enumerate(nested):
        if depth:
            name = f"{above[0]}.{number}" if above else str(number)
            _sit(inner, depth - 1, (name, *above), seats)
        elif isinstance(inner, bool) or not isinstance(inner, int) or inner in seats:
            raise ValueError(f"topology: ranks: {inner!r}: a number of a rank is expected, once")
        else:
            seats[inner] = above


def _components(nodes: Sequence[int], links: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    """Of each node the smallest that links lead to."""
    home = {node: node for node in nodes}
    for link in links:
        a, b = home.get(link["a"]), home.get(link["b"])
        if a is not None and b is not None and a != b:
            low, high = min(a, b), max(a, b)
            home = {node: low if root == high else root for node, root in home.items()}
    return home


def _fastest_links_only(report: Mapping[str, Any]) -> Mapping[str, Any]:
    """The planner knows one link inside a node: NVLinks where there are some, which then are those
    of the first level; the others are PCIe."""
    gpus = report.get("gpus") or {}
    near = [x for x in gpus.get("links") or () if str(x.get("link", "")).startswith("NV")]
    return {**report, "gpus": {**gpus, "links": near}} if near else report


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
