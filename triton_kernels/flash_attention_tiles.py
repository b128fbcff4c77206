"""What forward and backward of attention do with one block: load, score, mask, drop.

A head of any size is one part of a power of two, or two (80 = 64 + 16, 96 = 64 + 32): operands are
tuples of parts, and a product over the head is the sum of the parts' products.
"""

import triton
import triton.language as tl

from .epilogue import halves
from .signals import load_anew

LOG2E = tl.constexpr(1.4426950408889634)
# What differs from call to call, and would be compiled anew where it happens to be 1 or even.
VARYING = ["tile_count", "before", "after", "seed_low", "seed_high", "first_head"]
LN2 = tl.constexpr(0.6931471805599453)


def split_head(size: int) -> tuple[int, int]:
    """(main, tail) widths, powers of two from 16, that hold a head of `size` with least padding;
    tail 0: one part does. Beside 128, 64: narrower tails' backward spills on every chip."""
    whole = max(16, 1 << (size - 1).bit_length())
    main = 1 << (size.bit_length() - 1)
    if size <= 16 or main == size:
        return whole, 0
    tail = max(64 if main == 128 else 16, 1 << (size - main - 1).bit_length())
    return (main, tail) if main + tail < whole else (whole, 0)


@triton.jit
def place(tiles, tile_count, heads):
    """(its tile, head, batch) of this program.

    Called again after a loop, so that what follows from them is computed again, instead of taking
    registers through a loop that has none to spare: the last field of a tile is 0, which a compiler
    that must load it anew does not know.
    """
    program = tl.program_id(0) + load_anew(tiles + 7)
    tile = tiles + program % tile_count * 8
    return tile, program // tile_count % heads, program // (tile_count * heads)


@triton.jit
def append(parts, part):
    return parts + (part,)  # noqa: RUF005 - Triton does not unpack


@triton.jit
def row_offsets(rows, stride):
    """int64: row numbers may be small, what they reach is not."""
    return tl.cast(rows, tl.int64) * stride


@triton.jit
def of_head(x, batch, head, strides):
    """Where row 0 of a head lies; strides: (batch, row, head, column), or (batch, head, row)."""
    HEAD: tl.constexpr = len(strides) - 2
    return x + row_offsets(batch, strides[0]) + row_offsets(head, strides[HEAD])


@triton.jit
def tile_rows(tile, BLOCK: tl.constexpr):
    """(first row of a tile, lanes of the program, which of them are rows of the tile)."""
    lanes = tl.arange(0, BLOCK)
    return tl.load(tile), lanes, lanes < tl.load(tile + 1)


@triton.jit
def block_offsets(lanes, columns, strides, FAR: tl.constexpr):
    """[lanes, columns] from a block's first row, in 32 bits unless a block itself reaches FAR. Of
    blocks that are loaded again and again that halves what addresses take of the registers; where
    each thread has few rows and many columns, 64 bits take less: columns become immediates."""
    KIND: tl.constexpr = tl.int64 if FAR else tl.int32
    down = lanes.to(KIND) * tl.cast(strides[1], KIND)
    return down[:, None] + (columns.to(KIND) * tl.cast(strides[3], KIND))[None, :]


@triton.jit
def load_part(
    base,  # where row 0, column 0 lies
    row,  # the first row
    lanes,  # int [R]: rows from there
    valid,  # bool [R]: the others are loaded as 0
    strides,  # (batch, row, head, column)
    SIZE: tl.constexpr,  # of the head
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    CHECK_ROWS: tl.constexpr,
    FAR: tl.constexpr,
):
    """[R, WIDTH]: columns FIRST .. of these rows; columns past SIZE are 0."""
    columns = FIRST + tl.arange(0, WIDTH)
    pointers = base + row_offsets(row, strides[1]) + block_offsets(lanes, columns, strides, FAR)
    if CHECK_ROWS:
        if FIRST + WIDTH > SIZE:
            return tl.load(pointers, valid[:, None] & (columns < SIZE)[None, :], other=0.0)
        return tl.load(pointers, valid[:, None], other=0.0)
    if FIRST + WIDTH > SIZE:
        return tl.load(pointers, (columns < SIZE)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def load_parts(
    base,
    row,
    lanes,
    valid,
    strides,
    SIZE: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    CHECK_ROWS: tl.constexpr,
    FAR: tl.constexpr,
):
    # One return: of two, one behind the other, the compiler takes as many parts as both have.
    parts = (load_part(base, row, lanes, valid, strides, SIZE, 0, MAIN, CHECK_ROWS, FAR),)
    if TAIL > 0:
        tail = load_part(base, row, lanes, valid, strides, SIZE, MAIN, TAIL, CHECK_ROWS, FAR)
        parts = append(parts, tail)
    return parts


@triton.jit
def own_parts(
    x,
    batch,
    head,
    own,  # by tile_rows
    strides,
    SIZE: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    FAR: tl.constexpr,
):
    """The program's own rows of one head."""
    begin, lanes, valid = own
    base = of_head(x, batch, head, strides)
    return load_parts(base, begin, lanes, valid, strides, SIZE, MAIN, TAIL, True, FAR)


@triton.jit
def fetch_parts(
    blocks, batch, head, row, ROWS: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr
):
    """As load_parts, of ROWS rows from `row`, by descriptors [batch, head, row, column]."""
    parts = (blocks[0].load([batch, head, row, 0]).reshape(ROWS, MAIN),)
    if TAIL > 0:
        parts = append(parts, blocks[1].load([batch, head, row, MAIN]).reshape(ROWS, TAIL))
    return parts


@triton.jit
def _quarters(value):
    """Of the columns: all of a large part on its way to memory does not fit the registers."""
    WIDTH: tl.constexpr = value.shape[1]
    if WIDTH >= 64:
        left, right = halves(value, value.shape[0], WIDTH)
        pieces = halves(left, value.shape[0], WIDTH // 2)
        pieces = pieces + halves(right, value.shape[0], WIDTH // 2)
    else:
        pieces = (value,)
    return pieces


@triton.jit
def store_parts(
    base,
    parts,
    row,
    lanes,
    valid,
    strides,
    SIZE: tl.constexpr,
    MAIN: tl.constexpr,
    ADD: tl.constexpr,  # to what is there, in fp32
):
    """Rounds once, to the dtype of `base`; only valid rows and columns of the head are touched."""
    base += row_offsets(row, strides[1])
    for part in tl.static_range(len(parts)):
        pieces = _quarters(parts[part])
        for piece in tl.static_range(len(pieces)):
            columns = part * MAIN + piece * pieces[piece].shape[1]
            columns += tl.arange(0, pieces[piece].shape[1])
            pointers = base + block_offsets(lanes, columns, strides, True)
            mask = valid[:, None] & (columns < SIZE)[None, :]
            some = pieces[piece]
            if ADD:
                some += tl.load(pointers, mask, other=0.0)
            tl.store(pointers, some.to(base.dtype.element_ty), mask)


@triton.jit
def product(a, b, acc, UPCAST: tl.constexpr):
    """acc + a @ b with a in the dtype of b; UPCAST: in fp32, where the interpreter is wrong in 16
    bits (bf16 dots of triton 3.8 come out at 5e10)."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a.to(b.dtype), b, acc, input_precision="ieee")


@triton.jit
def products(a, b, UPCAST: tl.constexpr):
    """sum of a[part] @ b[part]^T: [rows of a, rows of b] in fp32."""
    acc = tl.zeros((a[0].shape[0], b[0].shape[0]), tl.float32)
    for part in tl.static_range(len(a)):
        acc = product(a[part], b[part].T, acc, UPCAST)
    return acc


@triton.jit
def _tanh(x):
    """To 1e-7 of its value: by its series near 0, where the quotient below cancels."""
    y = x * x
    series = x + x * y * (
        -0.3333333333333333
        + y * (0.13333333333333333 + y * (-0.05396825396825397 + y * 0.021869488536155203))
    )
    quotient = 1.0 - 2.0 / (1.0 + tl.math.exp2(x * (2 * LOG2E)))
    return tl.where(y < 0.0625, series, quotient)


@triton.jit
def log2_scores(
    raw,  # q . k
    scale,
    softcap,
    slope,  # of this head
    q_pos,  # int, of a shape that broadcasts to raw's
    k_pos,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
):
    """(scores in units of log 2, tanh of the softcap or raw)."""
    scores = raw * (scale * LOG2E)
    capped = raw
    if SOFTCAP:
        capped = _tanh(raw * (scale / softcap))
        scores = capped * (softcap * LOG2E)
    if ALIBI:
        scores -= tl.abs(q_pos - k_pos).to(tl.float32) * (slope * LOG2E)
    return scores, capped


@triton.jit
def seen_rows(
    own_pos,  # int32 [R]: positions of the rows of a tile
    valid,  # bool [R]: the others see nothing
    segment,  # begin, end, position of begin, stride
    back,
    forth,
    BACK: tl.constexpr,
    FORTH: tl.constexpr,
):
    """(first, last) row of the segment that each row of the tile sees: with positions own_pos -
    back .. own_pos + forth. A comparison of row numbers is all that is left for a score."""
    begin, end, position, stride = segment
    first = own_pos * 0 + begin
    last = own_pos * 0 + (end - 1)
    if BACK:
        steps = (tl.maximum(own_pos - back - position, 0) + (stride - 1)) // stride
        first = begin + steps
    if FORTH:
        ahead = own_pos + forth - position
        last = tl.minimum(last, begin + tl.maximum(ahead, 0) // stride)
        last = tl.where(ahead < 0, begin - 1, last)
    return first, tl.where(valid, last, begin - 1)


@triton.jit
def visible(lanes, row, seen, BACK: tl.constexpr):
    """bool [own rows, lanes]: which of the rows row + lanes are seen, by seen_rows. Lanes are known
    to the compiler, so that a comparison with them takes no register more."""
    mask = lanes[None, :] <= (seen[1] - row)[:, None]
    if BACK:
        mask = mask & (lanes[None, :] >= (seen[0] - row)[:, None])
    return mask


@triton.jit
def kept(q_pos, k_pos, document, plane, seed_low, seed_high, threshold):
    """Philox4x32-10 of (k_pos, q_pos, document, plane): kept where its first word is at least
    threshold. The same words in every engine, tile and shard."""
    word, _, _, _ = tl.philox_impl(
        k_pos.to(tl.uint32, bitcast=True),
        q_pos.to(tl.uint32, bitcast=True),
        document.to(tl.uint32, bitcast=True),
        plane.to(tl.uint32),
        seed_low.to(tl.uint32),
        seed_high.to(tl.uint32),
    )
    return word >= threshold.to(tl.uint32)


@triton.jit
def numbers_of(
    slopes,
    slope_strides,
    scale,
    softcap,
    document,
    seed_low,
    seed_high,
    threshold,
    undrop,
    first_head,
    all_heads,
    batch,
    head,
    ALIBI: tl.constexpr,
):
    """What scores and weights of this head are made with: scale, softcap, slope, document, plane,
    seeds, threshold, 1 / (1 - dropout_p)."""
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes + batch * slope_strides[0] + head * slope_strides[1])
    plane = batch * all_heads + first_head + head
    return scale, softcap, slope, document, plane, seed_low, seed_high, threshold, undrop


@triton.jit
def met_segment(
    segment,
    own_pos,  # int32 [R]: positions of the rows of the tile
    valid,  # bool [R]
    back,
    forth,
    MASKED: tl.constexpr,
    BACK: tl.constexpr,
    FORTH: tl.constexpr,
):
    """((first row, end, position of the first, stride), (first, last) row that each row of the tile
    sees, where to start, where to stop): of the blocks that need a mask, or of those that do not.
    """
    first, full_end, end = tl.load(segment), tl.load(segment + 1), tl.load(segment + 2)
    where = (first, end, tl.load(segment + 3), tl.load(segment + 4))
    seen = seen_rows(own_pos, valid, where, back, forth, BACK, FORTH)
    return where, seen, full_end if MASKED else first, end if MASKED else full_end


@triton.jit
def met_block(
    one,  # where row 0 of each of two operands lies, for this head
    two,
    one_blocks,  # their descriptors
    two_blocks,
    batch,
    head,
    row,  # the first of the block
    lanes,
    inside,  # bool [rows]: what is past the segment may be NaN, and 0 times that is not 0
    one_strides,
    two_strides,
    SIZE: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    SIZE_TWO: tl.constexpr,
    MAIN_TWO: tl.constexpr,
    TAIL_TWO: tl.constexpr,
    MASKED: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    FAR: tl.constexpr,
):
    """The parts of a block of keys and of values, or of queries and of gradients."""
    if DESCRIPTORS and not MASKED:
        ROWS: tl.constexpr = lanes.shape[0]
        first = fetch_parts(one_blocks, batch, head, row, ROWS, MAIN, TAIL)
        second = fetch_parts(two_blocks, batch, head, row, ROWS, MAIN_TWO, TAIL_TWO)
    else:
        first = load_parts(one, row, lanes, inside, one_strides, SIZE, MAIN, TAIL, MASKED, FAR)
        second = load_parts(
            two, row, lanes, inside, two_strides, SIZE_TWO, MAIN_TWO, TAIL_TWO, MASKED, FAR
        )
    return first, second
