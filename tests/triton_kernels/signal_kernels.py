"""Two small kernels that hand data round with signals.py, for its tests."""

import triton
import triton.language as tl

from pyparallel.triton_kernels.signals import (
    LINE,
    consume,
    flag_word,
    has_failed,
    peer_pointer,
    publish,
    publish_add,
)

COUNT = tl.constexpr(64)
FLAG_WORDS = tl.constexpr(LINE)
# Workspace in int64 words: flags [world], counter, failed, a line each; then a row per source.


@triton.jit
def put(table, values, me, world, call, signature):
    """Row `me` of every rank's data, then its flag."""
    lane = tl.arange(0, COUNT)
    value = tl.load(values + lane)
    for peer in range(world):
        data = peer_pointer(table, peer, ((world + 2) * FLAG_WORDS + me * COUNT) * 8, tl.int64)
        tl.store(data + lane, value)
        publish(
            peer_pointer(table, peer, me * FLAG_WORDS * 8, tl.int64), flag_word(call, signature)
        )
        publish_add(peer_pointer(table, peer, world * FLAG_WORDS * 8, tl.int64))


@triton.jit
def take(table, out, status, me, world, call, signature, timeout_us):
    """out [world, COUNT] = the rows of all sources, each once its flag has come."""
    lane = tl.arange(0, COUNT)
    failed = peer_pointer(table, me, (world + 1) * FLAG_WORDS * 8, tl.int64)
    go_on = not has_failed(failed)
    for source in range(world):
        if go_on:
            flag = peer_pointer(table, me, source * FLAG_WORDS * 8, tl.int64)
            word = flag_word(call, signature)
            go_on = consume(flag, word, failed, status, 7, source, timeout_us)
        if go_on:
            data = (world + 2) * FLAG_WORDS + source * COUNT
            row = tl.load(peer_pointer(table, me, data * 8, tl.int64) + lane)
            tl.store(out + source * COUNT + lane, row)
