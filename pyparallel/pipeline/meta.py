"""Models larger than a rank: built without their parameters, of which each rank fills its
stage's."""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

__all__ = ["materialise", "parameters_on_meta"]


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules built inside have their parameters on meta, where they take no memory, as soon as
    each is registered. Buffers (rotary frequencies) are real: nothing else could make them again.

    Ties survive: a parameter registered twice is the same one on meta.
    """
    register = nn.Module.register_parameter
    # The real ones are kept, emptied, so that no other can have the identity of one of them.
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            if id(parameter) not in made:
                meta = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
                made[id(parameter)] = (parameter, meta)
                parameter.data = parameter.data.new_empty(0)
            module._parameters[name] = made[id(parameter)][1]

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def materialise(
    stage: nn.Module, state: Mapping[str, Tensor], device: "torch.device | str" = "cpu"
) -> nn.Module:
    """Allocates a stage's parameters that are on meta and fills them from `state`.

    Args:
        state: name in the whole model -> value. Only this stage's names are asked for, so it may
            be a file that is read lazily.

    Returns:
        the stage.

    Raises:
        ValueError: names that `state` lacks, or values of another shape, all of them; nothing has
            been changed then.
    """
    waiting = [
        (module, name, f"{prefix}.{name}" if prefix else name, parameter)
        for prefix, module in stage.named_modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.is_meta
    ]
    missing = [name for _, _, name, _ in waiting if name not in state]
    if missing:
        raise ValueError(f"state lacks {missing}")
    misfits = [
        f"{name} is {tuple(state[name].shape)}, {tuple(parameter.shape)} in the model"
        for _, _, name, parameter in waiting
        if state[name].shape != parameter.shape
    ]
    if misfits:
        raise ValueError(f"state does not fit: {'; '.join(misfits)}")
    made: dict[int, nn.Parameter] = {}
    for module, name, full_name, parameter in waiting:
        if id(parameter) not in made:
            value = state[full_name].to(device=device, dtype=parameter.dtype, copy=True)
            made[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
        module._parameters[name] = made[id(parameter)]
    return stage
