"""Models in stages: every parameter once, outputs and gradients of the whole model to the bit.

Layers: lists of modules; three families of causal language models of transformers, tied and not,
cut in every way; two processes that hold the two copies of a tied embedding.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pyparallel.pipeline import (
    materialise,
    parameters_on_meta,
    partition_model,
    sum_tied_gradients,
)
from tests.launch import run_ranks


@pytest.fixture(autouse=True)
def _one_thread():
    """Models this small gain nothing from more, and the machine may be busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


SIZES = {"num_hidden_layers": 5, "num_attention_heads": 2, "hidden_size": 16, "vocab_size": 37}


class Body(nn.Module):
    """What a language model of transformers looks like from outside, without importing it."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(37, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(5))
        self.norm = nn.LayerNorm(16)

    def forward(self, input_ids=None, inputs_embeds=None, use_cache=False):
        value = self.tokens(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.layers:
            value = layer(value)
        return SimpleNamespace(last_hidden_state=self.norm(value))


class TiedModel(nn.Module):
    base_model_prefix = "body"

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body = Body()
        self.head = nn.Linear(16, 37, bias=False)
        self.head.weight = self.body.tokens.weight

    def get_input_embeddings(self):
        return self.body.tokens

    def get_output_embeddings(self):
        return self.head

    def forward(self, ids):
        return self.head(self.body(ids).last_hidden_state)


def sequential(layers=5):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(layers)))


def causal_lm(family, tie):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    common = {**SIZES, "tie_word_embeddings": tie, "bos_token_id": 1, "eos_token_id": 2}
    if family == "llama":
        config = transformers.LlamaConfig(**common, intermediate_size=24, num_key_value_heads=1)
    elif family == "gpt2":
        config = transformers.GPT2Config(**common, n_positions=32)
    else:
        config = transformers.GPTNeoXConfig(**common, intermediate_size=24)
    config._attn_implementation = "eager"
    return transformers.AutoModelForCausalLM.from_config(config)


def chain(partition, value, **keywords):
    for index in range(partition.stages):
        stage = partition.stage(index)
        values = value if isinstance(value, tuple) else (value,)
        value = stage(*values, **keywords)
    return value


def names_of(partition):
    """Parameter names, stage by stage; a tied parameter has a name on each of its stages."""
    return [
        [name for name, _ in partition.stage(i).named_parameters(remove_duplicate=False)]
        for i in range(partition.stages)
    ]


@pytest.mark.parametrize(("layers", "stages"), [(5, 2), (30, 4), (10, 3), (3, 3), (1, 1)])
def test_a_list_of_modules(layers, stages):
    """training.md 1, 2, 3: 5 layers on 2 stages, 30 on 4, 10 on 3: no layer is dropped."""
    model = sequential(layers)
    partition = partition_model(model, stages)
    names = [name for stage in names_of(partition) for name in stage]
    assert names == [name for name, _ in model.named_parameters()]
    x = torch.randn(4, 6)
    assert torch.equal(chain(partition, x), model(x))


def test_more_stages_than_layers():
    """training.md 5: refused with the nearest choice, or stages that pass their input on."""
    model = sequential(2)
    with pytest.raises(ValueError, match="4 stages for 2 parts.*nearest 2"):
        partition_model(model, 4)
    x = torch.randn(3, 6)
    for partition in (
        partition_model(model, 4, allow_empty=True),
        partition_model(model, counts=[0, 1, 0, 1]),
        partition_model(model, layout="t | | t |"),
    ):
        assert partition.stages == 4
        assert torch.equal(chain(partition, x), model(x))


LAYOUTS = [
    "E t*5 N L",
    "E t*2 | t*3 N L",
    "E | t*5 | N | L",
    "E t | | t*4 | N L",
    "E t*5 N | L",
    "E t | t | t | t | t N L",
]


def test_a_language_model_of_that_structure():
    model = TiedModel()
    ids = torch.randint(0, 37, (2, 9))
    check_every_layout(model, model(ids), ids, tie=True)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_causal_language_models(family, tie):
    model = causal_lm(family, tie)
    ids = torch.randint(0, SIZES["vocab_size"], (2, 9))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    model.eval()
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    check_every_layout(model, expected, ids, tie, attention_mask=mask)


def check_every_layout(model, expected, ids, tie, **keywords):
    """Every name on one stage, output and gradients of the whole model to the bit."""
    expected.square().mean().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    whole = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for layout in LAYOUTS:
        partition = partition_model(model, layout=layout)
        names = names_of(partition)
        assert sorted(name for stage in names for name in stage) == sorted(whole), layout
        assert len(partition.tied) == (tie and "|" in layout and layout != LAYOUTS[0])
        model.zero_grad()
        out = chain(partition, ids, **keywords)
        assert torch.equal(out, expected), layout
        out.square().mean().backward()
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.grad, gradients[name]), (layout, name)


class Branches(nn.Module):
    """A skip connection past several blocks, an input that only the end reads, a tied weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.end = nn.Linear(6, 6)
        self.end.weight = self.blocks[0].weight

    def forward(self, x, late):
        value = torch.tanh(self.blocks[0](x))
        skip = value * 2
        for block in self.blocks[1:]:
            value = torch.tanh(block(value)) + value
        return self.end(value + skip) + late


@pytest.mark.parametrize("exported", [False, True])
def test_split_points_of_any_model(exported):
    model = Branches()
    inputs = torch.randn(3, 6), torch.randn(3, 6)
    expected = model(*inputs)
    expected.square().mean().backward()
    gradients = {id(p): p.grad.clone() for p in model.parameters()}
    points = ["blocks.1", "blocks.2", "blocks.3", "end"]
    source = torch.export.export(model, inputs).module() if exported else model
    for arguments in ({"counts": [1, 1, 1, 1, 1]}, {"counts": [2, 0, 3]}, {"stages": 2}):
        partition = partition_model(source, split_points=points, **arguments)
        source.zero_grad()
        out = chain(partition, inputs)
        assert torch.equal(out, expected)
        names = {name for stage in names_of(partition) for name in stage}
        theirs = {name for name, _ in source.named_parameters(remove_duplicate=False)}
        # An exported graph reads a tied parameter under one of its names.
        assert names == theirs - ({"blocks.0.weight"} if exported else set())
        assert len(partition.tied) == 1
        out.square().mean().backward()
        for mine, theirs in zip(source.parameters(), model.parameters(), strict=True):
            assert torch.equal(mine.grad, gradients[id(theirs)])
    crossing = partition_model(source, split_points=points, counts=[2, 3]).stage(0)(*inputs)
    assert len(crossing) == 3, "the value, the skip connection, the input of the end"


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (["blocks.9"], "split point 'blocks.9' does not run after the beginning; modules run in"),
        (["blocks.2", "blocks.1"], r"'blocks.1' does not run after \['blocks.2'\]"),
    ],
)
def test_split_points_that_are_none(points, message):
    with pytest.raises(ValueError, match=message):
        partition_model(Branches(), counts=[1] * (len(points) + 1), split_points=points)


def test_a_model_that_cannot_be_traced():
    class Choosing(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(ValueError, match="Choosing cannot be traced by torch.fx .*torch.export"):
        partition_model(Choosing(), 1, split_points=[])


def test_position_embeddings_are_added_once_and_the_model_is_left_as_it_was():
    model = causal_lm("gpt2", tie=False)
    before = [(name, id(module)) for name, module in model.named_modules()]
    partition = partition_model(model, 3)
    for index in range(3):
        partition.stage(index)
    assert [(name, id(module)) for name, module in model.named_modules()] == before


def test_balance_counts_embedding_and_output_layer():
    model = causal_lm("llama", tie=False)
    layer, embedding = partition_model(model, 1).parts[1:3], partition_model(model, 1).parts[0]
    assert layer[0].parameters == layer[1].parameters
    assert embedding.parameters == 37 * 16
    assert embedding.flops == 0
    kinds = "".join(part.kind for part in partition_model(model, 1).parts)
    assert kinds == "EtttttNL"
    assert partition_model(model, 2, by=[0, 1, 1, 1, 1, 1, 1, 9]).counts == (7, 1)
    assert sum(partition_model(model, 3, by="flops").counts) == 8
    bytes_of_layer = layer[0].bytes
    tight = partition_model(model, 3, memory_cap=3 * bytes_of_layer)
    for index in range(3):
        held = {id(p): p for p in tight.stage(index).parameters()}
        assert sum(p.numel() * 4 for p in held.values()) <= 3 * bytes_of_layer


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_only_the_own_stage_is_materialised(family):
    """training.md 8: ties survive the way over meta."""
    real = causal_lm(family, tie=True)
    state = real.state_dict()
    with parameters_on_meta():
        model = causal_lm(family, tie=True)
    assert all(p.is_meta for p in model.parameters())
    assert not any(b.is_meta for b in model.buffers())
    partition = partition_model(model, layout="E t*2 | t*3 N L")
    assert len(partition.tied) == 1
    first = materialise(partition.stage(0), state)
    assert not any(p.is_meta for p in first.parameters())
    ids = torch.randint(0, SIZES["vocab_size"], (2, 7))
    real.eval()
    whole = partition_model(real, layout="E t*2 | t*3 N L")
    first.eval()
    assert torch.equal(first(ids), whole.stage(0)(ids))
    last = materialise(partition.stage(1), state)
    last.eval()
    assert torch.equal(last(first(ids)), real(ids).logits)

    lacking = {
        name: value for name, value in state.items() if "norm" not in name and "ln_" not in name
    }
    with parameters_on_meta():
        again = partition_model(causal_lm(family, tie=True), 2)
    with pytest.raises(ValueError, match="state lacks"):
        materialise(again.stage(1), lacking)
    wrong = {**state, "lm_head.weight": torch.zeros(3, 3)}
    with pytest.raises(ValueError, match=r"lm_head.weight is \(3, 3\), \(37, 16\) in the model"):
        materialise(again.stage(1), wrong)


def test_one_parameter_registered_twice_is_one_on_meta():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            shared = nn.Parameter(torch.ones(3))
            self.a, self.b = shared, shared
            self.others = nn.ParameterList(nn.Parameter(torch.ones(n)) for n in range(1, 9))

    with parameters_on_meta():
        model = Twice()
    assert model.a is model.b
    assert [p.numel() for p in model.others] == list(range(1, 9))
    assert nn.Linear(2, 2).weight.device.type == "cpu", "only inside"
    values = {name: torch.full_like(p, 3, device="cpu") for name, p in
              model.named_parameters(remove_duplicate=False)}  # fmt: skip
    materialise(model, values)
    assert model.a is model.b


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: partition_model(nn.Linear(2, 2), 1), "Linear: no body .*pass an nn.Sequential"),
        (
            lambda: partition_model(sequential(), 2, counts=[2, 3]),
            r"given are \['counts', 'stages'\]",
        ),
        (lambda: partition_model(sequential()), r"given are \[\]"),
        (lambda: partition_model(sequential(), counts=[2, 2]), "take 4 parts, the model has 5"),
        (lambda: partition_model(sequential(), counts=[5], by="flops"), "no effect with counts"),
        (lambda: partition_model(sequential(), 2, by="time"), "by='time': allowed are"),
        (lambda: partition_model(sequential(), 2, by=[1, 2]), "2 numbers for 5 parts"),
        (lambda: partition_model(sequential(), 2, memory_cap=10), "do not fit"),
        (lambda: partition_model(sequential(), 2).stage(2), "there are stages 0 to 1"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_body_of_another_structure_is_described():
    model = causal_lm("llama", tie=False)
    model.model.more = nn.ModuleList([nn.Linear(2, 2)])
    with pytest.raises(ValueError, match="one list of layers .*'more': 'ModuleList'"):
        partition_model(model, 2)


# Two processes, the embedding tied between them.


def _tied_steps(rank):
    """Three steps of plain gradient descent on one stage of two, messages through the
    communicator."""
    from pyparallel.comm import Communicator

    torch.set_num_threads(1)
    partition = partition_model(TiedModel(), layout="E t*2 | t*3 N L")
    stage = partition.stage(rank.rank)
    name = partition.tied[0].names[partition.tied[0].stages.index(rank.rank)]
    with Communicator.from_file(rank.rendezvous, rank.rank, rank.world_size) as comm:
        for step in range(3):
            ids = _ids(step)
            if rank.rank == 0:
                hidden = stage(ids)
                comm.send(hidden.detach(), 1)
                gradient = torch.empty_like(hidden)
                comm.recv(gradient, 1)
                hidden.backward(gradient)
            else:
                hidden = torch.empty(2, 8, SIZES["hidden_size"])
                comm.recv(hidden, 0)
                hidden.requires_grad_()
                stage(hidden).square().mean().backward()
                comm.send(hidden.grad, 0)
            sum_tied_gradients(
                stage, rank.rank, partition.tied, lambda t, stages: comm.all_reduce(t)
            )
            _descend(stage)
    return dict(stage.named_parameters())[name].detach()


def _descend(module):
    """A step of gradient descent by hand: torch.optim takes long to import."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None


def _ids(step):
    return torch.randint(
        0, SIZES["vocab_size"], (2, 8), generator=torch.Generator().manual_seed(step)
    )


def test_tied_embeddings_stay_equal_and_train_as_one():
    """training.md 6: after three steps equal to the bit on both stages, and close to one process
    (whose
    sum over the two uses is ordered differently: three steps of one rounding each)."""
    model = TiedModel()
    for step in range(3):
        model(_ids(step)).square().mean().backward()
        _descend(model)
    first, last = run_ranks(_tied_steps, 2)
    assert torch.equal(first, last)
    reference = model.head.weight.detach()
    scale = reference.abs().max()
    assert (first - reference).abs().max() <= 3 * 2 * torch.finfo(torch.float32).eps * scale
    untouched = TiedModel().head.weight
    assert (untouched - reference).abs().max() > 1e-4 * scale, "the steps did something"
