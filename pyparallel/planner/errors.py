"""One exception for all that a plan's input may get wrong."""

import difflib
from collections.abc import Iterable

__all__ = ["MOST_DEVICES", "PlanError", "in_microbatches", "named", "nearest_names", "shown"]

MOST_DEVICES = 1 << 24  # more than were ever built into one cluster; their divisors take no time
_LONGEST = 80  # characters of a value in a message


class PlanError(ValueError):
    """The request cannot be planned. The message has the rule, the numbers, and what would work."""


def nearest_names(name: str, known: Iterable[str], count: int = 3) -> str:
    """ "nearest: a, b" for a name that is not known; "" if none comes near."""
    lowered = {k.lower(): k for k in known}
    close = difflib.get_close_matches(name.lower(), lowered, n=count, cutoff=0.4)
    return f"nearest: {', '.join(lowered[c] for c in close)}" if close else ""


def shown(value: object) -> str:
    """A value for a message: as Python writes it, and cut where it is long."""
    return named(repr(value))


def named(text: str) -> str:
    """A key or a value for a message, cut where it is long: files may hold anything."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"


def in_microbatches(m: int) -> str:
    """For texts: "1 microbatch", "8 microbatches"."""
    return f"{m} microbatch" if m == 1 else f"{m} microbatches"
