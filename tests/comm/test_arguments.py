"""Arguments that cannot work: the rank that passed them says why, all others raise, none waits.

Each case runs the bad call on one rank and a good one on the others, then proves with an all_reduce
that the group is still usable.
"""

import inspect
import os
import re
from collections.abc import Callable

import pytest
import torch

from pyparallel.comm import Communicator, InvalidArgument, Mismatch, premul_sum
from tests.comm.threads import run_threads

F32 = torch.float32


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def grad() -> torch.Tensor:
    return torch.ones(4, requires_grad=True)


def huge() -> torch.Tensor:
    """16 TiB, of which no page is ever touched."""
    size = 1 << 44
    file = os.memfd_create("huge")
    try:
        os.ftruncate(file, size)
        return torch.from_file(f"/proc/self/fd/{file}", shared=True, size=size, dtype=torch.uint8)
    finally:
        os.close(file)


# name: (bad call, good call of the same op, what the bad rank says)
BAD: dict[str, tuple[Callable, Callable, str]] = {
    "no tensor": (
        lambda c: c.all_reduce([1.0, 2.0]),
        lambda c: c.all_reduce(ones(4)),
        "x is a list; expected a torch.Tensor",
    ),
    "unknown op": (
        lambda c: c.all_reduce(ones(4), "summ"),
        lambda c: c.all_reduce(ones(4)),
        'unknown reduction \'summ\'; known are "sum", "avg"',
    ),
    "op is no name": (
        lambda c: c.all_reduce(ones(4), ["sum"]),
        lambda c: c.all_reduce(ones(4)),
        "unknown reduction ['sum']",
    ),
    "avg of bool": (
        lambda c: c.all_reduce(ones(4).bool(), "avg"),
        lambda c: c.all_reduce(ones(4).bool()),
        "avg is not defined on bool",
    ),
    "premul_sum of ints": (
        lambda c: c.all_reduce(ones(4).long(), premul_sum(2)),
        lambda c: c.all_reduce(ones(4).long()),
        "premul_sum is not defined on int64",
    ),
    "band of floats": (
        lambda c: c.reduce(ones(4), "band"),
        lambda c: c.reduce(ones(4)),
        "band is not defined on float32",
    ),
    "dtype": (
        lambda c: c.all_reduce(ones(4).to(torch.complex64)),
        lambda c: c.all_reduce(ones(4)),
        "dtype torch.complex64; expected one of float64, .* torch.view_as_real",
    ),
    "device": (
        lambda c: c.all_reduce(torch.empty(4, device="meta")),
        lambda c: c.all_reduce(ones(4)),
        "x is on meta; this communicator moves CPU memory",
    ),
    "sparse": (
        lambda c: c.all_reduce(ones(4, 4).to_sparse()),
        lambda c: c.all_reduce(ones(4)),
        "layout torch.sparse_coo; expected a dense",
    ),
    "requires grad": (
        lambda c: c.all_reduce(grad()),
        lambda c: c.all_reduce(ones(4)),
        "x requires grad, and autograd would not see this call",
    ),
    "out requires grad": (
        lambda c: c.all_gather(ones(4), out=torch.empty(8, requires_grad=True)),
        lambda c: c.all_gather(ones(4)),
        "out requires grad",
    ),
    "expanded output": (
        lambda c: c.all_reduce(ones(1).expand(4)),
        lambda c: c.all_reduce(ones(4)),
        "x is expanded .* pass x.contiguous",
    ),
    "out of another shape": (
        lambda c: c.all_reduce(ones(4), out=ones(5)),
        lambda c: c.all_reduce(ones(4)),
        r"out is \[5\] torch.float32; expected \[4\] torch.float32",
    ),
    "out of another dtype": (
        lambda c: c.reduce_scatter(ones(4), out=ones(2).double()),
        lambda c: c.reduce_scatter(ones(4)),
        r"out is \[2\] torch.float64; expected \[2\] torch.float32",
    ),
    "remainder": (
        lambda c: c.reduce_scatter(ones(5)),
        lambda c: c.reduce_scatter(ones(4)),
        r"dim 0 of x \(shape \[5\]\) does not divide by 2 ranks; .* sizes=\[3, 2\]",
    ),
    "sizes of another whole": (
        lambda c: c.reduce_scatter(ones(5), sizes=[3, 3]),
        lambda c: c.reduce_scatter(ones(5), sizes=[3, 2]),
        r"sizes \[3, 3\] add up to 6, but dim 0 of x is 5",
    ),
    "sizes of another shard": (
        lambda c: c.all_gather(ones(3), sizes=[2, 2]),
        lambda c: c.all_gather(ones(2), sizes=[2, 2]),
        "but dim 0 of this rank's x is 3",
    ),
    "sizes are no ints": (
        lambda c: c.all_gather(ones(3), sizes=[2.5, 3.5]),
        lambda c: c.all_gather(ones(2), sizes=[2, 2]),
        "expected 2 sizes, one per rank",
    ),
    "dim": (
        lambda c: c.all_gather(ones(3), dim=1),
        lambda c: c.all_gather(ones(3)),
        "dim is 1, but x has shape",
    ),
    "root": (
        lambda c: c.broadcast(ones(3), 2),
        lambda c: c.broadcast(ones(3), 0),
        "root is 2; expected a rank of this group: 0 to 1",
    ),
    "list too short": (
        lambda c: c.all_gather(ones(3), out=[ones(3)]),
        lambda c: c.all_gather(ones(3)),
        "out has 1 tensors; expected 2, one per rank",
    ),
    "list of two dtypes": (
        lambda c: c.reduce_scatter([ones(3), ones(3).double()]),
        lambda c: c.reduce_scatter([ones(3), ones(3)]),
        r"x\[1\] is torch.float64; expected torch.float32",
    ),
    "list with dim": (
        lambda c: c.reduce_scatter([ones(3), ones(3)], dim=1),
        lambda c: c.reduce_scatter([ones(3), ones(3)]),
        "a list x has no dim or sizes",
    ),
    "one of two sizes": (
        lambda c: c.all_to_all(ones(4), in_sizes=[1, 3]),
        lambda c: c.all_to_all(ones(4)),
        "pass both or neither",
    ),
    "timeout": (
        lambda c: c.all_reduce(ones(4), timeout=-1),
        lambda c: c.all_reduce(ones(4)),
        "timeout is -1; expected seconds",
    ),
    "color": (
        lambda c: c.split(-3),
        lambda c: c.split(0),
        "color is -3; expected None or 0 to 2147483647",
    ),
    "large color": (
        lambda c: c.split(2**40),
        lambda c: c.split(0),
        "color is 1099511627776; expected None or 0 to 2147483647",
    ),
    "key": (
        lambda c: c.split(0, key=2**40),
        lambda c: c.split(0),
        "key is 1099511627776; expected an integer of 32 bits",
    ),
    "no memory for the result": (
        lambda c: c.all_gather(huge()),
        lambda c: c.all_gather(ones(4)),
        "can't allocate memory",
    ),
    "scatter without x": (
        lambda c: c.scatter(None, ones(2), root=0 if c.rank == 0 else 1),
        lambda c: c.scatter(None, ones(2), root=1 - c.rank),
        "x is a NoneType",
    ),
}


def bad_on(bad_rank: int, bad: Callable, good: Callable):
    def body(comm: Communicator) -> str:
        with pytest.raises((InvalidArgument, Mismatch)) as caught:
            (bad if comm.rank == bad_rank else good)(comm)
        assert comm.failure == ""
        assert comm.all_reduce(torch.ones(2)).tolist() == [2.0, 2.0]  # still usable
        return f"{type(caught.value).__name__}: {caught.value}"

    return body


@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize("case", BAD)
def test_one_bad_rank_fails_all_at_once(case, bad_rank):
    bad, good, message = BAD[case]
    said = run_threads(2, bad_on(bad_rank, bad, good), timeout=20, run_timeout=10)
    where = rf"InvalidArgument: .*rank {bad_rank}"
    assert re.match(where, said[bad_rank]), said[bad_rank]
    found = re.escape(message) if "[" in message and "\\" not in message else message
    assert re.search(found, said[bad_rank]), said[bad_rank]
    # The others are told the same reason, and by whom.
    assert said[1 - bad_rank].startswith("Mismatch"), said
    assert re.search(found, said[1 - bad_rank]), said[1 - bad_rank]
    assert f"rank {bad_rank}" in said[1 - bad_rank]


# --- each argument of each collective, of a type that it cannot be

CALLS: dict[str, Callable[[Communicator], dict]] = {
    "all_reduce": lambda c: {"x": ones(4)},
    "reduce": lambda c: {"x": ones(4)},
    "broadcast": lambda c: {"x": ones(4)},
    "all_gather": lambda c: {"x": ones(4)},
    "reduce_scatter": lambda c: {"x": ones(4)},
    "all_to_all": lambda c: {"x": ones(4)},
    "scatter": lambda c: {"x": ones(4) if c.rank == 0 else None, "out": ones(2)},
    "gather": lambda c: {"x": ones(4)},
    "barrier": lambda c: {},
    "split": lambda c: {"color": 0},
}


class Odd:
    """Raises whatever is asked of it."""

    def __eq__(self, other: object) -> bool:
        raise TypeError("odd")

    __hash__ = None


WRONG = [2.5, "x", object(), [object()], {1: 2}, 1 << 70, float("nan"), torch.float32, Odd()]
# What Python itself makes sense of: any object is true or false, and any text names a group.
FREE = {"async_op", "name"}


@pytest.mark.parametrize("op", CALLS)
def test_any_argument_of_a_wrong_type_fails_on_all(op):
    """On either rank; the group is still usable after each."""

    def body(comm: Communicator) -> None:
        method = getattr(comm, op)
        for parameter in inspect.signature(method).parameters:
            if parameter in FREE:
                continue
            for wrong in [*WRONG, ones(2, 3)]:
                for bad_rank in (0, 1):
                    arguments = CALLS[op](comm)
                    if comm.rank == bad_rank:
                        arguments[parameter] = wrong
                    try:
                        method(**arguments)
                    except (InvalidArgument, Mismatch, TypeError):
                        failed = 1.0
                    else:
                        failed = 0.0
                    # Here it may be right after all, such as a float that is no dim but a timeout.
                    said = comm.all_reduce(torch.tensor([failed])).item()
                    assert said in (0.0, 2.0), (parameter, wrong, bad_rank)
        assert comm.failure == ""

    run_threads(2, body, timeout=5, run_timeout=60)


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_call_that_does_not_bind_fails_on_all(bad_rank):
    """Python refuses it before the method's first line; the other rank hears of it all the same."""

    def body(comm: Communicator) -> None:
        for op, arguments in CALLS.items():
            method = getattr(comm, op)
            right = arguments(comm)
            wrong = [((), {**right, "sise": 3}), ((None,) * 9, {}), ((None,), right)]
            if right:
                wrong.append(((), {}))
            for positional, keywords in wrong:
                if comm.rank == bad_rank:
                    where = rf"^{op} #\d+, group .*, rank {bad_rank}: .*{op}\(\) "
                    with pytest.raises(TypeError, match=where):
                        method(*positional, **keywords)
                else:
                    with pytest.raises(Mismatch, match=rf"rank {bad_rank}.*{op}\(\) "):
                        method(**right)
        assert comm.failure == ""
        assert comm.all_reduce(torch.ones(2)).tolist() == [2.0, 2.0]

    run_threads(2, body, timeout=20, run_timeout=60)


def test_what_a_method_itself_raises_is_told_once():
    """A TypeError from inside is not taken for a call that does not bind."""

    def body(comm: Communicator) -> None:
        before = comm.sequence
        with pytest.raises((InvalidArgument, TypeError, Mismatch)):
            comm.all_reduce(None if comm.rank == 0 else ones(2))
        assert comm.sequence == before + 1

    run_threads(2, body)
    with pytest.raises(TypeError, match="all_reduce"):  # and without self nobody can be told
        Communicator.all_reduce()


def test_the_methods_look_like_functions():
    assert list(inspect.signature(Communicator.broadcast).parameters)[:3] == ["self", "x", "root"]
    assert "in place" in inspect.getdoc(Communicator.all_reduce)
    assert Communicator.gather.__name__ == "gather"
    assert inspect.isroutine(Communicator.gather)


@pytest.mark.parametrize("case", ["no tensor", "unknown op", "remainder", "root"])
def test_world_size_one_validates_too(case):
    bad, _, message = BAD[case]
    message = {
        "remainder": None,  # everything divides by one
        "root": "root is 2; expected a rank of this group: 0 to 0",
    }.get(case, message)

    def body(comm: Communicator) -> None:
        if message is None:
            assert bad(comm).shape == (5,)
            return
        with pytest.raises(InvalidArgument, match=message):
            bad(comm)

    run_threads(1, body)


def test_a_refusal_of_a_started_call_keeps_the_order():
    """What was started before the refused call still happens, on all ranks."""

    def body(comm: Communicator) -> None:
        works = [comm.all_reduce(torch.full((3,), float(n)), async_op=True) for n in range(5)]
        with pytest.raises((InvalidArgument, Mismatch), match="unknown reduction"):
            comm.all_reduce(ones(3), "no" if comm.rank == 1 else "sum")
        assert [work.wait()[0].item() for work in works] == [2.0 * n for n in range(5)]

    run_threads(2, body)


def test_no_grad_allows_parameters():
    def body(comm: Communicator) -> None:
        p = torch.nn.Parameter(torch.ones(4))
        with torch.no_grad():
            comm.all_reduce(p)
            assert comm.all_gather(p).shape == (8,)
            q = torch.nn.Parameter(torch.ones(4, 2))
            assert comm.all_reduce(q.t(), async_op=True).wait().sum() == 16
        assert p.tolist() == [2.0] * 4
        assert q.flatten().tolist() == [2.0] * 8
        assert p.requires_grad

    run_threads(2, body)


def test_a_backward_pass_that_saved_the_old_value_raises():
    def body(comm: Communicator) -> None:
        w = torch.ones(4, requires_grad=True)
        x = torch.ones(4)
        y = (w * x).sum()
        comm.all_reduce(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()

    run_threads(2, body)


def test_inference_tensors_and_negated_views():
    def body(comm: Communicator) -> None:
        with torch.inference_mode():
            x = torch.ones(3, 2)
            comm.all_reduce(x)
            comm.all_reduce(x.t(), async_op=True).wait()
        assert x.flatten().tolist() == [4.0] * 6
        z = torch.complex(torch.zeros(3), torch.ones(3))
        assert z.conj().imag.is_neg()
        y = z.conj().imag
        comm.all_reduce(y)
        assert y.tolist() == [-2.0] * 3
        assert comm.all_gather(z.conj().imag).tolist() == [-2.0] * 6

    run_threads(2, body)


def test_overlapping_input_and_output_are_right():
    """A shard of the input as output, and the other way round, as in-place collectives do.

    Exactly its own shard is worked on in place; anything else that overlaps goes through copies.
    """

    def body(comm: Communicator) -> None:
        me, base = comm.rank, torch.arange(12.0)
        whole = base + 100 * me
        comm.reduce_scatter(whole, out=whole[6 * me : 6 * me + 6])
        expected = (2 * base + 100)[6 * me : 6 * me + 6]
        assert whole[6 * me : 6 * me + 6].tolist() == expected.tolist()

        whole = torch.zeros(12)
        mine = whole[6 * me : 6 * me + 6]
        mine += base[:6] + 100 * me
        comm.all_gather(mine, out=whole)
        assert whole.tolist() == [*range(6), *range(100, 106)]

        sizes = [4, 8]
        uneven = torch.zeros(12)
        mine = uneven[4 * me : 4 * me + sizes[me]]
        mine += me + 1
        comm.all_gather(mine, sizes=sizes, out=uneven)
        assert uneven.tolist() == [1.0] * 4 + [2.0] * 8
        shifted = torch.arange(13.0)  # one element beside its own shard
        comm.all_gather(shifted[1 + 6 * me : 7 + 6 * me], out=shifted[:12])
        assert shifted.tolist() == [*range(1, 13), 12]

        x = base.clone()
        comm.all_reduce(x[:8], out=x[4:])
        assert x.tolist() == [0, 1, 2, 3, *(2.0 * n for n in range(8))]
        x = base + 100 * me
        comm.all_to_all(x, out=x)
        assert x.tolist() == [*range(6 * me, 6 * me + 6), *range(100 + 6 * me, 106 + 6 * me)]

    run_threads(2, body)
