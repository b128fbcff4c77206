"""Any model whose graph torch.fx can trace, cut where named modules begin.

A segment is what runs from one split point to the next. Whatever a later segment needs of an
earlier one
goes from stage to stage with the rest: activations, skip connections past several stages, and
inputs of the model that only a later stage reads. Parameters keep their names; one that several
segments read is in each.
"""

from collections.abc import Sequence
from typing import Any

from torch import fx, nn

from pyparallel.pipeline.parts import Part, part

__all__ = ["TracedModel"]


class TracedModel:
    """A traced model in segments: parts of kind "t", one more than there are split points.

    Args:
        model: a module, traced by torch.fx here; or an `fx.GraphModule`, such as
            `torch.export.export(model, inputs).module()` gives.
        split_points: qualified names of modules, in the order in which they run. Where the first
            operation of one comes, a new segment begins.

    Raises:
        ValueError: the model cannot be traced; a name that runs nowhere, or out of order.
    """

    def __init__(self, model: nn.Module, split_points: Sequence[str]) -> None:
        self.split_points = tuple(split_points)
        self.module = _traced(model)
        self.nodes = list(self.module.graph.nodes)
        self.segment: dict[fx.Node, int] = {}
        left, current = list(split_points), 0
        ran: dict[str, None] = {}
        for node in self.nodes:
            path = _path(node)
            ran.setdefault(path)
            if left and (path == left[0] or path.startswith(f"{left[0]}.")):
                left.pop(0)
                current += 1
            self.segment[node] = current
        if left:
            raise ValueError(
                f"{type(model).__name__}: split point {left[0]!r} does not run after "
                f"{list(split_points)[:current] or 'the beginning'}; modules run in the order "
                f"{[name for name in ran if name]}"
            )

    def parts(self) -> list[Part]:
        names = ("the beginning", *self.split_points)
        return [part("t", {name: self.stage(i, i + 1)}) for i, name in enumerate(names)]

    def stage(self, first: int, last: int) -> nn.Module:
        """Segments from `first` up to `last`. It takes what crosses into the first, in graph order
        (the model's own arguments at the beginning), and gives what crosses out of the last: one
        value as it is, several as a tuple; at the end what the model gives."""
        graph = fx.Graph()
        copied: dict[fx.Node, fx.Node] = {}

        def lookup(node: fx.Node) -> fx.Node:
            if node not in copied:  # parameters are read again by every stage that needs them
                copied[node] = graph.node_copy(node)
            return copied[node]

        for node in self._crossing(first) if first else ():
            copied[node] = graph.placeholder(node.name)
        for node in self.nodes:
            if node.op not in ("get_attr", "output") and first <= self.segment[node] < last:
                copied[node] = graph.node_copy(node, lookup)
        if last > len(self.split_points):
            result: Any = fx.node.map_arg(self.nodes[-1].args[0], lookup)
        else:
            values = tuple(copied[node] for node in self._crossing(last))
            result = values[0] if len(values) == 1 else values
        graph.output(result)
        graph.lint()
        stage = fx.GraphModule(self.module, graph)
        # An exported graph speaks of flat lists: its ends take and give what the model does.
        whole = self.module.graph
        if first == 0:
            stage.register_forward_pre_hook(lambda _, values: tuple(whole.process_inputs(*values)))
        if last > len(self.split_points):
            stage.register_forward_hook(lambda _, values, given: whole.process_outputs(given))
        stage.train(self.module.training)
        return stage

    def _crossing(self, boundary: int) -> list[fx.Node]:
        """The values made before a segment that it or a later one needs."""
        return [
            node
            for node in self.nodes
            if node.op != "get_attr"
            and self.segment[node] < boundary
            and any(self.segment[user] >= boundary for user in node.users)
        ]


def _traced(model: nn.Module) -> fx.GraphModule:
    if isinstance(model, fx.GraphModule):
        return model
    try:
        traced = fx.symbolic_trace(model)
    except Exception as error:  # whatever the model's own code raises under tracing
        raise ValueError(
            f"{type(model).__name__} cannot be traced by torch.fx ({error}): pass "
            "torch.export.export(model, inputs).module(), or make it an nn.Sequential"
        ) from error
    traced.train(model.training)
    return traced


def _path(node: fx.Node) -> str:
    """The qualified name of the innermost module that an operation belongs to."""
    if node.op == "call_module":
        return str(node.target)
    if node.op in ("placeholder", "get_attr", "output"):
        return ""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    name = str(next(reversed(stack.values()))[0])
    return name.removeprefix("L['self'].")
