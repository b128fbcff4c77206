"""Attention over sequences that no rank holds whole."""

from pyparallel.attention.core_attention import CoreAttention
from pyparallel.attention.engines import AttentionEngine, choose_engine, engine_names
from pyparallel.attention.explain import AttentionExplanation, explain
from pyparallel.attention.helpers import position_ids, shard, shard_labels, unshard
from pyparallel.attention.mask import Mask
from pyparallel.attention.pieces import Piece, Pieces
from pyparallel.attention.sequence_parallel import sequence_parallel_attention
from pyparallel.attention.sharding import SHARDINGS, Sharding
from pyparallel.attention.simulator import SimulatedGroup, simulate
from pyparallel.attention.state import State, finish

__all__ = [
    "SHARDINGS",
    "AttentionEngine",
    "AttentionExplanation",
    "CoreAttention",
    "Mask",
    "Piece",
    "Pieces",
    "Sharding",
    "SimulatedGroup",
    "State",
    "choose_engine",
    "engine_names",
    "explain",
    "finish",
    "position_ids",
    "sequence_parallel_attention",
    "shard",
    "shard_labels",
    "simulate",
    "unshard",
]
