"""What an algorithm does, as data for the model: transport, pieces, costs between the pieces.

One entry per algorithm of this library. How other libraries do it is described in the same terms in
bench/published.py; their fitted costs are where ours come from, since ours have not been timed on
an accelerator. Only the standard library is used here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["DESIGNS", "Design", "designs_of"]

_GATHER = ("all_gather_matmul",)
_SCATTER = ("matmul_reduce_scatter",)
_REDUCE = ("matmul_all_reduce",)
_TRANSPORTS = ("collective", "copies", "stores", "multimem")


@dataclass(frozen=True)
class Design:
    """How one algorithm overlaps a GEMM and a transfer."""

    name: str
    ops: tuple[str, ...]
    summary: str  # in words, for people
    source: str  # where the description and the costs come from
    transport: str  # "collective": the vendor's; "copies": copy engines; "stores": by SMs; ..
    pieces: str  # "whole": no overlap; "ranks"; "waves" of the GEMM; or a number
    piece_us: float = 0.0  # signal and issue of one piece, during which its link is idle
    fixed_us: float = 0.0  # launches and host work beside the GEMM's own
    meetings: int = 0  # times that all ranks wait for each other
    gemm_share: float = 1.0  # of the rate of the vendor's GEMM
    stall: float = 0.0  # part of the shorter of GEMM and transfer that is not hidden
    taken_sms: int = 0  # SMs that only communicate
    shots: int = 2  # of an all-reduce: 1 sends everything to everyone
    reduces_after: bool = False  # a kernel of its own adds what has arrived
    host_us: float = 0.0  # the host's time to issue the call, beside the device's ..
    host_rank_us: float = 0.0  # .. and for each rank: streams, waits, copies

    def __post_init__(self) -> None:
        if self.transport not in _TRANSPORTS:
            raise ValueError(f"{self.name}: transport {self.transport!r} is none of {_TRANSPORTS}")
        if self.pieces not in ("whole", "ranks", "waves") and not self.pieces.isdigit():
            raise ValueError(f"{self.name}: pieces {self.pieces!r}")


_OWN = (
    "this library; not timed on an accelerator, so its costs are assumed or taken from its kind: "
)
_LIKE_COPIES = "fitted on triton-distributed's, which is of the same kind (bench/published.py)"
_DESIGNS = (
    Design(
        "plain", _GATHER + _SCATTER + _REDUCE,
        "the vendor's GEMM and the vendor's collective, one after the other",
        "no cost of its own; the host's time for a matmul and a collective is assumed",
        "collective", "whole", host_us=25.0,
    ),
    Design(
        "copies", _GATHER,
        "copy engines bring one shard after the other; a persistent kernel starts with the local "
        "shard and waits for each other one",
        _OWN + _LIKE_COPIES, "copies", "ranks",
        piece_us=3.0, fixed_us=8.0, meetings=2, gemm_share=0.87, host_us=230.0, host_rank_us=11.0,
    ),
    Design(
        "pull", _GATHER,
        "the kernel itself reads the shards from its peers, tile by tile",
        _OWN + "rates of stores as fitted on flux; the host's time for one launch is assumed",
        "stores", "waves",
        fixed_us=4.0, meetings=2, gemm_share=0.87, stall=0.1, host_us=40.0,
    ),
    Design(
        "push", _SCATTER,
        "each tile is stored to its owner's slot when it is done; the owner adds the slots in rank "
        "order",
        _OWN + "rates of stores as fitted on flux; the host's time for two launches is assumed",
        "stores", "waves",
        fixed_us=8.0, meetings=2, gemm_share=0.90, stall=0.1, reduces_after=True, host_us=50.0,
    ),
    Design(
        "one_shot", _REDUCE,
        "each rank stores its product to every other rank, which adds all of them",
        _OWN + "all assumed", "stores", "waves",
        fixed_us=4.0, meetings=1, gemm_share=0.90, stall=0.1, shots=1, reduces_after=True,
        host_us=30.0,
    ),
    Design(
        "two_shot", _REDUCE,
        "tiles are stored to their owner, added there and stored to all",
        _OWN + "all assumed", "stores", "waves",
        fixed_us=4.0, meetings=2, gemm_share=0.90, stall=0.1, reduces_after=True, host_us=30.0,
    ),
    Design(
        "multimem", _REDUCE,
        "the switch adds the ranks' products and stores the sum to all",
        _OWN + "all assumed", "multimem", "waves",
        fixed_us=4.0, meetings=2, gemm_share=0.90, stall=0.1, host_us=30.0,
    ),
    Design(
        "signal", _SCATTER + _REDUCE,
        "groups of tiles are flagged; the vendor's collective sends each group while the next is "
        "computed",
        _OWN + "start-up of a collective for each group; 16 SMs for its channels assumed",
        "collective", "4", piece_us=22.0, gemm_share=0.95, stall=0.1, taken_sms=16,
    ),
)  # fmt: skip
DESIGNS: Mapping[str, Design] = {design.name: design for design in _DESIGNS}


def designs_of(op: str) -> list[Design]:
    """This library's algorithms for an op on an accelerator, the plain one first."""
    return [design for design in _DESIGNS if op in design.ops]
