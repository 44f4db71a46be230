"""Flash attention: one kernel for pages, dense and ragged tensors, held to the oracle; the choice; the tiles."""

from __future__ import annotations

import itertools
import json
import os
import random

import pytest
import torch

from kvlab import flash, flash_hopper, paged, reference, runtime, testing, zoo
from kvlab.flash import _kernel, _tune
from kvlab.flash._tune import Config
from kvlab.generate import generate
from kvlab.paged import PagedCache
from kvlab.sampling import SamplingParams

ON = runtime.device()
ON_GPU = runtime.HAS_GPU and not runtime.INTERPRET
I32 = {"dtype": torch.int32, "device": ON}
needs_triton = pytest.mark.skipif(not runtime.can_launch(), reason="no kernel can be launched here")
triton_and_torch = pytest.mark.parametrize("impl", ["torch", pytest.param("triton", marks=needs_triton)])


@pytest.fixture(autouse=True)
def nothing_is_timed(monkeypatch, tmp_path):
    """Tests take the first configuration, and leave the user's own file alone."""
    monkeypatch.setenv("KVLAB_TUNE", "0")
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path))


def gpu(*cells):
    """A case that only a GPU runs in reasonable time."""
    marks = [pytest.mark.gpu, pytest.mark.skipif(not ON_GPU, reason="only a GPU runs this in reasonable time")]
    return pytest.param(*cells, marks=marks)


def tile(monkeypatch, *sizes):
    """Let every launch take this tile: M, N, num_warps, num_stages."""
    config = Config(*sizes, *(4, 2)[len(sizes) - 2 :]) if len(sizes) < 4 else Config(*sizes)
    monkeypatch.setattr(_tune, "choose", lambda *_: config)


def holds(out, lse, q, k, v, **options):
    """Assert that out and lse of one sequence are as close to the oracle as the rule asks."""
    want, want_lse = reference.attend_one(q, k, v, **options)
    testing.assert_close(out, want, reference.attend_one(q, k, v, dtype=None, **options)[0], q.dtype)
    if lse is not None:
        testing.assert_close(lse, want_lse, reference.attend_one(q, k, v, dtype=torch.float32, **options)[1])


# --- the hostile table ---------------------------------------------------------------------------------------------


FILLS = (float("nan"), 1e4) if ON_GPU else (float("nan"),)
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
FEW = [
    "page edge, prefill", "group 5", "all scores 200", "window, softcap and sinks", "tree", "head size 80",
    "lengths 0 and 1", "page edge, decode", "page of one token", "table with garbage past the end", "head size 128",
    "no multiple of any tile", "more queries than keys", "head size 96 beside another head", "values of another size",
    "all scores -60000", "not causal", "window to both sides", "softcap", "sinks", "tree with a window",
]  # fmt: skip


@needs_triton
@TYPES
@pytest.mark.parametrize("case", testing.cases(ON), ids=lambda case: case.name)
def test_the_kernel_passes(case, dtype):
    if dtype != torch.float32 and not ON_GPU and case.name not in FEW[: None if dtype == torch.bfloat16 else 6]:
        pytest.skip("the interpreter is slow, and the types differ in rounding alone")
    before = runtime.launches["flash_attention_kernel"]
    testing.check_attention(flash.attention, case, dtype=dtype, device=ON, impl="triton", fills=FILLS)
    assert runtime.launches["flash_attention_kernel"] > before or case.name == "nothing to do"


@TYPES
@pytest.mark.parametrize("case", testing.cases(ON), ids=lambda case: case.name)
def test_the_torch_reference_passes(case, dtype):
    if dtype == torch.float16 and case.content == "-60000":
        pytest.skip("plain PyTorch in float16 cannot hold these scores before they are scaled")
    lse = dtype == torch.float32  # in low precision plain PyTorch has no better lse than its scores
    testing.check_attention(flash.attention, case, dtype=dtype, device=ON, impl="torch", lse=lse)


SMALL = [(1, 1), (39, 1), (65, 3), (13, 43), (23, 24), (3, 99), (0, 5), (5, 0)]
LARGE = [(1, 1), (239, 1), (799, 3), (113, 203), (1023, 1024), (3, 799), (4224, 4224)]
HEADS = [(6, 6), (6, 2), (6, 1), (5, 1), (14, 2)]
SIZES = [40, 59, 64, 80, 96, 111, 128, 192, 256]


def check_dense(lengths, heads, size, dtype, causal, impl="triton", v_size=None):
    rng = torch.Generator().manual_seed(size)
    (lq, lk), (h, h_kv) = lengths, heads
    batch = 2 if ON_GPU and lq < 1000 else 1
    q = torch.randn(batch, lq, h, size, generator=rng).to(ON, dtype)
    k, v = (torch.randn(batch, lk, h_kv, d, generator=rng).to(ON, dtype) for d in (size, v_size or size))
    out = torch.full((*q.shape[:3], v.shape[3]), float("nan"), dtype=dtype, device=ON)
    got, lse = flash.flash_attn_func(q, k, v, causal=causal, out=out, return_lse=True, impl=impl)
    assert got is out
    assert (lse.shape, lse.dtype) == ((batch, h, lq), torch.float32)
    for b in range(batch):
        holds(out[b], lse[b], q[b], k[b], v[b], causal=causal)


@needs_triton
@pytest.mark.parametrize("number", range(len(SMALL)))
def test_lengths_heads_and_head_sizes(number):
    """Each length beside another choice of heads, sizes and types."""
    dtype = (torch.float32, torch.bfloat16, torch.float16)[number % 3]
    for causal in (False, True):
        check_dense(SMALL[number], HEADS[number % 5], SIZES[number], dtype, causal)
    if number == 2:
        check_dense((17, 33), (6, 2), 256, torch.float32, True)
        check_dense((5, 40), (6, 2), 40, torch.float32, False, v_size=72)


@pytest.mark.parametrize(
    ("heads", "size", "dtype"),
    [
        gpu(HEADS[i % 5], size, dtype)
        for i, (size, dtype) in enumerate(itertools.product(SIZES, (torch.float16, torch.bfloat16)))
    ]
    + [gpu((6, 2), size, torch.float32) for size in (40, 64, 128, 256)],
)
def test_flash_attentions_grid(heads, size, dtype):
    for lengths, causal in itertools.product(LARGE, (False, True)):
        check_dense(lengths, heads, size, dtype, causal)


@needs_triton
@pytest.mark.parametrize(("m", "n"), [(16, 16), (32, 16), (16, 64), (128, 128)])
def test_any_tile(monkeypatch, m, n):
    """Where blocks are clear and where they have an edge depends on everything at once: random lengths and windows."""
    tile(monkeypatch, m, n)
    rng = random.Random(m + n)
    for _ in range(3 if not ON_GPU else 40):
        kv_len, group = rng.randint(1, 70), rng.choice([1, 2, 3, 7])
        q_len, window = rng.randint(1, kv_len), (rng.randint(-1, 40), rng.randint(-1, 20))
        causal, size = rng.random() < 0.7, rng.choice([1, 4, 16, 32])
        case = testing.AttentionCase(
            f"{q_len} of {kv_len}, group {group}, window {window}, causal {causal}, pages of {size}", (q_len, 1),
            (kv_len, 33), num_heads=group, num_kv_heads=1, head_dim=16, block_size=size, padding="garbage",
            options={"window_size": window, "causal": causal},
        )  # fmt: skip
        testing.check_attention(flash.attention, case, device=ON, impl="triton", fills=FILLS)


@needs_triton
@pytest.mark.parametrize("block_size", [1, 3, 24, 256])
def test_other_page_sizes_and_a_group_wider_than_a_tile(block_size):
    case = testing.AttentionCase("", (1, 4), (37, 80), num_heads=34, num_kv_heads=2, block_size=block_size, head_dim=16)
    testing.check_attention(flash.attention, case, device=ON, impl="triton", fills=FILLS)


@needs_triton
@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-30])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_any_scale(scale, softcap):
    options = {"softmax_scale": scale, "softcap": softcap}
    case = testing.AttentionCase("", (3, 1), (37, 18), options=options, head_dim=16)
    testing.check_attention(flash.attention, case, device=ON, impl="triton", fills=FILLS)


@needs_triton
@pytest.mark.parametrize("window", [(2**31 - 1, 0), (-1, 2**31 - 1), (2**40, 2**40)])
def test_a_window_wider_than_any_text(window):
    case = testing.AttentionCase("", (3, 1), (21, 18), options={"causal": False, "window_size": window}, head_dim=16)
    testing.check_attention(flash.attention, case, device=ON, impl="triton", fills=FILLS)


@needs_triton
def test_the_same_bits_each_time():
    case = testing.AttentionCase("", (17, 1), (90, 33), num_heads=6, head_dim=16)
    for dtype in (torch.float32, torch.bfloat16):
        inputs = case.build(device=ON, dtype=dtype)
        first = inputs.call(flash.attention, impl="triton", return_lse=True)
        for _ in range(100 if ON_GPU else 2):
            again = inputs.call(flash.attention, impl="triton", return_lse=True)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


# --- dense, ragged, paged --------------------------------------------------------------------------------------------


@triton_and_torch
@pytest.mark.parametrize("causal", [True, False])
def test_three_forms_give_the_same(impl, causal):
    case = testing.AttentionCase(
        "",
        (20, 20),
        (70, 70),
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        sinks=True,
        options={"causal": causal, "window_size": (50, 9), "softcap": 8.0},
    )
    inputs = case.build(device=ON)
    pages = inputs.call(flash.attention, impl=impl, return_lse=True)
    k, v = (paged.gather(c, inputs.block_table, inputs.seqused_k, 70) for c in (inputs.k_cache, inputs.v_cache))
    q, options = inputs.q, {**inputs.kwargs, "impl": impl, "return_lse": True}
    dense = flash.flash_attn_func(q.view(2, 20, *q.shape[1:]), k, v, **options)
    keys = torch.tensor([0, 70, 140], **I32)
    ragged = flash.flash_attn_varlen_func(q, k.flatten(0, 1), v.flatten(0, 1), inputs.cu_seqlens_q, keys, **options)
    for other in ((dense[0].flatten(0, 1), dense[1].transpose(0, 1).flatten(1)), ragged):
        torch.testing.assert_close(other[0], pages[0])
        torch.testing.assert_close(other[1], pages[1])
    assert dense[1].shape == (2, 2, 20)


def ragged_case(q_lens, k_lens, heads=(4, 2), size=16):
    torch.manual_seed(0)
    q = torch.randn(sum(q_lens), heads[0], size, device=ON)
    k, v = torch.randn(2, sum(k_lens), heads[1], size, device=ON).unbind(0)
    ends = [torch.tensor([0, *itertools.accumulate(lengths)], **I32) for lengths in (q_lens, k_lens)]
    slices = [[slice(a, b) for a, b in itertools.pairwise(e.tolist())] for e in ends]
    return q, k, v, ends, list(zip(*slices, strict=True))


@triton_and_torch
@pytest.mark.parametrize("bound", [None, 70])
def test_ragged_batches(impl, bound):
    q_lens, k_lens = (0, 67, 1, 0, 5, 33), (3, 67, 40, 0, 2, 50)
    q, k, v, ends, parts = ragged_case(q_lens, k_lens)
    out = torch.full_like(q, float("nan"))
    got, lse = flash.flash_attn_varlen_func(
        q, k, v, *ends, bound, bound, causal=True, return_lse=True, impl=impl, out=out
    )
    assert got is out
    for rows, keys in parts:
        holds(out[rows], lse[:, rows], q[rows], k[keys], v[keys])


@triton_and_torch
def test_a_neighbour_full_of_nan(impl):
    """Ragged sequences lie end to end: the tile that reads the last keys of one reaches into the next."""
    q, k, v, ends, parts = ragged_case((20, 30, 9), (20, 30, 41))
    (rows, keys), *_ = parts[1:2]
    for x, part in ((q, rows), (k, keys), (v, keys)):
        x[part] = float("nan")
    out = flash.flash_attn_varlen_func(q, k, v, *ends, impl=impl)
    assert out[rows].isnan().all()
    for rows, keys in (parts[0], parts[2]):
        holds(out[rows], None, q[rows], k[keys], v[keys], causal=False)


@needs_triton
def test_few_programs_of_a_ragged_batch_are_idle(monkeypatch):
    grids = []

    class Spy:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *_, **kwargs: grids.append(kwargs["SEARCH"])

    monkeypatch.setattr(_kernel, "flash_attention_kernel", Spy())
    tile(monkeypatch, 64, 32)
    for q_lens, want in (((1000, 3, 3, 3), [(1009 * 2 // 64 + 4, 2), True]), ((64, 64, 64), [(6, 2), False])):
        q, k, v, ends, _ = ragged_case(q_lens, q_lens)
        grids.clear()
        flash.flash_attn_varlen_func(q, k, v, *ends, max(q_lens), impl="triton")
        assert grids == want


def layouts():
    """q, k, v [2, tokens, heads, D] as users have them: what is between the numbers is poisoned."""
    torch.manual_seed(0)

    def poisoned(*shape):
        return torch.full(shape, float("nan"), device=ON)

    heads_first = poisoned(2, 4, 20, 24)[..., :16].transpose(1, 2)
    beside = poisoned(3, 37, 7, 2, 16)[1:, :, 2:6:2].flatten(2, 3)[:, :, ::2].unflatten(2, (1, 2)).squeeze(2)
    yield heads_first, beside
    fused = poisoned(2, 37, 8, 16)
    yield poisoned(4, 20, 4, 16)[::2], fused[:, :, 1:5:2]


@triton_and_torch
def test_any_strides(impl):
    for q, k in layouts():
        v = torch.full((2, 2, 37, 32), float("nan"), device=ON)[..., 8:24].transpose(1, 2)
        for x in (q, k, v):
            x.copy_(torch.randn(x.shape))
        room = torch.full((2, 20, 5, 48), float("nan"), device=ON)
        out = room[:, :, 1:, 16:32]
        flash.flash_attn_func(q, k, v, causal=True, out=out, impl=impl)
        for b in range(2):
            holds(out[b].contiguous(), None, q[b], k[b], v[b])
        out.fill_(float("nan"))
        assert room.isnan().all(), "something was written beside the output"


# --- cases that broken systems got wrong -----------------------------------------------------------------------------


def attend(q_len, kv_len, values, impl, scores=None, **options):
    """One head of size 16: all scores 0, or q . k = ``scores`` of each key; values [kv_len, Dv]."""
    q, k = torch.zeros(1, q_len, 1, 16, device=ON), torch.zeros(1, kv_len, 1, 16, device=ON)
    if scores is not None:
        q[..., 0], k[0, :, 0, 0] = 1.0, torch.tensor(scores, device=ON)
        options.setdefault("softmax_scale", 1.0)
    v = values.to(ON)[None, :, None]
    out, lse = flash.flash_attn_func(q, k, v, return_lse=True, impl=impl, **options)
    return out[0, :, 0].cpu(), lse[0, 0].cpu()


def visible(q_len, kv_len, impl):
    """Which keys each query gives weight to, when all scores are equal."""
    return (attend(q_len, kv_len, torch.eye(kv_len), impl, causal=True)[0] > 0).int().tolist()


@triton_and_torch
def test_causality_is_aligned_bottom_right(impl):  # F1
    assert visible(2, 5, impl) == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert visible(5, 2, impl) == [[0, 0], [0, 0], [0, 0], [1, 0], [1, 1]]


@triton_and_torch
def test_a_row_that_sees_nothing(impl):  # F2
    out, lse = attend(5, 2, torch.ones(2, 3), impl, causal=True)
    assert out.tolist() == [[0.0] * 3] * 3 + [[1.0] * 3] * 2
    assert lse[:3].tolist() == [float("-inf")] * 3
    torch.testing.assert_close(lse[3:], torch.tensor([1.0, 2.0]).log())
    out, lse = attend(3, 0, torch.ones(0, 3), impl, causal=False)
    assert not out.any()
    assert lse.tolist() == [float("-inf")] * 3


@triton_and_torch
def test_very_negative_scores(impl):  # F3
    values = torch.randn(4, 8)
    out, lse = attend(1, 4, values, impl, scores=[-6e4] * 4)
    torch.testing.assert_close(out[0], values.mean(0))
    assert abs(lse.item() + 59998.6137) < 0.01


@triton_and_torch
def test_the_tail_gets_no_weight(monkeypatch, impl):  # F5
    tile(monkeypatch, 64, 64)
    out, _ = attend(3, 113, torch.ones(113, 1), impl, causal=False)
    torch.testing.assert_close(out, torch.ones(3, 1))


@triton_and_torch
def test_other_head_sizes(impl):  # F6
    torch.manual_seed(0)
    for size in (80, 96, 128):
        q, k, v = torch.randn(3, 1, 21, 2, size, device=ON).unbind(0)
        if size == 128:
            q[..., :64], k[..., :64] = 0.0, 0.0
        room = torch.full((1, 21, 3, size), 7.0, device=ON)
        flash.flash_attn_func(q, k, v, causal=True, impl=impl, out=room[:, :, :2])
        holds(room[0, :, :2].contiguous(), None, q[0], k[0], v[0])
        assert (room[:, :, 2] == 7.0).all(), "the neighbouring head was written to"


@triton_and_torch
def test_a_cap_does_not_let_masked_keys_through(impl):  # F7
    values = torch.eye(2)
    out, _ = attend(2, 2, values, impl, scores=[1.0, 1.0], causal=True, softcap=1.0)
    assert out[0].tolist() == [1.0, 0.0]


@triton_and_torch
def test_cached_equals_uncached(impl):  # F11
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 5, 2, 16, device=ON).unbind(0)
    whole = flash.flash_attn_func(q, k, v, causal=True, impl=impl)
    first = flash.flash_attn_func(q[:, :3], k[:, :3], v[:, :3], causal=True, impl=impl)
    then = flash.flash_attn_func(q[:, 3:], k, v, causal=True, impl=impl)
    torch.testing.assert_close(torch.cat([first, then], dim=1), whole)
    torch.testing.assert_close(whole[:, 0], v[:, 0])
    assert attend(1, 4, torch.tensor([[0.0], [1], [2], [3]]), impl, causal=True)[0].item() == 1.5


@triton_and_torch
def test_unused_slots_never_show(impl):  # P1
    for fill, queries in itertools.product((float("nan"), 0.0, 1e4, float("inf")), (1, 5)):
        torch.manual_seed(0)
        k, v = torch.full((2, 2, 4, 1, 16), fill, device=ON)
        k.view(8, 16)[:5], v.view(8, 16)[:5] = torch.randn(5, 16, device=ON), 1.0
        out = flash.attention(
            torch.randn(queries, 1, 16, device=ON), k, v, block_table=torch.tensor([[0, 1]], **I32),
            cu_seqlens_q=torch.tensor([0, queries], **I32), seqused_k=torch.tensor([5], **I32), impl=impl,
        )  # fmt: skip
        torch.testing.assert_close(out, torch.ones_like(out))


BUGS = {
    "nothing shrunk": ("total * shrink + tl.sum", "total + tl.sum"),
    "sums shrunk, values not": ("acc * shrink[:, None]", "acc"),
    "a clear block too many": ("end - clear, N)", "end - clear + N, N)"),
    "last key left out": ("(k_index < high) if edge", "(k_index < high - 1) if edge"),
    "stale values read": (
        "there[:, None] & (dv < DV)[None, :])\n            acc",
        "(dv < DV)[None, :])\n            acc",
    ),
    "wrong head map": ("kv_head * GROUP + rows % GROUP", "kv_head + rows % GROUP * tl.num_programs(1)"),
    "page of another sequence": ("table_ptr += seq * table_row", "pass"),
    "positions from the wrong end": ("key_bits, q_len, kv_len, CAUSAL", "key_bits, 0, kv_len, CAUSAL"),
    "lse in base 2": ("peak * LN2", "peak"),
    "sink forgotten in the sum": ("total += tl.where(live, tl.exp2(sink - peak), 0.0)", "pass"),
    "cap forgotten": ("scores = cap(scores * scale, softcap)", "scores = scores * scale"),
    "left edge taken for clear": ("before = clear - begin", "before = 0"),
}


@needs_triton
@pytest.mark.skipif(runtime.HAS_GPU, reason="a stale or stray read may end the process on a GPU")
def test_bugs_in_the_kernel_are_caught(monkeypatch):
    tile(monkeypatch, 32, 16)
    small = {"head_dim": 16, "padding": "garbage"}
    few = [  # the quick ones first
        testing.AttentionCase("sinks", (6,), (21,), sinks=True, **small),
        testing.AttentionCase("softcap", (6, 1), (21, 18), options={"softcap": 1.0}, **small),
        testing.AttentionCase("window", (9,), (60,), options={"window_size": (40, -1)}, **small),
        testing.AttentionCase("prefill and decode", (17, 1), (40, 7), **small),
    ]

    def check(attention):
        for case in few:
            testing.check_attention(attention, case, fills=FILLS)

    testing.assert_caught(check, _kernel.flash_attention_kernel, BUGS, give="attention")


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("q", torch.zeros(2, 64)), ("q", torch.zeros(2, 3, 64)), ("q", torch.zeros(2, 4, 32)),
        ("q", torch.zeros(2, 4, 64, dtype=torch.bfloat16)), ("q", torch.zeros(2, 64, 4).transpose(1, 2)),
        ("q", torch.zeros(2, 4, 64, requires_grad=True)), ("v_cache", torch.zeros(5, 16, 2, 64)),
        ("block_table", torch.zeros(1, 2, dtype=torch.int64)), ("cu_seqlens_q", torch.zeros(3, dtype=torch.int32)),
        ("seqused_k", torch.zeros(1)), ("sinks", torch.zeros(3)), ("tree_mask", torch.zeros(2, dtype=torch.int32)),
        ("out", torch.zeros(2, 4, 32)), ("softcap", -1.0), ("softcap", float("nan")), ("window_size", (-2, 0)),
        ("window_size", (1.5, 0)), ("softmax_scale", float("inf")), ("max_seqlen_q", 1), ("max_seqlen_k", -1),
        ("max_seqlen_k", 2.5), ("impl", "cuda"), ("seqused_k", torch.zeros(1, dtype=torch.int32, device="meta")),
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
    with pytest.raises(ValueError, match=r"must be|requires grad"):
        flash.attention(q, k, v, **arguments)
    assert runtime.launches == before
    assert name == "out" or (out == 7.0).all()


DENSE = [
    ("q", torch.zeros(3, 4, 16)), ("q", torch.zeros(1, 3, 4, 16)), ("q", torch.zeros(2, 3, 3, 16)),
    ("q", torch.zeros(2, 3, 4, 8)), ("q", torch.zeros(2, 3, 4, 16, dtype=torch.float16)),
    ("q", torch.zeros(2, 3, 4, 16, dtype=torch.int32)), ("q", torch.zeros(2, 3, 16, 4).transpose(2, 3)),
    ("q", torch.zeros(2, 3, 0, 16)), ("q", torch.zeros(2, 3, 4, 16, requires_grad=True)),
    ("k", torch.zeros(2, 5, 0, 16)), ("q", torch.zeros(2, 3, 4, 16, device="meta")), ("v", torch.zeros(2, 4, 2, 16)),
    ("v", torch.zeros(2, 5, 1, 16)),
    ("v", torch.zeros(2, 5, 2, 16, device="meta")), ("v", torch.zeros(2, 5, 2, 0)), ("k", torch.zeros(2, 5, 3, 16)),
    ("window_size", (-2, 0)), ("window_size", 4), ("window_size", (True, 0)), ("softcap", -0.5),
    ("softcap", float("inf")), ("softcap", None), ("softmax_scale", float("nan")), ("softmax_scale", "a"),
    ("sinks", torch.zeros(2)), ("sinks", torch.zeros(4, dtype=torch.float64)), ("sinks", torch.zeros(8)[::2]),
    ("out", torch.zeros(2, 3, 4, 8)), ("out", torch.zeros(2, 3, 4, 16, dtype=torch.float16)),
    ("out", torch.zeros(2, 3, 16, 4).transpose(2, 3)), ("impl", "cuda"), ("impl", 3),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), DENSE, ids=str)
@triton_and_torch
def test_the_dense_form_refuses_what_does_not_fit(name, value, impl):
    good = {"q": torch.zeros(2, 3, 4, 16), "k": torch.zeros(2, 5, 2, 16), "v": torch.zeros(2, 5, 2, 16), "impl": impl}
    before = runtime.launches.copy()
    with pytest.raises(ValueError, match=r"must be|requires grad") as refused:
        flash.flash_attn_func(**{**good, name: value})
    if name in ("window_size", "softcap", "softmax_scale", "sinks", "out", "impl"):
        assert str(refused.value).startswith(name)
    assert runtime.launches == before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("q", torch.zeros(1, 7, 4, 16)), ("k", torch.zeros(9, 3, 16)), ("cu_seqlens_q", None), ("cu_seqlens_k", None),
        ("cu_seqlens_q", torch.zeros(3, dtype=torch.int64)), ("cu_seqlens_k", torch.zeros(4, dtype=torch.int32)),
        ("cu_seqlens_q", torch.zeros(1, 3, dtype=torch.int32)), ("cu_seqlens_k", torch.zeros(6).int()[::2]),
        ("cu_seqlens_q", torch.zeros(0, dtype=torch.int32)), ("cu_seqlens_k", torch.zeros(3, device="meta").int()),
        ("max_seqlen_q", 3), ("max_seqlen_q", -1), ("max_seqlen_q", True), ("max_seqlen_k", 1.0),
    ],
    ids=str,
)  # fmt: skip
@triton_and_torch
def test_the_ragged_form_refuses_what_does_not_fit(name, value, impl):
    good = {
        "q": torch.zeros(7, 4, 16), "k": torch.zeros(9, 2, 16), "v": torch.zeros(9, 2, 16), "impl": impl,
        "cu_seqlens_q": torch.tensor([0, 3, 7], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 4, 9], dtype=torch.int32),
    }  # fmt: skip
    with pytest.raises(ValueError, match="must be"):
        flash.flash_attn_varlen_func(**{**good, name: value})


@triton_and_torch
def test_contents_are_checked_when_asked(monkeypatch, impl):
    monkeypatch.setattr(runtime, "CHECK", True)
    q, k, v, ends, _ = ragged_case((3, 4), (4, 5))
    for wrong in ([0, 3, 6], [1, 3, 7], [0, 8, 7]):
        with pytest.raises(ValueError, match="cu_seqlens_q"):
            flash.flash_attn_varlen_func(q, k, v, torch.tensor(wrong, **I32), ends[1], impl=impl)
    with pytest.raises(ValueError, match="cu_seqlens_k"):
        flash.flash_attn_varlen_func(q, k, v, ends[0], torch.tensor([0, 4, 8], **I32), impl=impl)
    inputs = testing.AttentionCase("plain", (2,), (40,)).build(device=ON)
    inputs.seqused_k = torch.tensor([99], **I32)
    with pytest.raises(ValueError, match="seqused_k"):
        inputs.call(flash.attention, impl=impl)


@needs_triton
def test_what_the_kernels_do_not_take():
    q = torch.zeros(1, 3, 2, 264, device=ON)
    with pytest.raises(ValueError, match="256 at most"):
        flash.flash_attn_func(q, q, q, impl="triton")
    q = torch.zeros(1, 3, 2, 16, dtype=torch.float64, device=ON)
    with pytest.raises(ValueError, match="float64"):
        flash.flash_attn_func(q, q, q, impl="triton")
    assert not flash.flash_attn_func(q, q, q, impl="torch").any()


@triton_and_torch
def test_nothing_to_do(impl):
    for batch, lq, lk in ((0, 3, 3), (2, 0, 3), (2, 0, 0)):
        q, k = torch.zeros(batch, lq, 2, 16, device=ON), torch.zeros(batch, lk, 2, 16, device=ON)
        out, lse = flash.flash_attn_func(q, k, k, impl=impl, return_lse=True)
        assert (out.shape, lse.shape) == (q.shape, (batch, 2, lq))
    empty = torch.zeros(0, 2, 16, device=ON)
    assert flash.flash_attn_varlen_func(empty, empty, empty, *[torch.zeros(1, **I32)] * 2, impl=impl).shape == (
        0,
        2,
        16,
    )


# --- the choice ------------------------------------------------------------------------------------------------------


def test_a_reader_is_told_what_runs():
    q, k = torch.zeros(1, 40, 4, 16), torch.zeros(1, 40, 2, 16)
    assert str(flash.explain(q, k, k)) == "torch: tensors on the CPU"
    assert flash.explain(q, k, k, impl="torch").why == "asked for"
    for call in (flash.explain, flash.flash_attn_func):
        with pytest.raises(RuntimeError, match="impl='hopper' cannot run: "):
            call(q, k, k, impl="hopper")
        with pytest.raises(ValueError, match="must be"):
            call(q, k, k, impl="flash")
        with pytest.raises(ValueError, match="window_size"):
            call(q, k, k, window_size=(-3, 0))
    with pytest.raises(ValueError, match="tree_mask"):
        flash.explain(q, k, k, tree_mask=torch.zeros(40, dtype=torch.int64))
    with pytest.raises(ValueError, match="seqused_k"):
        flash.explain(q[0], k, k, block_table=torch.zeros(1, 1, dtype=torch.int32))
    if runtime.can_launch("cpu"):
        choice = flash.explain(q, k, k, impl="triton")
        assert choice.impl == "triton"
        assert set(choice.config) == {"M", "N", "num_warps", "num_stages"}
        assert str(choice).startswith("triton: asked for, and Triton's interpreter runs it (M ")


def choice(monkeypatch, *, unavailable=None, size=128, dtype=torch.bfloat16, lq=4096, table=False, **options):
    """What would run on a GPU: with tensors that have no memory, and a machine that is said to have a GPU."""
    monkeypatch.setattr(runtime, "can_launch", lambda on=None: True)
    monkeypatch.setattr(flash_hopper, "unavailable", lambda on: unavailable)
    made = {"dtype": dtype, "device": "meta"}
    q, k = torch.empty(1, lq, 8, size, **made), torch.empty(1, 4096, 2, size, **made)
    if not table:
        return flash.explain(q, k, k, **options)
    ints = {
        name: torch.empty(n, dtype=torch.int32, device="meta") for name, n in (("cu_seqlens_q", 2), ("seqused_k", 1))
    }
    pages = torch.empty(256, 16, 2, size, **made)
    table = torch.empty(1, 256, dtype=torch.int32, device="meta")
    return flash.explain(q[0], pages, pages, block_table=table, **ints, **options)


def test_the_choice_on_a_gpu(monkeypatch):
    where = "this GPU is sm_80 and the kernel is for sm_90"
    assert str(choice(monkeypatch, unavailable=where)).startswith(f"triton: {where} (M ")
    with pytest.raises(RuntimeError, match="sm_80"):
        choice(monkeypatch, unavailable=where, impl="hopper")
    for impl in (None, "hopper"):
        assert str(choice(monkeypatch, impl=impl)).startswith("hopper: sm_90, bfloat16, head size 128 (")
        paged_choice = choice(monkeypatch, impl=impl, table=True)
        assert str(paged_choice).startswith("hopper: sm_90, bfloat16, head size 128, pages of 16 by TMA (")
    assert choice(monkeypatch, lq=16).why == "64 rows a KV head at most, too few for hopper"
    assert choice(monkeypatch, lq=16, impl="hopper").impl == "hopper"
    for refused in ({"size": 59}, {"dtype": torch.float32}):
        assert choice(monkeypatch, **refused).impl == "triton"
        assert choice(monkeypatch, **refused).why.startswith("hopper refuses: ")
        with pytest.raises(ValueError, match="impl is 'hopper'"):
            choice(monkeypatch, **refused, impl="hopper")
    assert choice(monkeypatch, impl="torch").impl == "torch"
    with pytest.raises(ValueError, match="256 at most"):
        choice(monkeypatch, size=320)


def test_the_hopper_kernel_gets_all_arguments(monkeypatch):
    seen = {}
    monkeypatch.setattr(runtime, "can_launch", lambda on=None: True)
    monkeypatch.setattr(flash_hopper, "unavailable", lambda on: None)
    monkeypatch.setattr(flash_hopper, "forward", lambda q, k, v, **given: seen.update(given))
    q = torch.empty(1, 4096, 8, 64, dtype=torch.float16, device="meta")
    out, lse = flash.flash_attn_func(q, q, q, causal=True, window_size=(9, 0), softcap=2.0, return_lse=True)
    assert (out.shape, lse.shape) == (q.shape, (1, 8, 4096))
    assert (seen["out"] is out, seen["lse"] is lse) == (True, True)
    assert (seen["causal"], seen["window_size"], seen["softcap"], seen["softmax_scale"]) == (
        True,
        (9, 0),
        2.0,
        64**-0.5,
    )
    assert (seen["max_seqlen_q"], seen["max_seqlen_k"], seen["block_table"], seen["cu_seqlens_q"]) == (
        4096,
        4096,
        None,
        None,
    )


@pytest.mark.skipif(runtime.can_launch("cpu"), reason="the interpreter can be launched here")
def test_a_kernel_that_cannot_run_is_refused():
    q = torch.zeros(1, 3, 2, 16)
    with pytest.raises(RuntimeError, match="cannot be launched"):
        flash.flash_attn_func(q, q, q, impl="triton")


def test_the_model_writes_the_same_text_with_flash():
    model = zoo.load("stdlib-1m", device=ON, dtype=torch.float32)
    ids = zoo.tokenizer().encode("def heappop(heap):\n").ids
    prompts, params = [ids, ids[:3], ids * 3], SamplingParams(max_tokens=12)
    texts = []
    for attention in (paged.attention, flash.attention):
        pages = PagedCache(model.config, 40, 5, attention=attention, impl="torch", device=ON)
        texts.append([g.tokens for g in generate(model, pages, prompts, params)])
    assert texts[0] == texts[1]
    if runtime.can_launch():
        pages = PagedCache(model.config, 40, 5, attention=flash.attention, impl="triton", device=ON)
        short = SamplingParams(max_tokens=2)
        assert [g.tokens for g in generate(model, pages, prompts[1:2], short)] == [texts[0][1][:2]]


# --- tiles -----------------------------------------------------------------------------------------------------------

ROOM = {(8, 0): 163 * 1024, (8, 6): 99 * 1024, (8, 9): 99 * 1024, (9, 0): 227 * 1024, (12, 0): 99 * 1024}


def test_every_list_of_tiles_is_short_and_fits():
    widths, rows = (16, 64, 128, 256), (0, 1, 16, 17, 64, 65, 10**6)
    for capability, width, v_width, itemsize, count, indirect in itertools.product(
        ROOM, widths, widths, (2, 4), rows, (False, True)
    ):
        found = _tune.candidates(
            capability=capability, shared=ROOM[capability], width=width, v_width=v_width, itemsize=itemsize, rows=count,
            indirect=indirect,
        )  # fmt: skip
        assert 1 <= len(found) <= _tune.MAX_CONFIGS
        assert len(set(found)) == len(found)
        for c in found:
            assert c.M <= 128
            assert min(c.M, c.N) >= 16
            assert all(n & (n - 1) == 0 for n in (c.M, c.N, c.num_warps))
        if itemsize == 2 and count in (0, 1, 16):
            assert {c.M for c in found} == {16}, "a decode step needs no tile of 128 rows"
    with pytest.raises(ValueError, match="shared memory"):
        _tune.candidates(
            capability=(8, 6), shared=1000, width=64, v_width=64, itemsize=2, rows=99, indirect=False
        )  # fmt: skip


def test_classes_round_lengths_up():
    def name(length):
        return _tune.shape_class(D=64, max_q=length)

    assert name(1000) == name(513) == name(1024) == "D=64|max_q=1024"
    assert len({name(n) for n in (0, 1, 2, 3, 512, 1025)}) == 5


FOUND = [Config(128, 64, 8, 3), Config(128, 128, 8, 2), Config(64, 64, 4, 3)]


def timer(times):
    """A measure that says how often it was asked."""
    asked = []

    def measure(config):
        asked.append(config)
        return times[FOUND.index(config)]

    return measure, asked


def forget():
    _tune._TABLES.clear()


def test_the_fastest_tile_is_kept_here_and_on_disk():
    measure, asked = timer([3.0, 1.0, 2.0])
    assert _tune.choose("a", FOUND) == FOUND[0]  # nothing may be timed: the first, and nothing is kept
    assert not _tune.path().exists()
    assert _tune.choose("a", FOUND, measure) == FOUND[1]
    assert asked == FOUND
    assert _tune.choose("a", FOUND, measure) == _tune.choose("a", FOUND) == FOUND[1]
    assert asked == FOUND
    forget()  # as another process
    assert _tune.choose("a", FOUND, measure) == FOUND[1]
    assert asked == FOUND
    assert _tune.choose("b", FOUND, measure) == FOUND[1]  # another class: another Triton, say
    assert asked == FOUND * 2
    assert json.loads(_tune.path().read_text())["rows"] == {"a": [128, 128, 8, 2], "b": [128, 128, 8, 2]}
    assert _tune.choose("c", FOUND[:1], measure) == FOUND[0]  # nothing to choose from: nothing to time
    assert asked == FOUND * 2
    with pytest.raises(ValueError, match="found is empty"):
        _tune.choose("d", [])


def test_a_tile_that_cannot_run_is_left_out():
    assert _tune.choose("a", FOUND, timer([None, 5.0, None])[0]) == FOUND[1]
    with pytest.raises(RuntimeError, match="no configuration"):
        _tune.choose("b", FOUND, timer([None] * 3)[0])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"rows": 3}',
        '{"rows": {"a": [1, 2]}}',
        '{"rows": {"a": "four"}}',
        "\0\1",
        '{"rows": {"a": null}}',
    ],
)
def test_a_spoilt_file_counts_as_none(text):
    forget()
    _tune.path().parent.mkdir(parents=True, exist_ok=True)
    _tune.path().write_text(text)
    assert _tune.choose("a", FOUND, timer([3.0, 1.0, 2.0])[0]) == FOUND[1]
    forget()
    assert _tune.known("a", FOUND) == FOUND[1]


def test_a_tile_no_longer_listed_is_timed_anew():
    _tune.choose("a", FOUND, timer([3.0, 1.0, 2.0])[0])
    assert _tune.choose("a", [FOUND[0], FOUND[2]], timer([3.0, 1.0, 2.0])[0]) == FOUND[2]


def test_what_another_process_wrote_is_kept():
    _tune.choose("a", FOUND, timer([3.0, 1.0, 2.0])[0])
    rows = json.loads(_tune.path().read_text())["rows"]
    _tune.path().write_text(json.dumps({"rows": {**rows, "theirs": [64, 64, 4, 3]}}))
    _tune.choose("b", FOUND, timer([1.0, 3.0, 2.0])[0])
    assert set(json.loads(_tune.path().read_text())["rows"]) == {"a", "b", "theirs"}
    assert os.listdir(_tune.path().parent) == ["tune.json"]  # no half-written file is left


@pytest.mark.parametrize("place", ["a file", "nobody's"])
def test_a_place_that_cannot_be_written_to_costs_nothing(monkeypatch, tmp_path, place):
    there = tmp_path / "x"
    if place == "a file":
        there.write_text("")
    else:
        monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(PermissionError("no")))
    monkeypatch.setenv("KVLAB_CACHE", str(there))
    measure, asked = timer([3.0, 1.0, 2.0])
    assert _tune.choose("a", FOUND, measure) == _tune.choose("a", FOUND, measure) == FOUND[1]
    assert asked == FOUND
    assert place == "a file" or os.listdir(there) == []


def test_when_nothing_may_be_timed(monkeypatch):
    monkeypatch.setenv("KVLAB_TUNE", "1")
    assert not _tune.may_tune(torch.device("cpu"))
    monkeypatch.setattr(runtime, "INTERPRET", True)
    assert not _tune.may_tune(torch.device("cuda", 0))
    monkeypatch.setattr(runtime, "INTERPRET", False)
    for capturing in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        assert _tune.may_tune(torch.device("cuda", 0)) is not capturing
    monkeypatch.setenv("KVLAB_TUNE", "0")
    assert not _tune.may_tune(torch.device("cuda", 0))


def test_a_class_knows_what_matters(monkeypatch):
    """Whatever changes the work, or the code, changes the name of the class."""
    keys = []
    monkeypatch.setattr(_tune, "choose", lambda key, *_: keys.append(key))
    q, k = torch.zeros(1, 40, 4, 16), torch.zeros(1, 40, 2, 16)
    base = {"paged": False, "max_seqlen_q": 40, "max_seqlen_k": 40, "causal": True, "window_size": (-1, -1),
            "softcap": 0.0, "tree": False}  # fmt: skip
    changes = [{}, {"paged": True}, {"max_seqlen_q": 99}, {"max_seqlen_k": 99}, {"causal": False}, {"tree": True},
               {"window_size": (3, -1)}, {"window_size": (-1, 3)}, {"softcap": 1.0}]  # fmt: skip
    for change in changes:
        _kernel.configuration(q, k, k, **{**base, **change})
    for other in ((q[..., :8], k[..., :8], k), (q, k, k[..., :8]), (q, k[:, :, :1], k), (q.half(), k.half(), k.half())):
        _kernel.configuration(*other, **base)
    monkeypatch.setattr(_kernel, "_code", lambda: "another")
    _kernel.configuration(q, k, k, **base)
    assert len(set(keys)) == len(keys) == len(changes) + 5
    _kernel.configuration(q, k, k, **{**base, "window_size": (9, -1), "max_seqlen_q": 33})
    assert keys[-1] not in keys[:-1]  # of the other code; lengths and windows alike share a class
    _kernel.configuration(q, k, k, **{**base, "window_size": (8, -1), "max_seqlen_q": 64})
    assert keys[-1] == keys[-2]


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_tuning_on_a_gpu(monkeypatch):
    monkeypatch.setenv("KVLAB_TUNE", "1")
    q, k = torch.randn(1, 500, 8, 64, device=ON).half(), torch.randn(1, 500, 2, 64, device=ON).half()
    before = runtime.launches["flash_attention_kernel"]
    out = flash.flash_attn_func(q, k, k, impl="triton")
    assert runtime.launches["flash_attention_kernel"] == before + 1, "a trial counts as a launch"
    holds(out[0], None, q[0], k[0], k[0], causal=False)
    assert torch.equal(flash.flash_attn_func(q, k, k, impl="triton"), out)
    rows = json.loads(_tune.path().read_text())["rows"]
    assert list(flash.explain(q, k, k, impl="triton").config.values()) in rows.values()


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_a_captured_launch_replays_with_other_lengths(monkeypatch):
    monkeypatch.setenv("KVLAB_TUNE", "1")
    case = testing.AttentionCase("", (1, 1), (40, 33), padding="garbage")
    inputs = case.build(device=ON, dtype=torch.float16)
    inputs.call(flash.attention, impl="triton")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = inputs.call(flash.attention, impl="triton", max_seqlen_q=1)
    inputs.seqused_k.copy_(torch.tensor([17, 33], **I32))
    graph.replay()
    testing.assert_close(out, inputs.oracle()[0], inputs.plain()[0])
