"""The fused kernels of triton_kernels, for CUDA tensors: workspaces, configurations, launches.

In Triton's interpreter (TRITON_INTERPRET=1) the same code runs the same kernels on CPU tensors,
where `algorithm=` or PYPARALLEL_ALGORITHM names one of them: so the way from an op to its kernel is
tested between processes without a GPU.

What ranks must choose alike is made of sizes that all share, and of the least K, the least N and
the alignment of any rank, which each call agrees on through the group's communicator. That meeting
is of the host alone; nothing waits for the device.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from pyparallel.comm import Communicator, SymmetricMemory
from pyparallel.errors import InvalidArgument
from pyparallel.ops.choosing import algorithms

__all__ = ["DTYPES", "KERNELS", "DevicePath", "NormOf", "shards_on", "unfit"]

# Algorithms that this file launches; names as designs.py has them.
KERNELS = {
    "all_gather_matmul": ("copies", "pull"),
    "matmul_reduce_scatter": ("push", "signal"),
    "matmul_all_reduce": ("one_shot", "two_shot", "multimem", "signal"),
}
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)


def unfit(
    op: str, shared: int, dtype: torch.dtype, asked: str | None, reason: str = ""
) -> dict[str, str]:
    """Which of an accelerator's algorithms cannot take a call, and why: all of them for `reason`.

    `shared` is the size that all ranks share beside the rows, `asked` the algorithm that the caller
    or the environment names.
    """
    names = [name for name in algorithms(op, "cuda") if name != "plain"]
    if dtype not in DTYPES:
        reason = f"no kernel takes {dtype}"
    if reason:
        return dict.fromkeys(names, reason)
    bars = {name: "it is not part of the ops" for name in names if name not in KERNELS[op]}
    if dtype is torch.float8_e4m3fn and "signal" in names:
        bars["signal"] = f"it rounds parts to the dtype of x, which is {dtype}"
    if "multimem" in names and asked != "multimem":
        bars["multimem"] = "it adds in the switch's order, not in rank order: ask for it"
    elif "multimem" in names and shared % 4:
        bars["multimem"] = f"N is {shared}, no multiple of 4"
    return bars


@dataclass(frozen=True)
class NormOf:
    """The norm of an epilogue: residual [M, N] is added, weight [N] and eps are RMSNorm's."""

    residual: Tensor
    weight: Tensor
    eps: float


class DevicePath:
    """The workspaces of one group on one device, and the three ops on them.

    Every rank makes the same calls. A workspace grows with the call that needs it, collectively;
    under graph capture that raises, on all ranks, and names the call to make before.
    """

    def __init__(self, communicator: Communicator, device: torch.device, tiles: str) -> None:
        """`tiles`: measured ones (Policy.tiles), alike on all ranks."""
        self._communicator = communicator
        self._device = device
        self._tiles = tiles
        self._spaces: dict[tuple[Any, ...], tuple[SymmetricMemory, Any]] = {}
        self._streams: dict[str, torch.cuda.Stream] = {}

    # --- the ops: x [M, K] and weights [N, K] are 2-D, of any strides

    def all_gather_matmul(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        sizes: Sequence[int],
        note: str,
        algorithm: str,
        *,
        x_scale: Tensor | None = None,
        column_scales: Sequence[Tensor] | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> tuple[list[Tensor], Tensor]:
        """The products, and the gathered x, valid until the next call.

        Scales, float32, of fp8: x_scale of each row of x, column_scales of each weight's rows, or
        one value.
        """
        from pyparallel.triton_kernels.all_gather_gemm import WAITS, all_gather_gemm
        from pyparallel.triton_kernels.all_gather_plan import AllGatherLayout, candidates

        rows, k = sum(sizes), x.shape[1]
        least_n = min(w.shape[0] for w in weights)
        _, n, fits = self.agree(note, k, least_n, (*weights,))
        row_bytes = k * x.element_size()
        fits = fits and row_bytes % 16 == 0  # gathered rows lie side by side
        config = self.config("all_gather_gemm", tuple(sizes), n, k, x.dtype, fits)

        def layout() -> AllGatherLayout:
            most = _power_of_two(rows)
            nbytes = _power_of_two(max(rows * row_bytes, 1))
            old = self._spaces.get(("all_gather",))
            if old is not None:  # never smaller in any way, or two shapes would take turns growing
                most = max(most, old[1].layout.max_rows)
                nbytes = max(nbytes, old[1].layout.row_bytes)
            return AllGatherLayout(self._communicator.world_size, nbytes, most)

        workspace = self.space(
            ("all_gather",),
            lambda made: made.max_rows >= rows and made.row_bytes >= rows * row_bytes,
            layout,
            note,
        )
        pulled = algorithm == "pull"
        plans = [
            c.plan
            for c in candidates(config, tuple(sizes), row_bytes, workspace.layout)
            if not c.excluded and (c.plan.pullers > 0) == pulled
        ]
        outs = [x.new_empty((rows, w.shape[0]), dtype=out_dtype or x.dtype) for w in weights]
        self.raise_failure(workspace, "all_gather_matmul", WAITS)
        gathered = all_gather_gemm(
            outs,
            x,
            weights,
            workspace,
            shards_on(tuple(sizes), str(self._device)),
            min(plans, key=lambda plan: plan.chunk_rows),
            biases=[None if b is None else b.contiguous() for b in biases],
            x_scale=x_scale,
            column_scales=column_scales,
            timeout_s=self._communicator.timeout,
            copy_stream=None if pulled else self.stream("copies"),
        )
        self.raise_failure(workspace, "all_gather_matmul", WAITS)
        return outs, gathered

    def matmul_reduce_scatter(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sizes: Sequence[int],
        note: str,
        *,
        scales: "tuple[Tensor | None, Tensor | None]" = (None, None),
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """This rank's rows of the sum, bias added. Scales of x's and of the weight's rows."""
        from pyparallel.triton_kernels.gemm_reduce_scatter import (
            OP,
            gemm_reduce_scatter,
            layout_of,
        )
        from pyparallel.triton_kernels.slots import STEPS, tiles_of

        n, most = weight.shape[0], max(sizes)
        k, _, fits = self.agree(note, x.shape[1], n, (x, weight))
        config = self.config(OP, tuple(sizes), n, k, x.dtype, fits)
        tiles = tiles_of(most, n, config.block_m, config.block_n)
        workspace = self.space(
            ("reduce_scatter", n),
            lambda made: made.rows >= most and made.tiles >= tiles,
            lambda: layout_of(
                self._communicator.world_size, _power_of_two(most), n, self._configs(config, OP, n)
            ),
            note,
        )
        out = x.new_empty((sizes[self._communicator.rank], n), dtype=out_dtype or x.dtype)
        self.raise_failure(workspace, "matmul_reduce_scatter", STEPS)
        gemm_reduce_scatter(
            out,
            x,
            weight,
            shards_on(tuple(sizes), str(self._device)),
            workspace,
            config,
            bias=None if bias is None else bias.contiguous(),
            row_scale=scales[0],
            column_scale=scales[1],
            timeout_us=self.timeout_us,
        )
        self.raise_failure(workspace, "matmul_reduce_scatter", STEPS)
        return out

    def matmul_all_reduce(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        norm: NormOf | None,
        note: str,
        algorithm: str,
        *,
        scales: "tuple[Tensor | None, Tensor | None]" = (None, None),
        out_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The sum with bias and None; with `norm` its norm, and the sum with bias and residual."""
        from pyparallel.triton_kernels import gemm_all_reduce as kernel
        from pyparallel.triton_kernels.slots import STEPS, tiles_of

        m, n, world = x.shape[0], weight.shape[0], self._communicator.world_size
        dtype = out_dtype or x.dtype
        k, _, fits = self.agree(note, x.shape[1], n, (x, weight))
        config = self.config(kernel.problem_op(algorithm), (m,), n, k, x.dtype, fits)
        shards = _shards_of(algorithm, m, world, config, str(self._device))
        most = m if algorithm == kernel.MULTIMEM else max(shards.sizes)
        tiles = tiles_of(max(shards.sizes), n, config.block_m, config.block_n)
        results = 0 if algorithm == kernel.ONE_SHOT else m
        workspace = self.space(
            ("all_reduce", algorithm, n, dtype),
            lambda made: made.rows >= most and made.tiles >= tiles and made.result_rows >= results,
            lambda: kernel.layout_of(
                world,
                _power_of_two(m),
                n,
                self._configs(config, kernel.problem_op(algorithm), n),
                (algorithm,),
                result_dtype=dtype,
            ),
            note,
        )
        memory = self._spaces["all_reduce", algorithm, n, dtype][0]
        multicast = memory.multicast_pointer(workspace.memory)
        if algorithm == kernel.MULTIMEM and not multicast and x.is_cuda:
            raise InvalidArgument(
                "matmul_all_reduce: algorithm is 'multimem', but this group's memory has no "
                f"multicast address ({memory.explain()}); use two_shot"
            )
        out = x.new_empty((m, n), dtype=dtype)
        hidden = None if norm is None else x.new_empty((m, n))
        self.raise_failure(workspace, "matmul_all_reduce", STEPS)
        kernel.gemm_all_reduce(
            out,
            x,
            weight,
            algorithm,
            shards,
            workspace,
            config,
            bias=None if bias is None else bias.contiguous(),
            residual=None if norm is None else norm.residual.contiguous(),
            norm=None
            if norm is None or hidden is None
            else kernel.Norm(hidden, norm.weight.contiguous(), norm.eps),
            row_scale=scales[0],
            column_scale=scales[1],
            multicast=multicast,
            timeout_us=self.timeout_us,
        )
        self.raise_failure(workspace, "matmul_all_reduce", STEPS)
        return out, hidden

    # --- agreeing and choosing

    def agree(self, note: str, k: int, n: int, operands: Sequence[Tensor]) -> tuple[int, int, bool]:
        """The least K and N of any rank, and whether descriptors can load every rank's operands."""
        from pyparallel.triton_kernels.gemm import fits_descriptor

        facts = torch.tensor([k, n, int(all(map(fits_descriptor, operands)))])
        self._communicator.note(note)
        self._communicator.all_reduce(facts, "min")
        least_k, least_n, fits = facts.tolist()
        return least_k, least_n, bool(fits)

    def config(
        self, op: str, rows: tuple[int, ...], n: int, k: int, dtype: torch.dtype, fits: bool
    ) -> Any:
        """The tiles for a problem, a pure function of what ranks have agreed on."""
        name = str(dtype).removeprefix("torch.")
        return _chosen(op, rows, n, k, name, fits, str(self._device), self._tiles)

    def _configs(self, config: Any, op: str, n: int) -> list[Any]:
        """`config` and the smallest tiles that a later call may choose, so that flags suffice."""
        smallest = min(16, config.block_m), min(32, config.block_n)
        return [config, type(config)(block_m=smallest[0], block_n=smallest[1])]

    # --- memory, streams, failures

    def space(
        self,
        key: tuple[Any, ...],
        fits: Callable[[Any], bool],
        layout: Callable[[], Any],
        note: str,
    ) -> Any:
        """The workspace of that key; made anew where the call does not fit the one there is."""
        from pyparallel.triton_kernels.workspace import Workspace

        found = self._spaces.get(key)
        if found is not None and fits(found[1].layout):
            return found[1]
        planned = layout()
        if is_capturing(self._device):
            there = 0 if found is None else found[1].layout.nbytes
            raise self._communicator._refused(
                note.split(maxsplit=1)[0],
                InvalidArgument(
                    f"under CUDA graph capture no workspace can be made: this call needs "
                    f"{planned.nbytes} bytes, there are {there}; make the same call once, of these "
                    f"shapes or larger ones, before the capture ({note})"
                ),
            )
        self._communicator.note(note)
        memory = SymmetricMemory(
            self._communicator,
            planned.nbytes,
            device=self._device,
            name=f"{key[0]} of {self._communicator.name}",
        )
        workspace = Workspace.make(memory, planned)
        if found is not None:
            found[0].close()  # unmapped when the device has finished with it
        self._spaces[key] = (memory, workspace)
        return workspace

    def stream(self, name: str) -> "torch.cuda.Stream | None":
        if self._device.type != "cuda":
            return None
        if name not in self._streams:
            self._streams[name] = torch.cuda.Stream(self._device)
        return self._streams[name]

    @property
    def timeout_us(self) -> int:
        return min(int(self._communicator.timeout * 1e6), 2**31 - 1)

    def raise_failure(self, workspace: Any, op: str, steps: tuple[str, ...]) -> None:
        """What a kernel of this call (interpreted) or of an earlier one (on CUDA) has recorded."""
        from pyparallel.triton_kernels.signals import raise_failure

        raise_failure(workspace.status, op, self._communicator.name, steps)


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of `device` records a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@lru_cache(maxsize=4096)
def _chosen(
    op: str, rows: tuple[int, ...], n: int, k: int, dtype: str, fits: bool, device: str, tiles: str
) -> Any:
    from pyparallel.triton_kernels.configurations import CHIPS, Problem, chip_of, choose

    where = torch.device(device)
    chip = CHIPS["interpreter"] if where.type == "cpu" else chip_of(where.index or 0)
    return choose(Problem(op, rows, n, k, dtype, fits), chip, _measured(tiles)).config


@lru_cache(maxsize=8)
def _measured(tiles: str) -> dict[str, Any]:
    from pyparallel.triton_kernels.autotune import from_rows

    return from_rows(json.loads(tiles)) if tiles else {}


@lru_cache(maxsize=256)
def shards_on(sizes: tuple[int, ...], device: str) -> Any:
    """The rows of each rank, as kernels take them: with a table on the device."""
    from pyparallel.triton_kernels.all_gather_plan import Shards

    return Shards(sizes, device)


@lru_cache(maxsize=256)
def _shards_of(algorithm: str, rows: int, world: int, config: Any, device: str) -> Any:
    from pyparallel.triton_kernels.gemm_all_reduce import shards_of

    return shards_of(algorithm, rows, world, config, device)


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()
