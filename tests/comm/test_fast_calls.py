"""The short way for plain tensors (csrc/torch/fast_calls.cpp): what it takes, what it leaves alone.

One process, a group of one. That its results are right is shown by every other test of this folder:
the public calls try it first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from pyparallel.comm import Communicator
from tests.comm.threads import run_threads


@pytest.fixture
def seat() -> Iterator[Communicator]:
    with Communicator.from_id(Communicator.unique_id(), 0, 1) as communicator:
        yield communicator


class Wrapped(Tensor):
    """A subclass, whose memory might not be its own."""


def whole() -> Tensor:
    return torch.randn(4, 3)


NOT_PLAIN: dict[str, Callable[[], object]] = {
    "none": lambda: None,
    "list": lambda: [1.0],
    "transposed": lambda: torch.randn(3, 4).t(),
    "strided": lambda: torch.randn(8, 3)[::2],
    "requires grad": lambda: torch.randn(4, 3, requires_grad=True),
    "complex": lambda: torch.randn(4, 3, dtype=torch.complex64),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "meta": lambda: torch.empty(4, 3, device="meta"),
    "negative view": lambda: torch.randn(4, 3, dtype=torch.complex64).conj().imag,
    "subclass": lambda: torch.randn(4, 3).as_subclass(Wrapped),
}
CALLS: dict[str, Callable[[Any, Any, Any], object]] = {
    "all_reduce": lambda f, x, y: f.all_reduce(x, "sum", None),
    "reduce": lambda f, x, y: f.reduce(x, "sum", 0, None),
    "broadcast": lambda f, x, y: f.broadcast(x, 0),
    "send": lambda f, x, y: f.send(x, 0, 1),
    "recv": lambda f, x, y: f.recv(x, 0, 1),
    "reduce_scatter": lambda f, x, y: f.reduce_scatter(x, "sum", y),
    "reduce_scatter_uneven": lambda f, x, y: f.reduce_scatter_uneven(x, "sum", y, [4]),
    "all_gather": lambda f, x, y: f.all_gather(x, y),
    "all_gather_uneven": lambda f, x, y: f.all_gather_uneven(x, y, [4]),
    "all_to_all": lambda f, x, y: f.all_to_all(x, y),
    "all_to_all_uneven": lambda f, x, y: f.all_to_all_uneven(x, y, [4], [4]),
    "scatter": lambda f, x, y: f.scatter(x, y, 0),
    "gather": lambda f, x, y: f.gather(x, y, 0),
}
OF_TWO = list(CALLS)[5:]


@pytest.mark.parametrize("op", CALLS)
def test_plain_tensors_are_taken_and_marked_as_written(seat: Communicator, op: str) -> None:
    x, y = whole(), torch.full((4, 3), torch.nan)
    if op == "recv":
        seat.send(whole(), 0, 1)
    written = y if op in OF_TWO else x
    before, expected = written._version, x.clone()
    assert CALLS[op](seat._fast, x, y) is written
    if op != "recv":
        assert torch.equal(written, expected)
    unwritten = op in ("send", "broadcast")  # this rank is the root
    assert written._version == before + (not unwritten)


@pytest.mark.parametrize("kind", NOT_PLAIN)
@pytest.mark.parametrize("op", CALLS)
def test_what_is_not_plain_is_left_alone(seat: Communicator, op: str, kind: str) -> None:
    before = seat.sequence
    if kind != "none" or op not in OF_TWO:
        assert CALLS[op](seat._fast, NOT_PLAIN[kind](), whole()) is None
    if op in OF_TWO and kind != "none":  # None: the call makes the output
        assert CALLS[op](seat._fast, whole(), NOT_PLAIN[kind]()) is None
    assert seat.sequence == before


@pytest.mark.parametrize(
    "call",
    [
        lambda f: f.all_reduce(whole(), "band", None),  # not on floats
        lambda f: f.all_reduce(whole(), "nonsense", None),
        lambda f: f.all_reduce(whole(), 0, None),
        lambda f: f.all_reduce(torch.ones(2, dtype=torch.bool), "avg", None),
        lambda f: f.reduce(whole(), "sum", 1, None),
        lambda f: f.reduce(whole(), "sum", -1, None),
        lambda f: f.reduce(whole(), "sum", 0.0, None),
        lambda f: f.broadcast(whole(), 2**70),
        lambda f: f.broadcast(whole(), True),
        lambda f: f.all_gather(whole(), torch.empty(5, 3)),  # another size
        lambda f: f.all_gather(whole(), torch.empty(3, 4)),  # as many elements
        lambda f: f.all_gather(whole(), torch.empty(12)),
        lambda f: f.all_gather(whole(), torch.empty(4, 3).double()),
        lambda f: f.all_gather(torch.tensor(1.0), torch.empty(1)),  # no rows
        lambda f: f.all_gather_uneven(torch.empty(0, 3), torch.empty(0, 3), [0]),
        lambda f: f.all_gather_uneven(whole(), whole(), [5]),
        lambda f: f.all_gather_uneven(whole(), None, [5]),
        lambda f: f.all_gather_uneven(whole(), whole(), [2, 2]),
        lambda f: f.all_gather_uneven(whole(), whole(), [-4]),
        lambda f: f.all_gather_uneven(whole(), whole(), [2**62]),
        lambda f: f.all_gather_uneven(whole(), whole(), (4,)),
        lambda f: f.all_gather_uneven(whole(), whole(), [4.0]),
        lambda f: f.all_gather_uneven(whole(), whole().double(), [4]),
        lambda f: f.all_gather_uneven(whole(), torch.empty(4, 4), [4]),
        lambda f: f.reduce_scatter_uneven(whole(), "sum", torch.empty(3, 3), [4]),
        lambda f: f.reduce_scatter_uneven(whole(), "sum", None, [3]),
        lambda f: f.all_to_all_uneven(whole(), whole(), [4], None),
        lambda f: f.all_to_all_uneven(whole(), torch.empty(3, 3), [4], [3]),
        lambda f: f.all_to_all_uneven(whole(), torch.empty(4, 2), [4], [4]),
        lambda f: f.scatter(whole(), torch.empty(3, 3), 0),
        lambda f: f.send(whole(), 1, 0),
        lambda f: f.send(whole(), 0, 2**63),
        lambda f: f.recv(whole(), None, 0),
    ],
)
def test_what_does_not_fit_is_left_to_the_long_way(
    seat: Communicator, call: Callable[[Any], object]
) -> None:
    before = seat.sequence
    assert call(seat._fast) is None
    assert seat.sequence == before


def test_outputs_are_made_where_none_is_given(seat: Communicator) -> None:
    x = whole()
    for made in (
        seat._fast.all_gather_uneven(x, None, [4]),
        seat._fast.reduce_scatter_uneven(x, "max", None, [4]),
        seat._fast.all_to_all_uneven(x, None, [4], [4]),
    ):
        assert made is not None
        assert made is not x
        assert torch.equal(made, x)


def test_overlapping_memory_is_left_to_the_long_way(seat: Communicator) -> None:
    memory = torch.randn(7, 3)
    assert seat._fast.all_gather(memory[:4], memory[3:]) is None
    assert seat._fast.all_gather_uneven(memory[:4], memory[3:], [4]) is None
    assert seat._fast.all_to_all_uneven(memory[:4], memory[3:], [4], [4]) is None
    expected = memory[:4].clone()
    assert torch.equal(seat.all_gather(memory[:4], out=memory[3:]), expected)


def test_wrong_number_of_arguments_and_a_closed_seat(seat: Communicator) -> None:
    with pytest.raises(TypeError, match="expected 3 arguments, 1 given"):
        seat._fast.all_reduce(whole())  # type: ignore[call-arg]
    seat.close()
    with pytest.raises(RuntimeError, match="closed"):
        seat.all_reduce(whole())


def test_a_saved_tensor_that_a_call_has_changed_is_noticed_by_autograd(seat: Communicator) -> None:
    weight = torch.randn(3, requires_grad=True)
    x = torch.randn(3)
    product = (weight * x).sum()
    seat.all_reduce(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_what_gather_gives_off_the_root_is_nobody_else_s() -> None:
    """The empty tensor is made once and given again, but never while somebody has it."""

    def body(comm: Communicator) -> None:
        x = torch.ones(3, 2)

        def gathered(x: torch.Tensor = x) -> torch.Tensor:
            return comm.gather(x, root=0)

        if comm.rank == 0:
            for _ in range(7):
                gathered()
            gathered(torch.ones(3, 2).long())
            gathered(torch.ones(5))
            return
        held = [gathered() for _ in range(4)]
        assert len({id(y) for y in held}) == 4
        changed = gathered().requires_grad_()  # let go, with a mark
        alias, shape = changed.detach(), changed.shape
        del changed
        again = gathered()
        assert again.shape == shape == (0, 2)
        assert not again.requires_grad
        again.resize_(4)
        assert all(y.shape == (0, 2) for y in (alias, *held))
        del again
        assert gathered().shape == (0, 2)
        assert gathered(torch.ones(3, 2).long()).dtype == torch.int64
        assert gathered(torch.ones(5)).shape == (0,)

    run_threads(2, body)
