"""Loads and stores that reach every rank's memory at once, through the switch (sm_90, NVSwitch).

With signals.py the only place where scopes are spelled. `multicast` is the address that stands for
the workspaces of all ranks; the interpreter has none and goes through the table of addresses: the
sum is in rank order there, in the switch's order on a GPU.
"""

import triton
import triton.language as tl

from .signals import INTERPRETED, peer_pointer

if INTERPRETED.value:

    @triton.jit
    def fence_multicast():
        pass

    @triton.jit
    def sum_of_all(multicast, table, world, offset, lanes, inside):
        """fp32 sums over all ranks of 4 neighbours each; inside: lanes that count."""
        a = tl.zeros(lanes.shape, tl.float32)
        b = tl.zeros(lanes.shape, tl.float32)
        c = tl.zeros(lanes.shape, tl.float32)
        d = tl.zeros(lanes.shape, tl.float32)
        for peer in range(world):
            values = peer_pointer(table, peer, offset, tl.float32) + lanes * 4
            a += tl.load(values, mask=inside, other=0.0)
            b += tl.load(values + 1, mask=inside, other=0.0)
            c += tl.load(values + 2, mask=inside, other=0.0)
            d += tl.load(values + 3, mask=inside, other=0.0)
        return a, b, c, d

    @triton.jit
    def store_to_all(
        multicast, table, world, offset, lanes, inside, a, b, c, d, RESULT: tl.constexpr
    ):
        """Stores 4 neighbours each at every rank, rounded to RESULT."""
        for peer in range(world):
            values = peer_pointer(table, peer, offset, RESULT) + lanes * 4
            tl.store(values, a.to(RESULT), mask=inside)
            tl.store(values + 1, b.to(RESULT), mask=inside)
            tl.store(values + 2, c.to(RESULT), mask=inside)
            tl.store(values + 3, d.to(RESULT), mask=inside)

else:

    def _store(before: str, store: str) -> tl.constexpr:
        """The text of a store to all: $1 address, $2 whether, $3 to $6 values."""
        predicate = ".reg .pred p; setp.ne.b32 p, $2, 0;"
        send = f"@p multimem.st.relaxed.sys.global.{store};"
        return tl.constexpr(f"{{ {predicate} {before} {send} mov.b32 $0, 0; }}")

    def _store_pairs(kind: str) -> tl.constexpr:
        pairs = f"cvt.rn.{kind}.f32 low, $4, $3; cvt.rn.{kind}.f32 high, $6, $5;"
        return _store(f".reg .b32 low, high; {pairs}", f"v2.{kind} [$1], {{low, high}}")

    _STORE_FP32 = _store("", "v4.f32 [$1], {$3, $4, $5, $6}")
    _STORE_BF16 = _store_pairs("bf16x2")
    _STORE_FP16 = _store_pairs("f16x2")

    @triton.jit
    def fence_multicast():
        """Between accesses through ordinary addresses and through the multicast one: aliases."""
        tl.inline_asm_elementwise(
            "fence.proxy.alias; mov.u32 $0, 0;",
            "=r",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

    @triton.jit
    def sum_of_all(multicast, table, world, offset, lanes, inside):
        """fp32 sums over all ranks of 4 neighbours each; inside: lanes that count."""
        address = multicast + offset + lanes.to(tl.int64) * 16
        return tl.inline_asm_elementwise(
            """
            {
            .reg .pred p;
            setp.ne.b32 p, $5, 0;
            mov.b32 $0, 0f00000000;
            mov.b32 $1, 0f00000000;
            mov.b32 $2, 0f00000000;
            mov.b32 $3, 0f00000000;
            @p multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {$0, $1, $2, $3}, [$4];
            }
            """,
            "=&f,=&f,=&f,=&f,l,r",
            [address, inside.to(tl.int32)],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=False,
            pack=1,
        )

    @triton.jit
    def store_to_all(
        multicast, table, world, offset, lanes, inside, a, b, c, d, RESULT: tl.constexpr
    ):
        """Stores 4 neighbours each at every rank, rounded to RESULT."""
        address = multicast + offset + lanes.to(tl.int64) * (4 * RESULT.primitive_bitwidth // 8)
        if RESULT.primitive_bitwidth == 32:
            _send(_STORE_FP32, address, inside, a, b, c, d)
        elif RESULT.is_bf16():
            _send(_STORE_BF16, address, inside, a, b, c, d)
        else:
            _send(_STORE_FP16, address, inside, a, b, c, d)

    @triton.jit
    def _send(CODE: tl.constexpr, address, inside, a, b, c, d):
        tl.inline_asm_elementwise(
            CODE,
            "=r,l,r,f,f,f,f",
            [address, inside.to(tl.int32), a, b, c, d],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
