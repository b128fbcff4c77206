"""How Megatron-LM's flags cut a model into stages: evenly, with uneven ends, or by a layout."""

import re

from pyparallel.planner.importers.reader import Reader
from pyparallel.planner.importers.settings import Settings, nearest_divisors

__all__ = ["read_pipeline"]


def read_pipeline(reader: Reader, s: Settings, layers: int | None) -> None:
    per_chunk = reader.whole("num-layers-per-virtual-pipeline-stage")
    chunks = reader.whole("num-virtual-stages-per-pipeline-rank")
    layout = reader.word("pipeline-model-parallel-layout")
    ends = [
        reader.whole("decoder-first-pipeline-num-layers"),
        reader.whole("decoder-last-pipeline-num-layers"),
    ]
    extra = [
        int(reader.truth(f"account-for-{what}-in-pipeline-split")) for what in ("embedding", "loss")
    ]
    overlapped = not reader.truth("no-overlap-p2p-communication")
    given = [n for n in (per_chunk, chunks, layout) if n is not None]
    if len(given) > 1:
        reader.breaks(
            "num-layers-per-virtual-pipeline-stage",
            "at most one of --num-layers-per-virtual-pipeline-stage, "
            "--num-virtual-stages-per-pipeline-rank, --pipeline-model-parallel-layout",
            f"{len(given)} of them",
            "keep one",
        )
    if layout is not None:
        counts = _layout_layers(layout)
        stages = len(counts)
        if stages % s.pp:
            reader.breaks(
                "pipeline-model-parallel-layout",
                "its stages are a multiple of the pipeline ranks",
                f"{stages} stages, pp {s.pp}",
                f"take pp {nearest_divisors(s.pp, stages)}",
            )
        s.chunks = max(stages // s.pp, 1)
        s.layers_per_stage = tuple(counts) if len(set(counts)) > 1 else None
        if layers is not None and sum(counts) != layers:
            reader.breaks(
                "pipeline-model-parallel-layout",
                "its t's are the layers",
                f"{sum(counts)}, --num-layers {layers}",
                f"write {layers} of them",
            )
    elif layers is not None and not any(ends):
        _even(reader, s, layers + sum(extra), per_chunk, chunks)
        stage, over = divmod(layers + sum(extra), s.pp * s.chunks)
        if any(extra) and not over and s.pp > 1:
            less = [extra[0], *[0] * (s.pp * s.chunks - 2), extra[1]]
            s.layers_per_stage = tuple(stage - taken for taken in less)
    elif layers is not None:
        s.chunks = chunks or 1
        _uneven(reader, s, layers, ends)
    if s.chunks > 1:
        s.schedule = "interleaved-1f1b"
        least = 2 if overlapped else 3
        if s.pp < least:
            reader.breaks(
                "pipeline-model-parallel-size",
                f"virtual stages need at least {least} pipeline ranks"
                + ("" if overlapped else " without overlapped messages"),
                f"pp {s.pp}, {s.chunks} virtual stages per rank",
                f"take pp {least}, or remove the virtual stages",
            )
    key = "microbatch-group-size-per-virtual-pipeline-stage"
    group = reader.whole(key, s.pp if s.chunks > 1 else None)
    s.group_size = group if s.chunks > 1 and group is not None and group > s.pp else 0
    # Megatron's plain 1F1B waits for its messages.
    s.overlap_pp = s.pp == 1 or (s.chunks > 1 and overlapped)
    if group is not None and group < s.pp:
        reader.breaks(
            key,
            "it is at least pp",
            f"{group}, pp {s.pp}",
            f"take {s.pp}",
        )


def _layout_layers(layout: str) -> list[int]:
    """Decoder layers of each stage of a layout such as "Et*3|(tt|)*6tL"."""
    text = layout.replace(" ", "").replace(",", "")
    grouped = re.compile(r"\(([^()]*)\)\*(\d+)")
    while grouped.search(text):
        text = grouped.sub(lambda m: m[1] * min(int(m[2]), 4096), text)
    text = re.sub(r"(\w)\*(\d+)", lambda m: m[1] * min(int(m[2]), 4096), text)
    return [stage.count("t") for stage in text.rstrip("|").split("|")]


def _uneven(reader: Reader, s: Settings, layers: int, ends: list[int | None]) -> None:
    """First and last pipeline ranks by their own numbers, the others evenly between them."""
    middle = s.pp - sum(end is not None for end in ends)
    rest = layers - sum(end or 0 for end in ends)
    if s.pp > layers or middle < 0 or rest < 0 or (rest % middle if middle else rest):
        reader.breaks(
            "decoder-first-pipeline-num-layers",
            "what the first and last ranks leave is spread evenly over the others",
            f"{layers} layers, first {ends[0]}, last {ends[1]}, pp {s.pp}",
            f"leave a multiple of {max(middle, 1)} layers",
        )
        return
    ranks = [rest // middle] * middle if middle else []
    ranks = ([ends[0]] if ends[0] else []) + ranks + ([ends[1]] if ends[1] else [])
    if any(count % s.chunks for count in ranks):
        reader.breaks(
            "num-virtual-stages-per-pipeline-rank",
            "it divides the layers of every pipeline rank",
            f"{s.chunks}, layers {ranks}",
            "remove it, or change the layers",
        )
        return
    s.layers_per_stage = tuple(count // s.chunks for _ in range(s.chunks) for count in ranks)


def _even(
    reader: Reader, s: Settings, layers: int, per_chunk: int | None, chunks: int | None
) -> None:
    if layers % s.pp:
        reader.breaks(
            "pipeline-model-parallel-size",
            "pp divides the layers (and what --account-for-* adds)",
            f"{layers} layers, pp {s.pp}",
            f"take pp {nearest_divisors(s.pp, layers)}, or --decoder-first-pipeline-num-layers",
        )
        s.chunks = chunks or 1
        return
    stage = layers // s.pp
    if per_chunk is not None:
        if stage % per_chunk:
            reader.breaks(
                "num-layers-per-virtual-pipeline-stage",
                "it divides the layers of a pipeline rank",
                f"{per_chunk}, {stage} layers",
                f"take {nearest_divisors(per_chunk, stage)}",
            )
        s.chunks = max(stage // per_chunk, 1)
    elif chunks is not None:
        if stage % chunks:
            reader.breaks(
                "num-virtual-stages-per-pipeline-rank",
                "it divides the layers of a pipeline rank",
                f"{chunks}, {stage} layers",
                f"take {nearest_divisors(chunks, stage)}",
            )
        s.chunks = chunks
