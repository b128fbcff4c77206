"""The changes that make a model one rank's part of it: checked first, all of them, then made.

`Work` collects one change per module and what it cannot do. Nothing is touched before `apply`.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from pyparallel.errors import InvalidArgument
from pyparallel.layers.embedding import VocabParallelEmbedding
from pyparallel.layers.linear import ColumnParallelLinear, RowParallelLinear
from pyparallel.layers.module import ShardedModule
from pyparallel.layers.norm import LayerNorm, RMSNorm
from pyparallel.layers.parallelize_blocks import (
    MLPS,
    SEPARATE,
    Attention,
    attention_of,
    experts_misfit,
    is_transposed,
    linear_size,
)
from pyparallel.layers.parallelize_mixins import (
    BlockInput,
    ColumnOfBlock,
    ScaledVocabRows,
    ShardedExperts,
    SummedGradients,
    WholeSequence,
    become,
)
from pyparallel.layers.parallelize_report import ShardedEntry
from pyparallel.layers.parallelize_ties import plan_ties
from pyparallel.layers.partition import Partition
from pyparallel.layers.place import Place
from pyparallel.layers.sequence import SequenceSharding

__all__ = ["Work"]

ALIGNED = 16  # bytes: what grouped matmul kernels want of an expert's rows


class Work:
    """Changes to `model` on one rank; `styles` has those that the plan asks for, by module name.

    layers: names of a stack of layers that is cut from the rest of the model; under sequence
    parallelism the rest sees the whole sequence. None: all of the model sees parts.
    """

    def __init__(
        self,
        model: nn.Module,
        place: Place,
        styles: "dict[str, str]",
        sequence: "SequenceSharding | None",
        config: Any,
        *,
        layers: "tuple[str, ...] | None" = None,
    ) -> None:
        self.model, self.place, self.sequence, self.config = model, place, sequence, config
        self.layers = layers
        self.styles = styles
        self.modules = dict(model.named_modules())
        self.entries: dict[str, ShardedEntry] = {}
        self.misfits: list[str] = []
        self.changes: list[Callable[[], None]] = []
        self._homes: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in self.modules.values():
            for attribute, child in module._modules.items():
                if child is not None:
                    self._homes.setdefault(id(child), []).append((module, attribute))

    # --- planning

    def plan(self) -> None:
        """A change for every style. Misfits are collected, for one error that names them all."""
        for name, module in self.modules.items():
            attention = attention_of(module, self.config)
            if attention is not None and self._asked(name, SEPARATE):
                self._plan_attention(name, module, attention)
        for name in self.modules:
            self._plan_gated(name)
        for name, style in self.styles.items():
            if name not in self.entries and style != "replicated":
                self._plan_one(name, self.modules[name], style)
        plan_ties(self.model, self.entries, self.styles, self.misfits, self.changes)

    def _asked(self, parent: str, children: "tuple[str, ...]") -> bool:
        """Whether the plan shards one of these, or a fused projection, of a module."""
        names = (*children, "query_key_value", "c_attn")
        return any(self._style(parent, child).startswith("colwise") for child in names)

    def _style(self, parent: str, child: str) -> str:
        return self.styles.get(_join(parent, child), "")

    def _plan_attention(self, name: str, module: nn.Module, found: "Attention | str") -> None:
        if isinstance(found, str):
            self.misfits.append(f"the attention {name} cannot be sharded by heads: {found}")
            return
        wanted = {**dict.fromkeys(found.columns, "colwise"), found.row: "rowwise"}
        given = {child: self._style(name, child) for child in wanted}
        if given != wanted:
            self.misfits.append(
                f"of the attention {name} the plan has {given}; its heads need {wanted}"
            )
            return
        ranks, rank = self.place.size, self.place.rank
        split = found.split(ranks)
        self._bring(name, module)
        for child, partition in zip(found.columns, found.column_partitions(split), strict=True):
            self._column(_join(name, child), "colwise", partition, of_block=True)
        self._row(_join(name, found.row), "rowwise", split.query)
        for child in found.norms:
            self._summed(_join(name, child), "summed")
        self.changes.append(lambda: found.set_heads(module, split, rank))

    def _plan_gated(self, name: str) -> None:
        for columns, row in MLPS:
            mine = [_join(name, child) for child in columns]
            if len(columns) < 2 or any(self._style(name, child) != "colwise" for child in columns):
                continue
            sizes = [linear_size(self.modules[child]) for child in mine]
            into = linear_size(self.modules.get(_join(name, row)))
            if len(set(sizes)) != 1 or sizes[0] is None or self._style(name, row) != "rowwise":
                continue
            if into is None or into[1] != sizes[0][0]:
                continue
            self._bring(name, self.modules[name])
            for child in mine:
                self._column(child, "colwise", None, of_block=True)

    def _plan_one(self, name: str, module: nn.Module, style: str) -> None:
        if style in ("colwise", "colwise_gather_output"):
            self._column(name, style, None, of_block=False)
        elif style in ("rowwise", "rowwise_split_input"):
            self._row(name, style, None)
        elif style == "vocab":
            self._vocab(name, module)
        elif style == "experts":
            self._experts(name, module)
        elif style == "sequence" and self._sequence_of(name) is None:
            self._misfit(name, style, "sequence_parallel=True, and a place where it is cut")
        else:
            self._summed(name, style)

    def _misfit(self, name: str, style: str, expected: str) -> None:
        module = self.modules[name]
        weight = module._parameters.get("weight")
        shape = f" with weight {list(weight.shape)}" if weight is not None else ""
        kind = type(module).__name__
        self.misfits.append(f"{name} is a {kind}{shape}; style {style!r} needs {expected}")

    def _bring(self, name: str, module: nn.Module) -> None:
        """A block's input comes once, for all the columns in it."""
        sequence = self._sequence_of(name)
        hook = BlockInput(self.place, sequence)

        def change() -> None:
            module.register_forward_pre_hook(hook, with_kwargs=True)

        self.changes.append(change)
        ops = ("all_gather", "reduce_scatter") if sequence else ("", "all_reduce")
        self.entries[name] = ShardedEntry(name, "block", (), (), *ops)

    def _linear(self, name: str, style: str) -> "tuple[nn.Module, tuple[int, int] | None]":
        """The linear layer of this name and its size; None, and a misfit, if it is none."""
        size = linear_size(self.modules[name])
        if size is None:
            self._misfit(name, style, "a torch.nn.Linear or a Conv1D")
        return self.modules[name], size

    def _column(
        self, name: str, style: str, partition: "Partition | None", *, of_block: bool
    ) -> None:
        linear, size = self._linear(name, style)
        if size is None:
            return
        partition = partition or Partition.even(size[0], self.place.size)
        sequence = None if of_block else self._sequence_of(name)
        first, second = "", "" if of_block else "matmul_all_reduce"
        if sequence:
            first, second = "all_gather_matmul", "matmul_reduce_scatter"
        if style == "colwise_gather_output":
            first = f"{first}, gather" if first else "gather"
        options: dict[str, Any] = {
            "partition": partition,
            "gather_output": style == "colwise_gather_output",
            "sequence_parallel": sequence or False,
            "transposed": is_transposed(linear),
        }
        kind = ColumnOfBlock if of_block else ColumnParallelLinear
        local = (partition.local_size(self.place.rank), size[1])
        self._entry(name, style, size, local, (first, second))
        self._replace(name, lambda: kind.from_linear(_linear(linear), self.place.group, **options))

    def _row(self, name: str, style: str, partition: "Partition | None") -> None:
        linear, size = self._linear(name, style)
        if size is None:
            return
        partition = partition or Partition.even(size[1], self.place.size)
        split_input = style == "rowwise_split_input"
        sequence = self._sequence_of(name)
        options = {
            "partition": partition,
            "input_is_parallel": not split_input,
            "sequence_parallel": sequence or False,
            "transposed": is_transposed(linear),
        }
        ops = ("matmul_all_reduce", "all_gather" if split_input else "")
        if sequence:
            ops = ("matmul_reduce_scatter", "all_gather_matmul")
        self._entry(name, style, size, (size[0], partition.local_size(self.place.rank)), ops)
        self._replace(
            name,
            lambda: RowParallelLinear.from_linear(_linear(linear), self.place.group, **options),
        )

    def _vocab(self, name: str, table: nn.Module) -> None:
        if not isinstance(table, nn.Embedding):
            self._misfit(name, "vocab", "a torch.nn.Embedding")
            return
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(table, option):
                self._misfit(name, "vocab", f"one without {option}")
                return
        rows, columns = table.weight.shape
        mine = Partition.even(rows, self.place.size).local_size(self.place.rank)
        sequence = self._sequence_of(name)
        ops = ("reduce_scatter", "all_gather") if sequence else ("all_reduce", "")
        self._entry(name, "vocab", (rows, columns), (mine, columns), ops)
        plain = type(table).forward is nn.Embedding.forward

        def made() -> VocabParallelEmbedding:
            layer = VocabParallelEmbedding.from_embedding(
                table, self.place.group, sequence_parallel=sequence or False
            )
            if plain:
                return layer
            become(table, ScaledVocabRows, behind=True)
            assert isinstance(table, ScaledVocabRows)
            table.adopt(layer)
            return table

        self._replace(name, made)

    def _experts(self, name: str, module: nn.Module) -> None:
        misfit = experts_misfit(module)
        if misfit != "":
            self._misfit(
                name,
                "experts",
                "parameters gate_up_proj [E, 2 I, H] and down_proj [E, H, I]"
                + (f" alone: {misfit}" if misfit else ""),
            )
            return
        up, down = module._parameters["gate_up_proj"], module._parameters["down_proj"]
        assert up is not None
        assert down is not None
        middle = down.shape[2]
        step = max(1, ALIGNED // down.element_size())
        partition = Partition.even(middle, self.place.size, multiple_of=step)
        mine = partition.local_size(self.place.rank)
        local = (up.shape[0], 2 * mine, up.shape[2])
        self._entry(name, "experts", tuple(up.shape), local, ("all_reduce", "all_reduce"))

        def change() -> None:
            become(module, ShardedExperts)
            assert isinstance(module, ShardedExperts)
            module.adopt(self.place, partition)
            for attribute in ("intermediate_dim", "intermediate_size"):
                if getattr(module, attribute, None) == middle:
                    setattr(module, attribute, mine)

        self.changes.append(change)

    def _summed(self, name: str, style: str) -> None:
        """Replicated parameters whose gradients every rank has a part of."""
        module = self.modules[name]
        if isinstance(module, ShardedModule) or not any(True for _ in module.parameters(False)):
            self._misfit(name, style, "a module with parameters of its own")
            return
        shapes = [tuple(p.shape) for p in module.parameters(False)]
        self._entry(name, style, shapes[0], shapes[0], ("", "all_reduce"))
        own: Any = module
        norms: dict[type, Any] = {nn.LayerNorm: LayerNorm, nn.RMSNorm: RMSNorm}
        ours = norms.get(type(module))
        if ours is not None and style == "sequence" and len(own.normalized_shape) == 1:
            options = {"sequence_parallel": self.sequence or False}
            self._replace(name, lambda: ours.from_norm(own, self.place.group, **options))
            return

        def change() -> None:
            become(module, SummedGradients)
            own.place = self.place

        self.changes.append(change)

    def sum_gradients(self, name: str) -> None:
        """A module outside the plan gets this rank's part of the sequence."""
        if name not in self.entries:
            self._summed(name, "sequence")

    def whole_sequence(self, name: str, region: WholeSequence) -> None:
        """A module that is not sharded, or not by linear layers, gets the whole sequence."""
        module = self.modules[name]

        def change() -> None:
            module.register_forward_pre_hook(region.before, with_kwargs=True)
            module.register_forward_hook(region.after)

        self.changes.append(change)
        self.entries.setdefault(
            name, ShardedEntry(name, "whole sequence", (), (), "gather, split", "all_gather")
        )

    def on_parts(self, name: str) -> bool:
        """Whether a dropout sees parts: of the heads, of the features, of the sequence."""
        parent, _, child = name.rpartition(".")
        siblings = list(self.modules[parent]._modules)
        styles = [self._style(parent, sibling) for sibling in siblings]
        at = siblings.index(child)
        if child.startswith(("attn_drop", "attention_drop")):
            return any(style == "colwise" for style in styles)
        if "colwise" in styles[:at] and "rowwise" in styles[at:]:
            return True
        return self._sequence_of(name) is not None

    def _sequence_of(self, name: str) -> "SequenceSharding | None":
        """How the activations at a module are cut; None if they are whole there."""
        inside = self.layers is None or any(name.startswith(f"{at}.") for at in self.layers)
        return self.sequence if inside else None

    # --- making the changes

    def _entry(
        self,
        name: str,
        style: str,
        whole: tuple[int, ...],
        local: tuple[int, ...],
        ops: tuple[str, str],
    ) -> None:
        self.entries[name] = ShardedEntry(name, style, whole, local, *ops)

    def _replace(self, name: str, made: "Callable[[], nn.Module]") -> None:
        old = self.modules[name]
        hooks = (old._forward_pre_hooks, old._forward_hooks, old._backward_hooks)
        if any(hooks) or old._backward_pre_hooks:
            self.misfits.append(
                f"{name} has hooks, which what takes its place would not have; register them after "
                "parallelize"
            )

        def change() -> None:
            new = made()
            new.train(old.training)
            for parent, attribute in self._homes[id(old)]:
                parent._modules[attribute] = new

        self.changes.append(change)

    def raise_any(self) -> None:
        """One error for all that does not fit."""
        if self.misfits:
            raise InvalidArgument("; ".join(self.misfits))

    def apply(self) -> None:
        """Makes the changes. What was checked cannot fail; nothing is communicated."""
        for change in self.changes:
            change()


def _linear(module: nn.Module) -> nn.Linear:
    """The layer, or one with the parameters of a Conv1D, whose weight is [in, out]."""
    if isinstance(module, nn.Linear):
        return module
    weight, bias = module._parameters["weight"], module._parameters.get("bias")
    assert weight is not None
    linear = nn.Linear(weight.shape[0], weight.shape[1], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach().t(), weight.requires_grad)
    if bias is not None:
        linear.bias = bias
    return linear


def _join(parent: str, child: str) -> str:
    return f"{parent}.{child}" if parent else child
