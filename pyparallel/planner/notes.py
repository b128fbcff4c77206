"""What a layout may do, and its user should know: sentences with the values they are made of, so
that another language can say them too."""

from collections.abc import Iterator, Mapping
from typing import Any

from pyparallel.planner.clusters import ClusterSpec
from pyparallel.planner.layout import Job, Layout

__all__ = ["SENTENCES", "Note", "notes"]

SENTENCES: Mapping[str, str] = {
    "padded": "vocabulary {vocab} is padded to {padded} for tp {tp} and masked",
    "kv heads": "{kv_heads} kv heads for tp {tp}: each is held by {copies} ranks",
    "tp crosses": "tp {tp} crosses nodes of {node}: a rank has {inter:g} GB/s to other nodes, "
    "and {intra:g} inside",
    "uneven": "{layers} layers over {stages} stages are uneven; Megatron-LM wants them even, or "
    "its own flags for first and last stage",
    "zero 2 with pp": "zero 2 with pp {pp}: gradients are scattered once per microbatch, which is "
    "counted; DeepSpeed refuses the combination",
    "zero 3 with pp": "zero 3 with pp {pp}: gradients are scattered, and weights gathered twice, "
    "once per microbatch, which is counted; DeepSpeed refuses the combination",
    "selective": "selective recompute has nothing to do: flash attention keeps no scores",
}


class Note(str):
    """A sentence in English, with its key in `SENTENCES` and its values."""

    key: str
    values: Mapping[str, Any]

    def __new__(cls, key: str, **values: Any) -> "Note":
        made = super().__new__(cls, SENTENCES[key].format(**values))
        made.key, made.values = key, values
        return made

    def __getnewargs_ex__(self) -> tuple[tuple[str], dict[str, Any]]:
        """What copy and pickle make it anew from."""
        return (self.key,), dict(self.values)


def notes(job: Job, cluster: ClusterSpec, layout: Layout) -> tuple[Note, ...]:
    """What is allowed, and should be known."""
    return tuple(_notes(job, cluster, layout))


def _notes(job: Job, cluster: ClusterSpec, layout: Layout) -> Iterator[Note]:
    model, t = job.model, layout.tp
    padded = model.padded_vocab(t)
    if padded != model.vocab:
        yield Note("padded", vocab=model.vocab, padded=padded, tp=t)
    if model.latent is None and t > model.kv_heads:
        yield Note("kv heads", kv_heads=model.kv_heads, tp=t, copies=t // model.kv_heads)
    if t > cluster.node_size:
        rates = {"inter": cluster.inter.gbps, "intra": cluster.intra.gbps}
        yield Note("tp crosses", tp=t, node=cluster.node_size, **rates)
    if layout.layers_per_stage is None and model.layers % layout.stages:
        yield Note("uneven", layers=model.layers, stages=layout.stages)
    if layout.zero >= 2 and layout.pp > 1:
        yield Note(f"zero {layout.zero} with pp", pp=layout.pp)
    if layout.recompute == "selective" and job.attention == "flash":
        yield Note("selective")
