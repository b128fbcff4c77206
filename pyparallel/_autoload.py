"""Makes `init_process_group("pyparallel")` known to torch.

`import pyparallel.comm` does it, and so does `import torch` where the wheel is installed (entry
point `torch.backends`). It costs next to nothing: the native backend comes with the first group.
"""

from typing import Any

__all__ = ["register"]


def register() -> None:
    """Registers the backend; a second call has no effect."""
    from torch import distributed as dist

    if dist.is_available() and not hasattr(dist.Backend, "PYPARALLEL"):
        dist.Backend.register_backend(
            "pyparallel", _create, extended_api=True, devices=["cpu", "cuda"]
        )


def _create(options: Any, backend_options: Any) -> Any:
    from pyparallel.comm.torch_backend import create

    return create(options, backend_options)
