"""The attention forward with warp roles, in Gluon, for sm_90: the same step as flash_attention.py.

A program owns 128 queries of one head and has three roles of warps:

    loader       one warp: brings the queries, then keys and values block by block, by TMA
    two readers  a warpgroup each with 64 of the queries: scores, softmax, sum of values

Registers are dealt out by role (setmaxnreg): the loader needs few, so that a reader has what its
sums, scores and weights take. A reader starts the scores of the next block before the sum of this
one, so that the tensor cores work while it makes weights; and what one reader leaves of them the
other takes.

    Protocol "block ready": an mbarrier per buffer, one set for keys and one for values
      loader   waits until both readers have let the buffer go, announces its bytes, starts the copy
      reader   waits until they are there; lets go when no product of its own reads them any more
      order    all three walk the tile's segments in the same order, so that no index travels
      progress the loader is ahead by at most BUFFERS blocks; a reader waits for the loader only

Which attentions it takes: `unfit_for_roles`. Gluon is not interpreted: the tests run this source in
an emulator of the operations it uses, and read what it compiles to; no GPU has run it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from .flash_attention_roles_steps import (
    NOTHING,
    anew,
    clear_rest,
    far_offsets,
    is_visible,
    own_rows,
    packed,
    rows_seen,
    segment_fields,
    soften,
    start_scores,
    start_sums,
    survey,
)
from .flash_attention_tiles import LN2, LOG2E, VARYING

__all__ = ["BUFFERS", "READERS", "READER_ROWS", "roles_kernel"]

BUFFERS = 2
READERS = 2
READER_ROWS = 64
READER_REGISTERS = gl.constexpr(240)
LOADER_REGISTERS = gl.constexpr(24)


# --- 2 device helpers


@gluon.jit
def _load_blocks(
    blocks,
    buffers,
    flags,
    tile,
    segments,
    batch,
    head,
    kv_head,
    BLOCK: gl.constexpr,
    BUFFERS: gl.constexpr,
    READERS: gl.constexpr,
    READER_ROWS: gl.constexpr,
):
    """The loader. Blocks without a mask of all segments, then those with one."""
    q_blocks, k_blocks, v_blocks = blocks
    queries, keys, values = buffers
    queries_there, keys_there, keys_free, values_there, values_free = flags
    begin = gl.load(tile)
    mbarrier.expect(queries_there, READERS * q_blocks.nbytes_per_cta)
    for reader in gl.static_range(READERS):
        where = [batch, head, begin + reader * READER_ROWS, 0]
        tma.async_load(q_blocks, where, queries_there, queries.index(reader))
    turn = 0
    for masked in gl.static_range(2):
        for number in range(gl.load(tile + 5), gl.load(tile + 6)):
            segment = segments + number * 5
            start, stop = gl.load(segment + masked), gl.load(segment + 1 + masked)
            for row in range(start, stop, BLOCK):
                buffer, phase = turn % BUFFERS, turn // BUFFERS & 1
                where = [batch, kv_head, row, 0]
                mbarrier.wait(keys_free.index(buffer), phase ^ 1)
                mbarrier.expect(keys_there.index(buffer), k_blocks.nbytes_per_cta)
                tma.async_load(k_blocks, where, keys_there.index(buffer), keys.index(buffer))
                mbarrier.wait(values_free.index(buffer), phase ^ 1)
                mbarrier.expect(values_there.index(buffer), v_blocks.nbytes_per_cta)
                tma.async_load(v_blocks, where, values_there.index(buffer), values.index(buffer))
                turn += 1


@gluon.jit
def _read_blocks(
    buffers,
    flags,
    tile,
    segments,
    memory,
    strides,  # of acc and out (row, column), of row_max, row_sum and lse (row)
    scale,
    before,
    after,
    head,
    READER: gl.constexpr,
    SIZE: gl.constexpr,
    SIZE_V: gl.constexpr,
    BLOCK: gl.constexpr,
    BUFFERS: gl.constexpr,
    READER_ROWS: gl.constexpr,
    BEFORE: gl.constexpr,
    AFTER: gl.constexpr,
    SINKS: gl.constexpr,
    LOAD: gl.constexpr,
    FINISH: gl.constexpr,
):
    """A reader: READER_ROWS of the tile's queries, from their state to their state or the end."""
    queries, keys, values = buffers
    queries_there, keys_there, keys_free, values_there, values_free = flags
    row_max, row_sum, acc, out, lse, sinks = memory
    OF_SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    OF_SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE_V, 16])
    OF_WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OF_SUMS, 2)
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, OF_SCORES)
    OF_SUM_ROWS: gl.constexpr = gl.SliceLayout(1, OF_SUMS)

    rows, q_pos, valid = own_rows(tile, READER, READER_ROWS, OF_ROWS)
    lanes = gl.arange(0, BLOCK, gl.SliceLayout(0, OF_SCORES))
    factor = scale * LOG2E

    columns = gl.arange(0, SIZE_V, gl.SliceLayout(0, OF_SUMS))
    if LOAD:
        m = gl.load(row_max + far_offsets(rows, strides[4]), valid, other=NOTHING) * LOG2E
        total = gl.load(row_sum + far_offsets(rows, strides[5]), valid, other=0.0)
        sum_rows, _, sum_valid = own_rows(tile, READER, READER_ROWS, OF_SUM_ROWS)
        places = acc + far_offsets(sum_rows, strides[0])[:, None]
        places += (columns * strides[1])[None, :]
        sums = gl.load(places, sum_valid[:, None], other=0.0)
    else:
        m = gl.full([READER_ROWS], NOTHING, gl.float32, OF_ROWS)
        total = gl.full([READER_ROWS], 0.0, gl.float32, OF_ROWS)
        sums = gl.full([READER_ROWS, SIZE_V], 0.0, gl.float32, OF_SUMS)

    whole, count, place, row = survey(tile, segments, BLOCK)
    mbarrier.wait(queries_there, 0)  # always: no copy may be under way when a program ends
    if count > 0:
        own = queries.index(READER).reshape([READER_ROWS, SIZE])
        scores = start_scores(own, keys, keys_there, 0, OF_SCORES, SIZE, BLOCK, BUFFERS)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(keys_free.index(0), count=1)
        where = segment_fields(segments + place * 5)
        seen = rows_seen(q_pos, valid, where, before, after, BEFORE, AFTER)
        mask = is_visible(lanes, row, seen, BEFORE)  # of a block without a mask: all that is valid
        m, total, weights, shrink = soften(m, total, gl.where(mask, scores, NOTHING), factor)
        sums = sums * gl.convert_layout(shrink, OF_SUM_ROWS)[:, None]
        weights = packed(weights, values)
        for turn in range(1, whole):
            scores = start_scores(own, keys, keys_there, turn, OF_SCORES, SIZE, BLOCK, BUFFERS)
            sums = start_sums(
                weights, sums, values, values_there, turn - 1, OF_WEIGHTS, SIZE_V, BLOCK, BUFFERS
            )
            scores = warpgroup_mma_wait(1, deps=[scores])
            mbarrier.arrive(keys_free.index(turn % BUFFERS), count=1)
            m, total, weights, shrink = soften(m, total, scores, factor)
            sums = warpgroup_mma_wait(0, deps=[sums])
            mbarrier.arrive(values_free.index((turn - 1) % BUFFERS), count=1)
            sums = sums * gl.convert_layout(shrink, OF_SUM_ROWS)[:, None]
            weights = packed(weights, values)
        tile = anew(tile)
        rows, q_pos, valid = own_rows(tile, READER, READER_ROWS, OF_ROWS)
        turn = gl.maximum(whole, 1)
        done = gl.where(whole == 0, BLOCK, 0)  # rows of the first masked block, met above
        for number in range(gl.load(tile + 5), gl.load(tile + 6)):
            where = segment_fields(segments + number * 5)
            seen = rows_seen(q_pos, valid, where, before, after, BEFORE, AFTER)
            start, end = gl.load(segments + number * 5 + 1), where[1]
            for row in range(start + done, end, BLOCK):
                scores = start_scores(own, keys, keys_there, turn, OF_SCORES, SIZE, BLOCK, BUFFERS)
                sums = start_sums(
                    weights,
                    sums,
                    values,
                    values_there,
                    turn - 1,
                    OF_WEIGHTS,
                    SIZE_V,
                    BLOCK,
                    BUFFERS,
                )
                scores = warpgroup_mma_wait(1, deps=[scores])
                mbarrier.arrive(keys_free.index(turn % BUFFERS), count=1)
                scores = gl.where(is_visible(lanes, row, seen, BEFORE), scores, NOTHING)
                m, total, weights, shrink = soften(m, total, scores, factor)
                sums = warpgroup_mma_wait(0, deps=[sums])
                mbarrier.arrive(values_free.index((turn - 1) % BUFFERS), count=1)
                sums = sums * gl.convert_layout(shrink, OF_SUM_ROWS)[:, None]
                weights = packed(weights, values)
                turn += 1
            left = (end - start) % BLOCK
            if left > 0:
                clear_rest(values, values_there, turn - 1, left, SIZE_V, BLOCK, BUFFERS)
            done = gl.where(end > start, 0, done)
        sums = start_sums(
            weights, sums, values, values_there, turn - 1, OF_WEIGHTS, SIZE_V, BLOCK, BUFFERS
        )
        sums = warpgroup_mma_wait(0, deps=[sums])

    tile = anew(tile)
    rows, q_pos, valid = own_rows(tile, READER, READER_ROWS, OF_ROWS)
    sum_rows, _, sum_valid = own_rows(tile, READER, READER_ROWS, OF_SUM_ROWS)
    if FINISH:
        if SINKS:
            sink = gl.load(sinks + head).to(gl.float32)
            highest = gl.maximum(m, sink * LOG2E)
            base = gl.where(highest == NOTHING, 0.0, highest)
            shrink = gl.exp2(m - base)
            total = total * shrink + gl.exp2(sink * LOG2E - base)
            m = highest
        else:
            shrink = gl.full([READER_ROWS], 1.0, gl.float32, OF_ROWS)
        empty = total == 0.0
        some = gl.where(empty, 1.0, total)
        log_sum = gl.where(empty, NOTHING, (m + gl.log2(some)) * LN2)
        factor = gl.where(empty, 0.0, shrink / some)
        gl.store(lse + far_offsets(rows, strides[6]), log_sum, valid)
        result = sums * gl.convert_layout(factor, OF_SUM_ROWS)[:, None]
        places = out + far_offsets(sum_rows, strides[2])[:, None]
        places += (columns * strides[3])[None, :]
        gl.store(places, result.to(out.dtype.element_ty), sum_valid[:, None])
    else:
        gl.store(row_max + far_offsets(rows, strides[4]), m * LN2, valid)
        gl.store(row_sum + far_offsets(rows, strides[5]), total, valid)
        places = acc + far_offsets(sum_rows, strides[0])[:, None]
        places += (columns * strides[1])[None, :]
        gl.store(places, sums, sum_valid[:, None])


# --- 3 kernel


@gluon.jit(do_not_specialize=VARYING)
def roles_kernel(
    q_blocks,  # descriptor of q as [batch, heads, seq_q, SIZE], blocks of READER_ROWS
    k_blocks,  # of k as [batch, kv_heads, seq_k, SIZE], blocks of BLOCK_K
    v_blocks,
    row_max,  # fp32 [batch, heads, seq_q]: state, read if LOAD, written unless FINISH
    row_sum,
    acc,  # fp32 [batch, seq_q, heads, SIZE_V]
    out,  # [batch, seq_q, heads, SIZE_V]: written if FINISH
    lse,  # fp32 [batch, heads, seq_q]
    sinks,  # [heads], if SINKS
    tiles,  # int32 [tile_count, 8]: Plan.tiles
    segments,  # int32 [*, 5]: Plan.segments
    acc_strides,  # (batch, row, head, column)
    out_strides,
    row_max_strides,  # (batch, head, row)
    row_sum_strides,
    lse_strides,
    scale,
    before,
    after,
    tile_count,
    heads,
    group,  # heads / kv_heads
    SIZE: gl.constexpr,
    SIZE_V: gl.constexpr,
    BLOCK_K: gl.constexpr,
    BUFFERS: gl.constexpr,
    READERS: gl.constexpr,
    READER_ROWS: gl.constexpr,
    BEFORE: gl.constexpr,
    AFTER: gl.constexpr,
    SINKS: gl.constexpr,
    LOAD: gl.constexpr,
    FINISH: gl.constexpr,
):
    program = gl.program_id(0)
    tile = tiles + program % tile_count * 8
    head = program // tile_count % heads
    batch = program // (tile_count * heads)
    kv_head = head // group
    queries = gl.allocate_shared_memory(
        q_blocks.dtype, [READERS, 1, 1, READER_ROWS, SIZE], q_blocks.layout
    )
    keys = gl.allocate_shared_memory(
        q_blocks.dtype, [BUFFERS, 1, 1, BLOCK_K, SIZE], k_blocks.layout
    )
    values = gl.allocate_shared_memory(
        q_blocks.dtype, [BUFFERS, 1, 1, BLOCK_K, SIZE_V], v_blocks.layout
    )
    queries_there = mbarrier.allocate_mbarrier()
    keys_there = mbarrier.allocate_mbarrier(batch=BUFFERS)
    keys_free = mbarrier.allocate_mbarrier(batch=BUFFERS)
    values_there = mbarrier.allocate_mbarrier(batch=BUFFERS)
    values_free = mbarrier.allocate_mbarrier(batch=BUFFERS)
    mbarrier.init(queries_there, count=1)
    for buffer in gl.static_range(BUFFERS):
        mbarrier.init(keys_there.index(buffer), count=1)
        mbarrier.init(values_there.index(buffer), count=1)
        mbarrier.init(keys_free.index(buffer), count=READERS)
        mbarrier.init(values_free.index(buffer), count=READERS)
    fence_async_shared()  # copies see the flags as they were made

    if LOAD or not FINISH:
        row_max += far_offsets(batch, row_max_strides[0]) + far_offsets(head, row_max_strides[1])
        row_sum += far_offsets(batch, row_sum_strides[0]) + far_offsets(head, row_sum_strides[1])
        acc += far_offsets(batch, acc_strides[0]) + far_offsets(head, acc_strides[2])
    if FINISH:
        out += far_offsets(batch, out_strides[0]) + far_offsets(head, out_strides[2])
        lse += far_offsets(batch, lse_strides[0]) + far_offsets(head, lse_strides[1])
    blocks = (q_blocks, k_blocks, v_blocks)
    buffers = (queries, keys, values)
    flags = (queries_there, keys_there, keys_free, values_there, values_free)
    memory = (row_max, row_sum, acc, out, lse, sinks)
    strides = (
        acc_strides[1], acc_strides[3], out_strides[1], out_strides[3], row_max_strides[2],
        row_sum_strides[2], lse_strides[2],
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_read_blocks, (
                buffers, flags, tile, segments, memory, strides, scale, before, after, head, 0,
                SIZE, SIZE_V, BLOCK_K, BUFFERS, READER_ROWS, BEFORE, AFTER, SINKS, LOAD, FINISH,
            )),
            (_read_blocks, (
                buffers, flags, tile, segments, memory, strides, scale, before, after, head, 1,
                SIZE, SIZE_V, BLOCK_K, BUFFERS, READER_ROWS, BEFORE, AFTER, SINKS, LOAD, FINISH,
            )),
            (_load_blocks, (
                blocks, buffers, flags, tile, segments, batch, head, kv_head, BLOCK_K, BUFFERS,
                READERS, READER_ROWS,
            )),
        ],
        [4, 1],
        [READER_REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip
