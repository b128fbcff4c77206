"""The executor in one process: gradients of every schedule, what it keeps, what it takes.

Layers: every schedule against one process, to 1e-12 of float64; graphs alive counted by themselves;
outputs of all kinds; bad input. Ranks in processes: test_executor_ranks.py.
"""

import gc

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from pyparallel.pipeline import PipelineError, PipelineExecutor, partition_model, recompute
from pyparallel.schedule import Kind, Schedule, generate, validate, with_steps
from tests.pipeline.executor_models import (
    WIDTH,
    Counter,
    data,
    fp32_limits,
    grid,
    loss_fn,
    model,
    plan_of,
    reference,
    stages,
)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def largest_error(whole, gradients):
    found = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    assert found.keys() == gradients.keys()
    return max(float((found[n] - g).abs().max()) for n, g in gradients.items())


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_schedule_gives_the_gradients_of_one_process(ranks):
    """Sums of at most 8 terms of size 1, in another order: 1e-12 is thousands of roundings."""
    known = {}
    for name, p, m, v in grid((ranks,), (1, 2, 3, 4, 5, 6, 7, 8)):
        plan = plan_of(name, p, m, v)
        whole = model(plan.stages)
        inputs, targets = data(m)
        if (plan.stages, m) not in known:
            known[plan.stages, m] = reference(whole, inputs, targets)
        loss, gradients = known[plan.stages, m]
        executor = PipelineExecutor(stages(whole, plan.stages), loss_fn, dry_run=False)
        result = executor.step(plan, inputs, targets)
        assert abs(result.loss - loss) < 1e-12, (name, p, m, v)
        assert largest_error(whole, gradients) < 1e-12, (name, p, m, v)


def test_every_schedule_keeps_to_the_bound_of_fp32():
    """|ours - ref| <= |one process - ref| + m eps32 sum |g_i|, ref in float64: the microbatches'
    gradients are the same numbers, added in another order."""
    cases = [c for c in grid((1, 2, 3, 4), (1, 3, 8)) if c[2] != 3 or c[1] in (2, 3)]
    known = {}
    for name, p, m, v in cases:
        plan = plan_of(name, p, m, v)
        key = (plan.stages, m)
        if key not in known:
            known[key] = fp32_limits(*key)
        truth, limits = known[key]
        whole = model(plan.stages, torch.float32)
        executor = PipelineExecutor(stages(whole, plan.stages), loss_fn, dry_run=False)
        executor.step(plan, *data(m, torch.float32))
        for n, parameter in whole.named_parameters():
            assert ((parameter.grad - truth[n]).abs() <= limits[n]).all(), (name, p, m, v, n)
    assert all(
        ((truth[n] * 1e-3).abs() > limits[n]).any()
        for truth, limits in known.values()
        for n in truth
    ), "the bound bites"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_graphs_alive_are_those_the_validator_counts(ranks):
    """Of copied stages (DualPipe) a process per rank counts: test_executor_ranks.py."""
    for name, p, m, v in grid((ranks,), (1, 3, 8)):
        plan = plan_of(name, p, m, v)
        inputs, targets = data(m)
        parts = stages(model(plan.stages), plan.stages)
        counters = [Counter() for _ in range(p)]
        for rank, held in enumerate(plan.held):
            for stage in held:
                parts[stage][0].counter = counters[rank]
        executor = PipelineExecutor(parts, loss_fn, dry_run=False)
        gc.disable()  # what is freed is freed by its last reference, or it is not free yet
        try:
            executor.step(plan, inputs, targets)
            alive = [counter.now for counter in counters]
        finally:
            gc.enable()
        assert alive == [0] * p, (name, p, m, v)
        if sum(len(held) for held in plan.held) == plan.stages:
            most = tuple(counter.most for counter in counters)
            assert most == validate(plan).peak_bytes, (name, p, m, v)


def test_two_steps_add_up_and_microbatches_may_change():
    """Neither is the sum scaled again, nor are gradients zeroed, nor is m fixed."""
    whole = model(2)
    executor = PipelineExecutor(stages(whole, 2), loss_fn)
    expected = {}
    for m in (4, 1, 6):
        inputs, targets = data(m, uneven=True)
        _, gradients = reference(whole, inputs, targets)
        expected = {n: expected.get(n, 0) + g for n, g in gradients.items()}
        executor.step(plan_of("zb-h1", 2, m), inputs, targets)
    assert largest_error(whole, expected) < 1e-12


def test_uneven_microbatches_weigh_what_their_tokens_are():
    whole = model(4)
    inputs, targets = data(5, uneven=True)
    tokens = [float(len(x)) for x in inputs]
    loss, gradients = reference(whole, inputs, targets, weights=tokens)
    executor = PipelineExecutor(stages(whole, 4), loss_fn)
    result = executor.step(plan_of("zb-v", 2, 5), inputs, targets, weights=tokens)
    assert abs(result.loss - loss) < 1e-12
    assert largest_error(whole, gradients) < 1e-12
    # Sums over tokens, divided once by their number, are the same.
    whole.zero_grad()
    summed = PipelineExecutor(stages(whole, 4), lambda y, t: ((y - t) ** 2).sum() / WIDTH)
    summed.step(plan_of("zb-v", 2, 5), inputs, targets, total=sum(tokens))
    assert largest_error(whole, gradients) < 1e-12


class Many(nn.Module):
    """Several outputs, plain values, integers, one that no gradient comes back for."""

    def __init__(self, first):
        super().__init__()
        self.first = first
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.shared = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x, extra=None):
        skip, flag = (x, {"scale": 2.0}) if self.first else (extra["skip"], extra["flag"])
        out = torch.tanh(self.linear(x * self.shared) * flag["scale"]) * self.shared
        out = nn.functional.linear(out, self.linear.weight) + self.linear.bias
        ids = torch.arange(3)
        unused = out.sum() * 3
        return out, {"skip": skip * 1, "flag": flag, "ids": [ids, None, unused, True, "a"]}


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, extra):
        assert extra["ids"][1:2] + extra["ids"][3:] == [None, True, "a"]
        assert extra["ids"][0].dtype == torch.int64
        return self.linear(x) + extra["skip"]


def many_stages():
    torch.manual_seed(3)
    return nn.ModuleList([Many(True), Many(False), Many(False), Last()]).double()


def many_reference(parts, inputs, targets):
    def whole(x):
        value = parts[0](x)
        for part in list(parts)[1:]:
            value = part(*value)
        return value

    loss = sum(loss_fn(whole(x), t) for x, t in zip(inputs, targets, strict=True)) / len(inputs)
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in parts.named_parameters()}
    parts.zero_grad()
    return loss.item(), gradients


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_outputs_of_any_kind_and_weights_used_twice(name):
    """`shared` and `linear` are used by several operations on one path: a half that ran the path
    once more would count them twice."""
    parts = many_stages()
    inputs, targets = data(4)
    loss, gradients = many_reference(parts, inputs, targets)
    executor = PipelineExecutor(dict(enumerate(parts)), loss_fn)
    result = executor.step(plan_of(name, 4, 4), inputs, targets)
    assert abs(result.loss - loss) < 1e-12
    assert largest_error(parts, gradients) < 1e-12


def test_halves_recompute_nothing():
    """Each operation's gradients are computed once: for the input in the one half, for the weight
    in the other."""
    calls = []

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            calls.append("forward")
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        def backward(ctx, gradient):
            x, w = ctx.saved_tensors
            calls.append("backward")
            return gradient @ w.t(), x.t() @ gradient

    class Stage(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))

        def forward(self, x):
            return Product.apply(x, self.w)

    inputs, targets = data(3)
    parts = nn.Sequential(Stage(), Stage())
    executor = PipelineExecutor({0: parts[0], 1: parts[1]}, loss_fn, dry_run=False)
    executor.step(plan_of("zb-h1", 2, 3), inputs, targets)
    assert calls.count("forward") == 6
    # Stage 0 has no half for its input; stage 1 runs the node in each half.
    assert calls.count("backward") == 3 + 6


class Recomputed(nn.Module):
    def __init__(self, inner, by):
        super().__init__()
        self.inner, self.by, self.runs = inner, by, 0
        self.dropout = nn.Dropout(0.5)

    def _count(self, x):
        self.runs += 1
        return self.dropout(self.inner(x))

    def forward(self, x):
        if self.by == "kept":
            return self._count(x)
        if self.by == "torch":
            return torch.utils.checkpoint.checkpoint(self._count, x, use_reentrant=False)
        return recompute(self._count, x)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
def test_activations_are_recomputed_once_whatever_the_halves(name):
    """Dropout drops the same the second time: gradients equal those of kept activations."""
    found = {}
    plan = plan_of(name, 2, 4)
    for by in ("kept", "torch", "ours"):
        whole = model(plan.stages)
        inputs, targets = data(4)
        parts = {i: Recomputed(stage, by) for i, stage in stages(whole, plan.stages).items()}
        torch.manual_seed(11)
        result = PipelineExecutor(parts, loss_fn, dry_run=False).step(plan, inputs, targets)
        found[by] = (result.loss, {n: p.grad for n, p in whole.named_parameters()})
        runs = [part.runs for part in parts.values()]
        if by != "torch":
            assert runs == [8 if by == "ours" else 4] * plan.stages
        elif name == "1f1b":
            assert runs == [8, 8]
    assert found["ours"][0] == found["torch"][0] == found["kept"][0]
    assert largest_difference(found["ours"][1], found["kept"][1]) < 1e-12
    assert largest_difference(found["torch"][1], found["kept"][1]) < 1e-12


def largest_difference(one, other):
    assert one.keys() == other.keys()
    return max(float((one[n] - other[n]).abs().max()) for n in one)


def test_recomputing_outside_of_a_pipeline():
    """Nested, with keywords, under autocast, twice over a retained graph, freed with the graph."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
    x = torch.randn(4, WIDTH, requires_grad=True)

    def inner(value, *, scale):
        return torch.tanh(layers[1](value)) * scale

    def outer(value):
        dropped = nn.functional.dropout(torch.tanh(layers[0](value)))
        return layers[2](
            recompute(inner, dropped, scale=2.0) if again else inner(dropped, scale=2.0)
        )

    found = []
    for again in (False, True):
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = recompute(outer, x) if again else outer(x)
        leaves = [x, *layers.parameters()]
        first = torch.autograd.grad(y.float().sum(), leaves, retain_graph=True)
        second = torch.autograd.grad(y.float().sum(), leaves)
        assert all(map(torch.equal, first, second))
        found.append(first)
    assert all(map(torch.equal, *found))
    with torch.no_grad():
        assert recompute(outer, x).grad_fn is None

    calls = []

    def fickle(value):
        calls.append(1)
        return torch.tanh(value if len(calls) == 1 else value[:2])

    with pytest.raises(
        RuntimeError, match=r"fickle saved 1 .* again; number 0 was \(24, 1\).*\(2, 1\)"
    ):
        recompute(fickle, x.view(-1, 1) * 1).sum().backward()


class Skipping(nn.Module):
    """Its first activation is used by the last layer again, and its input by the third."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        first = self.a(x)
        value = self.relu(self.b(first))
        value = self.c(value) * x
        return self.d(value) + first


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_skip_connections_to_later_stages(name):
    torch.manual_seed(0)
    whole = Skipping().double()
    inputs, targets = data(3)
    loss, gradients = reference(whole, inputs, targets)
    partition = partition_model(whole, counts=[1] * 4, split_points=["b", "relu", "d"])
    executor = PipelineExecutor({i: partition.stage(i) for i in range(4)}, loss_fn)
    result = executor.step(plan_of(name, 4, 3), inputs, targets)
    assert abs(result.loss - loss) < 1e-12
    assert largest_error(whole, gradients) < 1e-12


def test_keywords_go_to_every_stage():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH).double()

        def forward(self, x, scale):
            return self.linear(x) * scale

    parts = nn.ModuleList([Scaled(), Scaled()])
    inputs, targets = data(3)
    scales = [0.5, 2.0, 3.0]
    value = sum(
        loss_fn(parts[1](parts[0](x, s), s), t)
        for x, t, s in zip(inputs, targets, scales, strict=True)
    )
    (value / 3).backward()
    gradients = {n: p.grad for n, p in parts.named_parameters()}
    parts.zero_grad()
    executor = PipelineExecutor(dict(enumerate(parts)), loss_fn)
    keywords = [{"scale": s} for s in scales]
    executor.step(plan_of("zb-h1", 2, 3), inputs, targets, keywords=keywords)
    assert largest_error(parts, gradients) < 1e-12


def test_a_stage_without_layers_passes_on():
    whole = model(2)
    inputs, targets = data(3)
    loss, gradients = reference(whole, inputs, targets)
    partition = partition_model(whole, counts=[0, 1, 0, 1])
    for name in ("1f1b", "zb-h1", "gpipe"):
        whole.zero_grad()
        executor = PipelineExecutor({i: partition.stage(i) for i in range(4)}, loss_fn)
        result = executor.step(plan_of(name, 4, 3), inputs, targets)
        assert abs(result.loss - loss) < 1e-12
        assert largest_error(whole, gradients) < 1e-12


def test_evaluation_keeps_nothing_and_gives_outputs():
    whole = model(4)
    inputs, targets = data(5)
    loss, _ = reference(whole, inputs, targets)
    counter = Counter()
    for layer in whole:
        layer.counter = counter
    executor = PipelineExecutor(stages(whole, 4), loss_fn)
    for name in ("interleaved-1f1b", "zb-v", "dualpipev"):
        result = executor.evaluate(plan_of(name, 2, 5), inputs, targets)
        assert abs(result.loss - loss) < 1e-12
        for m, x in enumerate(inputs):
            assert torch.equal(result.outputs[m], whole(x).detach())
            assert not result.outputs[m].requires_grad
    assert executor.evaluate(plan_of("zb-v", 2, 5), inputs).loss is None
    assert all(p.grad is None for p in whole.parameters())
    assert counter.now == 0


def test_reductions_and_steps_of_a_plan_are_called_once_each():
    inputs, targets = data(4)
    called = []
    for name in ("zb-v", "dualpipe"):
        plan = with_steps(plan_of(name, 2, 4))
        whole = model(plan.stages)
        parts = stages(whole, plan.stages)
        executor = PipelineExecutor(
            parts,
            loss_fn,
            reduce=lambda stage: called.append(("reduce", stage)),
            optimizer_step=lambda stage: called.append(("step", stage)),
        )
        called.clear()
        executor.step(plan, inputs, targets)
        wanted = [(what, s) for what in ("reduce", "step") for s in range(plan.stages)]
        assert sorted(called) == wanted
        steps = [i for i, (what, _) in enumerate(called) if what == "step"]
        assert min(steps) >= plan.stages


def test_what_fails_in_a_stage_is_named():
    whole = model(2)
    inputs, targets = data(3)
    parts = stages(whole, 2)
    parts[1] = nn.Linear(WIDTH + 1, WIDTH).double()
    executor = PipelineExecutor(parts, loss_fn, dry_run=False)
    with pytest.raises(
        PipelineError, match=r"1F0 of \(float64\[2, 6\]\): RuntimeError: .*6.*7"
    ) as caught:
        executor.step(plan_of("1f1b", 2, 3), inputs, targets)
    assert isinstance(caught.value.__cause__, RuntimeError)
    vector = PipelineExecutor(stages(whole, 2), lambda y, t: y)
    with pytest.raises(PipelineError, match=r"a tensor of one element"):
        vector.step(plan_of("1f1b", 2, 3), inputs, targets)
    made = PipelineExecutor({0: nn.Module(), 1: parts[1]}, loss_fn)
    with pytest.raises(PipelineError, match=r"0F0 of .*: NotImplementedError"):
        made.step(plan_of("1f1b", 2, 3), inputs, targets)


@pytest.mark.parametrize("way", ["function", "method"])
def test_compiled_stages(way):
    """A compiled backward is one piece: fine where backwards are whole; in halves it runs twice, if
    its buffers allow it, and is refused before anything runs if they do not."""
    whole = model(2)
    inputs, targets = data(3)
    loss, gradients = reference(whole, inputs, targets)
    parts = stages(whole, 2)
    for number, part in parts.items():
        if way == "method":
            part.compile(backend="aot_eager")
        else:
            parts[number] = torch.compile(part, backend="aot_eager")
    torch._dynamo.reset()
    result = PipelineExecutor(parts, loss_fn).step(plan_of("1f1b", 2, 3), inputs, targets)
    assert abs(result.loss - loss) < 1e-12
    assert largest_error(whole, gradients) < 1e-12
    whole.zero_grad()
    halves = plan_of("zb-h1", 2, 3)
    with pytest.raises(ValueError, match=r"halves, and stages \[1\] are compiled.*donated_buffer"):
        PipelineExecutor(parts, loss_fn).step(halves, inputs, targets)
    assert all(p.grad is None for p in whole.parameters())
    torch._dynamo.reset()
    with torch._functorch.config.patch(donated_buffer=False):
        PipelineExecutor(parts, loss_fn).step(halves, inputs, targets)
    assert largest_error(whole, gradients) < 1e-12


class Reshaping(nn.Module):
    """Has what a run changes: a count, a table made at the first call, running statistics."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)
        self.linear = nn.Linear(width, WIDTH).double()
        self.calls, self.table = 0, None

    def forward(self, x):
        self.calls += 1
        if self.table is None:
            self.table = torch.arange(WIDTH, dtype=torch.float64)
        return self.linear(self.norm(x) + self.table)


def test_stages_that_do_not_fit_are_refused_before_anything_runs():
    """Each stage is tried without numbers; what that leaves behind is nothing."""
    inputs, targets = data(3)
    plan = plan_of("1f1b", 3, 3)
    fits, other = Reshaping(WIDTH), Reshaping(WIDTH + 1)
    before = {n: t.clone() for n, t in fits.state_dict().items()}
    executor = PipelineExecutor({0: fits, 1: other, 2: Reshaping(WIDTH)}, loss_fn)
    for _ in range(2):
        with pytest.raises(
            ValueError,
            match=r"1f1b: stage 1 on rank 1 does not take what stage 0 gives, \(float64\[2, 6\]\) "
            r"\(microbatch 0\): RuntimeError: .*6.*7.*nothing has run.*dry_run=False",
        ):
            executor.step(plan, inputs, targets)
    assert fits.calls == other.calls == 0
    assert fits.table is None
    assert all(torch.equal(t, before[n]) for n, t in fits.state_dict().items())
    assert all(p.grad is None for p in fits.parameters())

    class Two(nn.Module):
        def forward(self, x, y):
            return x + y

    three = {0: Reshaping(WIDTH), 1: Two(), 2: Reshaping(WIDTH)}
    with pytest.raises(ValueError, match=r"stage 1 .*TypeError: .*missing 1 required.*'y'"):
        PipelineExecutor(three, loss_fn).step(plan, inputs, targets)
    with pytest.raises(ValueError, match=r"stage 0 on rank 0 does not take what it is given"):
        executor.evaluate(plan, [torch.zeros(2, 5, dtype=torch.float64)] * 3)
    # Where all fits, and each kind of microbatch once.
    three = {s: Reshaping(WIDTH) for s in range(3)}
    executor = PipelineExecutor(three, loss_fn)
    executor.step(plan, inputs, targets)
    assert [part.calls for part in three.values()] == [3, 3, 3]
    with pytest.raises(ValueError, match=r"float64\[4, 7\]"):
        executor.step(plan, [*inputs[:2], torch.zeros(4, 7, dtype=torch.float64)], targets)
    assert [part.calls for part in three.values()] == [3, 3, 3]


class Leaves(nn.Module):
    """Leaves torch in a way that a fake tensor cannot follow."""

    def __init__(self, way):
        super().__init__()
        self.way, self.linear = way, nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x):
        x = self.linear(x)
        if self.way == "numpy":
            return x + torch.from_numpy(x.detach().numpy().copy())
        if self.way == "address":
            return x + (x.data_ptr() == 0)
        if self.way == "number":
            return x[: int(x[0, 0].item() * 0) + 1]
        return x[x[:, 0] > -1e9]


@pytest.mark.parametrize("way", ["numpy", "address", "number", "mask", "hook"])
def test_what_only_numbers_can_tell_is_left_to_the_run(way):
    inputs, targets = data(2)
    if way == "number":
        targets = [t[:1] for t in targets]
    first = Leaves(way)
    if way == "hook":
        first.way = "mask"
        first.register_forward_hook(lambda module, given, out: out[:1])
        targets = [t[:1] for t in targets]
    parts = {0: first, 1: nn.Linear(WIDTH, WIDTH).double()}
    PipelineExecutor(parts, loss_fn).step(plan_of("1f1b", 2, 2), inputs, targets)
    parts[1] = nn.Linear(WIDTH + 1, WIDTH).double()
    with pytest.raises(PipelineError, match="1F0"):
        PipelineExecutor(parts, loss_fn).step(plan_of("1f1b", 2, 2), inputs, targets)


def test_a_loss_and_its_targets_fit():
    inputs, targets = data(2)
    plan = plan_of("1f1b", 2, 2)
    whole = model(2)
    for loss in (loss_fn, nn.MSELoss()):
        with pytest.raises(ValueError, match=r"targets are missing.*loss_fn\(.*target"):
            PipelineExecutor(stages(whole, 2), loss).step(plan, inputs)
    PipelineExecutor(stages(whole, 2), lambda y: y.sum()).step(plan, inputs)
    with pytest.raises(ValueError, match=r"takes no target.*leave them out"):
        PipelineExecutor(stages(whole, 2), lambda y: y.sum()).step(plan, inputs, targets)


def wrong_plan():
    plan = plan_of("1f1b", 2, 3)
    rows = list(plan.rows)
    at = next(i for i, a in enumerate(rows[0]) if a.kind is Kind.BACKWARD)
    rows[0] = (*rows[0][:at], *rows[0][at + 1 :])
    return Schedule(plan.name, tuple(rows), plan.stages, plan.microbatches, plan.held)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plan": generate("1f1b", 2, 3)}, "0F0 is used on rank 1.*with_transfers"),
        ({"plan": wrong_plan()}, "0I0.*is missing"),
        ({"plan": plan_of("1f1b", 3, 3)}, r"stages here are \[0, 1\], in the plan \[0, 1, 2\]"),
        ({"inputs": data(4)[0]}, r"inputs has 4 microbatches, the plan 3.*microbatches=4"),
        ({"targets": data(2)[1]}, r"targets has 2 microbatches, the plan 3.*microbatches=2"),
        ({"inputs": None}, r"inputs are missing: microbatches \[0, 1, 2\]"),
        ({"inputs": [1.0] * 3}, r"inputs\[0\] has no tensor"),
        ({"inputs": [object()] * 3}, r"inputs\[0\]: the value is a object"),
        ({"weights": [1.0, -2.0, 1.0]}, r"weights \[-2.0\]"),
        ({"weights": [0.0, 0.0, 0.0]}, r"total is 0.0"),
        ({"total": float("nan")}, r"total is nan"),
        ({"keywords": [{}]}, r"keywords has 1 microbatches"),
        ({"targets": None}, r"targets are missing: microbatches \[0, 1, 2\] end.*\(output"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(change, message):
    whole = model(2)
    ran = []
    whole[0].register_forward_pre_hook(lambda *_: ran.append(1))
    executor = PipelineExecutor(stages(whole, 2), loss_fn)
    inputs, targets = data(3)
    given = {"plan": plan_of("1f1b", 2, 3), "inputs": inputs, "targets": targets, **change}
    with pytest.raises(ValueError, match=f"(?s){message}"):
        executor.step(**given)
    assert not ran
    with pytest.raises(ValueError, match="loss_fn is missing"):
        PipelineExecutor(stages(whole, 2)).step(plan_of("1f1b", 2, 3), inputs, targets)
    with pytest.raises(ValueError, match="no stages"):
        PipelineExecutor({}, loss_fn)
    with torch.no_grad(), pytest.raises(ValueError, match="evaluate"):
        executor.step(plan_of("1f1b", 2, 3), inputs, targets)
