"""A model that is a list of modules, each fed with the output of the one before."""

from collections import OrderedDict

from torch import nn

from pyparallel.pipeline.parts import Part, part

__all__ = ["SequentialModel"]


class SequentialModel:
    """An `nn.Sequential`: every child is a part, of kind "t"."""

    def __init__(self, model: nn.Sequential) -> None:
        self.children = dict(model.named_children())

    def parts(self) -> list[Part]:
        return [part("t", {name: child}) for name, child in self.children.items()]

    def stage(self, first: int, last: int) -> nn.Module:
        """The children from `first` up to `last`, under the names they have in the model."""
        chosen = list(self.children.items())[first:last]
        return nn.Sequential(OrderedDict(chosen))
