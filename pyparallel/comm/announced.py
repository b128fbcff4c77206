"""Collectives that a wrong call cannot leave alone: one that does not bind to the signature raises
Python's TypeError before the method's first line, and the other ranks have to hear of that too."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from pyparallel import _core

__all__ = ["Method", "announced", "announced_by"]

Method = TypeVar("Method", bound=Callable[..., Any])
# (positional arguments, keywords, the TypeError) -> what this rank raises; tells the others first.
_Refuse = Callable[[tuple[Any, ...], dict[str, Any], Exception], BaseException]


def announced(method: Method) -> Method:
    """A collective of a class with `_refused`."""
    name = method.__name__
    return announced_by(lambda given, _, error: cast(Exception, given[0]._refused(name, error)))(
        method
    )


def announced_by(refuse: _Refuse) -> Callable[[Method], Method]:
    """A collective whose misfits `refuse` tells; not asked where not even self is given."""

    def around(method: Method) -> Method:
        guarded = _core.announced(
            method, lambda given, named, error: refuse(given, named, error) if given else error
        )
        functools.update_wrapper(guarded, method)
        return cast(Method, guarded)

    return around
