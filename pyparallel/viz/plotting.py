"""matplotlib, which is loaded only where something is drawn by it."""

from importlib import import_module
from typing import Any

__all__ = ["matplotlib"]


def matplotlib(module: str, otherwise: str) -> Any:
    """A module of matplotlib, "figure" or "patches"; "" for itself.

    Raises:
        ImportError: it is not installed; it says how to get it, and `otherwise`.
    """
    try:
        whole = import_module("matplotlib")
        return import_module(f"matplotlib.{module}") if module else whole
    except ImportError as error:
        raise ImportError(
            f"matplotlib, which draws this, does not load ({error}): pip install matplotlib"
            f"{otherwise}"
        ) from error
