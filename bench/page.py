"""A page of memory that the ranks of a run share: aligned starts and small exchanges.

It belongs to neither contestant. Using one side's barrier to align the ranks would let that side's
exit skew into everybody's numbers, and would tie the measurement to the thing measured.

Protocol: slot r is written by rank r only. `arrived` counts up by one per meeting and is never
cleared; values lie in two banks used in turn, so a bank is overwritten only after a meeting that
every reader of it has passed. Between the write of a value and of its counter lie many bytecodes of
the interpreter, locked instructions among them, so that no processor reorders the two.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path

from bench.machine import usable_cores

_LINE = 64
_VALUES = 7  # doubles per bank, one line with the counter
_TEXT = 512
_RANK_BYTES = _LINE + 2 * _LINE + _TEXT


class PageTimeout(RuntimeError):
    pass


class Page:
    """One rank's seat at the page. close() may be called twice."""

    def __init__(self, path: Path, rank: int, world: int, timeout: float) -> None:
        self.rank, self.world, self.timeout = rank, world, timeout
        fd = os.open(path, os.O_RDWR)
        try:
            self._map = mmap.mmap(fd, world * _RANK_BYTES)
        finally:
            os.close(fd)
        self._ints = memoryview(self._map).cast("q")
        self._floats = memoryview(self._map).cast("d")
        self._meetings = 0
        self._others = [r * _RANK_BYTES // 8 for r in range(world) if r != rank]
        self._mine = rank * _RANK_BYTES // 8
        self._spins = 2000 if world <= usable_cores() else 0

    @staticmethod
    def create(path: Path, world: int) -> None:
        path.write_bytes(bytes(world * _RANK_BYTES))

    def align(self) -> None:
        """Returns on all ranks within a few microseconds of the last one's coming."""
        self._meetings += 1
        ints, target = self._ints, self._meetings
        ints[self._mine] = target
        spins, started = self._spins, 0.0
        for slot in self._others:
            while ints[slot] < target:
                if spins > 0:
                    spins -= 1
                    continue
                started = started or time.monotonic()
                waited = time.monotonic() - started
                if waited > self.timeout:
                    absent = slot * 8 // _RANK_BYTES
                    raise PageTimeout(
                        f"benchmark page, meeting {target}: rank {absent} has not come "
                        f"after {self.timeout:.0f} s"
                    )
                if waited > 0.01:
                    time.sleep(0.0005)
                else:
                    os.sched_yield()

    def exchange(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's values, in rank order. All ranks give equally many, at most seven."""
        if len(values) > _VALUES:
            raise ValueError(f"at most {_VALUES} values, not {len(values)}")
        bank = _LINE // 8 * (1 + self._meetings % 2)
        for i, value in enumerate(values):
            self._floats[self._mine + bank + i] = value
        self.align()
        return [
            [self._floats[r * _RANK_BYTES // 8 + bank + i] for i in range(len(values))]
            for r in range(self.world)
        ]

    def exchange_text(self, text: str) -> list[str]:
        """Every rank's text, cut to what fits."""
        encoded = text.encode()[: _TEXT - 1]
        start = self.rank * _RANK_BYTES + 3 * _LINE
        self._map[start : start + _TEXT] = encoded.ljust(_TEXT, b"\0")
        self.align()
        texts = []
        for r in range(self.world):
            start = r * _RANK_BYTES + 3 * _LINE
            raw = self._map[start : start + _TEXT].split(b"\0", 1)[0]
            texts.append(raw.decode(errors="replace"))
        self.align()
        return texts

    def close(self) -> None:
        self._ints.release()
        self._floats.release()
        self._map.close()
