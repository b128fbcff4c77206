"""A causal language model in the structure Hugging Face gives it, cut without knowing which model
it is.

What is looked for: a body (`base_model`) whose children are embeddings, one list of layers, and a
final norm, and an output layer on top. A stage is the same model with the layers of others left
out: its body is entered by `inputs_embeds`, its missing embeddings and norm pass data through. So
masks, positions and whatever else a model prepares for its layers stay the model's own code, and
parameters keep their names.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from pyparallel.pipeline.parts import Part, part, shallow

__all__ = ["CausalLM", "CausalLMStage"]


class _Nothing(nn.Module):
    """In place of a position embedding that another stage has added: adds nothing."""

    def forward(self, positions: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.zeros((), device=positions.device)


class CausalLM:
    """The structure found in a model.

    Raises:
        ValueError: it has another one; what was looked for and what was found.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        asked: Any = model
        self.prefix = str(getattr(model, "base_model_prefix", ""))
        body = getattr(model, self.prefix, None) if self.prefix else None
        tokens = asked.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
        head = asked.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        if not isinstance(body, nn.Module) or tokens is None or head is None:
            raise ValueError(
                f"{type(model).__name__}: no body under base_model_prefix, or no input or output "
                "embeddings: pass an nn.Sequential, a causal language model of transformers, or "
                "split_points of any model"
            )
        self.body: nn.Module = body
        self.head = next(name for name, child in model.named_children() if child is head)
        children = dict(body.named_children())
        lists = [name for name, child in children.items() if isinstance(child, nn.ModuleList)]
        self.embeddings = [
            name
            for name, child in children.items()
            if isinstance(child, (nn.Embedding, nn.Dropout)) or child is tokens
        ]
        norms = [
            name
            for name, child in children.items()
            if name not in (*lists, *self.embeddings) and any(True for _ in child.parameters())
        ]
        others = [
            name for name, child in model.named_children() if name not in (self.prefix, self.head)
        ]
        if len(lists) != 1 or len(norms) > 1 or others or children.get(self._first()) is not tokens:
            found = {name: type(child).__name__ for name, child in children.items()}
            raise ValueError(
                f"{type(model).__name__}: expected is a body of embeddings, one list of layers and "
                f"one norm, and an output layer; found {found}, beside the body "
                f"{others or 'nothing'}"
            )
        self.layers = lists[0]
        self.norm = norms[0] if norms else None
        self.tokens = tokens

    def _first(self) -> str:
        return self.embeddings[0] if self.embeddings else ""

    def parts(self) -> list[Part]:
        """E, the layers, N where there is a final norm, L."""
        children = dict(self.body.named_children())

        def named(*names: str) -> dict[str, nn.Module]:
            return {f"{self.prefix}.{name}": children[name] for name in names}

        layers = cast(nn.ModuleList, children[self.layers])
        found = [part("E", named(*self.embeddings))]
        for name, layer in layers.named_children():
            found.append(part("t", {f"{self.prefix}.{self.layers}.{name}": layer}))
        if self.norm is not None:
            found.append(part("N", named(self.norm)))
        head = dict(self.model.named_children())[self.head]
        found.append(part("L", {self.head: head}))
        return found

    def stage(self, first: int, last: int) -> nn.Module:
        """Parts from `first` up to `last` as a module of its own, sharing the model's
        parameters."""
        kinds = [entry.kind for entry in self.parts()]
        has = set(kinds[first:last])
        model, body = shallow(self.model), shallow(self.body)
        model._modules[self.prefix] = body
        layers = cast(nn.ModuleList, dict(self.body.named_children())[self.layers])
        own = nn.ModuleList()
        for index, (name, layer) in enumerate(layers.named_children(), start=1):
            if first <= index < last:
                own._modules[name] = layer  # the name it has in the model
        body._modules[self.layers] = own
        if "E" not in has:
            for name in self.embeddings:
                child = body._modules[name]
                looked_up = isinstance(child, nn.Embedding) and child is not self.tokens
                body._modules[name] = _Nothing() if looked_up else nn.Identity()
        if self.norm is not None and "N" not in has:
            body._modules[self.norm] = nn.Identity()
        if "L" not in has:
            model._modules[self.head] = nn.Identity()
        model.train(self.model.training)
        return CausalLMStage(model, self.prefix, self.head, has)


class CausalLMStage(nn.Module):
    """A stage of a causal language model.

    Parameters are reached, and named, as in the whole model. Buffers that every stage needs (rotary
    frequencies) are on every stage.
    """

    def __init__(self, model: nn.Module, prefix: str, head: str, has: set[str]) -> None:
        super().__init__()
        for name, child in model.named_children():
            self.add_module(name, child)
        self._prefix, self._head, self._has = prefix, head, frozenset(has)

    def forward(self, value: Tensor, **keywords: Any) -> Tensor:
        """What the whole model does with its parts of this stage.

        Args:
            value: token ids, shape (batch, sequence), where the stage has the embedding; else the
                hidden states of the stage before, (batch, sequence, hidden).
            keywords: what the body takes, such as attention_mask and position_ids: the same on
                every stage.

        Returns:
            the hidden states, or the logits (batch, sequence, vocabulary) where the stage has the
            output layer.
        """
        if self._has & {"E", "t", "N"}:
            body = getattr(self, self._prefix)
            entry = {"input_ids" if "E" in self._has else "inputs_embeds": value}
            value = body(**entry, **keywords, use_cache=False).last_hidden_state
        return cast(Tensor, getattr(self, self._head)(value)) if "L" in self._has else value
