"""A whole checkpoint into a model, its optimizer and other state, at this job's layout."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pyparallel.errors import InvalidArgument
from pyparallel.training.checkpoint.errors import CheckpointError
from pyparallel.training.checkpoint.optimizer_state import OptimizerState
from pyparallel.training.checkpoint.pieces import Held, Piece, held_by, modules_of
from pyparallel.training.checkpoint.ranks import Ranks
from pyparallel.training.checkpoint.states import Saved, check_target
from pyparallel.training.checkpoint.storage import Reader, fill

__all__ = ["MODEL", "restore"]

MODEL = "model."


class _Plan:
    """What this rank will read, and what will then be made of it. Changes nothing."""

    def __init__(
        self, reader: Reader, model: Any, optimizer: Any, state: Mapping[str, Any], ranks: Ranks
    ) -> None:
        manifest = reader.manifest
        self._aliases: Mapping[str, str] = manifest["aliases"]
        tensors = reader.metadata.state_dict_metadata
        self._stored = {
            key: (t.properties.dtype, tuple(t.size))  # type: ignore[union-attr]
            for key, t in tensors.items()
        }
        held = held_by(modules_of(model))
        self.names = sorted({key for h in held for names in h.names for key in names})
        self.pieces = [piece for h in held for piece in self._of_model(h)]
        self.optimizer = OptimizerState(optimizer, held) if optimizer is not None else None
        self.options: Sequence[Mapping[str, Any]] = ()
        if self.optimizer is not None:
            if not manifest["optimizer"]:
                raise InvalidArgument("it holds no optimizer: load with optimizer=None")
            self.options = self.optimizer.find_options(manifest["optimizer"], self._key_of)
            self.pieces += self.optimizer.await_states(self._stored, self._key_of)
        self.states = []
        for name, target in state.items():
            check_target(name, target)
            if name not in manifest["state"]:
                raise InvalidArgument(
                    f"it holds no state {name!r}; there are {sorted(manifest['state'])}"
                )
            self.states.append(
                Saved(
                    name,
                    manifest["state"][name],
                    target,
                    ranks.place,
                    ranks.sizes,
                    manifest["layout"],
                    self._stored,
                )
            )
        self.pieces += [piece for one in self.states for piece in one.pieces]
        self._check()

    def _key_of(self, names: Sequence[str]) -> str:
        """Of the names of a tensor, the one by which the checkpoint has it."""
        for name in names:
            if MODEL + name in self._stored:
                return name
        for name in names:
            if MODEL + str(self._aliases.get(name)) in self._stored:
                return self._aliases[name]
        return names[0]

    def _of_model(self, held: Held) -> list[Piece]:
        keys = [self._key_of(names) for names in zip(*held.names, strict=True)]
        return held.renamed(keys).pieces(held.tensor, counted=False, prefix=MODEL)

    def _check(self) -> None:
        misfits = []
        for piece in self.pieces:
            if piece.key not in self._stored:
                misfits.append(f"{piece.key} is missing")
                continue
            dtype, shape = self._stored[piece.key]
            if shape != piece.shape or dtype is not piece.view.dtype:
                misfits.append(
                    f"{piece.key} is {dtype} {list(shape)}, and {piece.view.dtype} "
                    f"{list(piece.shape)} is wanted"
                )
        if misfits:
            more = f", and {len(misfits) - 6} more" if len(misfits) > 6 else ""
            raise InvalidArgument("; ".join(misfits[:6]) + more)


@torch.no_grad()
def restore(
    reader: Reader,
    ranks: Ranks,
    model: Any,
    optimizer: Any,
    state: Mapping[str, Any],
) -> None:
    """Collective.

    Raises:
        CheckpointError: on all ranks: it holds something else than is asked for (nothing was
            changed then), or reading failed half-way (it says so).
    """
    where = f"checkpoint {reader.folder.name}"
    plan: _Plan | None = None
    problem: Exception | None = None
    try:
        plan = _Plan(reader, model, optimizer, state, ranks)
    except (CheckpointError, TypeError, ValueError) as error:
        problem = error
    ranks.agree(where, problem)
    assert plan is not None
    known = {name for names in ranks.gather(plan.names) for name in names}
    unexpected = sorted(
        key
        for key in reader.manifest["tensors"]
        if key.startswith(MODEL) and key[len(MODEL) :] not in known
    )
    if unexpected:  # the same on all ranks
        raise CheckpointError(
            f"{where}: it has {len(unexpected)} tensors that the model has not: {unexpected[:6]}"
        )
    try:
        fill(plan.pieces, reader)
        if plan.optimizer is not None:
            plan.optimizer.take(plan.options)
        for one in plan.states:
            one.load()
    except Exception as error:
        problem = error
    ranks.agree(f"{where}, half-way: model and optimizer hold parts of it", problem)
