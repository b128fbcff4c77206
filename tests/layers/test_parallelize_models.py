"""Hugging Face models sharded by `parallelize` against themselves: logits, loss, every gradient.

Layers of proof: N processes on a CPU, 1 to 4 ranks, with and without sequence parallelism, over a
communicator. Float64 proves the algebra (1e-12 of a tensor's size; for it the models' own steps in
fp32 are widened); fp32 and bf16 errors against float64 may be twice the unsharded model's own, in
the root mean square (tests/layers/test_model.py says why). What is alike on all ranks is alike bit
for bit. All of it runs in CI, except on Python 3.10, where transformers does not install.

Each world size is one run for all models: a process needs seconds to import transformers.
"""

import hashlib
import importlib.util
from collections import Counter
from contextlib import contextmanager
from copy import deepcopy

import pytest
import torch

from tests.launch import run_ranks
from tests.layers.test_model import close64, gradients, within_twice

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="transformers is not installed (requirements.txt; it needs Python 3.11)",
)
MODELS = ["llama", "llama-tied", "qwen2", "qwen3", "mistral", "gemma", "gpt-neox"]
MODELS += ["gpt2", "mixtral"]


@contextmanager
def widened():
    """Within it, float64 models stay in float64 where they would compute in fp32."""
    to, narrow = torch.Tensor.to, torch.Tensor.float

    def to_wide(self, *args, **kwargs):
        if self.dtype is torch.float64:
            args = [torch.float64 if a is torch.float32 else a for a in args]
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return to(self, *args, **kwargs)

    torch.Tensor.to = to_wide
    torch.Tensor.float = lambda self: self if self.dtype is torch.float64 else narrow(self)
    try:
        yield
    finally:
        torch.Tensor.to, torch.Tensor.float = to, narrow


@contextmanager
def on(rank):
    import transformers  # noqa: F401  before the ranks wait for one another: it takes seconds

    from pyparallel.comm import Communicator

    torch.set_num_threads(1)
    place = (rank.rendezvous, rank.rank, rank.world_size)
    with Communicator.from_file(*place, timeout=rank.timeout) as group:
        yield group


def run(model, batches):
    """Logits and loss of each batch; gradients are those of all."""
    found = []
    for ids, labels in batches:
        out = model(input_ids=ids, labels=labels)
        out.loss.backward()
        found.append((out.logits.detach(), out.loss.detach()))
    return found


def digest(tensors):
    data = b"".join(x.detach().contiguous().numpy().tobytes() for x in tensors)
    return hashlib.sha256(data).hexdigest()


def models(rank, names):
    """Each model, sharded both ways, against itself; gives digests of what all ranks must share."""
    from pyparallel.layers import full_state_dict, gradient_norm, parallelize
    from tests.layers import causal_models as causal

    batches = [causal.batch_of(1), causal.batch_of(2, size=1, length=10)]
    digests = []
    with on(rank) as group, widened():
        for name in names:
            whole = causal.built(name)
            ref = run(whole, batches)
            state = whole.state_dict()
            grads = {n: p.grad for n, p in whole.named_parameters()}
            norm = torch.stack([grad.norm() for grad in grads.values()]).norm()
            for sequence_parallel in (False, True):
                what = (name, sequence_parallel, rank.rank)
                model = causal.built(name)
                report = parallelize(model, group, sequence_parallel=sequence_parallel)
                assert not report.unsharded, (what, report.unsharded)
                found = run(model, batches)
                for (logits, loss), (true_logits, true_loss) in zip(found, ref, strict=True):
                    close64(logits, true_logits, (*what, "logits"))
                    close64(loss, true_loss, (*what, "loss"))
                own = gradients(model)
                for key, grad in grads.items():
                    close64(own[key], grad, (*what, key))
                ours = gradient_norm(model)
                assert abs(ours - norm) <= 1e-12 * norm, (*what, ours, norm)
                again = full_state_dict(model)
                assert list(again) == list(state), what
                assert all(torch.equal(again[key], state[key]) for key in state), what
                if "tied" in name or name in ("gemma", "gpt2"):
                    head, table = model.get_output_embeddings(), model.get_input_embeddings()
                    assert head.weight is table.weight, what
                shared = [x for pair in found for x in pair] + [*own.values(), ours]
                digests.append((what[:2], digest(shared)))
    return digests


@pytest.mark.slow
@pytest.mark.timeout(320)  # seconds on an idle machine; minutes where others load its cores
@pytest.mark.parametrize(("world", "names"), [(1, ["llama"]), *((n, MODELS) for n in (2, 3, 4))])
def test_model_equals_itself(world, names):
    ranks = run_ranks(models, world, names, timeout=300.0)
    assert len(ranks[0]) == 2 * len(names)
    assert all(found == ranks[0] for found in ranks)


def precisions(rank, cases):
    from pyparallel.layers import parallelize
    from tests.layers import causal_models as causal

    batches = [causal.batch_of(1), causal.batch_of(2, size=1, length=10)]
    with on(rank) as group:
        for name, dtype, sequence_parallel in cases:
            what = (name, dtype, sequence_parallel)
            changes = {"num_local_experts": 3, "experts_implementation": "grouped_mm"}
            changes |= {"intermediate_size": 32}
            changes = changes if name == "mixtral" else {}
            stock, exact = causal.built(name, dtype=dtype, **changes), None
            exact = causal.built(name, dtype=dtype).double() if not changes else None
            if exact is None:  # the grouped kernel has no float64
                changes["experts_implementation"] = "eager"
                exact = causal.built(name, dtype=dtype, **changes).double()
                changes["experts_implementation"] = "grouped_mm"
            model = causal.built(name, dtype=dtype, **changes)
            parallelize(model, group, sequence_parallel=sequence_parallel)
            with widened():
                ref = run(exact, batches)
            theirs, ours = run(stock, batches), run(model, batches)
            for i in (0, 1):
                columns = [[pair[i] for pair in found] for found in (ours, theirs, ref)]
                if i == 0:
                    within_twice(*columns, (*what, "logits"))
            own = gradients(model)
            names = [n for n, p in exact.named_parameters() if p.grad.abs().max() > 1e-6]
            stocks, exacts = dict(stock.named_parameters()), dict(exact.named_parameters())
            within_twice(
                [own[n] for n in names],
                [stocks[n].grad for n in names],
                [exacts[n].grad for n in names],
                (*what, "gradients"),
            )


def test_precisions_are_those_of_the_whole():
    run_ranks(
        precisions,
        3,
        [
            ("qwen3", torch.bfloat16, True),
            ("gpt2", torch.bfloat16, False),
            ("gemma", torch.float32, True),
            ("mixtral", torch.float32, True),
        ],
    )


def decoding(rank):
    """generate() with its cache, greedy: the same tokens; and step by step: the same logits."""
    from pyparallel.layers import parallelize
    from tests.layers import causal_models as causal

    prompt, _ = causal.batch_of(3, length=5)
    options = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with on(rank) as group, widened(), torch.no_grad():
        for name in ("llama", "gpt2"):
            whole = causal.built(name).eval()
            expected = whole.generate(prompt, **options)
            for sequence_parallel in (False, True):
                model = causal.built(name).eval()
                parallelize(model, group, sequence_parallel=sequence_parallel)
                tokens = model.generate(prompt, **options)
                assert torch.equal(tokens, expected), (name, sequence_parallel, tokens, expected)
                assert tokens.shape[1] == 12
                steps = model(tokens[:, :4], use_cache=True)
                logits = [steps.logits]
                cache = steps.get("cache", None) or steps.past_key_values
                key = "cache" if "cache" in steps else "past_key_values"
                for i in range(4, 8):
                    step = model(tokens[:, i : i + 1], use_cache=True, **{key: cache})
                    logits.append(step.logits)
                close64(torch.cat(logits, 1), whole(tokens[:, :8]).logits, (name, "cached"))


def test_generation_with_a_cache():
    run_ranks(decoding, 3)


def states(rank, folder):
    """Loaded before, after, into meta, and saved for the unsharded class: one model."""
    from pyparallel.layers import full_state_dict, load_full_state_dict, parallelize
    from tests.layers import causal_models as causal

    (ids, _), kept = causal.batch_of(1), {}
    with on(rank) as group, torch.no_grad():
        for name in ("llama-tied", "gemma", "gpt2", "mixtral"):
            state = causal.built(name).state_dict()
            before = causal.built(name)
            parallelize(before, group)
            expected = before(ids).logits
            after = causal.built(name, seed=1)
            parallelize(after, group)
            assert not torch.equal(after(ids).logits, expected)
            load_full_state_dict(after, state)
            assert torch.equal(after(ids).logits, expected), name
            empty = causal.made(name, device="meta")
            report = parallelize(empty, group)
            assert not [note for note in report.notes if "meta" in note], report.notes
            if name != "mixtral":  # a tied checkpoint as it lies on disk: one name of the two
                del state["lm_head.weight"]
            assert load_full_state_dict(empty, state) == ([], [])
            assert not any(p.is_meta for p in (*empty.parameters(), *empty.buffers()))
            assert torch.equal(empty(ids).logits, expected), name
            full = full_state_dict(empty)
            if rank.rank == 0:
                names = sorted(full)
                before.save_pretrained(f"{folder}/{name}", state_dict=full)
                again = causal.class_of(name).from_pretrained(
                    f"{folder}/{name}", dtype=torch.float64, experts_implementation="eager"
                )
                close64(again(ids).logits, expected, (name, "saved"))
                kept[name] = sorted(again.state_dict()) == names
    return kept


def test_states_before_after_meta_and_saved(tmp_path):
    kept = run_ranks(states, 2, str(tmp_path))[0]
    assert kept == dict.fromkeys(["llama-tied", "gemma", "gpt2", "mixtral"], True)


def reports(rank):
    """The report names the ops that run, and a model's structure gives what its plan gives."""
    from pyparallel import ops
    from pyparallel.layers import hugging_face, parallelize
    from tests.layers import causal_models as causal

    found = []
    (ids, _), calls = causal.batch_of(1), Counter()
    counted = ["matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul", "all_gather"]
    counted += ["gather", "all_reduce", "reduce_scatter", "split"]
    with on(rank) as group, torch.no_grad(), pytest.MonkeyPatch.context() as patch:

        def counting(name):
            real = getattr(ops, name)

            def call(*args, **kwargs):
                calls[name] += 1
                return real(*args, **kwargs)

            return call

        for name in counted:
            patch.setattr(ops, name, counting(name))
        for name in ("llama", "gpt2", "mixtral"):
            for sequence_parallel in (False, True):
                model = causal.built(name)
                report = parallelize(model, group, sequence_parallel=sequence_parallel)
                calls.clear()
                model(ids)
                said = Counter(op for e in report.sharded for op in e.forward.split(", ") if op)
                assert calls == said, (name, sequence_parallel, calls, said)
                found.append(sum(n for op, n in calls.items() if "matmul" in op))
        for name in ("llama", "qwen3", "mixtral", "gpt-neox"):
            model = causal.built(name)
            by_plan = hugging_face.automatic_plan(model, hugging_face.stack_of(model))
            model.config.base_model_tp_plan, model._tp_plan = None, {}
            by_structure = hugging_face.automatic_plan(model, hugging_face.stack_of(model))
            assert any("no tensor-parallel plan" in note for note in by_structure.notes)
            summed = {n: s for n, s in by_plan.styles.items() if s == "summed"}
            assert by_plan.styles == by_structure.styles | summed, name
        model = causal.built("gpt2", attn_pdrop=0.1, embd_pdrop=0.1, resid_pdrop=0.1)
        for parallel in (False, True):
            copy = deepcopy(model)
            notes = parallelize(copy, group, sequence_parallel=parallel).notes
            streams = {note.split()[0]: note.split()[4] for note in notes if "stream" in note}
            block = "own" if parallel else "shared"
            expected = {"transformer.drop": "shared"}
            for i in (0, 1):
                layer = f"transformer.h.{i}"
                expected[f"{layer}.attn.attn_dropout"] = "own"
                expected |= {f"{layer}.attn.resid_dropout": block, f"{layer}.mlp.dropout": block}
            assert streams == expected, streams
            close64(copy.eval()(ids).logits, model.eval()(ids).logits, "dropouts in eval")
        model = causal.built("llama", attention_dropout=0.1)
        plan = {  # a plan for a part of it: the rest stays whole, on the whole sequence
            "model.layers.0.self_attn.[qkv]_proj": "colwise",
            "model.layers.0.self_attn.o_proj": "rowwise",
            "model.layers.1.mlp.gate_proj": "colwise",
            "model.layers.1.mlp.up_proj": "colwise",
            "model.layers.1.mlp.down_proj": "rowwise",
        }
        report = parallelize(model, group, plan, sequence_parallel=True)
        assert [e.name for e in report.sharded if e.style == "whole sequence"] == [
            "model.layers.0.mlp",
            "model.layers.1.self_attn",
        ]
        assert any("drop attention by torch's generator" in note for note in report.notes)
        close64(model.eval()(ids).logits, causal.built("llama")(ids).logits, "a part of it")
        _check_vocabulary_parallel_loss(group, causal)
        unknown = causal.built("llama")
        block = unknown.model.layers[1].mlp
        block.extra = torch.nn.Linear(24, 24).double()
        with pytest.warns(UserWarning, match=r"left 1 modules whole.*layers\.1\.mlp"):
            report = parallelize(unknown, group, sequence_parallel=True)
        assert list(report.unsharded) == ["model.layers.1.mlp"]
        close64(unknown(ids).logits, causal.built("llama")(ids).logits, "left whole")
        assert "not sharded: model.layers.1.mlp" in str(report)
    return found


def _check_vocabulary_parallel_loss(group, causal):
    """A head that does not gather, a loss that takes its parts, layers that are recomputed."""
    from pyparallel.layers import parallelize, vocab_parallel_cross_entropy

    columns = ["self_attn.[qkv]_proj", "mlp.gate_proj", "mlp.up_proj"]
    plan = {f"model.layers.*.{name}": "colwise" for name in columns}
    plan |= {f"model.layers.*.{name}": "rowwise" for name in ("self_attn.o_proj", "mlp.down_proj")}
    plan |= {"model.embed_tokens": "vocab", "lm_head": "colwise"}
    batches = [causal.batch_of(1)]
    for parallel in (False, True):
        with torch.enable_grad(), widened():
            whole, model = causal.built("llama-tied"), causal.built("llama-tied")
            ((_, expected),) = run(whole, batches)
            parallelize(model, group, plan, parallel)
            model.train()
            model.gradient_checkpointing_enable()
            model.loss_function = lambda logits, labels, vocab_size, **_: (
                vocab_parallel_cross_entropy(logits[:, :-1], labels[:, 1:], vocab_size, group)
            )
            ((logits, loss),) = run(model, batches)
        assert logits.shape[-1] < causal.VOCAB
        close64(loss, expected, ("parts of logits", parallel))
        own = gradients(model)
        for name, parameter in whole.named_parameters():
            close64(own[name], parameter.grad, ("recomputed", parallel, name))


def test_the_report_says_what_runs():
    found = run_ranks(reports, 2)
    # GPT-2 under sequence parallelism: both rows of both layers, and the first half of its MLPs.
    assert found[0] == found[1] == [4, 4, 4, 6, 2, 2]
