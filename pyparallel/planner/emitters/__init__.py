"""A planned layout as the configuration of a framework, which our importer reads back alike.

    made = emit("megatron", job, layout)
    print(made.text)

What a framework cannot do is refused, with the nearest layout that it can; what it does but keeps
outside of its configuration is told in `notes`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyparallel.planner.emitters.deepspeed import deepspeed_json
from pyparallel.planner.emitters.form import Emission
from pyparallel.planner.emitters.megatron import megatron_script
from pyparallel.planner.emitters.own import own_json
from pyparallel.planner.emitters.torchtitan import torchtitan_toml
from pyparallel.planner.errors import PlanError, nearest_names
from pyparallel.planner.layout import Job, Layout

__all__ = ["EMITTERS", "SPACES", "Emitted", "emit"]


@dataclass(frozen=True)
class Emitted:
    """A configuration.

    Attributes:
        framework: a key of `EMITTERS`.
        filename: what to call it, with the ending by which it is known.
        text: its content.
        notes: what has to be done besides, in the framework's own words.
    """

    framework: str
    filename: str
    text: str
    notes: tuple[str, ...]


# Framework -> file name and what writes it.
EMITTERS: dict[str, tuple[str, Callable[[Emission], str]]] = {
    "pyparallel": ("pyparallel.json", own_json),
    "deepspeed": ("deepspeed.json", deepspeed_json),
    "megatron": ("megatron.sh", megatron_script),
    "torchtitan": ("torchtitan.toml", torchtitan_toml),
}


# What a framework does otherwise than a search does by itself: fields of candidates.Space.
SPACES: dict[str, dict[str, Any]] = {
    "deepspeed": {
        "fixed": {"sequence_parallel": False, "cp_kind": "ulysses"},
        "schedules": ("1f1b",),
    },
    "torchtitan": {"zero": (2, 3)},
}


def emit(framework: str, job: Job, layout: Layout, node_size: int = 8) -> Emitted:
    """The configuration that makes `framework` train `job` by `layout`.

    Args:
        node_size: devices of a node, for launch commands.

    Raises:
        PlanError: no such framework, or it cannot do this: everything that it cannot is listed,
            with what it can.
    """
    if framework not in EMITTERS:
        near = nearest_names(framework, EMITTERS)
        there = ", ".join(EMITTERS) + (f"; {near}" if near else "")
        raise PlanError(f"no framework {framework!r}; there are {there}")
    filename, write = EMITTERS[framework]
    emission = Emission(framework, job, layout, node_size)
    text = write(emission)
    emission.finish()
    return Emitted(framework, filename, text, tuple(emission.notes))
