"""A model that is embeddings, one list of layers, a norm and an output layer, cut without knowing
which model it is.

What is looked for is one `nn.ModuleList`, among the children of the model or of one child of it,
the body. Children before the list embed, those after it in the body are the final norm, and what
the model has after its body is the output layer. A stage is the same model with the layers of
others left out and `nn.Identity` in place of the embedding, norm or output that it lacks: its code
runs as it stands, on hidden states in place of token ids. So the forward must use its children in
this order, once each, and its first argument only in the first of them.
"""

from torch import nn

from pyparallel.pipeline.parts import Part, part, shallow

__all__ = ["Decoder"]


class Decoder:
    """The structure found in a model.

    Raises:
        ValueError: it has another one; what was looked for and what was found.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.body_name, body = _body(model)
        children = list(body.named_children())
        at = next(i for i, (_, child) in enumerate(children) if isinstance(child, nn.ModuleList))
        self.layers = children[at][0]
        before = [name for name, child in children[:at] if _matters(child)]
        after = [name for name, child in children[at + 1 :] if _matters(child)]
        heads = [
            name for name, child in model.named_children() if name != self.body_name
        ] if self.body_name else [after.pop()] if len(after) > 1 else []  # fmt: skip
        own = [name for name, _ in body.named_parameters(recurse=False)]
        if self.body_name:
            own += [name for name, _ in model.named_parameters(recurse=False)]
        if len(before) != 1 or len(after) > 1 or len(heads) != 1 or own:
            found = {name: type(child).__name__ for name, child in children}
            raise ValueError(
                f"{type(model).__name__}: expected is one embedding, one list of layers, at most "
                f"one norm, and one output layer, all parameters in these; found {found}, beside "
                f"it {heads or 'nothing'}, parameters outside {own or 'none'}"
            )
        self.embedding, self.head = before[0], heads[0]
        self.norm = after[0] if after else None

    def _path(self, name: str) -> str:
        return f"{self.body_name}.{name}" if self.body_name else name

    def _kinds(self) -> list[tuple[str, str]]:
        """(kind, name) of every part."""
        layers = self.model.get_submodule(self._path(self.layers))
        found = [("E", self._path(self.embedding))]
        found += [("t", f"{self._path(self.layers)}.{name}") for name, _ in layers.named_children()]
        if self.norm is not None:
            found.append(("N", self._path(self.norm)))
        return [*found, ("L", self.head)]

    def parts(self) -> list[Part]:
        """E, the layers, N where there is a final norm, L."""
        return [part(kind, {name: self.model.get_submodule(name)}) for kind, name in self._kinds()]

    def stage(self, first: int, last: int) -> nn.Module:
        """Parts from `first` up to `last` as a module of its own, sharing the model's parameters
        and their names."""
        kinds = self._kinds()
        lacking = {name for kind, name in kinds[:first] + kinds[last:] if kind != "t"}
        kept = {name for kind, name in kinds[first:last] if kind == "t"}
        model = shallow(self.model)
        body = model
        if self.body_name:
            body = shallow(self.model.get_submodule(self.body_name))
            model._modules[self.body_name] = body
        layers = body._modules[self.layers]
        assert layers is not None
        own = nn.ModuleList()
        for name, layer in layers.named_children():
            if f"{self._path(self.layers)}.{name}" in kept:
                own._modules[name] = layer  # the name it has in the model
        own.train(layers.training)
        body._modules[self.layers] = own
        for path in lacking:
            parent, _, name = path.rpartition(".")
            (body if parent else model)._modules[name] = nn.Identity()
        return model


def _body(model: nn.Module) -> tuple[str, nn.Module]:
    """The module that has the list of layers: the model, or a child of it."""
    places = [("", model), *model.named_children()]
    having = [
        (name, place)
        for name, place in places
        if not isinstance(place, nn.ModuleList)
        and any(isinstance(child, nn.ModuleList) for _, child in place.named_children())
    ]
    lists = [
        name
        for _, place in having
        for name, child in place.named_children()
        if isinstance(child, nn.ModuleList)
    ]
    if len(having) != 1 or len(lists) != 1:
        raise ValueError(
            f"{type(model).__name__}: no body with one list of layers, in it and its children are "
            f"{lists or 'none'}: pass an nn.Sequential, a causal language model of transformers, "
            "a model of an embedding, a list of layers, a norm and an output layer, or "
            "split_points of any model"
        )
    return having[0]


def _matters(module: nn.Module) -> bool:
    """Whether a part is to be where its layer is: what has no parameters may be on every stage."""
    return any(True for _ in module.parameters())
