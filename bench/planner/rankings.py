"""What is faster in a published comparison has to be faster here."""

from __future__ import annotations

from dataclasses import dataclass

from bench.planner.tables import Group, rows
from bench.planner.times import B200, H100
from pyparallel.planner import Job, Layout, preset
from pyparallel.planner.clusters import ClusterSpec
from pyparallel.planner.cost import time_report

NEAR = 1.02  # published values closer than this have no order


@dataclass(frozen=True)
class Order:
    """Pairs of one comparison.

    Attributes:
        right, pairs: how many of how many pairs lie in the published order.
        wrong: those that do not.
    """

    title: str
    table: str
    right: int
    pairs: int
    wrong: tuple[str, ...]
    said: str = ""


def _order(title: str, table: str, items: list[tuple[str, float, float]], said: str = "") -> Order:
    """Of (label, published, ours), smaller being better in both."""
    right, wrong, pairs = 0, [], 0
    for i, (a, published_a, ours_a) in enumerate(items):
        for b, published_b, ours_b in items[i + 1 :]:
            if max(published_a, published_b) < NEAR * min(published_a, published_b):
                continue
            pairs += 1
            if (published_a < published_b) == (ours_a < ours_b):
                right += 1
            else:
                wrong.append(f"{a} against {b}")
    return Order(title, table, right, pairs, tuple(wrong), said)


def _of_group(title: str, group: Group, labels: tuple[str, ...], said: str = "") -> Order:
    items = [
        (row.label, row.published, row.ours)
        for row in group.rows
        if any(label in row.label for label in labels)
    ]
    return _order(title, group.table, items, said)


def _ultrascale(name: str, layouts: dict[int, Layout], batch: int) -> Order:
    """Tokens per second and device as a dimension grows, 8 devices to a node."""
    job = Job(preset("llama-3.2-3b"), 4096, batch)
    items = []
    for row in rows("ultrascale_scaling"):
        if row["experiment"] != name:
            continue
        layout = layouts[int(row["degree"])]
        scaled = Job(job.model, job.seq, batch * layout.dp)
        step = time_report(scaled, H100, layout).step
        rate = scaled.tokens / step / layout.devices
        items.append((f"{name} {row['degree']}", 1 / float(row["tokens_per_s_per_gpu"]), 1 / rate))
    return _order(f"Ultra-Scale playbook: {name}", "ultrascale_scaling", items,
                  "A model of 3B is assumed.")  # fmt: skip


_TP_HEADS = {2: 2, 4: 4, 8: 8, 16: 12, 32: 24}  # what divides the 24 heads of the model assumed


def _tensor(sharded: bool) -> dict[int, Layout]:
    return {
        degree: Layout(tp=tp, micro_batch=4, sequence_parallel=sharded)
        for degree, tp in _TP_HEADS.items()
    }


def _async_tensor() -> Order:
    """torchtitan: overlapped tensor parallelism is faster, by 4 to 16 %."""
    found, wrong = 0, []
    table = rows("torchtitan_async_tp")
    for row in table:
        model = preset("llama-3.1-70b" if row["model"] == "70B" else "llama-3.1-8b")
        dp, tp = int(row["fsdp"]), int(row["tp"])
        precision = "bf16" if row["precision"] == "bf16" else "fp8"
        job = Job(model, 8192, dp * int(row["local_batch"]), precision)
        layout = Layout(dp=dp, tp=tp, zero=3, recompute="full", micro_batch=1,
                        overlap_backward=False)  # fmt: skip
        gain = (
            time_report(job, H100, layout).step
            / time_report(job, H100, layout.with_(overlap_tp=True)).step
        )
        if 1.0 < gain <= 1.25:
            found += 1
        else:
            wrong.append(f"{row['model']} {row['precision']}: {gain:.2f}, not {row['speedup']}")
    return Order("Overlapped tensor parallelism gains, by no more than a quarter",
                 "torchtitan_async_tp", found, len(table), tuple(wrong))  # fmt: skip


def _bridge() -> Order:
    """Tokens per second and device: 8B before 70B before 405B, B200 before H100."""
    items = []
    cases: tuple[tuple[str, str, ClusterSpec, Layout, int], ...] = (
        ("H100 LLAMA3_8B", "llama-3-8b", H100, Layout(dp=8, zero=3), 128),
        ("H100 LLAMA3_70B", "llama-3-70b", H100,
         Layout(dp=2, tp=4, pp=8, chunks=5, schedule="interleaved-1f1b", overlap_tp=True), 128),
        ("B200 LLAMA3_8B", "llama-3-8b", B200, Layout(dp=8, micro_batch=2), 128),
    )  # fmt: skip
    published = {f"{r['system']} {r['model']}": r for r in rows("megatron_bridge_25_11")}
    for label, name, cluster, layout, batch in cases:
        job = Job(preset(name), 8192, batch, "fp8")
        rate = job.tokens / time_report(job, cluster, layout).step / layout.devices
        there = float(published[label]["tokens_per_s_per_gpu"])
        items.append((label, 1 / there, 1 / rate))
    return _order("Megatron-Bridge: tokens per second and device", "megatron_bridge_25_11", items)


def _jobs(group: Group) -> list[Order]:
    """Jobs of one model and sequence length: layouts and numbers of microbatches."""
    kinds: dict[tuple[str, str], list[tuple[str, float, float]]] = {}
    for row, one in zip(rows(group.table), group.rows, strict=True):
        item = (one.label, one.published, one.ours)
        kinds.setdefault((row["model"], row["seq"]), []).append(item)
    return [
        _order(f"8 x B200, {model}, {seq} tokens", group.table, items)
        for (model, seq), items in kinds.items()
        if len(items) > 1
    ]


def orders(times: list[Group]) -> list[Order]:
    """All comparisons; `times` are the groups of times.py, already worked out."""
    by_title = {group.title: group for group in times}
    end_to_end = by_title["Step time, up to 512 x A100"]
    layer = by_title["Time of one layer, 8 x A100"]
    scaling = by_title["Step time, PTD-P and ZeRO-3"]
    found = [
        _of_group(f"Recompute, {model}", end_to_end, (f"{model} ",))
        for model in ("22B", "175B", "530B", "1T")
    ]
    found.append(_of_group("One layer, five methods", layer, ("combined",)))
    for pair in ("174.6B on 384", "174.6B on 768", "174.6B on 1536"):
        found.append(_of_group(f"PTD-P before ZeRO-3, {pair}", scaling, (pair,)))
    for zero, ours in (("640", "560"), ("1120", "1120"), ("2240", "2240")):
        labels = (f"ZeRO-3 529.6B on {zero}", f"PTD-P 529.6B on {ours}")
        items = [
            (row.label, row.published * int(row.label.split()[-1]),
             row.ours * int(row.label.split()[-1]))
            for row in scaling.rows if row.label in labels
        ]  # fmt: skip
        found.append(_order(f"PTD-P before ZeRO-3, device seconds, 529.6B near {zero}",
                            scaling.table, items))  # fmt: skip
    found += _jobs(by_title["Step time, 8 x B200"])
    found.append(_ultrascale("TP", _tensor(False), 16))
    found.append(_ultrascale("TP+SP", _tensor(True), 16))
    found.append(_ultrascale("DP", {d: Layout(dp=d, zero=0) for d in (8, 16, 32, 64, 128, 256)}, 1))
    found += [_async_tensor(), _bridge()]
    return found
