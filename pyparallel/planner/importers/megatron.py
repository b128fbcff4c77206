"""Megatron-LM's flags: defaults and rules of megatron/training/arguments.py (core 0.12 to 0.16)."""

from pyparallel.planner.importers.megatron_model import read_model
from pyparallel.planner.importers.megatron_pipeline import read_pipeline
from pyparallel.planner.importers.reader import Reader
from pyparallel.planner.importers.settings import Settings

__all__ = ["read"]

_SHARDS = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def read(reader: Reader) -> Settings:
    s = Settings()
    s.tp = reader.whole("tensor-model-parallel-size", 1) or 1
    s.pp = reader.whole("pipeline-model-parallel-size", 1) or 1
    s.cp = reader.whole("context-parallel-size", 1) or 1
    s.ep = reader.whole("expert-model-parallel-size", 1) or 1
    per_node = reader.whole("nproc_per_node") or reader.whole("nproc-per-node")
    nodes = reader.whole("nnodes")
    if per_node is not None:
        s.gpus = per_node * (nodes or 1)
    _precision(reader, s)
    s.model = read_model(reader, s)
    _sequence(reader, s)
    layers = s.model.layers if s.model else None
    read_pipeline(reader, s, layers)
    _sharding(reader, s)
    _recompute(reader, s)
    s.microbatch = reader.whole("micro-batch-size")
    s.batch = reader.whole("global-batch-size")
    hidden, attention = (reader.number(f"{k}-dropout", 0.1) for k in ("hidden", "attention"))
    s.dropout = bool(hidden or attention)
    backends = ("auto", "flash", "fused", "unfused", "local")
    s.unfused = reader.word("attention-backend", "auto", backends) in ("unfused", "local")
    if s.microbatch is None:
        reader.lacks("micro-batch-size", "add --micro-batch-size 1")
    if s.batch is None:
        s.accumulation = 1
    if len(reader.words("rampup-batch-size")) not in (0, 3):
        reader.breaks(
            "rampup-batch-size",
            "it takes three numbers: start, increment, samples",
            " ".join(reader.words("rampup-batch-size")),
            "give three, or remove it",
        )
    return s


def _precision(reader: Reader, s: Settings) -> None:
    fp16, bf16 = reader.truth("fp16"), reader.truth("bf16")
    if fp16 and bf16:
        reader.breaks("fp16", "--fp16 and --bf16 exclude each other", "both", "remove one")
    s.precision = "bf16" if bf16 else "fp16" if fp16 else "fp32"
    fp8 = reader.word("fp8-format", None, ("e4m3", "hybrid"))
    in_fp32 = reader.truth("accumulate-allreduce-grads-in-fp32", bf16)
    if bf16 and reader.truth("grad-reduce-in-bf16"):
        in_fp32 = False
    s.gradient_bytes = 4 if in_fp32 or s.precision == "fp32" else 2
    s.main_gradients = s.precision == "fp16" and not in_fp32
    if fp8 is not None:
        s.precision = "fp8"


def _sequence(reader: Reader, s: Settings) -> None:
    s.sequence_parallel = reader.truth("sequence-parallel")
    if s.sequence_parallel and s.tp == 1:
        s.sequence_parallel = False
        reader.assumptions.append("--sequence-parallel is switched off at tp 1, as Megatron does")
    if s.ep > 1 and s.tp > 1 and not s.sequence_parallel:
        reader.breaks(
            "expert-model-parallel-size",
            "experts and tensor parallelism together need --sequence-parallel",
            f"ep {s.ep}, tp {s.tp}, no sequence parallel",
            "add --sequence-parallel",
        )
    s.overlap_tp = reader.truth("tp-comm-overlap")
    if s.overlap_tp and not s.sequence_parallel:
        reader.breaks(
            "tp-comm-overlap",
            "it needs --sequence-parallel and tp above 1",
            f"tp {s.tp}, no sequence parallel",
            "add --sequence-parallel, or remove it",
        )
    kind = reader.words("cp-comm-type") or ["p2p"]
    known = ("p2p", "a2a", "allgather", "a2a+p2p")
    if kind[0] not in known:
        raise reader.source.fail(("cp-comm-type",), f"{kind[0]!r}; allowed are {', '.join(known)}")
    s.context = {"a2a": "ulysses", "allgather": "all-gather"}.get(kind[0], "ring")
    if kind[0] == "a2a+p2p" and s.cp > 1:
        reader.assumptions.append(f"--cp-comm-type {kind[0]} is planned as a ring")
    if s.sequence and s.cp > 1 and s.sequence % (2 * s.cp):
        step = 2 * s.cp
        reader.breaks(
            "seq-length",
            "the sequence is a multiple of 2 x cp",
            f"{s.sequence}, cp {s.cp}",
            f"take {s.sequence // step * step or step} or {(s.sequence // step + 1) * step}",
        )
    if s.sequence and s.sequence_parallel and s.sequence % s.tp:
        reader.breaks(
            "seq-length",
            "tp divides the sequence under sequence parallelism",
            f"{s.sequence}, tp {s.tp}",
            f"take {(s.sequence // s.tp + 1) * s.tp}",
        )


def _sharding(reader: Reader, s: Settings) -> None:
    distributed = reader.truth("use-distributed-optimizer")
    reduce = reader.truth("overlap-grad-reduce")
    gather = reader.truth("overlap-param-gather")
    s.overlap_dp = reduce
    own = reader.truth("use-megatron-fsdp") or reader.truth("use-custom-fsdp")
    torch = reader.truth("use-torch-fsdp2")
    strategy = reader.word("data-parallel-sharding-strategy", "no_shard", _SHARDS) or "no_shard"
    s.zero = 3 if torch else _SHARDS[strategy] if own else int(distributed)
    s.replicas = reader.whole("num-distributed-optimizer-instances", 1) or 1
    if s.replicas > 1 and not s.zero:
        reader.breaks(
            "num-distributed-optimizer-instances",
            "it needs --use-distributed-optimizer",
            str(s.replicas),
            "add it, or remove this",
        )
    s.offload_optimizer = reader.truth("optimizer-cpu-offload")
    aware = reader.truth("use-precision-aware-optimizer")
    if (s.offload_optimizer and not aware) or (aware and not (distributed or own)):
        what = "optimizer-cpu-offload" if s.offload_optimizer else "use-precision-aware-optimizer"
        reader.breaks(
            what,
            "--optimizer-cpu-offload needs --use-precision-aware-optimizer, and that a sharded "
            "optimizer",
            f"precision aware {'on' if aware else 'off'}, distributed optimizer "
            f"{'on' if distributed else 'off'}",
            "add --use-precision-aware-optimizer and --use-distributed-optimizer",
        )
    if gather and not ((distributed or own) and reduce):
        reader.breaks(
            "overlap-param-gather",
            "it needs --use-distributed-optimizer and --overlap-grad-reduce",
            f"distributed optimizer {'on' if distributed else 'off'}, "
            f"overlapped reduction {'on' if reduce else 'off'}",
            "add them, or remove it",
        )
    if torch:
        tied = s.model is not None and s.model.tied
        for wrong, what, mend in (
            (s.pp > 1, f"pp {s.pp}", "take pp 1"),
            (s.ep > 1, f"ep {s.ep}", "take ep 1"),
            (distributed, "--use-distributed-optimizer", "remove it"),
            (s.precision == "fp16", "--fp16", "take --bf16"),
            (tied, "tied embeddings", "add --untie-embeddings-and-output-weights"),
        ):
            if wrong:
                reader.breaks("use-torch-fsdp2", f"it does not go with {what}", what, mend)
    if reader.truth("async-save"):
        format_ = reader.word("ckpt-format", "torch_dist")
        if format_ != "torch_dist":
            reader.breaks(
                "async-save", "it needs --ckpt-format torch_dist", str(format_), "take torch_dist"
            )


def _recompute(reader: Reader, s: Settings) -> None:
    kinds = ("full", "selective")
    granularity = reader.word("recompute-granularity", None, kinds)
    if reader.truth("recompute-activations"):
        granularity = "selective"
    method = reader.word("recompute-method", None, ("uniform", "block"))
    layers = reader.whole("recompute-num-layers")
    modules = reader.words("recompute-modules")
    s.recompute = granularity or "none"
    if granularity == "full" and method is None:
        reader.breaks(
            "recompute-granularity",
            "full needs --recompute-method uniform or block",
            "none",
            "add --recompute-method uniform --recompute-num-layers 1",
        )
    if granularity == "selective" and method is not None:
        reader.breaks(
            "recompute-method", "selective takes no method", method, "remove it, or take full"
        )
    if method == "block":
        s.recompute_layers = layers
    elif granularity == "full" and (layers or 1) > 1:
        reader.assumptions.append(
            f"recompute in groups of {layers} layers is planned as layer by layer"
        )
    if modules and modules != ["core_attn"]:
        reader.assumptions.append(
            f"--recompute-modules {' '.join(modules)} is planned as attention's core alone"
        )
    if reader.truth("distribute-saved-activations") and (granularity != "full" or s.tp == 1):
        reader.breaks(
            "distribute-saved-activations",
            "it needs full recompute and tp above 1",
            f"{granularity or 'no'} recompute, tp {s.tp}",
            "remove it",
        )
