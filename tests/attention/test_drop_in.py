"""The names, argument orders and results of other libraries, over simulated ranks."""

import inspect
from types import SimpleNamespace

import pytest
import torch

from pyparallel.attention import CoreAttention, ring_flash_attn, simulate
from tests.attention.whole import Case, check, rms_error

BOUND = 1e-6
DENSE = {
    "contiguous": "ring_flash_attn",
    "zigzag": "zigzag_ring_flash_attn",
    "striped": "stripe_flash_attn",
}
VARLEN = {
    "contiguous": "ring_flash_attn_varlen",
    "zigzag": "zigzag_ring_flash_attn_varlen",
    "striped": "stripe_flash_attn_varlen",
}
# dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
ARGUMENTS = (0.0, 0.3, True, (6, 0), SLOPES, True, True)


def run(case, world, call, packed_dim=-3):
    """out, lse and gradients of `call(form, group, operands)`, for the three forms of operands."""
    queries, keys = case.shardings(world)
    found = []
    for form in ("", "kvpacked_", "qkvpacked_"):
        if form == "qkvpacked_" and case.q.shape[2] != case.k.shape[2]:
            continue

        def rank(group, form=form):
            rows, key_rows = queries.rows(group.rank), keys.rows(group.rank)
            q, k, v = case.q[:, rows], case.k[:, key_rows], case.v[:, key_rows]
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            q, k, v = leaves
            operands = {
                "": lambda: (q, k, v),
                "kvpacked_": lambda: (q, torch.stack((k, v), packed_dim)),
                "qkvpacked_": lambda: (torch.stack((q, k, v), packed_dim),),
            }[form]()
            out, lse, third = call(form, group, operands)
            assert third is None
            loss = case.dout[:, rows].view(out.shape), case.dlse[:, :, rows].view(lse.shape)
            torch.autograd.backward([out, lse], loss)
            return [out.detach(), lse.detach(), *(x.grad for x in leaves)]

        every = simulate(world, rank)
        whole = {}
        for i, name in enumerate(("out", "lse", "dq", "dk", "dv")):
            order = (keys if name in ("dk", "dv") else queries).order()
            parts = [tensors[i] for tensors in every]
            dim = -1 if name == "lse" else -3
            whole[name] = torch.cat(parts, dim).index_select(dim, order)
        found.append(whole)
    return found


@pytest.mark.parametrize("sharding", DENSE)
def test_dense_names_take_positional_calls(sharding):
    torch.manual_seed(0)
    for kv_heads, causal, world in ((4, True, 2), (2, True, 4), (4, False, 3)):
        case = Case.random(batch=2, rows=19, kv_heads=kv_heads, sharding=sharding, causal=causal,
                           softmax_scale=0.3, window_size=(6, 0) if causal else (-1, -1),
                           alibi_slopes=SLOPES)  # fmt: skip
        arguments = (0.0, 0.3, causal, case.options["window_size"], SLOPES, True, True)

        def call(form, group, operands, arguments=arguments):
            function = getattr(ring_flash_attn, f"{DENSE[sharding]}_{form}func")
            return function(*operands, *arguments, group)

        for found in run(case, world, call):
            check(found, case.reference(), BOUND, sharding)


@pytest.mark.parametrize("sharding", VARLEN)
def test_varlen_names_cut_each_document(sharding):
    torch.manual_seed(1)
    world, lengths = 2, (3, 0, 5, 1, 4)
    cu = [0]
    for n in lengths:
        cu.append(cu[-1] + n)
    whole = [n * world for n in cu]
    case = Case.random(rows=whole[-1], kv_heads=4, sharding=sharding, cu_seqlens=whole,
                       per_document=True, causal=True, softmax_scale=0.3, window_size=(6, 0),
                       alibi_slopes=SLOPES)  # fmt: skip

    def call(form, group, operands):
        function = getattr(ring_flash_attn, f"{VARLEN[sharding]}_{form}func")
        lengths = torch.tensor(cu, dtype=torch.int32)
        out, lse, third = function(*(x[0] for x in operands), lengths, 5, *ARGUMENTS, group)
        assert out.dim() == 3
        assert tuple(lse.shape) == (4, cu[-1])  # (heads, tokens), float32
        assert lse.dtype == torch.float32
        return out, lse, third

    for found in run(case, world, call):
        reference = case.reference()
        squeezed = {k: v if k[0] == "d" else v[0] for k, v in reference.items()}
        check(found, squeezed, BOUND, sharding)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("stride", [1, 2])
def test_llama3_varlen_and_its_helper(causal, stride):
    torch.manual_seed(2)
    cu = torch.tensor([0, 3, 3, 5, 9, 10, 16], dtype=torch.int32)
    for world in (1, 2, 4):
        case = Case.random(rows=16, heads=8, kv_heads=2, sharding="contiguous", causal=causal,
                           cu_seqlens=cu.tolist())  # fmt: skip

        def call(form, group, operands, world=world):
            prepared = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(
                cu, causal, group.rank, world
            )
            function = getattr(ring_flash_attn, f"llama3_flash_attn_varlen_{form}func")
            return function(*(x[0] for x in operands), *prepared[:4], stride, prepared[4], 0.0,
                            None, causal, (-1, -1), None, False, True, group)  # fmt: skip

        for found in run(case, world, call):
            reference = case.reference()
            squeezed = {k: v if k[0] == "d" else v[0] for k, v in reference.items()}
            check(found, squeezed, BOUND, (world, causal, stride))


def test_arguments_have_the_order_of_ring_flash_attention():
    """Of all forms; what is in none of them, or twice, is a TypeError."""
    common = ["dropout_p", "softmax_scale", "causal", "window_size", "alibi_slopes",
              "deterministic", "return_attn_probs", "group"]  # fmt: skip
    of_llama3 = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "heads_k_stride",
                 "local_k_slice"]  # fmt: skip
    names = {
        **dict.fromkeys(DENSE.values(), ()),
        **dict.fromkeys(VARLEN.values(), ("cu_seqlens", "max_seqlen")),
        "llama3_flash_attn_varlen": of_llama3,
    }
    for name, between in names.items():
        for form, operands in (("", ["q", "k", "v"]), ("kvpacked_", ["q", "kv"]),
                               ("qkvpacked_", ["qkv"])):  # fmt: skip
            function = getattr(ring_flash_attn, f"{name}_{form}func")
            assert list(inspect.signature(function).parameters) == [*operands, *between, *common]
            assert function.__name__ == f"{name}_{form}func"
    assert set(ring_flash_attn.__all__) <= set(dir(ring_flash_attn))
    q = torch.randn(1, 4, 3, 2, 8)
    function = ring_flash_attn.ring_flash_attn_qkvpacked_func
    with pytest.raises(TypeError, match="too many positional"):
        function(q, *ARGUMENTS, None, "and more")
    with pytest.raises(TypeError, match="unexpected keyword argument 'softcap'"):
        function(q, softcap=3.0)
    with pytest.raises(TypeError, match="multiple values for argument 'group'"):
        function(q, *ARGUMENTS, None, group=None)


def test_drop_in_names_refuse_what_they_cannot_honour():
    q = torch.randn(1, 4, 2, 8)
    lengths = torch.tensor([0, 4])
    faults = [
        (lambda g: ring_flash_attn.ring_flash_attn_kvpacked_func(q, q, group=g),
         r"kv is \[1, 4, 2, 8\]; expected"),
        (lambda g: ring_flash_attn.ring_flash_attn_func(q, q, q, dropout_p=1.5, group=g),
         "dropout_p is 1.5"),
        (lambda g: ring_flash_attn.ring_flash_attn_varlen_func(
            q[0], q[0], q[0], lengths, 3, group=g), "max_seqlen is 3; the longest document"),
        (lambda g: ring_flash_attn.ring_flash_attn_varlen_func(
            q[0], q[0], q[0], torch.tensor([0, 3]), 3, group=g), "the ranks hold 8 rows of k"),
        (lambda g: ring_flash_attn.llama3_flash_attn_varlen_func(
            q[0], q[0], q[0], lengths, lengths, 4, 4, 3, slice(0, 4), group=g),
         "heads_k_stride is 3; expected a divisor of the 2"),
        (lambda g: ring_flash_attn.llama3_flash_attn_varlen_func(
            q[0], q[0], q[0], lengths, lengths, 4, 4, 1, slice(0, 5), group=g),
         "llama3_flash_attn_prepare_cu_seqlens makes them"),
        (lambda g: ring_flash_attn.ring_flash_attn_varlen_func(
            q[0], q[0], q[0], lengths, lengths, group=g), r"max_seqlen is tensor\(\[0, 4\]\)"),
        (lambda g: ring_flash_attn.ring_flash_attn_varlen_func(
            q[0], q[0], q[0], lengths, True, group=g), "max_seqlen is True"),
        *((lambda g, change=change: llama3(g, **change), text) for change, text in (
            ({"local_k_slice": slice(0, 4, 2)}, "llama3_flash_attn_prepare_cu_seqlens makes them"),
            ({"v": torch.randn(4, 4, 8)}, "they may differ in the last dim only"),
            ({"q": torch.randn(4, 5, 8)}, "q has 5 heads, k 2; expected a multiple"),
            ({"alibi_slopes": torch.ones(8)}, r"alibi_slopes has shape \[8\]"),
            ({"alibi_slopes": [0.5, 0.5]}, "alibi_slopes is a list"),
            ({"return_attn_probs": 2}, "return_attn_probs is 2; expected True or False"),
        )),
    ]  # fmt: skip

    def llama3(group, **change):
        borders = torch.tensor([0, 4 * group.world_size])
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "local_k_slice")
        prepared = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(
            borders, True, group.rank, group.world_size
        )
        given = {"q": q[0], "k": q[0], "v": q[0], "heads_k_stride": 1, "causal": True,
                 **dict(zip(names, prepared, strict=True)), **change}  # fmt: skip
        return ring_flash_attn.llama3_flash_attn_varlen_func(**given, group=group)

    for call, text in faults:
        with pytest.raises(ValueError, match=text):
            simulate(2, call)

    def uneven(group):
        rows = 5 - group.rank
        lengths = torch.tensor([0, rows])
        begin = group.rank * rows
        return llama3(
            group, **dict.fromkeys("qkv", torch.randn(rows, 2, 8)), cu_seqlens_q=lengths,
            cu_seqlens_k=lengths, max_seqlen_q=rows, max_seqlen_k=rows,
            local_k_slice=slice(begin, begin + rows),
        )  # fmt: skip

    with pytest.raises(ValueError, match=r"the ranks hold \[5, 4\] tokens"):
        simulate(2, uneven)
    with pytest.raises(ValueError, match="group is None, which is the world, and there is none"):
        ring_flash_attn.ring_flash_attn_func(q, q, q)


def test_core_attention_has_megatron_s_calls():
    torch.manual_seed(4)
    case = Case.random(batch=2, rows=18, causal=True, window_size=(7, 0), sinks=True)
    want = case.reference()

    def dense(group):
        module = CoreAttention(group, window_size=(7, 0), sinks=4)
        with torch.no_grad():
            module.sinks.copy_(case.sinks)
        rows = case.shardings(2)[0].rows(group.rank)
        q, k, v = (x[:, rows].transpose(0, 1) for x in (case.q, case.k, case.v))
        out = module(q, k, v, None, SimpleNamespace(name="causal"))
        out.sum().backward()
        assert module.sinks.grad.abs().sum() > 0
        return out.detach()

    parts = simulate(2, dense)
    assert parts[0].shape == (9, 2, 32)
    order = case.shardings(2)[0].order()
    got = torch.cat(parts).index_select(0, order).transpose(0, 1).unflatten(2, (4, 8))
    assert rms_error(got, want["out"]) <= BOUND

    cu = [0, 3, 9, 18]
    case = Case.random(rows=18, cu_seqlens=cu, per_document=True)
    lengths = torch.tensor(cu, dtype=torch.int32)
    params = SimpleNamespace(qkv_format="thd", cu_seqlens_q=lengths, cu_seqlens_kv=lengths.clone())

    def packed(group):
        rows = case.shardings(2)[0].rows(group.rank)
        q, k, v = (x[0, rows] for x in (case.q, case.k, case.v))
        return CoreAttention(group)(q, k, v, attn_mask_type="padding", packed_seq_params=params)

    order = case.shardings(2)[0].order()
    got = torch.cat(simulate(2, packed)).index_select(0, order).unflatten(1, (4, 8))
    assert rms_error(got, case.reference()["out"][0]) <= BOUND


def test_core_attention_refuses_masks_it_cannot_honour():
    q = torch.randn(4, 1, 2, 8)
    lengths = torch.tensor([0, 8])
    padded = SimpleNamespace(cu_seqlens_q=lengths, cu_seqlens_kv=lengths,
                             cu_seqlens_q_padded=lengths + 1)  # fmt: skip
    faults = [
        ((q > 0,), "attention_mask is a tensor"),
        ((None, None, q), "attention_bias is a tensor"),
        ((None, "padding"), r"attn_mask_type is 'padding'; expected one of causal"),
        ((None, "arbitrary"), "attn_mask_type is 'arbitrary'"),
        ((None, None, None, padded), "cu_seqlens_q_padded differs"),
        ((None, None, None, SimpleNamespace(qkv_format="sbhd")), "qkv_format is 'sbhd'"),
        ((None, None, None, SimpleNamespace(cp_group=q)), "cp_group is set"),
    ]
    for given, text in faults:
        with pytest.raises(ValueError, match=text):
            simulate(2, lambda group, given=given: CoreAttention(group)(q, q, q, *given))
