"""`parallelize` with a plan, on modules of no library: patterns, styles, ties, dropout, bad input.

Layers of proof: pure functions; N processes on a CPU, 1 to 4 ranks, float64 against the unsharded
model (1e-12 of a tensor's size). All of it runs in CI. Hugging Face models: the file beside this.
"""

import warnings

import pytest
import torch
from torch import nn

from pyparallel.errors import InvalidArgument
from pyparallel.layers.parallelize_plan import STYLES, find, resolve
from tests.launch import run_ranks
from tests.layers import plain_model as plain
from tests.layers.test_model import close64, gradients

NAMES = ["embed", "blocks", "blocks.0", "blocks.0.mlp", "blocks.0.mlp.up", "blocks.10.mlp.up"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("embed", ["embed"]),
        ("blocks.*", ["blocks.0"]),
        ("blocks.*.mlp.up", NAMES[4:]),
        ("blocks.?.mlp.up", NAMES[4:5]),
        ("blocks.[0-5].mlp.*", NAMES[4:5]),
        ("**.up", NAMES[4:]),
        ("**", NAMES),
        ("blocks.**", NAMES[1:]),
        ("blocks.**.up", NAMES[4:]),
        ("*", NAMES[:2]),
        ("up", []),
        ("blocks.*.up", []),
    ],
)
def test_patterns_match_part_by_part(pattern, expected):
    assert find(pattern, NAMES) == expected


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (
            {"heads": "colwise"},
            r"'heads' matches no module; the model has embed, blocks, blocks\.0",
        ),
        ({"mlp.0": "colwise"}, r"'mlp\.0' matches no module; its last part alone fits blocks\.0"),
        ({"head": "column"}, "'head' has the style 'column'; expected one of colwise, "),
        (
            {"head": "colwise", "h*": "rowwise"},
            "head is 'colwise' by 'head' and 'rowwise' by 'h.'",
        ),
        ({"head": 3}, "'head': 3 is no pair of strings"),
        ({}, "expected a dict of name patterns"),
        (["head"], "expected a dict of name patterns"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(plan, says):
    with pytest.raises(InvalidArgument, match=says):
        resolve(plain.Plain(), plan)


def test_all_misfits_of_a_plan_are_named_at_once():
    with pytest.raises(InvalidArgument, match="'a' matches.*'b' has the style.*'c' matches"):
        resolve(plain.Plain(), {"a": "colwise", "b": "no", "c": "vocab"})


def test_other_names_of_styles():
    styles = resolve(plain.Plain(), {"head": "colwise_rep", "embed": "embedding_rowwise"})
    assert styles == {"embed": "vocab", "head": "colwise_gather_output"}
    assert set(styles.values()) <= set(STYLES)


def run(model, batches):
    found = []
    for ids, target in batches:
        logits = model(ids)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
        loss.backward()
        found.append((logits.detach(), loss.detach()))
    return found


def models(rank, cases):
    from pyparallel.comm import Communicator
    from pyparallel.layers import (
        SequenceSharding,
        full_state_dict,
        gradient_norm,
        load_full_state_dict,
        parallelize,
    )

    batches = [plain.batch_of(1), plain.batch_of(2, size=1, length=10)]
    losses = []
    with Communicator.from_file(rank.rendezvous, rank.rank, rank.world_size) as group:
        for plan, parallel, tied in cases:
            what = (plan, parallel, tied)
            whole = plain.plain(tied=tied)
            ref = run(whole, batches)
            grads = {n: p.grad for n, p in whole.named_parameters(remove_duplicate=False)}
            model = plain.plain(tied=tied)
            sequence = SequenceSharding(dim=1) if parallel else False
            report = parallelize(model, group, plan, sequence)
            assert (model.head.weight is model.embed.weight) == tied
            found = run(model, batches)
            for (logits, loss), (true_logits, true_loss) in zip(found, ref, strict=True):
                close64(logits, true_logits, (*what, "logits"))
                close64(loss, true_loss, (*what, "loss"))
            own = gradients(model)
            assert list(own) == list(grads)
            for name, grad in grads.items():
                close64(own[name], grad, (*what, name))
            unique = [p.grad for p in whole.parameters()]
            norm = torch.stack([grad.norm() for grad in unique]).norm()
            assert abs(gradient_norm(model) - norm) <= 1e-12 * norm, what
            state = whole.state_dict()
            full = full_state_dict(model)
            assert all(torch.equal(full[name], state[name]) for name in state)
            with torch.device("meta"):
                empty = plain.Plain(tied=tied).double()
            parallelize(empty, group, plan, sequence)
            load_full_state_dict(empty, state)
            assert torch.equal(run(empty, batches[:1])[0][0], found[0][0]), what
            named = {entry.name for entry in report.sharded} | set(report.whole)
            assert {n for n, m in model.named_modules() if list(m.parameters(False))} <= named
            losses.append([x.tolist() for pair in found for x in pair])
    return losses


CASES = [
    (plain.PLAN, False, False),
    (plain.PLAN, False, True),
    (plain.SEQUENCE, True, False),
    (plain.SEQUENCE, True, True),
    (plain.ALONE, False, False),
]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_model_equals_the_whole(world):
    ranks = run_ranks(models, world, CASES)
    assert all(found == ranks[0] for found in ranks)


def bad(rank):
    """Every misfit raises on all ranks, leaves the model as it was, and the group usable."""
    from pyparallel.comm import Communicator
    from pyparallel.layers import SequenceSharding, parallelize

    PLAN = plain.PLAN
    without = {k: v for k, v in PLAN.items() if k != "embed"}
    cases = [  # plan, sequence_parallel, what the error says
        ({**PLAN, "norm": "colwise"}, False, r"norm is a LayerNorm.*'colwise' needs a torch.nn.Li"),
        ({**PLAN, "head": "vocab"}, False, "head is a Linear with weight.*needs a torch.nn.Embedd"),
        ({**PLAN, "embed": "rowwise"}, False, "embed is a Embedding.*'rowwise' needs"),
        (
            {**PLAN, "blocks.*.mlp": "experts"},
            False,
            "Sequential; style 'experts' needs parameters",
        ),
        ({**PLAN, "norm": "sequence"}, False, "'sequence' needs sequence_parallel=True, and"),
        ({**PLAN, "blocks.*.mlp": "summed"}, False, "'summed' needs a module with parameters"),
        (
            {**PLAN, "**.o_proj": "replicated"},
            False,
            "of the attention blocks.0.attention the plan",
        ),
        (without, False, "embed.weight and head.weight are tied, but the plan has"),
        (None, False, "Plain is no Hugging Face causal language model"),
        (PLAN, "yes", "sequence_parallel is 'yes'; expected True, False"),
        ({**PLAN, "nothing": "colwise"}, False, "'nothing' matches no module"),
    ]
    said = []
    with Communicator.from_file(rank.rendezvous, rank.rank, rank.world_size) as group:

        def refused(model, plan, parallel, says):
            kinds = [type(m) for m in model.modules()]
            before = dict(model.named_parameters(remove_duplicate=False))
            with pytest.raises(ValueError, match=says):
                parallelize(model, group, plan, parallel)
            assert [type(m) for m in model.modules()] == kinds
            after = dict(model.named_parameters(remove_duplicate=False))
            assert all(after[name] is parameter for name, parameter in before.items())
            assert not any(m._forward_pre_hooks for m in model.modules())
            said.append(says)

        for plan, parallel, says in cases:
            refused(plain.plain(tied=True), plan, parallel, says)
        for plan, parallel, says in cases:  # one rank alone is wrong: all hear of it
            wrong = rank.rank == 1
            hears = says if wrong else "parallelize|refused|rank 1"
            refused(plain.plain(tied=True), plan if wrong else PLAN, wrong and parallel, hears)
        other = {**PLAN, "norm": "summed"} if rank.rank else PLAN
        refused(plain.plain(), other, False, r"ranks differ in plans, names.*: \[")
        refused(plain.plain(seed=rank.rank), PLAN, False, r"ranks differ in values.*embed.weight")
        with torch.device("meta" if rank.rank else "cpu"):
            somewhere = plain.Plain().double()
        refused(somewhere, PLAN, False, "kinds of devices")
        dims = SequenceSharding(dim=rank.rank)
        refused(plain.plain(), plain.SEQUENCE, dims, "ranks differ in plans")
        capped = plain.plain()
        capped.embed.max_norm = 1.0
        refused(capped, PLAN, False, "'vocab' needs one without max_norm")
        hooked = plain.plain()
        hooked.head.register_forward_hook(print)
        refused(hooked, PLAN, False, "head has hooks, which what takes its place")
        done = plain.plain()
        parallelize(done, group, PLAN)
        with pytest.raises(ValueError, match="sharded layers already"):
            parallelize(done, group, PLAN)
        with pytest.raises(ValueError, match="model is a list; expected a torch.nn.Module"):
            parallelize([], group, PLAN)
        with pytest.raises(ValueError, match="group is None"):
            parallelize(plain.plain(), None, PLAN)
        ids, _ = plain.batch_of(1)
        close64(done(ids), plain.plain()(ids), "the group goes on")
    return len(said)


def test_bad_input_raises_on_all_ranks_and_changes_nothing():
    assert run_ranks(bad, 2) == [28, 28]


def dropped(rank):
    """Masks: alike on what is alike, apart on parts; and torch's own generator is not asked."""
    from pyparallel.comm import Communicator
    from pyparallel.layers import Dropout, SequenceSharding, parallelize

    found = []
    with Communicator.from_file(rank.rendezvous, rank.rank, rank.world_size) as group:
        for parallel in (False, True):
            model = plain.plain(p=0.4)
            torch.manual_seed(1000 + rank.rank)
            plan = plain.SEQUENCE if parallel else plain.PLAN
            report = parallelize(model, group, plan, SequenceSharding(1) if parallel else False)
            drops = {n: m for n, m in model.named_modules() if isinstance(m, Dropout)}
            own = {n: m.sharded for n, m in drops.items()}
            assert own == {
                f"blocks.{i}.mlp.{j}": j == 2 or parallel for i in (0, 1) for j in (2, 4)
            }
            assert all(f"{n} draws from the" in str(report) for n in drops)
            assert report.streams is drops["blocks.0.mlp.2"].streams
            ones = torch.ones(64, 64)
            within, after = drops["blocks.0.mlp.2"](ones), drops["blocks.0.mlp.4"](ones)
            logits = model(plain.batch_of(1)[0])
            model.eval()
            exact = plain.plain(p=0.4).eval()
            close64(model(plain.batch_of(1)[0]), exact(plain.batch_of(1)[0]), "in eval")
            found.append((within, after, logits.detach()))
    return found


def test_dropout_draws_from_the_right_stream():
    ranks = run_ranks(dropped, 3)
    for case, parallel in enumerate((False, True)):
        (within0, after0, logits0), *others = [found[case] for found in ranks]
        for within, after, logits in others:
            assert not torch.equal(within, within0)
            assert torch.equal(after, after0) != parallel
            assert torch.equal(logits, logits0)


def test_one_process_and_its_warning():
    """A world of one through torch's own group: the plan still says what is whole."""
    import torch.distributed as dist

    from pyparallel.layers import parallelize

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = plain.plain()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            report = parallelize(model, dist.group.WORLD, {"head": "colwise", "norm": "replicated"})
        assert [entry.name for entry in report.sharded] == ["head"]
        assert report.whole["norm"] == "by the plan"
        assert report.whole["embed"] == "not in the plan, alike on all ranks"
        ids, _ = plain.batch_of(1)
        assert torch.equal(model(ids), plain.plain()(ids))
    finally:
        dist.destroy_process_group()
