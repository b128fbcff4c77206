"""Plans: which modules of a model are sharded, and how, by name patterns.

A pattern is a dotted name, compared part by part: `*`, `?` and `[...]` stand for characters of one
part, `**` for any number of whole parts. `layers.*.mlp.up` is that of every layer, `**.up` any.
"""

import fnmatch
from collections.abc import Mapping

from torch import nn

from pyparallel.errors import InvalidArgument

__all__ = ["ALIASES", "STYLES", "find", "resolve"]

# What a plan may say of a module, and what it then is.
STYLES = {
    "colwise": "a linear layer's output features are sharded",
    "colwise_gather_output": "the same, and all ranks get all output features",
    "rowwise": "a linear layer's input features are sharded, as a colwise layer gives them",
    "rowwise_split_input": "the same of an input that all ranks have whole",
    "vocab": "an embedding's rows are sharded",
    "experts": "stacked gated experts: each one's middle features are sharded",
    "sequence": "replicated, on this rank's part of the sequence",
    "summed": "replicated, used by each rank with its own shard: gradients are summed",
    "replicated": "left whole",
}
# Other libraries' names of the same, as Hugging Face models' own plans have them.
ALIASES = {
    "colwise_rep": "colwise_gather_output",
    "rowwise_rep": "rowwise_split_input",
    "embedding_rowwise": "vocab",
    "moe_tp_experts": "experts",
    "replicated_with_grad_allreduce": "summed",
}


def find(pattern: str, names: "list[str]") -> list[str]:
    """The names that a pattern matches, in their order."""
    parts = pattern.split(".")
    return [name for name in names if _matches(parts, name.split("."))]


def _matches(pattern: "list[str]", name: "list[str]") -> bool:
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(_matches(pattern[1:], name[i:]) for i in range(len(name) + 1))
    return (
        bool(name) and fnmatch.fnmatchcase(name[0], pattern[0]) and _matches(pattern[1:], name[1:])
    )


def resolve(model: nn.Module, plan: "Mapping[str, str]") -> dict[str, str]:
    """The style of each module that `plan` names, by module name, in the model's order.

    Raises ValueError that names every pattern without a module, every unknown style, and modules
    that two patterns want differently.
    """
    if not isinstance(plan, Mapping) or not plan:
        raise InvalidArgument(f"plan is {plan!r}; expected a dict of name patterns and styles")
    names = [name for name, _ in model.named_modules() if name]
    found: dict[str, tuple[str, str]] = {}
    misfits = []
    for pattern, style in plan.items():
        if not isinstance(pattern, str) or not isinstance(style, str):
            misfits.append(f"{pattern!r}: {style!r} is no pair of strings")
            continue
        style = ALIASES.get(style, style)
        if style not in STYLES:
            misfits.append(
                f"{pattern!r} has the style {style!r}; expected one of {', '.join(STYLES)}"
            )
            continue
        matching = find(pattern, names)
        if not matching:
            misfits.append(f"{pattern!r} matches no module; {_near(pattern, names)}")
        for name in matching:
            before = found.setdefault(name, (style, pattern))
            if before[0] != style:
                misfits.append(
                    f"{name} is {before[0]!r} by {before[1]!r} and {style!r} by {pattern!r}"
                )
    if misfits:
        raise InvalidArgument("; ".join(misfits))
    return {name: found[name][0] for name in names if name in found}


def _near(pattern: str, names: "list[str]") -> str:
    """Modules with the pattern's last part, or some of all."""
    last = pattern.split(".")[-1]
    alike = [name for name in names if fnmatch.fnmatchcase(name.split(".")[-1], last)]
    if alike:
        return f"its last part alone fits {', '.join(alike[:4])}"
    return f"the model has {', '.join(names[:6])}, ..."
