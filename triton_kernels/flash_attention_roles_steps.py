"""What a role of flash_attention_roles.py does with one tile or one block."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
)

from .flash_attention_tiles import row_offsets, seen_rows, visible

NOTHING = gl.constexpr(float("-inf"))
# The same source as the plain kernels'.
rows_seen = gluon.jit(seen_rows.fn)
is_visible = gluon.jit(visible.fn)
far_offsets = gluon.jit(row_offsets.fn)


@gluon.jit
def survey(tile, segments, BLOCK: gl.constexpr):
    """(blocks without a mask, all blocks, the segment of the first one, its first row)."""
    whole, count, place, row = 0, 0, 0, 0
    for number in range(gl.load(tile + 5), gl.load(tile + 6)):
        segment = segments + number * 5
        first, full_end, end = gl.load(segment), gl.load(segment + 1), gl.load(segment + 2)
        some, more = (full_end - first) // BLOCK, gl.cdiv(end - full_end, BLOCK)
        if (whole == 0) & (some > 0):
            place, row = number, first
        elif (count == 0) & (more > 0):
            place, row = number, full_end
        whole += some
        count += some + more
    return whole, count, place, row


@gluon.jit
def anew(tile):
    """The tile, by an address that a compiler cannot know to be the same: its last field is 0. What
    is computed from it again behind a long loop takes no register through that loop."""
    return tile + gl.load(tile + 7, volatile=True)


@gluon.jit
def own_rows(tile, READER: gl.constexpr, ROWS: gl.constexpr, OF_ROWS: gl.constexpr):
    """(row, position, whether it is the tile's) of the queries of this reader."""
    lanes = READER * ROWS + gl.arange(0, ROWS, OF_ROWS)
    position = gl.load(tile + 2) + lanes * gl.load(tile + 3)
    return gl.load(tile) + lanes, position, lanes < gl.load(tile + 1)


@gluon.jit
def segment_fields(segment):
    """(first row, end, position of the first, stride)."""
    return gl.load(segment), gl.load(segment + 2), gl.load(segment + 3), gl.load(segment + 4)


@gluon.jit
def packed(weights, like):
    """Weights rounded to the dtype of `like`, two in an int32 of the first one's place: carried
    through a loop as 16 bits they are taken apart and put together in every turn, and as fp32 they
    take 32 registers of a thread more than there are."""
    if like.dtype == gl.float16:
        both = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $3, $2;", "=r,=r,r,r", [weights], gl.int32, True, 2
        )
    else:
        both = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $3, $2;", "=r,=r,r,r", [weights], gl.int32, True, 2
        )
    return both


@gluon.jit
def unpacked(both, like, OF_WEIGHTS: gl.constexpr):
    weights = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [both], like.dtype, True, 2)
    return gl.convert_layout(weights, OF_WEIGHTS)


@gluon.jit
def start_scores(
    own,
    keys,
    there,
    turn,
    OF_SCORES: gl.constexpr,
    SIZE: gl.constexpr,
    BLOCK: gl.constexpr,
    BUFFERS: gl.constexpr,
):
    """Starts queries times the keys of this turn, once they are there."""
    buffer = turn % BUFFERS
    mbarrier.wait(there.index(buffer), turn // BUFFERS & 1)
    its = keys.index(buffer).reshape([BLOCK, SIZE]).permute([1, 0])
    nothing = gl.full([own.shape[0], BLOCK], 0.0, gl.float32, OF_SCORES)
    return warpgroup_mma(own, its, nothing, use_acc=False, is_async=True)


@gluon.jit
def start_sums(
    weights,
    sums,
    values,
    there,
    turn,
    OF_WEIGHTS: gl.constexpr,
    SIZE_V: gl.constexpr,
    BLOCK: gl.constexpr,
    BUFFERS: gl.constexpr,
):
    """Starts weights times the values of this turn, added to the sums."""
    buffer = turn % BUFFERS
    ready = unpacked(weights, values, OF_WEIGHTS)
    mbarrier.wait(there.index(buffer), turn // BUFFERS & 1)
    its = values.index(buffer).reshape([BLOCK, SIZE_V])
    return warpgroup_mma(ready, its, sums, is_async=True)


@gluon.jit
def clear_rest(
    values,
    there,
    turn,
    left,
    SIZE_V: gl.constexpr,
    BLOCK: gl.constexpr,
    BUFFERS: gl.constexpr,
):
    """The values of this turn from row `left` of their block on become 0, once they are there: they
    are another document's, or nobody's, and what is not finite there a weight of 0 would not hide.
    Both readers write the same, before a product of their own reads it: neither waits for the
    other."""
    OF_PART: gl.constexpr = gl.BlockedLayout([1, 8], [256 // SIZE_V, SIZE_V // 8], [4, 1], [1, 0])
    ROWS: gl.constexpr = 16
    buffer = turn % BUFFERS
    mbarrier.wait(there.index(buffer), turn // BUFFERS & 1)
    its = values.index(buffer).reshape([BLOCK, SIZE_V])
    nothing = gl.full([ROWS, SIZE_V], 0.0, values.dtype, OF_PART)
    for part in gl.static_range(BLOCK // ROWS):
        if left < ROWS * (part + 1):
            some = its.slice(ROWS * part, ROWS)
            inside = ROWS * part + gl.arange(0, ROWS, gl.SliceLayout(1, OF_PART)) < left
            some.store(gl.where(inside[:, None], some.load(OF_PART), nothing))
    fence_async_shared()  # products and copies see what was written,
    gl.barrier()  # by any warp of the reader


@gluon.jit
def soften(m, total, scores, factor):
    """(row maximum, row sum, weights, what sums so far shrink by), exponents of 2."""
    highest = gl.maximum(m, gl.max(scores, 1) * factor)
    base = gl.where(highest == NOTHING, 0.0, highest)
    weights = gl.exp2(scores * factor - base[:, None])
    shrink = gl.exp2(m - base)
    return highest, total * shrink + gl.sum(weights, 1), weights, shrink
