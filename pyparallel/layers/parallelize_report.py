"""What `parallelize` did with a model, module by module, to be read and printed."""

from dataclasses import dataclass, field

from pyparallel.layers.dropout import RandomStreams

__all__ = ["ParallelizeReport", "ShardedEntry"]


@dataclass(frozen=True)
class ShardedEntry:
    """A module whose parameters, or whose gradients, now concern several ranks.

    name    in the model
    style   of the plan, see `parallelize`; "block" for one whose input comes once, for all columns
            in it, "whole sequence" for one that needs it and is not sharded by linear layers
    whole   shape of its weight in the unsharded model
    local   shape on this rank, padding included
    forward, backward   what is communicated, by the op that does it; "" for nothing. An op with
                        matmul in its name is the fused one
    """

    name: str
    style: str
    whole: tuple[int, ...]
    local: tuple[int, ...]
    forward: str = ""
    backward: str = ""


@dataclass
class ParallelizeReport:
    """What became of every module that has parameters; `str()` of it is a table.

    sharded    the modules that are parts now
    whole      others with parameters, kept whole on every rank, and why
    unsharded  those of them that could have been worth sharding and were not, and why
    notes      what else a user should know
    streams    generators of the model's dropouts (`RandomStreams`), if it has any
    """

    sharded: list[ShardedEntry] = field(default_factory=list)
    whole: dict[str, str] = field(default_factory=dict)
    unsharded: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    streams: "RandomStreams | None" = None

    def __str__(self) -> str:
        rows = [(e.name, e.style, _held(e), e.forward, e.backward) for e in self.sharded]
        rows.insert(0, ("module", "style", "this rank's weight", "forward", "backward"))
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        lines += [f"whole: {name}: {why}" for name, why in self.whole.items()]
        lines += [f"not sharded: {name}: {why}" for name, why in self.unsharded.items()]
        return "\n".join(lines + [f"note: {note}" for note in self.notes])


def _held(entry: ShardedEntry) -> str:
    local, whole = ("x".join(map(str, sizes)) for sizes in (entry.local, entry.whole))
    return f"{local} of {whole}" if whole else ""
