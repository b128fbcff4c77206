"""A backward in two halves, through the graph that autograd has recorded, without recomputing.

Input half: the engine runs from the outputs to the stage's inputs only, so operations that lead to
weights alone are left out, and operations that lead to both compute just the gradient that goes on.
What each of these was given is kept. Weight half: each is run once more, from what it was given,
for the gradients that were left out, and the engine goes on from there to the weights.

    y = matmul(x, w)         input half:  dx = dy w'        keeps dy
                             weight half: dw = x' dy

A weight that several operations use on the way from input to output gets its gradient in the input
half, whole; only adding it to `.grad` waits for the weight half.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from pyparallel.pipeline.engine import accumulate, gradients_of, python_nodes_last
from pyparallel.pipeline.recompute import keep_recomputed

__all__ = ["WeightHalf", "backward_input"]


class WeightHalf:
    """What is left of a backward once its input half has run. `run` adds the weights' gradients to
    their `.grad`, once."""

    def __init__(
        self,
        joints: "list[_Joint]",
        late_roots: list[tuple[GradientEdge, Tensor]],
        late: list[Tensor] | None,
        early: list[tuple[Tensor, Tensor]],
        held: Sequence[GradientEdge],
    ) -> None:
        self._joints, self._roots, self._late, self._early = joints, late_roots, late, early
        self._held = held  # keeps the graph alive where joints do not

    def run(self) -> None:
        roots = list(self._roots)
        for joint in self._joints:
            roots += joint.gradients()
        self._joints.clear()
        if roots and self._late != []:
            edges, gradients = zip(*roots, strict=True)
            accumulate(edges, gradients, self._late or ())
        for parameter, gradient in self._early:
            accumulate([get_gradient_edge(parameter)], [gradient])
        self._roots, self._early, self._held = [], [], ()


class _Joint:
    """An operation that leads to the input and, by `edges`, to weights alone."""

    def __init__(self, node: Node, edges: list[GradientEdge]) -> None:
        self.node, self.edges = node, edges
        self.given: tuple[Tensor | None, ...] = ()
        self._hook = node.register_prehook(self._keep)

    def _keep(self, gradients: tuple[Tensor | None, ...]) -> None:
        self.given = tuple(gradients)

    def close(self) -> None:
        self._hook.remove()

    def gradients(self) -> list[tuple[GradientEdge, Tensor]]:
        """The gradients that go out by `edges`."""
        given = [(GradientEdge(self.node, i), g) for i, g in enumerate(self.given) if g is not None]
        if not given:
            return []
        outputs, values = zip(*given, strict=True)
        found = gradients_of(self.edges, outputs, values)
        return [(e, g) for e, g in zip(self.edges, found, strict=True) if g is not None]


def backward_input(
    outputs: Sequence[GradientEdge], gradients: Sequence[Tensor], inputs: Sequence[Tensor]
) -> tuple[list[Tensor | None], WeightHalf]:
    """The input half.

    Args:
        outputs: edges of the stage's outputs (`torch.autograd.graph.get_gradient_edge`).
        gradients: one per output.
        inputs: leaves that require gradients.

    Returns:
        the gradient of each input (None: no output depends on it), and the weight half. The graph
        is kept until the latter has been dropped.
    """
    graph = _Graph(outputs, inputs)
    joints = [_Joint(node, edges) for node, edges in graph.joints()]
    try:
        asked = [*inputs, *graph.early]
        found: tuple[Tensor | None, ...] = ()
        if asked and outputs:
            with keep_recomputed():
                found = gradients_of(asked, outputs, gradients)
    finally:
        for joint in joints:
            joint.close()
    own: list[Tensor | None] = [None] * len(inputs)
    if found:
        own = list(found[: len(inputs)])
    early = [
        (p, g) for p, g in zip(graph.early, found[len(inputs) :], strict=True) if g is not None
    ] if found else []  # fmt: skip
    late_roots = [
        (edge, gradient)
        for edge, gradient in zip(outputs, gradients, strict=True)
        if edge.node not in graph.to_input
    ]
    held = () if python_nodes_last() else tuple(outputs)
    return own, WeightHalf(joints, late_roots, graph.late, early, held)


class _Graph:
    """Which operations lead to the inputs, which to weights, and where the two ways part.

    Attributes:
        early: weights to which ways lead that part and meet again: their gradients are whole only
            where the engine walks all of it at once.
        late: the others, or None where there are no early ones.
    """

    def __init__(self, outputs: Sequence[GradientEdge], inputs: Sequence[Tensor]) -> None:
        own = {get_gradient_edge(tensor).node for tensor in inputs}
        order = _topological(outputs)
        self.to_input: set[Node] = set()
        to_weight: set[Node] = set()
        arriving: dict[Node, int] = {}
        for edge in outputs:
            arriving[edge.node] = arriving.get(edge.node, 0) + 1
        for node in order:  # what it leads to comes before it
            if node in own:
                self.to_input.add(node)
            elif hasattr(node, "variable"):
                to_weight.add(node)
            for child, _ in _edges(node):
                arriving[child] = arriving.get(child, 0) + 1
                if child in self.to_input:
                    self.to_input.add(node)
                if child in to_weight:
                    to_weight.add(node)
        self._parting = {
            node: [
                GradientEdge(child, number)
                for child, number in _edges(node)
                if child in to_weight and child not in self.to_input
            ]
            for node in order
            if node in self.to_input
        }
        meeting = [
            edge for edges in self._parting.values() for edge in edges if arriving[edge.node] > 1
        ]
        self._early = _leaves(meeting)
        self.early = list(self._early.values())
        self.late: list[Tensor] | None = None
        if self._early:
            every = [n for n in order if n in to_weight and n not in own and hasattr(n, "variable")]
            self.late = [n.variable for n in every if id(n.variable) not in self._early]

    def joints(self) -> list[tuple[Node, list[GradientEdge]]]:
        """Operations from which ways lead to weights alone, and these ways; but for those that lead
        to early weights only."""
        found = []
        for node, edges in self._parting.items():
            if self._early:
                edges = [edge for edge in edges if _leaves([edge]).keys() - self._early.keys()]
            if edges:
                found.append((node, edges))
        return found


def _leaves(edges: Sequence[GradientEdge]) -> dict[int, Tensor]:
    """The weights that these lead to."""
    nodes = _topological(edges)
    return {id(node.variable): node.variable for node in nodes if hasattr(node, "variable")}


def _edges(node: Node) -> list[tuple[Node, int]]:
    return [(child, number) for child, number in node.next_functions if child is not None]


def _topological(outputs: Sequence[GradientEdge]) -> list[Node]:
    """All operations behind the outputs, each after those that it leads to."""
    order: list[Node] = []
    seen: set[Node] = set()
    for edge in outputs:
        stack: list[tuple[Node, Any]] = []
        if edge.node not in seen:
            seen.add(edge.node)
            stack.append((edge.node, iter(_edges(edge.node))))
        while stack:
            node, children = stack[-1]
            for child, _ in children:
                if child not in seen:
                    seen.add(child)
                    stack.append((child, iter(_edges(child))))
                    break
            else:
                order.append(node)
                stack.pop()
    return order
