"""The way of every public op from its arguments to what runs.

    prepare   the arguments as the schema has them, cast, listed, the caller's buffers looked at
    direct?   a call that nothing watches runs at once, and checks its arguments first
    checked   any other is checked here, since torch's dispatcher would raise on this rank alone
    library   then torch's dispatcher: autograd, fake tensors, subclasses

Whatever raises before an op runs is told to the other ranks by `refused`, types too: a rank that
passes 5 for a weight keeps nobody waiting. What raises later is an op's own affair. A traced call
(torch.compile) goes to the library at once; its fake makes the checks. Tensors on meta have shapes
alone: nothing is sent, but ranks meet, since those with numbers would wait for the others' data.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from pyparallel.comm.announced import Method
from pyparallel.errors import InvalidArgument
from pyparallel.ops.groups import MOST_PLANS, Seat, group_name, key_of, seat_of
from pyparallel.ops.library import is_direct, is_real, library_op
from pyparallel.ops.outputs import check_like, check_written, listed, put

__all__ = ["Operation", "announced", "invoke", "told"]

Prepare = Callable[[Any], tuple[Any, ...]]
Shapes = Callable[..., Sequence[Sequence[int]]]


@dataclass(frozen=True)
class Operation:
    """What the public functions differ in. Each callable takes the arguments of the schema.

    Where the schema has the group's name they are given the seat, which `seat_of` takes as well.
    """

    name: str  # in torch.ops.pyparallel
    run: Callable[..., Any]
    check: Callable[..., Any]
    shapes: Shapes | None = None  # of the results that out= takes; None: there is no out=
    # As `run`, with out= behind: gives what it did not write there itself. None: there is no such.
    run_into: Callable[..., Any] | None = None
    shown: str = ""  # the name that errors have, where it is not that of the schema
    writes: bool = False  # in place: eager calls always run directly


def invoke(op: Operation, group: Any, prepare: Prepare, out: Any = None) -> Any:
    """Runs `op` with what `prepare` gives, and gives its result, or `out`.

    `prepare` gets the group as the arguments shall have it: the seat, or its name in a traced call.
    """
    if torch.compiler.is_compiling():
        return _through_library(op, prepare(group_name(group)), out)
    seat = seat_of(group)
    try:
        args = prepare(seat)
        outs = None if out is None else listed(out)
        if outs is not None:
            _check_out(op, args, out, outs)
        tensors = _flat(args)
        shapes_alone = bool(tensors) and tensors[0].is_meta and is_real(tensors[0])
        direct = not shapes_alone and (is_direct(*tensors, *(outs or ())) or op.writes)
        if not direct:
            _check_once(op, seat, args)
    except Exception as error:
        raise seat.refused(op.shown or op.name, error) from None
    if shapes_alone:
        seat.meet(f"{op.name} of tensors on meta")
    if not direct:
        return _through_library(op, _with_name(args, seat), out)
    if outs is None:
        return op.run(*args)
    put(outs, op.run(*args) if op.run_into is None else op.run_into(*args, outs[0]))
    return out


def _check_once(op: Operation, seat: Seat, args: tuple[Any, ...]) -> None:
    """Checks arguments unlike those of an earlier call: of the same shapes, dtypes, sizes."""
    key = key_of(op.name, *(key_of(*a) if type(a) is list else a for a in args))
    try:
        if key in seat.checked:
            return
    except TypeError:  # something that is no key: the check says what
        op.check(*args)
        return
    op.check(*args)
    if len(seat.checked) >= MOST_PLANS:
        seat.checked.clear()
    seat.checked.add(key)


def told(op: str, group: Any, check: Callable[..., Any], *args: Any) -> Any:
    """check(*args), part of a call of `op`; what it raises is told to all ranks."""
    try:
        return check(*args)
    except Exception as error:
        raise seat_of(group).refused(op, error) from None


def announced(op: Method) -> Method:
    """A public op whose calls that do not bind to its signature are told to all ranks.

    In Python, unlike that of pyparallel.comm: torch.compile has to look through it.
    """
    name = op.__name__
    place = op.__code__.co_varnames.index("group")

    @functools.wraps(op)
    def guarded(*given: Any, **named: Any) -> Any:
        try:
            return op(*given, **named)
        except TypeError as error:
            # Binding fails before the first line of `op`, so there is no frame below this one.
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise
            group = named.get("group", given[place] if place < len(given) else None)
            raise _misfit(name, group, error) from None

    return cast(Method, guarded)


def _misfit(name: str, group: Any, error: TypeError) -> Exception:
    try:
        seat = seat_of(group)
    except InvalidArgument:  # of no group: there is nobody to tell
        return error
    return seat.refused(name, error)


def _through_library(op: Operation, args: tuple[Any, ...], out: Any) -> Any:
    if out is None:
        return library_op(op.name)(*args)
    library_op(f"{op.name}_out")(*args, listed(out))
    return out


def _with_name(args: tuple[Any, ...], seat: Seat) -> tuple[Any, ...]:
    return tuple(seat.name if a is seat else a for a in args)


def _check_out(op: Operation, args: tuple[Any, ...], out: Any, outs: list[Tensor]) -> None:
    assert op.shapes is not None
    names = ["out"] if isinstance(out, Tensor) else [f"out[{i}]" for i in range(len(outs))]
    written = dict(zip(names, outs, strict=True))
    op.check(*args)
    check_written(written, _named(op, args))
    check_like(written, op.shapes(*args), _flat(args)[0])


def _named(op: Operation, args: tuple[Any, ...]) -> dict[str, Tensor]:
    """The tensors of a call, by the names of the schema: xs of one x is x."""
    found = {}
    schema = getattr(torch.ops.pyparallel, op.name).default._schema
    for argument, value in zip(schema.arguments, args, strict=False):
        if isinstance(value, Tensor):
            found[argument.name] = value
        elif isinstance(value, list):
            singular = argument.name.removesuffix("es") if argument.name == "biases" else ""
            singular = singular or argument.name.removesuffix("s")
            one = len(value) == 1
            for i, x in enumerate(value):
                if isinstance(x, Tensor):
                    found[singular if one else f"{singular}[{i}]"] = x
    return found


def _flat(args: tuple[Any, ...]) -> list[Any]:
    """The tensors among arguments, those in lists too."""
    flat: list[Any] = []
    for a in args:
        if isinstance(a, Tensor):
            flat.append(a)
        elif type(a) is list:
            flat.extend(x for x in a if isinstance(x, Tensor))
    return flat
