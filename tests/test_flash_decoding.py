"""Flash-decoding: split keys held to the oracle for every way to split them; the merge; memory that outlives a call."""

from __future__ import annotations

import functools
import itertools
import random
import time

import compiling
import dealing
import pytest
import torch

from kvlab import flash_decoding, flash_hopper, paged, reference, runtime, testing, zoo
from kvlab.flash import _tune
from kvlab.flash_decoding import _attention, _hopper_launch, _kernel, _launch, _splits, choose_splits, merge_states
from kvlab.generate import generate
from kvlab.paged import PagedCache
from kvlab.sampling import SamplingParams

ON = runtime.device()
ON_GPU = runtime.HAS_GPU and not runtime.INTERPRET
I32 = {"dtype": torch.int32, "device": ON}
INF = float("inf")
needs_triton = pytest.mark.skipif(not runtime.can_launch(), reason="no kernel can be launched here")
triton_and_torch = pytest.mark.parametrize("impl", ["torch", pytest.param("triton", marks=needs_triton)])
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not ON_GPU, reason="needs a GPU")]
attention = flash_decoding.attention
FILLS = (float("nan"), 1e4) if ON_GPU else (float("nan"),)


@pytest.fixture(autouse=True)
def nothing_is_timed(monkeypatch, tmp_path):
    """Tests take the first configuration, and leave the user's own file alone."""
    monkeypatch.setenv("KVLAB_TUNE", "0")
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path))


@pytest.fixture
def small_tiles(monkeypatch):
    """In the interpreter a tile of 16 keys, so that a short text has many."""
    monkeypatch.setattr(_splits, "_INTERPRETED", 16)


def in_two_launches(*args, **kwargs):
    """``attention`` with the merge in a kernel of its own."""
    plain = _launch.launch
    try:
        _launch.launch = functools.partial(plain, one_launch=False)
        return attention(*args, **kwargs)
    finally:
        _launch.launch = plain


def case_of(q_lens, kv_lens, **kwargs):
    return testing.AttentionCase(f"{q_lens} of {kv_lens}", q_lens, kv_lens, **{"head_dim": 16, **kwargs})


RAGGED = case_of((1, 1, 1, 1, 1), (1, 5, 17, 300, 0), num_heads=3, num_kv_heads=1, padding="garbage")
MIXED = case_of((1, 40, 3, 0, 1, 33), (50, 90, 35, 9, 0, 33), sinks=True)


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# --- the hostile table -----------------------------------------------------------------------------------------------

TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
FEW = [
    "page edge, decode", "group 5", "all scores 200", "window, softcap and sinks", "tree", "head size 80",
    "short and long together", "lengths 0 and 1", "page of one token", "table with garbage past the end",
    "decode and prefill in one batch", "more queries than keys", "head size 96 beside another head",
    "values of another size", "all scores -60000", "not causal", "window to both sides", "softcap", "sinks",
    "head size 128", "tree with a window",
]  # fmt: skip


@needs_triton
@TYPES
@pytest.mark.parametrize("case", testing.cases(ON), ids=lambda case: case.name)
def test_the_kernel_passes(case, dtype):
    if dtype != torch.float32 and not ON_GPU and case.name not in FEW[: None if dtype == torch.bfloat16 else 6]:
        pytest.skip("the interpreter is slow, and the types differ in rounding alone")
    before = runtime.launches.copy()
    bound = max(case.q_lens)
    testing.check_attention(attention, case, dtype=dtype, device=ON, impl="triton", fills=FILLS, max_seqlen_q=bound)
    made = runtime.launches - before
    assert made["merge_kernel"] == 0, "one launch is the default"
    rows = [n * (case.num_heads // case.num_kv_heads) for n in case.q_lens]
    assert (made["flash_decoding_kernel"] > 0) == (sum(rows) > 0)
    assert (made["flash_attention_kernel"] > 0) == (max(rows) > 64)


@needs_triton
@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("form", [attention, in_two_launches], ids=["one launch", "two launches"])
def test_the_kernel_passes_with_three_splits(small_tiles, form, name):
    case = next(case for case in testing.ATTENTION if case.name == name)
    before = runtime.launches.copy()
    testing.check_attention(form, case, device=ON, impl="triton", fills=FILLS, num_splits=3)
    made = runtime.launches - before
    assert made["merge_kernel"] == (made["flash_decoding_kernel"] if form is in_two_launches else 0)


@TYPES
@pytest.mark.parametrize("how", [{}, {"num_splits": 3}, {"split_size": 7}], ids=str)
@pytest.mark.parametrize("case", testing.cases(ON), ids=lambda case: case.name)
def test_the_torch_reference_passes(case, how, dtype):
    if dtype == torch.float16 and case.content == "-60000":
        pytest.skip("plain PyTorch in float16 cannot hold these scores before they are scaled")
    lse = dtype == torch.float32  # in low precision plain PyTorch has no better lse than its scores
    testing.check_attention(attention, case, dtype=dtype, device=ON, impl="torch", lse=lse, **how)


# --- every number of splits ------------------------------------------------------------------------------------------


def both_forms_pass_alike(**how):
    """Check the merge in one launch and in two, and that they give the same bits."""
    results = []

    def noted(form):
        def run(*args, **kwargs):
            results.append(form(*args, **kwargs))
            return results[-1]

        return run

    for form in (attention, in_two_launches):
        testing.check_attention(noted(form), RAGGED, device=ON, impl="triton", fills=FILLS, **how)
    half = len(FILLS)
    assert all(same(one, two) for one, two in zip(results[:half], results[half:], strict=True))


@needs_triton
@pytest.mark.parametrize("splits", [1, 2, 3, 4, 5, 6, 7, 8, 9, 40])
def test_every_number_of_splits(small_tiles, splits):
    """300 keys are 19 tiles of 16: more splits than tiles, and than tokens, are among these."""
    both_forms_pass_alike(num_splits=splits)


@needs_triton
@pytest.mark.parametrize("size", [64, 128, 320])
def test_every_split_size(size):
    both_forms_pass_alike(split_size=size)


OPTIONS = [
    {"options": {"window_size": (40, -1)}},
    {"options": {"window_size": (20, 5), "causal": False}, "sinks": True},
    {"options": {"softcap": 1.0}, "v_head_dim": 32},
    {"tree": True, "sinks": True},
    {"options": {"window_size": (7, -1), "softcap": 5.0}, "num_heads": 7, "num_kv_heads": 1},
    {"block_size": 1},
    {"block_size": 3, "sinks": True},
    {"block_size": 128, "strided": True},
]


@needs_triton
@pytest.mark.parametrize("extra", OPTIONS, ids=str)
@pytest.mark.parametrize("how", [{}, {"num_splits": 4}, {"split_size": 64}], ids=str)
def test_splits_with_every_option(small_tiles, how, extra):
    case = case_of((5, 1, 3, 1), (70, 33, 3, 150), **extra)
    form = in_two_launches if how == {"num_splits": 4} else attention
    testing.check_attention(form, case, device=ON, impl="triton", fills=FILLS, max_seqlen_q=5, **how)


@needs_triton
def test_random_batches_are_dealt_out_right(small_tiles, monkeypatch):
    """Which program reads what depends on all lengths at once."""
    rng = random.Random(0)
    for number in range(60 if ON_GPU else 8):
        batch = rng.choice([1, 2, 3, 8, 9, 17])
        kv_lens = tuple(rng.choice([0, 1, 15, 16, 17, rng.randint(1, 400 // batch + 20)]) for _ in range(batch))
        q_lens = tuple(rng.choice([0, 1, 1, 1, min(3, n or 1)]) for n in kv_lens)
        monkeypatch.setattr(_splits, "LONGEST_CHUNK", rng.choice([16, 32, 4096]))
        count = rng.choice([1, 2, 7])
        monkeypatch.setattr(_launch, "multiprocessors", lambda on, count=count: count)
        case = case_of(q_lens, kv_lens, num_heads=2, num_kv_heads=1)
        form = in_two_launches if number % 2 else attention
        testing.check_attention(form, case, device=ON, impl="triton", fills=FILLS, max_seqlen_q=3)


@needs_triton
def test_short_rows_and_many_splits():  # D5
    inputs = case_of((1, 1, 1, 1), (1, 5, 17, 300), head_dim=64).build(device=ON)
    one, eight = (inputs.call(attention, impl="triton", num_splits=n, return_lse=True) for n in (1, 8))
    for a, b in zip(one, eight, strict=True):
        assert not b.isnan().any()
        torch.testing.assert_close(a, b)


@triton_and_torch
def test_an_empty_request_keeps_no_old_memory(impl):  # D2
    inputs = case_of((1, 1), (0, 17)).build(device=ON)
    assert inputs.block_table[0, 0] == -1
    for how in ({}, {"num_splits": 3}):
        out = torch.full_like(inputs.q, float("nan"))
        _, lse = inputs.call(attention, impl=impl, out=out, return_lse=True, **how)
        assert not out[0].any()
        assert (lse[:, 0] == -INF).all()
        testing.assert_close(out, *(x[0] for x in (inputs.oracle(), inputs.plain())))


@triton_and_torch
@pytest.mark.parametrize("how", [{"num_splits": 4}, {"split_size": 64}], ids=str)
def test_large_logits(impl, how):  # D8
    for length in (40, 300):
        inputs = case_of((1,), (length,), content="200", num_heads=1, num_kv_heads=1).build(device=ON)
        out, lse = inputs.call(attention, impl=impl, return_lse=True, **how)
        v = paged.gather(inputs.v_cache, inputs.block_table, inputs.seqused_k, length)[0]
        torch.testing.assert_close(out, v.mean(0, keepdim=True))
        torch.testing.assert_close(lse, torch.full_like(lse, 200.0 + torch.tensor(float(length)).log().item()))


@needs_triton
@pytest.mark.parametrize("how", [{}, {"num_splits": 3}, {"split_size": 64}], ids=str)
def test_where_the_pages_lie_does_not_show(how):  # D9
    torch.manual_seed(0)
    length, heads, size = 200, 2, 16
    q, k, v = torch.randn(1, 2 * heads, size), torch.randn(length, heads, size), torch.randn(length, heads, size)
    outs = {}
    for block_size, shuffled in itertools.product((1, 8, 16, 128, 256), (False, True, True)):
        count = -(-length // block_size)
        order = torch.randperm(count + 3)[:count] if shuffled else torch.arange(count)
        caches = []
        for x in (k, v):
            cache = torch.full((count + 3, block_size, heads, size), float("nan"))
            full = torch.full((count * block_size, heads, size), float("nan"))
            full[:length] = x
            cache[order] = full.view(count, block_size, heads, size)
            caches.append(cache.to(ON))
        out = attention(
            q.to(ON), *caches, block_table=order.to(ON, torch.int32)[None], cu_seqlens_q=torch.tensor([0, 1], **I32),
            seqused_k=torch.tensor([length], **I32), max_seqlen_k=256, impl="triton", **how,
        )  # fmt: skip
        assert torch.equal(outs.setdefault(block_size, out), out), f"pages of {block_size} in another order"
    for out in outs.values():
        torch.testing.assert_close(out, outs[16])


@needs_triton
def test_the_same_bits_each_time():
    for dtype, how in ((torch.float32, {}), (torch.bfloat16, {"num_splits": 5}), (torch.bfloat16, {"split_size": 128})):
        inputs = RAGGED.build(device=ON, dtype=dtype)
        first = inputs.call(attention, impl="triton", return_lse=True, **how)
        for _ in range(100 if ON_GPU else 1):
            assert same(first, inputs.call(attention, impl="triton", return_lse=True, **how))


@needs_triton
@pytest.mark.skipif(ON_GPU, reason="programs arrive in any order there anyway")
def test_whoever_comes_last_merges_in_the_same_order(small_tiles, monkeypatch):
    inputs = RAGGED.build()
    for how in ({}, {"num_splits": 6}):
        want = inputs.call(attention, impl="triton", return_lse=True, **how)
        turned = testing.planted(
            _kernel.flash_decoding_kernel,
            [
                ("(tl.program_id(0) % kv_heads)", "((tl.num_programs(0) - 1 - tl.program_id(0)) % kv_heads)"),
                (", tl.program_id(0) // kv_heads", ", (tl.num_programs(0) - 1 - tl.program_id(0)) // kv_heads"),
            ],
        )
        with monkeypatch.context() as patched:
            patched.setattr(_launch, "flash_decoding_kernel", turned)
            assert same(want, inputs.call(attention, impl="triton", return_lse=True, **how))


# --- alone and in company --------------------------------------------------------------------------------------------


def alone(inputs, b):
    """The inputs of one sequence of a batch, and its rows."""
    return inputs.alone(b), slice(*inputs.cu_seqlens_q[b : b + 2].tolist())


COMPANIES = [
    case_of((1, 1, 1, 1, 1), (70, 300, 5, 17, 0), num_heads=3, num_kv_heads=1),
    case_of((1, 5, 3), (150, 60, 33), num_heads=2, num_kv_heads=1, sinks=True, options={"window_size": (60, -1)}),
    case_of((1, 40, 2), (150, 60, 133), num_heads=2, num_kv_heads=1, options={"softcap": 3.0}),
    case_of((4, 9), (150, 9), num_heads=2, num_kv_heads=1, tree=True),
]


@needs_triton
@TYPES
@pytest.mark.parametrize("case", COMPANIES, ids=lambda case: case.name)
def test_a_split_size_gives_the_same_bits_in_any_company(case, dtype):
    if dtype == torch.float16 and not ON_GPU:
        pytest.skip("the interpreter is slow, and the types differ in rounding alone")
    inputs = case.build(device=ON, dtype=dtype)
    size = max(64, _attention._fixed_tile(inputs.q, inputs.v_cache))
    out, lse = inputs.call(attention, impl="triton", split_size=size, return_lse=True)
    for b in range(len(case.q_lens)):
        one, rows = alone(inputs, b)
        for bounds in ({}, {"max_seqlen_q": max(one.q.shape[0], 1)}, {"max_seqlen_q": 64, "max_seqlen_k": 320}):
            if rows.start == rows.stop or (rows.stop - rows.start) * (case.num_heads // case.num_kv_heads) > 64:
                continue
            mine = one.call(attention, impl="triton", split_size=size, return_lse=True, **bounds)
            assert same(mine, (out[rows], lse[:, rows])), f"sequence {b} with {bounds}"


@needs_triton
def test_the_balanced_rule_does_depend_on_the_company(small_tiles, monkeypatch):
    """Otherwise the test above would prove nothing."""
    monkeypatch.setattr(_launch, "multiprocessors", lambda on: 4)
    inputs = case_of((1, 1), (300, 300), num_heads=1, num_kv_heads=1).build(device=ON)
    out, one = inputs.call(attention, impl="triton"), alone(inputs, 0)[0]
    assert not torch.equal(one.call(attention, impl="triton"), out[:1])


@needs_triton
def test_long_rows_and_short_ones_in_one_call():
    """64 rows are this kernel's, 65 are flash attention's; every row is written once."""
    before = runtime.launches.copy()
    testing.check_attention(attention, MIXED, device=ON, impl="triton", fills=FILLS)
    made = runtime.launches - before
    assert made["flash_decoding_kernel"] == made["flash_attention_kernel"] == len(FILLS)
    for group, few in ((2, 32), (1, 64), (5, 12), (64, 1)):
        case = case_of((few, few + 1), (few, few + 5), num_heads=group, num_kv_heads=1)
        testing.check_attention(attention, case, device=ON, impl="triton", fills=FILLS)
        inputs = case.build(device=ON)
        for kernel, rows in (("flash_attention_kernel", slice(0, few)), ("flash_decoding_kernel", slice(few, None))):
            out = torch.full_like(inputs.q, 7.0)
            skip_launch(kernel, lambda out=out, inputs=inputs: inputs.call(attention, impl="triton", out=out))
            assert (out[rows] != 7.0).all(), f"{kernel} alone is left out: the others' rows are written"
            rest = slice(few, None) if rows.start == 0 else slice(0, few)
            assert (out[rest] == 7.0).all(), f"{kernel} is left out and its rows are written all the same"


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("impl", [None, "triton"])
def test_prompts_and_decodes_in_one_call_on_a_gpu(impl):
    """Long rows by whatever flash.attention takes unasked, the Hopper kernel where there is one."""
    q_lens, kv_lens = (1, 700, 1, 0, 4, 130, 16, 17), (5000, 900, 17, 3, 2000, 130, 300, 17)
    for size, heads in ((128, (32, 8)), (64, (8, 2)), (128, (6, 6))):
        case = case_of(q_lens, kv_lens, head_dim=size, num_heads=heads[0], num_kv_heads=heads[1])
        testing.check_attention(attention, case, device=ON, dtype=torch.bfloat16, impl=impl, max_seqlen_q=700)


def skip_launch(name, run):
    """Run something while one kernel does nothing."""
    from kvlab.flash import _kernel as flash_kernel

    module = flash_kernel if name == "flash_attention_kernel" else _launch
    kernel = getattr(module, name)

    class Nothing:
        fn = kernel.fn

        def __getitem__(self, grid):
            return lambda *_, **__: None

    try:
        setattr(module, name, Nothing())
        run()
    finally:
        setattr(module, name, kernel)


@needs_triton
def test_a_group_wider_than_a_tile():
    case = case_of((1, 2), (37, 80), num_heads=70, num_kv_heads=1)
    before = runtime.launches["flash_decoding_kernel"]
    testing.check_attention(attention, case, device=ON, impl="triton", fills=FILLS)
    assert runtime.launches["flash_decoding_kernel"] == before


@needs_triton
def test_large_heads_of_float32_have_smaller_tiles():
    case = case_of((17, 8), (40, 33), head_dim=160)
    before = runtime.launches.copy()
    testing.check_attention(attention, case, device=ON, impl="triton", fills=FILLS, num_splits=2)
    assert (runtime.launches - before)["flash_attention_kernel"] == len(FILLS)


@needs_triton
@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-30])
def test_any_scale(scale):
    case = case_of((3, 1), (37, 18), options={"softmax_scale": scale})
    testing.check_attention(attention, case, device=ON, impl="triton", fills=FILLS, num_splits=2)


@needs_triton
def test_a_length_past_the_bound_is_read_whole(small_tiles):
    """A bound that is too small costs speed, and nothing else: the last chunk takes what is left."""
    inputs = case_of((1, 1), (300, 40)).build(device=ON)
    want = inputs.oracle()[0]
    for how in ({"split_size": 64}, {}, {"num_splits": 2}):
        out = inputs.call(attention, impl="triton", max_seqlen_k=64, **how)
        testing.assert_close(out, want, inputs.plain()[0])


# --- merging ---------------------------------------------------------------------------------------------------------


def states(*shape, dtype=torch.float32, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=rng).to(ON, dtype), 3 * torch.randn(*shape[:-1], generator=rng).to(ON)


@triton_and_torch
@pytest.mark.parametrize("parts", [1, 2, 3, 9, 33])
def test_merging_nothing_gives_nothing(impl, parts):  # D1
    outs, lses = torch.full((parts, 3, 4, 16), float("nan"), device=ON), torch.full((parts, 3, 4), -INF, device=ON)
    out, lse = merge_states(outs, lses, impl=impl)
    assert not out.any()
    assert (lse == -INF).all()


@triton_and_torch
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parts", [1, 2, 3, 20])
def test_one_part_comes_back_bit_for_bit(impl, dtype, parts):  # D1
    for place in {0, parts - 1, parts // 2}:
        outs, lses = states(parts, 5, 3, 24, dtype=dtype)
        want = outs[place].clone(), lses[place].clone()
        empty = torch.arange(parts, device=ON) != place
        outs[empty], lses[empty] = float("nan"), -INF
        assert same(merge_states(outs, lses, impl=impl), want)


@triton_and_torch
def test_prefix_and_suffix(impl):  # D4
    lses = torch.tensor([[3.0], [1.0]], device=ON).log()
    out, lse = merge_states(torch.tensor([[[0.0]], [[1.0]]], device=ON), lses, impl=impl)
    torch.testing.assert_close(out, torch.tensor([[0.25]], device=ON))
    assert abs(lse.item() - 1.386294) < 1e-6


@triton_and_torch
def test_merging_is_what_attention_over_all_keys_does(impl):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 4, 16), torch.randn(50, 2, 16), torch.randn(50, 2, 24)
    want, want_lse = reference.attend_one(q, k, v, causal=False)
    pieces = [slice(0, 7), slice(7, 8), slice(8, 31), slice(31, 50)]
    parts = [reference.attend_one(q, k[p], v[p], causal=False, dtype=torch.float32) for p in pieces]
    outs, lses = torch.stack([o for o, _ in parts]).to(ON), torch.stack([s.T for _, s in parts]).to(ON)
    plain = reference.attend_one(q, k, v, causal=False, dtype=torch.float32)
    out, lse = merge_states(outs, lses, impl=impl)
    testing.assert_close(out, want, plain[0])
    testing.assert_close(lse, want_lse.T, plain[1].T)


@triton_and_torch
def test_merging_in_any_order_and_in_groups(impl):
    outs, lses = states(7, 11, 2, 40)
    whole = merge_states(outs, lses, impl=impl)
    for order in ([3, 1, 6, 0, 2, 5, 4], [6, 5, 4, 3, 2, 1, 0]):
        torch.testing.assert_close(merge_states(outs[order], lses[order], impl=impl), whole)
    for cut in (1, 3, 6):
        groups = [merge_states(outs[:cut], lses[:cut], impl=impl), merge_states(outs[cut:], lses[cut:], impl=impl)]
        stacked = (torch.stack(x) for x in zip(*groups, strict=True))
        torch.testing.assert_close(merge_states(*stacked, impl=impl), whole)


@needs_triton
@pytest.mark.parametrize("shape", [(1, 1), (2, 1, 256), (40, 3, 5, 80), (3, 7, 128), (2, 0, 16), (9, 4, 1)], ids=str)
def test_the_merge_kernel_is_the_torch_one(shape):
    outs, lses = states(*shape)
    before = runtime.launches["merge_states_kernel"]
    torch.testing.assert_close(merge_states(outs, lses, impl="triton"), merge_states(outs, lses, impl="torch"))
    assert runtime.launches["merge_states_kernel"] == before + (0 not in shape)


def test_a_log_sum_exp_in_double_precision():
    outs, lses = torch.ones(2, 3, 4), torch.tensor([[-6e4, 0.0, -INF], [-6e4 + 1e-6, 1.0, -INF]], dtype=torch.float64)
    out, lse = merge_states(outs, lses)
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float64)
    torch.testing.assert_close(lse, lses.logsumexp(0))
    assert merge_states(outs.double(), lses)[0].dtype == torch.float64


@pytest.mark.parametrize(
    ("outs", "lses"),
    [
        (torch.zeros(2, 3, 4), torch.zeros(2, 4)), (torch.zeros(2, 3, 4), torch.zeros(3)),
        (torch.zeros(0, 3, 4), torch.zeros(0, 3)), (torch.tensor(1.0), torch.tensor(1.0)),
        (torch.zeros(2, 3, 4).int(), torch.zeros(2, 3)), (torch.zeros(2, 3, 4), torch.zeros(2, 3).half()),
        (torch.zeros(2, 3, 4, device="meta"), torch.zeros(2, 3)),
        (torch.zeros(2, 3, 4, requires_grad=True), torch.zeros(2, 3)),
    ],
    ids=str,
)  # fmt: skip
def test_merging_refuses_what_does_not_fit(outs, lses):
    with pytest.raises(ValueError, match=r"must be|requires grad"):
        merge_states(outs, lses)
    with pytest.raises(ValueError, match="impl is"):
        merge_states(torch.zeros(2, 3, 4), torch.zeros(2, 3), impl="cuda")


@needs_triton
def test_the_merge_kernel_takes_no_double_precision():
    with pytest.raises(ValueError, match="neither may be float64"):
        merge_states(torch.zeros(2, 3, 4, device=ON), torch.zeros(2, 3, device=ON).double(), impl="triton")


# --- how many splits -------------------------------------------------------------------------------------------------


def dealt(tiles, wave, limit, longest):
    """Splits of each sequence, as ``deal_chunks`` finds them on the device."""
    chunk = max(1, -(-sum(tiles) // limit), min(-(-sum(tiles) // wave), longest))
    return [max(1, min(limit, -(-n // chunk))) for n in tiles], chunk


def test_choose_splits():
    """On 132 multiprocessors with 8 KV heads, 33 chunks a head give every one two programs."""
    assert choose_splits(1, 8, 4, 131072, 132) == (33, 33)
    assert choose_splits(1, 8, 4, 4096, 132)[0] == 33
    assert choose_splits(1, 8, 4, 640, 132)[0] == 10, "no chunk is smaller than a tile"
    assert choose_splits(1, 8, 64, 4096, 132)[0] == 8, "many rows want longer chunks: each is written and read"
    assert choose_splits(32, 8, 4, 32768, 132) == (33, 256), "32 sequences of 8 chunks of 4096"
    assert choose_splits(1000, 8, 4, 131072, 132)[1] == 264
    assert choose_splits(1, 1, 16, 131072, 132)[0] == 264
    assert choose_splits(3, 8, 4, 0, 132) == (1, 1)


@pytest.mark.parametrize("name", ["batch", "kv_heads", "rows", "multiprocessors", "tile", "max_seqlen_k"])
def test_choose_splits_refuses(name):
    good = {"batch": 1, "kv_heads": 1, "rows": 1, "max_seqlen_k": 9, "multiprocessors": 1, "tile": 16}
    with pytest.raises(ValueError, match=rf"^{name} is "):
        choose_splits(**{**good, name: -1})


def test_every_chunk_has_a_program():
    rng = random.Random(1)
    for _ in range(2000):
        batch, heads, units = rng.randint(1, 200), rng.choice([1, 2, 8, 32]), rng.choice([1, 4, 132])
        longest = rng.choice([1, 100, 4000, 140000])
        tiles = [rng.randint(0, rng.randint(0, longest)) for _ in range(batch)]
        bound = 64 * max(tiles)
        for rows in (1, 64):
            splits = _splits.plan(0, None, batch=batch, kv_heads=heads, rows=rows, max_seqlen_k=bound,
                                  multiprocessors=units, tile=64)  # fmt: skip
            counts, _ = dealt(tiles, splits.wave, splits.limit, splits.longest)
            assert sum(counts) <= splits.programs == splits.limit + batch


def test_one_long_sequence_among_thirty_short_ones():
    tiles = [2048] + [16] * 30
    wave, limit = choose_splits(31, 8, 4, 131072, 132)
    counts, chunk = dealt(tiles, wave, limit, 64)
    assert counts[0] >= 32
    assert set(counts[1:]) == {1}
    assert chunk <= 64


@needs_triton
def test_the_device_tells_how_it_deals():
    kv_lens = (500, 16, 3, 0, 40, 170)
    starts, used = (torch.tensor(x, **I32) for x in (range(7), kv_lens))
    counts = torch.full((8,), -1, **I32)
    sizes = {"GROUP": 4, "MAX_ROWS": 64, "N": 16, "LONGEST": 256, "BATCH": 8}
    _kernel.deal_chunks_kernel[(1,)](starts, used, counts, 6, 9, 12, **sizes)
    assert counts.tolist() == [*dealt([-(-n // 16) for n in kv_lens], 9, 12, 256)[0], 0, 0]


@needs_triton
def test_the_device_deals_as_the_host_would(small_tiles, monkeypatch):
    """Which slots of the workspace are written says how often a sequence was split."""
    monkeypatch.setattr(_launch, "multiprocessors", lambda on: 4)
    kv_lens = (500, 16, 3, 0, 40, 170)
    inputs = case_of((1,) * 6, kv_lens, num_heads=1, num_kv_heads=1).build(device=ON)
    _launch._buffers.clear()
    seen = []

    def spy(*args):
        part, stat, arrived = _workspace(*args)
        stat.fill_(float("nan"))
        seen.append((args[1], stat, arrived))
        return part, stat, arrived

    _workspace = _launch.workspace
    monkeypatch.setattr(_launch, "workspace", spy)
    out = inputs.call(attention, impl="triton", max_seqlen_q=1, max_seqlen_k=512)
    testing.assert_close(out, inputs.oracle()[0], inputs.plain()[0])
    (splits, stat, arrived), tile = seen[0], 64 if ON_GPU else 16
    counts, _ = dealt([-(-n // tile) for n in kv_lens], splits.wave, splits.limit, splits.longest)
    peaks = stat[: 2 * splits.programs * 16].view(splits.programs, 2, 16)[:, 0, 0]  # 16 rows a tile, of which one lives
    want = [n > 1 for n in counts for _ in range(n)]
    assert max(counts) > 2
    assert (~peaks.isnan()).tolist() == want + [False] * (splits.programs - len(want))
    assert not arrived.any(), "every counter is 0 again"


# --- memory that outlives a call -------------------------------------------------------------------------------------


@needs_triton
def test_memory_is_kept_and_grown():
    _launch._buffers.clear()
    small, large = RAGGED.build(device=ON), case_of((1,) * 20, (300,) * 20).build(device=ON)
    small.call(attention, impl="triton", num_splits=4)
    ((room, arrived),) = _launch._buffers.values()
    want = small.call(attention, impl="triton", num_splits=4)
    ((again, counters),) = _launch._buffers.values()
    assert again is room
    assert counters is arrived
    large.call(attention, impl="triton", num_splits=4)
    ((grown, counters),) = _launch._buffers.values()
    assert grown.numel() > room.numel()
    assert counters.numel() >= 40
    assert torch.equal(small.call(attention, impl="triton", num_splits=4), want)
    assert not counters.any()


def test_a_captured_launch_has_counters_of_its_own(monkeypatch):
    monkeypatch.setattr(_launch, "_slabs", {ON: (torch.zeros(100, dtype=torch.int32), 0)})
    one, two, three = (_launch._captured_counters(ON, 40) for _ in range(3))
    assert len({x.data_ptr() for x in (one, two, three)}) == 3
    assert two.data_ptr() - one.data_ptr() == 160
    assert not three.any()
    monkeypatch.setattr(_launch, "_slabs", {})
    assert _launch._captured_counters(ON, 40).numel() == 40


def replayed_while_lengths_grow(form, **how):
    """Capture a call, replay it at other lengths, and hold each result to the oracle and to an eager call."""
    case = case_of((1,) * 4, (1000, 700, 300, 64), head_dim=128, num_heads=32, num_kv_heads=8)
    inputs = case.build(device=ON, dtype=torch.bfloat16)
    full = inputs.seqused_k.clone()
    out = torch.empty_like(inputs.q)
    bounds = {"max_seqlen_q": 1, "max_seqlen_k": 1024, **how}
    inputs.call(form, out=out, **bounds)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inputs.call(form, out=out, **bounds)
    for lengths in ([1, 1, 1, 1], [5, 0, 17, 64], [64, 65, 66, 63], [500, 700, 1, 33], full.tolist()):
        inputs.seqused_k.copy_(torch.tensor(lengths, **I32))
        out.fill_(float("nan"))
        graph.replay()
        testing.assert_close(out, inputs.oracle()[0], inputs.plain()[0])
        assert torch.equal(out, inputs.call(form, **bounds)), "an eager call gives other bits"


@pytest.mark.parametrize("form", [attention, in_two_launches], ids=["one launch", "two launches"])
@pytest.mark.parametrize("how", [{}, {"num_splits": 6}, {"split_size": 256}], ids=str)
@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_a_captured_call_replays_while_lengths_grow(form, how):
    replayed_while_lengths_grow(form, impl="triton", **how)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_two_captured_calls_do_not_share_memory():
    case = case_of((1,) * 8, (4000,) * 8, head_dim=128, num_heads=32, num_kv_heads=8)
    inputs = case.build(device=ON, dtype=torch.bfloat16)
    want = inputs.call(attention, impl="triton", max_seqlen_q=1)
    graphs, outs = [torch.cuda.CUDAGraph() for _ in range(2)], [torch.empty_like(want) for _ in range(2)]
    for graph, out in zip(graphs, outs, strict=True):
        with torch.cuda.graph(graph):
            inputs.call(attention, impl="triton", max_seqlen_q=1, out=out)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(50):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, want) for out in outs)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_a_warm_call_allocates_nothing_and_waits_for_nothing():
    inputs = RAGGED.build(device=ON, dtype=torch.bfloat16)
    out, lse_free = torch.empty_like(inputs.q), {"impl": "triton", "max_seqlen_q": 1, "max_seqlen_k": 512}
    for how in ({}, {"num_splits": 5}, {"split_size": 128}):
        inputs.call(attention, out=out, **lse_free, **how)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            inputs.call(attention, out=out, **lse_free, **how)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("block_size", [1, 16, 64, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_long_contexts(block_size, dtype):
    """Several splits of several chunks, and one long sequence among short ones."""
    lengths = (20000, *range(1, 3000, 211))
    for heads, size, q_len in (((32, 8), 128, 1), ((28, 4), 64, 5), ((32, 1), 128, 1), ((6, 2), 256, 3)):
        case = case_of((q_len,) * len(lengths), tuple(max(n, q_len) for n in lengths), num_heads=heads[0],
                       num_kv_heads=heads[1], head_dim=size, block_size=block_size)  # fmt: skip
        testing.check_attention(attention, case, device=ON, dtype=dtype, impl="triton", max_seqlen_q=q_len)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_tuning_on_a_gpu(monkeypatch):
    monkeypatch.setenv("KVLAB_TUNE", "1")
    inputs = case_of((1,) * 4, (1000, 700, 300, 64), head_dim=128).build(device=ON, dtype=torch.bfloat16)
    before = runtime.launches["flash_decoding_kernel"]
    out = inputs.call(attention, impl="triton", max_seqlen_q=1)
    assert runtime.launches["flash_decoding_kernel"] == before + 1, "a trial counts as a launch"
    testing.assert_close(out, inputs.oracle()[0], inputs.plain()[0])
    assert _tune.path().exists()
    tiles = inputs.call(flash_decoding.explain, impl="triton", max_seqlen_q=1).config
    assert torch.equal(inputs.call(attention, impl="triton", max_seqlen_q=1), out)
    assert tiles == inputs.call(flash_decoding.explain, impl="triton", max_seqlen_q=1).config


# --- planted bugs ----------------------------------------------------------------------------------------------------

KERNEL_BUGS = {
    "last key left out": ("(k_index < high)", "(k_index < high - 1)"),
    "a row sees one key too few": ("visible(q_index, k_index", "visible(q_index - 1, k_index"),
    "stale values read": (
        "v_rows[:, None] + dv[None, :], there[:, None] & (dv < DV)[None, :])",
        "v_rows[:, None] + dv[None, :], (dv < DV)[None, :])",
    ),
    "nothing shrunk": ("total * shrink + tl.sum(weight, axis=1)", "total + tl.sum(weight, axis=1)"),
    "sums shrunk, values not": ("acc * shrink[:, None])\n        peak", "acc)\n        peak"),
    "wrong head map": ("kv_head * GROUP + rows % GROUP", "kv_head + rows % GROUP * kv_heads"),
    "page of another sequence": ("table_ptr += seq.to(tl.int64) * table_row", "pass"),
    "positions from the wrong end": ("key_bits, q_len, kv_len, CAUSAL", "key_bits, 0, kv_len, CAUSAL"),
    "the last but one merges": ("== splits - 1:", "== splits - 2:"),
    "counter not set back": ("tl.store(counter, 0)", "pass"),
    "counter of another head": ("arrived_ptr + seq * kv_heads + kv_head", "arrived_ptr + seq * kv_heads"),
    "cap forgotten": ("scores = cap(scores * scale, softcap)", "scores = scores * scale"),
    "first slot taken for the sequence's": ("sink_ptr, slot - split, splits", "sink_ptr, slot, splits"),
    "sink counted once a split": (
        "    if splits == 1:\n",
        "    if sink_ptr is not None:\n"
        "        total += tl.exp2(tl.load(sink_ptr + head, mask=live, other=0.0) * LOG2E - peak)\n"
        "    if splits == 1:\n",
    ),
    "masked keys weighed": ("scores = tl.where(seen, scores, float(\"-inf\"))", "pass"),
}  # fmt: skip

OTHER_BUGS = [
    ("merge_splits", {
        "peaks of other splits ignored": ("weight[:, :, None] * part", "part"),
        "nothing shrunk in the merge": ("acc = acc * shrink[:, None] +", "acc = acc +"),
        "the last splits forgotten": ("range(0, splits, S,", "range(0, splits - S, S,"),
        "an empty split is NaN": ("tl.where(higher == float(\"-inf\"), 0.0, higher)", "higher"),
        "totals forgotten": ("tl.sum(weight * totals, axis=0)", "tl.sum(weight, axis=0)"),
    }),
    ("write_rows", {
        "sink forgotten": ("total * shrink + tl.exp2(sink - stable), stable", "total * shrink, stable"),
        "lse in base 2": ("peak * LN2", "peak"),
        "sink not in base 2": ("other=float(\"-inf\")) * LOG2E", "other=float(\"-inf\"))"),
    }),
    ("split_range", {
        "a tile forgotten": ("+ (split < rest).to(tl.int32)", ""),
        "a tile read twice": ("+ (split < rest).to(tl.int32)", "+ 1"),
        "chunk off by one": ("(low // chunk + split) * (chunk // N)", "(low // chunk + split) * (chunk // N) + 1"),
    }),
    ("find_split", {"one sequence too far": ("before = ends <= slot", "before = ends < slot")}),
    ("count_splits", {"nobody writes an empty row": ("tl.maximum(tl.minimum(splits, limit), 1)",
                                                     "tl.minimum(splits, limit)")}),
    ("write_part", {"part of another head": ("* kv_heads + kv_head", "* kv_heads")}),
]  # fmt: skip


def with_kernel(kernel):
    """``attention`` launching another kernel, with counters that no earlier bug has left at odds."""

    def variant(*args, **kwargs):
        plain = _launch.flash_decoding_kernel
        _launch._buffers.clear()
        try:
            _launch.flash_decoding_kernel = kernel
            return attention(*args, **{"impl": "triton", **kwargs})
        finally:
            _launch.flash_decoding_kernel = plain
            _launch._buffers.clear()

    return variant


@needs_triton
@pytest.mark.skipif(runtime.HAS_GPU, reason="a stale or stray read may end the process on a GPU")
def test_bugs_in_the_kernel_are_caught(small_tiles, monkeypatch):
    monkeypatch.setattr(_launch, "multiprocessors", lambda on: 5)
    few = [  # what is quick and catches most comes first
        (case_of((1,), (90,), num_heads=1, num_kv_heads=1), {"split_size": 32}),
        (case_of((1, 2), (70, 7), sinks=True, options={"softcap": 1.0}), {"num_splits": 3}),
        (case_of((3, 1, 1, 0, 40), (60, 7, 0, 9, 41), padding="garbage"), {}),
        (case_of((1, 40), (450, 33), num_heads=1, num_kv_heads=1), {"num_splits": 20}),
        (case_of((1,), (150,), options={"window_size": (60, -1)}), {"split_size": 32}),
    ]

    def check(form):
        for case, how in few:
            testing.check_attention(form, case, fills=FILLS, **how)
            if how.get("num_splits") == 3:  # a second call meets what the first has left
                inputs = case.build()
                results = [inputs.call(form, return_lse=True, **how) for _ in range(2)]
                assert same(*results)

    def check_twice(form):
        """Calls that share their counters."""
        inputs = few[1][0].build()
        _launch._buffers.clear()
        plain = _launch.flash_decoding_kernel
        try:
            _launch.flash_decoding_kernel = form
            for _ in range(2):
                out = inputs.call(attention, impl="triton", num_splits=3, out=torch.full_like(inputs.q, float("nan")))
                testing.assert_close(out, inputs.oracle()[0], inputs.plain()[0])
        finally:
            _launch.flash_decoding_kernel = plain
            _launch._buffers.clear()

    kernel = _kernel.flash_decoding_kernel
    variants = {name: testing.planted(kernel, bug) for name, bug in KERNEL_BUGS.items()}
    for function, bugs in OTHER_BUGS:
        for name, bug in bugs.items():
            variants[name] = testing.planted(getattr(_kernel, function), bug, give="flash_decoding_kernel")
    check_twice(kernel)
    with pytest.raises(AssertionError):
        check_twice(variants.pop("counter not set back"))
    check(with_kernel(kernel))
    testing.assert_caught(check, attention, {name: with_kernel(bug) for name, bug in variants.items()})


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU with room for pages far apart")
def test_a_32_bit_offset_is_caught():
    case = next((case for case in testing.cases(ON) if case.far), None)
    if case is None:
        pytest.skip("not enough memory")
    testing.check_attention(attention, case, device=ON, impl="triton", num_splits=2)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("q", torch.zeros(2, 64)), ("q", torch.zeros(2, 3, 64)), ("q", torch.zeros(2, 4, 64, dtype=torch.bfloat16)),
        ("q", torch.zeros(2, 4, 64, requires_grad=True)), ("v_cache", torch.zeros(5, 16, 2, 64)),
        ("block_table", torch.zeros(1, 2, dtype=torch.int64)), ("cu_seqlens_q", torch.zeros(3, dtype=torch.int32)),
        ("seqused_k", torch.zeros(1)), ("sinks", torch.zeros(3)), ("tree_mask", torch.zeros(2, dtype=torch.int32)),
        ("out", torch.zeros(2, 4, 32)), ("softcap", -1.0), ("window_size", (-2, 0)), ("softmax_scale", float("inf")),
        ("softmax_scale", 1e39), ("softcap", 10**400), ("causal", None), ("causal", 1), ("q", [1.0]),
        ("sinks", [0.0] * 4), ("block_table", [[0, 1]]),
        ("out", torch.zeros(400).as_strided((2, 4, 64), (4, 64, 1))), ("max_seqlen_q", 1),
        ("max_seqlen_k", -1), ("impl", "cuda"), ("num_splits", -1),
        ("num_splits", 2.0), ("num_splits", True), ("num_splits", None), ("split_size", 0), ("split_size", -64),
        ("split_size", 64.0), ("split_size", True),
    ],
    ids=str,
)  # fmt: skip
@triton_and_torch
def test_attention_refuses_what_does_not_fit(name, value, impl):
    inputs = testing.AttentionCase("plain", (2,), (20,)).build()
    tensors = {n: getattr(inputs, n) for n in ("q", "k_cache", "v_cache", "block_table", "cu_seqlens_q", "seqused_k")}
    arguments = {**tensors, "impl": impl, name: value}
    q, k, v = (arguments.pop(n) for n in ("q", "k_cache", "v_cache"))
    out = arguments.setdefault("out", torch.full((2, 4, 64), 7.0))
    before = runtime.launches.copy()
    for function in (attention, flash_decoding.explain):
        if function is flash_decoding.explain and arguments.pop("out") is None:
            continue
        if name == "out" and function is flash_decoding.explain:
            continue
        with pytest.raises(ValueError, match=r"must be|requires grad"):
            function(q, k, v, **arguments)
    assert runtime.launches == before
    assert name == "out" or (out == 7.0).all()


@triton_and_torch
def test_one_rule_at_a_time(impl):
    inputs = RAGGED.build(device=ON)
    with pytest.raises(ValueError, match="num_splits is 2; with a split_size"):
        inputs.call(attention, impl=impl, num_splits=2, split_size=64)


@needs_triton
def test_what_the_kernels_do_not_take():
    with pytest.raises(ValueError, match="256 at most"):
        case_of((1,), (3,), head_dim=264).build(device=ON).call(attention, impl="triton")
    inputs = case_of((1,), (3,)).build(device=ON, dtype=torch.float64)
    with pytest.raises(ValueError, match="float64"):
        inputs.call(attention, impl="triton")
    assert inputs.call(attention, impl="torch", num_splits=2).isfinite().all()
    with pytest.raises(ValueError, match="multiple of the tile"):
        case_of((1,), (3,)).build(device=ON).call(attention, impl="triton", split_size=24)


@triton_and_torch
def test_contents_are_checked_when_asked(monkeypatch, impl):
    monkeypatch.setattr(runtime, "CHECK", True)
    inputs = RAGGED.build(device=ON)
    inputs.seqused_k = torch.tensor([1, 5, 17, 9999, 0], **I32)
    with pytest.raises(ValueError, match="seqused_k"):
        inputs.call(attention, impl=impl)
    inputs = case_of((3, 2), (7, 5), tree=True).build(device=ON)
    inputs.call(attention, impl=impl)
    inputs.kwargs["tree_mask"][3] |= 1 << 2  # of two new tokens the third
    with pytest.raises(ValueError, match=r"tree_mask\[3\] is 0x\w+; its bits must be among the lowest 2"):
        inputs.call(attention, impl=impl)


@triton_and_torch
def test_nothing_to_do(impl):
    caches = torch.zeros(3, 16, 2, 16, device=ON)
    for batch, total in ((0, 0), (2, 0)):
        out, lse = attention(
            torch.zeros(total, 4, 16, device=ON), caches, caches, block_table=torch.zeros(batch, 1, **I32),
            cu_seqlens_q=torch.zeros(batch + 1, **I32), seqused_k=torch.zeros(batch, **I32), impl=impl, return_lse=True,
        )  # fmt: skip
        assert (out.shape, lse.shape) == ((total, 4, 16), (4, total))


@needs_triton
def test_more_sequences_than_a_program_looks_at(monkeypatch):
    monkeypatch.setattr(_splits, "MAX_BATCH", 3)
    testing.check_attention(attention, RAGGED, device=ON, impl="triton", fills=FILLS)


# --- the choice ------------------------------------------------------------------------------------------------------


def test_a_reader_is_told_what_runs():
    inputs = case_of((1, 1), (300, 40)).build()
    explain = functools.partial(inputs.call, flash_decoding.explain)
    assert str(explain()) == "torch: tensors on the CPU"
    assert explain(impl="torch").why == "asked for"
    with pytest.raises(ValueError, match="must be"):
        explain(impl="flash")
    if runtime.can_launch("cpu"):
        choice = explain(impl="triton")
        assert choice.impl == "triton"
        assert set(choice.config) == {"M", "N", "num_warps", "num_stages"}
        assert "split-KV, balanced, " in str(choice)
        assert explain(impl="triton", num_splits=3).why.endswith("split-KV, 3 splits a sequence")
        assert explain(impl="triton", split_size=128).why.endswith("split-KV, chunks of 128 keys")
        assert "more than 32 new tokens by flash.attention" in explain(impl="triton", max_seqlen_q=99).why
        wide = case_of((1,), (3,), num_heads=65, num_kv_heads=1).build()
        assert "flash.attention takes all" in wide.call(flash_decoding.explain, impl="triton").why


ROOM = {(8, 0): 163 * 1024, (8, 6): 99 * 1024, (8, 9): 99 * 1024, (9, 0): 227 * 1024, (12, 0): 99 * 1024}


def test_every_list_of_tiles_is_short_and_fits():
    for capability, width, v_width, itemsize, rows in itertools.product(
        ROOM, (16, 64, 128, 256), (16, 64, 128, 256), (2, 4), (0, 1, 16, 17, 64, 1000)
    ):
        kind = {"capability": capability, "shared": ROOM[capability], "width": width, "v_width": v_width}
        found = _splits.candidates(**kind, itemsize=itemsize, rows=rows)
        most = _splits.max_rows(itemsize, max(width, v_width))
        assert 1 <= len(found) <= _tune.MAX_CONFIGS
        assert len(set(found)) == len(found)
        assert {c.M for c in found} == {max(16, min(most, 1 << max(rows - 1, 0).bit_length()))}
        fixed = _splits.candidates(**kind, itemsize=itemsize, rows=rows, fixed=True)
        assert [c.M for c in fixed] == [most]
        assert fixed == _splits.candidates(**kind, itemsize=itemsize, rows=1, fixed=True)
    with pytest.raises(ValueError, match="shared memory"):
        _splits.candidates(capability=(8, 6), shared=1000, width=64, v_width=64, itemsize=2, rows=9)


def test_a_class_knows_what_matters(monkeypatch):
    keys = []
    monkeypatch.setattr(_tune, "choose", lambda key, *_: keys.append(key))
    q, k = torch.zeros(3, 4, 16), torch.zeros(5, 16, 2, 16)
    base = {"batch": 3, "max_seqlen_q": 1, "max_seqlen_k": 80, "causal": True, "window_size": (-1, -1), "softcap": 0.0,
            "tree": False, "fixed": False}  # fmt: skip
    changes = [{}, {"batch": 30}, {"max_seqlen_q": 3}, {"max_seqlen_k": 999}, {"causal": False}, {"tree": True},
               {"window_size": (3, -1)}, {"softcap": 1.0}]  # fmt: skip
    for change in changes:
        _launch.configuration(q, k, k, **{**base, **change})
    for other in ((q, k[:, :8], k[:, :8]), (q, k[:, :, :1], k[:, :, :1]), (q.half(), k.half(), k.half())):
        _launch.configuration(*other, **base)
    monkeypatch.setattr(_launch, "_code", lambda: "another")
    _launch.configuration(q, k, k, **base)
    assert len(set(keys)) == len(keys) == len(changes) + 4


# --- in a model ------------------------------------------------------------------------------------------------------


def test_the_model_writes_the_same_text_with_flash_decoding():
    model = zoo.load("stdlib-1m", device=ON, dtype=torch.float32)
    ids = zoo.tokenizer().encode("def heappop(heap):\n").ids
    prompts, params = [ids, ids[:3], ids * 3], SamplingParams(max_tokens=12)
    texts = []
    split = functools.partial(attention, num_splits=3)
    for function in (paged.attention, attention, split):
        pages = PagedCache(model.config, 40, 5, attention=function, impl="torch", device=ON)
        texts.append([g.tokens for g in generate(model, pages, prompts, params)])
    assert texts[0] == texts[1] == texts[2]
    if runtime.can_launch():
        pages = PagedCache(model.config, 40, 5, attention=attention, impl="triton", device=ON)
        short = SamplingParams(max_tokens=2)
        assert [g.tokens for g in generate(model, pages, prompts[1:2], short)] == [texts[0][1][:2]]


def test_the_parts_of_a_split_by_hand():
    assert _attention._cuts(10, 3, None) == [(0, 3), (3, 6), (6, 10)]
    assert _attention._cuts(2, 3, None) == [(0, 1), (1, 2)]
    assert _attention._cuts(10, 0, 4) == [(0, 4), (4, 8), (8, 10)]
    assert _attention._cuts(8, 0, 4) == [(0, 4), (4, 8)]
    assert _attention._cuts(0, 0, 4) == [(0, 0)]


# --- what was once wrong ----------------------------------------------------------------------------------------------


@triton_and_torch
def test_tokens_without_a_sequence_are_refused(impl):
    empty = torch.zeros(0, **I32)
    q, cache = torch.ones(4, 4, 16, device=ON), torch.ones(3, 16, 2, 16, device=ON)
    out = torch.full_like(q, 7.0)
    with pytest.raises(ValueError, match="q is of 4 tokens and no sequence"):
        attention(q, cache, cache, block_table=empty.view(0, 1), cu_seqlens_q=torch.zeros(1, **I32), seqused_k=empty,
                  impl=impl, out=out)  # fmt: skip
    assert (out == 7.0).all()


@triton_and_torch
def test_an_output_whose_rows_are_one_is_refused(impl):
    inputs = case_of((1, 1), (5, 7)).build(device=ON)
    with pytest.raises(ValueError, match="out is overlapping itself"):
        inputs.call(attention, impl=impl, out=torch.zeros_like(inputs.q[:1]).expand_as(inputs.q))


@triton_and_torch
def test_merging_rows_without_numbers(impl):
    out, lse = merge_states(torch.zeros(2, 3, 0, device=ON), torch.ones(2, 3, device=ON), impl=impl)
    assert out.shape == (3, 0)
    torch.testing.assert_close(lse, torch.full((3,), 1.6931471805599453, device=ON))


@triton_and_torch
def test_merging_numbers_without_rows_is_refused(impl):
    with pytest.raises(ValueError, match="outs and lses have shapes"):
        merge_states(torch.ones(3, device=ON), torch.tensor(0.0, device=ON), impl=impl)


def test_more_splits_than_tiles_cost_nothing():
    sizes = {"batch": 1, "kv_heads": 2, "rows": 2, "multiprocessors": 4, "tile": 64}
    assert _splits.plan(10**6, None, max_seqlen_k=300, **sizes).programs == 5
    assert _splits.plan(0, 64 * 10**30, max_seqlen_k=300, **sizes).chunk < 2**31
    assert len(_attention._cuts(5, 10**6, None)) == 5
    inputs = case_of((1,), (40,)).build(device=ON)
    table = inputs.block_table
    assert _attention._bounds(inputs.q, inputs.k_cache, table, 1, 2**62) == (1, 16 * table.shape[1])


@needs_triton
def test_an_interrupted_launch_leaves_no_counters_behind(monkeypatch):
    inputs = case_of((1,), (40,)).build(device=ON)
    inputs.call(attention, impl="triton")
    key = _launch._stream(inputs.q.device)
    assert key in _launch._buffers

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(_launch, "configuration", interrupted)
    with pytest.raises(KeyboardInterrupt):
        inputs.call(attention, impl="triton")
    assert key not in _launch._buffers


@needs_triton
def test_a_sequence_longer_than_its_bound_writes_nothing_outside(small_tiles, monkeypatch):
    inputs = case_of((4, 16), (60, 300), num_heads=1, num_kv_heads=1).build(device=ON)
    guards = []

    def guarded(*args):
        found = []
        for x in workspace(*args):
            wider = torch.full((x.numel() + 4096,), 7.0 if x.is_floating_point() else 0, dtype=x.dtype, device=ON)
            guards.append(wider[x.numel() :])
            found.append(wider[: x.numel()])
        return tuple(found)

    workspace = _launch.workspace
    monkeypatch.setattr(_launch, "workspace", guarded)
    inputs.call(attention, impl="triton", max_seqlen_q=10, num_splits=4)
    assert guards
    assert all((guard == guard[0]).all() for guard in guards)


# --- the Hopper kernel -----------------------------------------------------------------------------------------------

WHY_NOT = flash_hopper.unavailable(ON)


def on_hopper(*args, **kwargs):
    """``attention`` by the Hopper kernel, which must have been launched."""
    before = runtime.launches["flash_decoding_hopper_kernel"]
    result = attention(*args, impl="hopper", **kwargs)
    assert runtime.launches["flash_decoding_hopper_kernel"] > before or args[0].shape[0] == 0
    return result


@pytest.mark.gpu
@pytest.mark.skipif(WHY_NOT is not None, reason=f"no Hopper kernel here: {WHY_NOT}")
class TestOnHopper:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_the_hostile_table(self, dtype):
        taken = 0
        for case in testing.cases(ON):
            inputs = case.build(dtype=dtype, device=ON)
            refused = ""
            try:
                inputs.call(on_hopper)
            except ValueError as error:
                refused = str(error)
            del inputs
            if refused:
                assert "impl is 'hopper'" in refused
                continue
            testing.check_attention(on_hopper, case, dtype=dtype, device=ON)
            taken += 1
        assert taken > 15

    @pytest.mark.parametrize("block_size", [8, 16, 64, 256])
    def test_long_contexts(self, block_size):
        """Shares that begin and end anywhere: whole items, pieces, and one long sequence among short ones."""
        lengths = (20000, 0, *range(1, 3000, 211))
        for heads, size, q_len, how in (
            ((32, 8), 128, 1, {}), ((28, 4), 64, 5, {}), ((32, 1), 128, 1, {"softcap": 8.0}),
            ((6, 2), 256, 3, {"window_size": (300, -1)}), ((5, 1), 96, 2, {"window_size": (64, 0)}),
            ((8, 8), 40, 1, {}),
        ):  # fmt: skip
            case = case_of((q_len,) * len(lengths), tuple(max(n, q_len) if n else 0 for n in lengths),
                           num_heads=heads[0], num_kv_heads=heads[1], head_dim=size, block_size=block_size,
                           sinks=size == 64, options=how)  # fmt: skip
            testing.check_attention(on_hopper, case, device=ON, dtype=torch.bfloat16, max_seqlen_q=q_len)

    def test_lengths_shorter_than_a_share_and_none_at_all(self):
        for lengths in ((1, 5, 17, 300, 0), (0, 0, 0), (1,), (65,) * 200, (300,) * 300, (100_000,)):
            case = case_of((1,) * len(lengths), lengths, num_heads=32, num_kv_heads=8, head_dim=128, padding="garbage")
            testing.check_attention(on_hopper, case, device=ON, dtype=torch.bfloat16, max_seqlen_q=1)

    def test_prompts_and_decodes_in_one_call(self):
        case = case_of((1, 40, 3, 0, 1, 300), (500, 90, 3500, 9, 0, 300), num_heads=8, head_dim=128, sinks=True)
        testing.check_attention(on_hopper, case, device=ON, dtype=torch.bfloat16)

    def test_a_launch_repeated_100_times_is_equal_to_the_bit_wherever_the_pages_lie(self):
        case = case_of((1,) * 9, (9000, *range(1, 4000, 500)), num_heads=32, num_kv_heads=8, head_dim=128)
        inputs = case.build(device=ON, dtype=torch.bfloat16)
        first = inputs.call(on_hopper, max_seqlen_q=1)
        for _ in range(100):
            out = torch.full_like(first, float("nan"))
            assert torch.equal(inputs.call(on_hopper, max_seqlen_q=1, out=out), first)

    def test_thousands_of_launches_in_a_row_come_to_an_end(self):
        """Two CTAs on a multiprocessor and nothing left over: there a barrier lay where arguments are handed over."""
        inputs = case_of((1,) * 8, (4096,) * 8, num_heads=32, num_kv_heads=8, head_dim=128).build(
            device=ON, dtype=torch.bfloat16
        )
        out = inputs.call(on_hopper, max_seqlen_q=1, max_seqlen_k=4096)
        first, ended = out.clone(), torch.cuda.Event()
        for _ in range(20_000):
            inputs.call(attention, impl="hopper", max_seqlen_q=1, max_seqlen_k=4096, out=out)
        ended.record()
        latest = time.monotonic() + 30
        while not ended.query():
            assert time.monotonic() < latest, "a launch does not end"
            time.sleep(0.01)
        assert torch.equal(out, first)

    def test_a_captured_call_replays_while_lengths_grow(self):
        replayed_while_lengths_grow(on_hopper)

    def test_a_reader_is_told(self):
        inputs = case_of((1, 1), (100, 200), head_dim=64).build(device=ON, dtype=torch.bfloat16)
        assert inputs.call(flash_decoding.explain, impl="hopper").impl == "hopper"
        assert inputs.call(flash_decoding.explain).impl == "hopper"
        other = inputs.call(flash_decoding.explain, num_splits=2)
        assert (other.impl, other.why.split(": split-KV")[0]) == (
            "triton", "hopper refuses: the splits are given, and it deals them out itself")  # fmt: skip
        with pytest.raises(ValueError, match="the splits are given"):
            inputs.call(attention, impl="hopper", num_splits=2)


def test_asking_for_the_hopper_kernel_where_it_cannot_run_is_an_error():
    if WHY_NOT is None:
        pytest.skip("it can run here")
    with pytest.raises(RuntimeError, match="cannot run"):
        case_of((1,), (20,)).build().call(attention, impl="hopper")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_splits": 2}, "the splits are given"), ({"split_size": 64}, "the splits are given"),
        ({"batch": 5000}, "5000 sequences are more than 4096"), ({"heads": 130}, "a group of 65 heads"),
        ({"block_size": 4}, "pages of 4 tokens"), ({"dtype": torch.float32}, "float32 has no place"),
        ({"tree_mask": torch.ones(3, dtype=torch.int64)}, "there is a tree mask"),
        ({"softmax_scale": 0.0}, "not positive"),
    ],
)  # fmt: skip
def test_what_the_hopper_kernel_refuses(change, reason):
    def refused(heads=4, block_size=16, dtype=torch.bfloat16, **options):
        q, cache = torch.zeros(3, heads, 64, dtype=dtype), torch.zeros(5, block_size, 2, 64, dtype=dtype)
        plain = {"batch": 3, "num_splits": 0, "split_size": None, "softmax_scale": None, "window_size": (-1, -1),
                 "softcap": 0.0, "sinks": None, "tree_mask": None}  # fmt: skip
        return _hopper_launch.refusal(q, cache, cache, **{**plain, **options})

    assert refused() is None
    assert reason in refused(**change)


def test_the_hopper_kernels_tiles_fit():
    for dim, keys in itertools.product((16, 40, 64, 96, 128, 200, 256), (1, 10**6)):
        tile = _hopper_launch.tiling(dim, dim, keys)
        rows = 64 + tile.stages * tile.N  # queries and keys; then values
        needed = 2 * (rows * tile.wide + tile.stages * tile.N * tile.wide_v) + 512
        assert tile.ctas * (needed + 1024) <= 228 * 1024
        assert tile.stages <= 6, "a named barrier for each stage of K and of V"


@needs_triton
@pytest.mark.parametrize("seed", range(3))
def test_the_hopper_kernel_deals_every_block_once(seed):
    kernel = pytest.importorskip("kvlab.flash_decoding._hopper", exc_type=ImportError)
    rng, chunked = random.Random(seed), 0
    for _ in range(20):
        q_lens = [rng.choice([0, 1, 1, 5, 99]) for _ in range(rng.choice([1, 2, 5, 40]))]
        kv_lens = [rng.choice([0, 1, 64, 65, rng.randint(0, 9000), rng.randint(0, 40000)]) for _ in q_lens]
        plan = kernel.DecodePlan(
            form="paged", group=4, share=1, dim=128, dim_v=128, wide=128, wide_v=128, N=64, stages=3, block_size=16,
            causal=True, left=rng.choice([-1, 100, 3000]), batch=64, live=16, chunked=rng.random() < 0.8,
        )  # fmt: skip
        kv_heads, groups = rng.choice([1, 2, 7, 8]), rng.choice([1, 3, 33])
        chunked += dealing.deal(kernel, plan, q_lens, kv_lens, kv_heads, groups * kv_heads)
    assert chunked, "no case had blocks left over"


CHILD = r"""
from kvlab.flash_decoding import _hopper_launch
from kvlab.flash_decoding._hopper import DecodePlan, flash_decoding_hopper_kernel

works = [
    (128, 16, 10**6, {}), (128, 64, 1, dict(sinks=True, live=64, batch=4096)),
    (256, 256, 10**6, dict(left=300)), (256, 16, 10**6, {}),
    (64, 8, 10**6, dict(softcap=True, right=0, live=16, batch=128)),
]
tiles = [_hopper_launch.tiling(dim, dim, keys) for dim, _, keys, _ in works]
launched = [(work, tile, chunked) for work, tile in zip(works, tiles) for chunked in (False, True)
            if not chunked or _hopper_launch.leaves_over(tile, work[3].get("live", 4))]
for (dim, page, _, options), tile, chunked in launched:
    plan = DecodePlan(form="paged", group=5, share=1, dim=dim, dim_v=dim, causal=True, lse=True, block_size=page,
                      chunked=chunked, wide=tile.wide, wide_v=tile.wide_v, N=tile.N, stages=tile.stages, **options)
    types = {"k_desc": descriptor([1, 1, plan.rows, 1, plan.wide]), "scale": "fp32", "softcap": "fp32",
             "v_desc": descriptor([1, 1, plan.rows, 1, plan.wide_v]), "q_ptr": "*bf16", "out_ptr": "*bf16"}
    types |= {name: "*fp32" for name in ("lse_ptr", "part_ptr", "peak_ptr", "total_ptr")}
    types |= {name: "*i32" for name in ("table_ptr", "cu_q", "used", "arrived")}
    types |= {"sink_ptr": "*fp32"} if plan.sinks else {}
    values = {"C": plan, **({} if plan.sinks else {"sink_ptr": None})}
    registers = {"maxnreg": tile.maxnreg} if tile.maxnreg else {}
    done, said = compiled_gluon(flash_decoding_hopper_kernel.fn, types, values, **registers)
    found.append({"name": f"D {dim} pages of {page}", "said": said, "chunked": chunked, "ctas": tile.ctas,
                  "shared": done.metadata.shared, "overwritten": overwritten_barriers(done.asm["ptx"]),
                  "spills": sum(int(n) for n in re.findall(r"(\d+) bytes spill", said)),
                  **{word: word in done.asm["ptx"] for word in ("wgmma.mma_async", "cp.async.bulk.tensor", "acq_rel")}})
"""


@pytest.mark.slow
@pytest.mark.skipif(not runtime.HAS_TRITON, reason="triton is not installed")
def test_the_hopper_kernel_compiles_to_asynchronous_products_and_copies_without_spills(pytestconfig):
    found = compiling.child(pytestconfig, hopper_decoding=CHILD)["hopper_decoding"]
    assert [kernel["chunked"] for kernel in found].count(True) == 2
    assert len(found) == 7
    for kernel in found:
        assert kernel["wgmma.mma_async"], kernel
        assert kernel["cp.async.bulk.tensor"], kernel
        assert kernel["acq_rel"], kernel
        assert "serialized" not in kernel["said"], kernel
        assert kernel["ctas"] * (kernel["shared"] + 1024) <= 228 * 1024, kernel
        assert not kernel["overwritten"], kernel  # else its warps wait for ever, in one launch of some thousands
        assert kernel["spills"] == 0, kernel
