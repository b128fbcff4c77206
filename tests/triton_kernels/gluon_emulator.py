"""Runs a Gluon kernel's own source on the CPU: the operations that the attention kernel uses.

Each role of a program is a thread, of which one runs at a time; at every wait, arrival and copy the
next one is drawn at random, so that a seed is an order of events. Copies arrive when the draw says
so, and until then their buffer holds NaN; a product that is waited for reads its operands as late
as its wait allows. So a buffer let go too early, a wait for the wrong phase or a product used
before its wait gives a wrong result or an error, and roles that wait for one another in a circle
are told by name.
"""

import inspect
import random
import threading
import types

import torch
import triton.language as tl
from triton.experimental.gluon._runtime import GluonJITFunction

NAN = float("nan")
STAY = 0.6  # how likely a role that need not wait goes on


class Stuck(Exception):
    """No role can go on."""


class Roles:
    """Threads of which one runs at a time: the one whose turn was given to it."""

    def __init__(self, seed):
        self._random = random.Random(seed)
        self._ready = {}  # name -> predicate, of roles that have not ended
        self._turns = {}
        self._ended = threading.Semaphore(0)
        self._error = None
        self.copies = []  # under way
        self.products = {}  # role -> those under way

    def run(self, functions):
        self._ready = dict.fromkeys(functions, lambda: True)
        self._turns = {name: threading.Semaphore(0) for name in functions}
        for name, call in functions.items():
            threading.Thread(target=self._body, args=(name, *call), name=name, daemon=True).start()
        self._give(self._draw())
        for _ in functions:
            assert self._ended.acquire(timeout=120), "a role never ended"
        if self._error:
            raise self._error

    def step(self, ready=lambda: True):
        """Lets others run; comes back when `ready`."""
        name = threading.current_thread().name
        if self._random.random() < STAY and ready():
            return
        self._ready[name] = ready
        chosen = self._draw()
        if chosen != name:
            self._give(chosen)
            self._take(name)

    def _body(self, name, function, arguments):
        try:
            self._take(name)
            function(*arguments)
        except BaseException as error:  # told by run()
            self._error = self._error or error
        del self._ready[name]
        self._give(self._draw() if self._ready else None)
        self._ended.release()

    def _take(self, name):
        assert self._turns[name].acquire(timeout=120), f"{name} got no turn"
        if self._error:
            raise Stuck("another role failed")

    def _give(self, name):
        if name is not None:
            self._turns[name].release()

    def _draw(self):
        """Lands copies and draws the role that goes on; any, so that it ends, after an error."""
        while not self._error:
            names = sorted(name for name, ready in self._ready.items() if ready())
            if not names and not self.copies:
                self._error = Stuck(f"each waits for another: {sorted(self._ready)}")
                break
            choice = self._random.randrange(len(names) + len(self.copies))
            if choice < len(names):
                return names[choice]
            self.copies.pop(choice - len(names)).land()
        return next(iter(self._ready))


class Copy:
    def __init__(self, flag, data, target):
        self.flag, self.data, self.target = flag, data, target

    def land(self):
        self.target.copy_(self.data)
        self.flag.come(self.data.numel() * self.data.element_size())


class Flag:
    """An mbarrier."""

    def __init__(self):
        self.count = self.left = self.bytes = self.phase = 0

    def init(self, count):
        self.count = self.left = count

    def arrive(self, count=1, expected=0):
        self.left -= count
        self.bytes += expected
        assert self.left >= 0, "more arrivals in a phase than were announced"
        self._flip()

    def come(self, size):
        self.bytes -= size
        self._flip()

    def _flip(self):
        if self.left == 0 and self.bytes == 0:
            self.left, self.phase = self.count, self.phase + 1

    def passed(self, parity):
        """Whether the phase of this parity is over."""
        return self.phase % 2 != parity


class Flags:
    def __init__(self, batch):
        self.flags = [Flag() for _ in range(batch)]

    def index(self, number):
        return self.flags[number]


class Shared:
    def __init__(self, data):
        self.data = data

    dtype = property(lambda self: self.data.dtype)
    shape = property(lambda self: self.data.shape)

    def index(self, number):
        return Shared(self.data[number])

    def reshape(self, shape):
        return Shared(self.data.view(shape))

    def permute(self, order):
        return Shared(self.data.permute(order))

    def slice(self, start, length):
        return Shared(self.data[start : start + length])

    def load(self, layout):
        return self.data.clone()

    def store(self, value):
        self.data.copy_(value)


class Descriptor:
    def __init__(self, host):
        self.base, self.shape, self.strides = host.base, host.shape, host.strides
        self.block, self.layout = host.block_shape, host.layout
        self.dtype = host.base.dtype
        self.nbytes_per_cta = torch.Size(self.block).numel() * host.base.element_size()

    def read(self, where):
        whole = self.base.as_strided(self.shape, self.strides)
        batch, head, row, column = where
        assert column == 0
        out = torch.zeros(self.block, dtype=self.dtype)  # past the end
        there = whole[batch, head, max(row, 0) : row + self.block[2]]
        out[0, 0, : len(there)] = there
        return out


class Pointer:
    def __init__(self, flat, offset=0):
        self.flat, self.offset = flat, offset

    @property
    def dtype(self):
        return types.SimpleNamespace(element_ty=self.flat.dtype)

    def __add__(self, more):
        return Pointer(self.flat, self.offset + more)

    @staticmethod
    def to(x):
        if not isinstance(x, torch.Tensor):
            return x
        whole = x.untyped_storage().nbytes() // x.element_size()
        return Pointer(x.as_strided((whole,), (1,), 0), x.storage_offset())


class Product:
    """A warpgroup_mma under way."""

    def __init__(self, a, b, acc, use_acc):
        assert not isinstance(acc, Product), "sums that are still under way"
        self.a, self.b, self.acc, self.use_acc, self.value = a, b, acc, use_acc, None

    def finish(self):
        if self.value is None:
            a, b = (x.data if isinstance(x, Shared) else x for x in (self.a, self.b))
            self.value = a.float() @ b.float() + (self.acc if self.use_acc else 0.0)


def _tensor(x):
    return x if isinstance(x, torch.Tensor) else torch.tensor(x)


def _namespace(roles, program):
    """(gl and tl, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait) for one program."""

    def load(pointer, mask=None, other=0.0, volatile=False):
        if isinstance(pointer.offset, int):
            found = pointer.flat[pointer.offset]
            return found if found.is_floating_point() else found.item()
        mask = torch.ones_like(pointer.offset, dtype=torch.bool) if mask is None else mask
        mask = mask.expand(pointer.offset.shape)
        found = pointer.flat[torch.where(mask, pointer.offset, 0)]
        return torch.where(mask, found, torch.tensor(other, dtype=found.dtype))

    def store(pointer, value, mask):
        mask = mask.expand(pointer.offset.shape)
        pointer.flat[pointer.offset[mask]] = value[mask]

    def where(condition, one, two):
        if isinstance(condition, bool):
            return one if condition else two
        return torch.where(condition, one, two)

    def maximum(one, two):
        if isinstance(one, int) and isinstance(two, int):
            return max(one, two)
        return torch.maximum(_tensor(one), _tensor(two))

    def specialize(functions, warps, registers):
        assert len(warps) == len(registers) == len(functions) - 1
        roles.run({f"role {n}": call for n, call in enumerate(functions)})

    gl = types.SimpleNamespace(
        load=load, store=store, where=where, maximum=maximum, warp_specialize=specialize,
        minimum=lambda a, b: torch.minimum(_tensor(a), _tensor(b)),
        arange=lambda a, b, layout=None: torch.arange(a, b),
        full=lambda shape, value, dtype, layout=None: torch.full(shape, value, dtype=dtype),
        max=lambda x, axis: x.amax(axis), sum=lambda x, axis: x.sum(axis),
        exp2=torch.exp2, log2=torch.log2, cdiv=lambda a, b: -(-a // b),
        cast=lambda x, dtype: x, convert_layout=lambda x, layout: x,
        static_range=range, program_id=lambda axis: program, constexpr=None,
        float32=torch.float32, int64=torch.int64,
        allocate_shared_memory=lambda dtype, shape, layout: Shared(
            torch.full(shape, NAN, dtype=dtype)
        ),
        NVMMADistributedLayout=lambda *a: None, DotOperandLayout=lambda *a: None,
        SliceLayout=lambda *a: None, BlockedLayout=lambda *a: None, barrier=lambda: None,
    )  # fmt: skip

    def wait(flag, phase, pred=True):
        if pred:
            roles.step(lambda: flag.passed(phase))

    def arrive(flag, count=1, pred=True):
        if pred:
            flag.arrive(count)
        roles.step()

    mbarrier = types.SimpleNamespace(
        allocate_mbarrier=lambda batch=None: Flag() if batch is None else Flags(batch),
        init=lambda flag, count: flag.init(count),
        expect=lambda flag, size: flag.arrive(1, size),
        wait=wait,
        arrive=arrive,
    )

    def async_load(descriptor, where, flag, target):
        target.data.fill_(NAN)
        roles.copies.append(Copy(flag, descriptor.read(where), target.data))
        roles.step()

    def mma(a, b, acc, use_acc=True, is_async=False):
        assert is_async
        product = Product(a, b, acc, use_acc)
        roles.products.setdefault(threading.current_thread().name, []).append(product)
        roles.step()
        return product

    def mma_wait(outstanding, deps):
        roles.step()
        under_way = roles.products[threading.current_thread().name]
        while len(under_way) > outstanding:
            under_way.pop(0).finish()
        (one,) = deps
        assert one.value is not None, "read before its wait"
        return one.value

    return {
        "gl": gl, "tl": gl, "mbarrier": mbarrier, "warpgroup_mma": mma,
        "warpgroup_mma_wait": mma_wait, "fence_async_shared": lambda: None,
        "tma": types.SimpleNamespace(async_load=async_load),
        # Inline assembly: two rounded weights in one word, and back.
        "packed": lambda weights, like: weights.to(like.dtype),
        "unpacked": lambda weights, like, layout: weights,
    }  # fmt: skip


def _rebuilt(function, space, known):
    """The function as plain Python, in a namespace where the device's operations are those here."""
    if function in known:
        return known[function]
    source = function.fn
    names = dict(source.__globals__)
    out = types.FunctionType(source.__code__, names, source.__name__, source.__defaults__)
    known[function] = out
    for name, value in source.__globals__.items():
        if name in space:
            names[name] = space[name]
        elif isinstance(value, GluonJITFunction):
            names[name] = _rebuilt(value, space, known)
        elif isinstance(value, tl.constexpr):
            names[name] = value.value
    return out


class Emulated:
    """Stands in for a kernel: `kernel[grid](...)` runs its programs one after another."""

    def __init__(self, kernel, seed=0):
        self.kernel, self.seed, self.launches = kernel, seed, 0

    def __getitem__(self, grid):
        return lambda *arguments, **options: self._launch(grid, arguments, options)

    def _launch(self, grid, arguments, options):
        self.launches += 1
        names = list(inspect.signature(self.kernel.fn).parameters)
        options = {name: value for name, value in options.items() if name in names}
        given = [Descriptor(x) if hasattr(x, "block_shape") else Pointer.to(x) for x in arguments]
        for program in range(grid[0]):
            roles = Roles(self.seed * 1009 + program)
            space = _namespace(roles, program)
            _rebuilt(self.kernel, space, {})(*given, **options)
            assert not roles.copies, "a copy is under way when the program ends"
