"""Which parts of a model are sharded over the tensor parallel ranks, where nobody says so."""

from torch import nn

from pyparallel.errors import InvalidArgument
from pyparallel.layers.hugging_face import automatic_plan, stack_of

__all__ = ["plan_of"]


def plan_of(model: nn.Module, *, whole_logits: bool) -> dict[str, str]:
    """Styles by module name, as `layers.parallelize` takes them: by the model's own plan, or by the
    structure of its layers.

    Args:
        whole_logits: every rank gets the logits of the whole vocabulary. False: of its part.

    Raises:
        ValueError: the model's structure is not known.
    """
    stack = stack_of(model)
    if stack is None:
        raise InvalidArgument(
            f"{type(model).__name__} has no config with model_type and num_hidden_layers, so its "
            'structure is not known: pass plan, such as {"**.up": "colwise", "**.down": "rowwise"}'
        )
    styles = automatic_plan(model, stack).styles
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for name, module in model.named_modules():
        if module is head and styles.get(name) == "colwise_gather_output" and not whole_logits:
            styles[name] = "colwise"
    if not styles:
        raise InvalidArgument(
            f"nothing in {type(model).__name__} is known to be shardable: pass plan"
        )
    return styles
