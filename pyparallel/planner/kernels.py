"""How long one device takes for a GEMM, for attention, and for a pass over memory.

GEMM        max(flops / (peak x share x waves), bytes / memory rate) + kernel
waves       of tiles over the multiprocessors: how full they are on average
accumulate  a weight gradient is added to a float32 one: 8 bytes per element, of which the GEMM
            hides half (kernels on an A100 and a B200: MooreThreads/SimuMax, configs/system:
            0.71 against 0.755 and 0.455 against 0.505 of the peak at 4096 tokens)
"""

from math import ceil, log, sqrt

from pyparallel.planner.clusters import Gpu
from pyparallel.planner.layout import Precision

__all__ = ["Kernels", "running"]

# (rows, columns, share of the best rate). Smaller tiles load more per product; shares assumed.
TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 64, 0.6))
SPLITS = (1, 2, 4)  # of the inner dimension, where there are too few tiles to fill the device
ACCUMULATE_EXPOSED = 0.5
# Experts' GEMMs are many small ones in a call. On the same two devices: 0.84 to 0.93 of a GEMM's
# rate forward, and weight halves that hide less of what they add to (0.28 of a B200's peak at 1024
# rows an expert, 0.52 of an A100's at 616).
GROUPED_SHARE = 0.88
GROUPED_EXPOSED = 0.75
# Flash attention ends with its longest rows of tiles alone: 2 x 128 queries over all keys on one
# multiprocessor. On a B200 (SimuMax, 4096 tokens) a kernel takes 71 us + 3.3 us per head; the
# formula's 71 us are those.
TAIL_ROWS = 256
# An unfused attention's batched GEMMs have an inner or outer size of a head, 64 to 128: too little
# work per tile to hide the loads and stores of the scores. Assumed.
BATCHED_SHARE = 0.6
# In a running job kernels take longer than alone, because every rank waits for the slowest: of N
# equal normal deviates the largest is about sqrt(2 ln N) of their width. FITTED: the width, at
# N = 8: the mean by which MooreThreads/SimuMax, which has every kernel's own time, falls short of
# its measurements on 8 B200 is 5 % (docs/validation.md).
JITTER = 0.0245


def running(devices: int) -> float:
    """What a kernel takes in a job of so many devices, beside its time alone."""
    return 1.0 + JITTER * sqrt(2.0 * log(devices)) if devices > 1 else 1.0


class Kernels:
    """Times of one device at one precision in a job of `devices`, in seconds. Remembers what it
    was asked."""

    def __init__(self, gpu: Gpu, precision: Precision, devices: int = 1) -> None:
        self.gpu = gpu
        self._running = running(devices)
        self.dtype = precision.compute
        self.element = precision.activation
        self._gemms: dict[tuple[float, ...], float] = {}
        self._rate = {d: gpu.peak(d) * gpu.share(d) for d in {self.dtype, self._wide}}

    @property
    def _wide(self) -> str:
        """The dtype of what stays out of fp8: attention, the output layer."""
        return "bf16" if self.dtype == "fp8" else self.dtype

    def gemm(
        self,
        m: float,
        n: float,
        k: float,
        copies: float = 1,
        *,
        accumulate: bool = False,
        wide: bool = False,
    ) -> float:
        """[m, k] x [k, n] -> [m, n], `copies` times in one call.

        Args:
            accumulate: the product is added to a float32 array.
            wide: in 16 bits even where the precision is fp8.
        """
        if min(m, n, k) <= 0:
            return 0.0
        key = (m, n, k, copies, accumulate, wide)
        if key not in self._gemms:
            self._gemms[key] = self._gemm(m, n, k, copies, accumulate, wide)
        return self._gemms[key]

    def _gemm(
        self, m: float, n: float, k: float, copies: float, accumulate: bool, wide: bool
    ) -> float:
        dtype = self._wide if wide else self.dtype
        item = {"fp8": 1, "fp32": 4}.get(dtype, 2)
        flops = 2.0 * m * n * k * copies
        share = GROUPED_SHARE if copies > 1 else 1.0
        compute = flops / (self._rate[dtype] * share * self.waves(m, n, k, copies))
        moved = copies * ((m * k + n * k) * item + m * n * max(item, 2))
        seconds = max(compute, moved / self.gpu.memory_rate)
        if accumulate:
            exposed = GROUPED_EXPOSED if copies > 1 else ACCUMULATE_EXPOSED
            seconds += exposed * 8.0 * m * n * copies / self.gpu.memory_rate
        return self._running * seconds + self.gpu.kernel_us * 1e-6

    def waves(self, m: float, n: float, k: float, copies: float = 1) -> float:
        """Share of the device that a GEMM keeps busy: the best tile and split."""
        sms = self.gpu.sms
        if sms == 0:
            return 1.0
        best = 0.0
        for rows, columns, speed in TILES:
            down, across = ceil(m / rows), ceil(n / columns)
            used = (m / (down * rows)) * (n / (across * columns))
            for split in SPLITS:
                if split > 1 and k / split < 512:
                    continue
                tiles = down * across * copies * split
                full = tiles / (ceil(tiles / sms) * sms)
                best = max(best, full * used * speed * (1.0 if split == 1 else 0.95))
        return best

    def flash(
        self, flops: float, keys: float, width: float, *, backward: bool = False, share: float = 1.0
    ) -> float:
        """Flash attention of so many FLOPs, counted as executed (half with a causal mask), over so
        many keys, heads being `width` wide; `share` of the device's usual rate."""
        rate = self.gpu.peak(self._wide) * self.gpu.attention_share[backward] * share
        tail = 0.0
        if self.gpu.sms:
            tail = min(4.0 * TAIL_ROWS * keys * width * self.gpu.sms, flops) / rate
        return self._running * (flops / rate + tail) + self.gpu.kernel_us * 1e-6

    def batched(self, flops: float, moved: float) -> float:
        """A batched GEMM of unfused attention: `moved` bytes of scores pass through memory."""
        rate = self._rate[self._wide] * BATCHED_SHARE
        seconds = flops / rate + moved / self.gpu.memory_rate
        return self._running * seconds + self.gpu.kernel_us * 1e-6

    def move(self, count: float, kernels: float = 1) -> float:
        """Kernels that read and write `count` bytes in all."""
        if count <= 0:
            return 0.0
        return self._running * count / self.gpu.memory_rate + kernels * self.gpu.kernel_us * 1e-6
