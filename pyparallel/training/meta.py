"""Models built on meta: of their tensors each rank allocates its part, which must be loaded before
the first step."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pyparallel.errors import InvalidArgument
from pyparallel.layers.hugging_face import fill_buffers
from pyparallel.pipeline.agreement import GroupAgreement
from pyparallel.training.precision import local

__all__ = ["Waiting", "compute_buffers"]


def compute_buffers(module: nn.Module) -> bool:
    """Whether the module has something on meta, and has computed the buffers there that no state
    dict has.

    Raises:
        ValueError: it cannot compute some of them.
    """
    if not any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()]):
        return False
    missing = fill_buffers(module)
    if missing:
        raise InvalidArgument(
            f"buffers {missing[:4]} are on meta, and no state dict has them: build the model with "
            "values, or give it a method _init_weights(module) that fills them"
        )
    return True


class Waiting:
    """Tensors of this rank's stages that were on meta, from now on allocated and not a number.

    Args:
        stages: of this rank, before they are wrapped. What they share they go on sharing.
        device: where the tensors are to be.
    """

    def __init__(self, stages: Iterable[nn.Module], device: str) -> None:
        made: dict[int, tuple[Tensor, Tensor]] = {}  # keeps the old ones, and so their ids
        for module in (module for stage in stages for module in stage.modules()):
            for own in (module._parameters, module._buffers):
                for name, tensor in own.items():
                    if tensor is None or not tensor.is_meta:
                        continue
                    if id(tensor) not in made:
                        made[id(tensor)] = tensor, _not_a_number(tensor, device)
                    own[name] = made[id(tensor)][1]  # type: ignore[assignment]

    def refuse_unloaded(
        self, parameters: Iterable[tuple[str, nn.Parameter]], agreement: GroupAgreement
    ) -> None:
        """Collective.

        Raises:
            ValueError: on all ranks, where some rank has a parameter without values.
        """
        found = [name for name, p in parameters if bool(local(p.detach()).isnan().any())]
        texts = agreement.texts(", ".join(found[:3]))
        unloaded = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
        if unloaded:
            raise InvalidArgument(
                f"the model was built on meta, and parameters have no values yet ({unloaded[0]}): "
                "load_state_dict, import_hugging_face or Checkpointer.load gives them some"
            )


@torch.no_grad()
def _not_a_number(tensor: Tensor, device: str) -> Tensor:
    new = torch.empty_like(tensor, device=device)
    if new.is_floating_point():
        new.fill_(torch.nan)
    else:
        new.zero_()
    return nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
