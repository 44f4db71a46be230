"""reference: the oracle itself, against numbers worked out by hand and against PyTorch's own attention."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from kvlab.reference import attend_one, attention, flash_attn_func, tile_kinds, visible_keys

INF = float("inf")


def ints(mask: torch.Tensor) -> list[list[int]]:
    return mask.int().tolist()


def one_head(values, q_len: int = 1, q: float = 0.0, k: float = 0.0):
    """q [q_len, 1, 1], k and v [len(values), 1, 1]; all scores are q * k."""
    v = torch.tensor(values, dtype=torch.float64).reshape(-1, 1, 1)
    return torch.full((q_len, 1, 1), q, dtype=torch.float64), torch.full_like(v, k), v


def random(q_len=5, kv_len=9, heads=4, kv_heads=2, dim=8, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(n, h, dim, generator=g, dtype=torch.float64).to(dtype)
        for n, h in ((q_len, heads), (kv_len, kv_heads), (kv_len, kv_heads))
    )


# ------------------------------------------------------------------------------------------------ visible keys


def test_causal_is_aligned_bottom_right():
    assert ints(visible_keys(2, 5)) == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert ints(visible_keys(5, 2)) == [[0, 0], [0, 0], [0, 0], [1, 0], [1, 1]]


def test_prefill_of_three_then_two_sees_what_five_do():
    whole = ints(visible_keys(5, 5))
    assert [row[:3] for row in whole[:3]] == ints(visible_keys(3, 3))
    assert whole[3:] == ints(visible_keys(2, 5))


def test_window_is_inclusive_on_both_sides():
    assert ints(visible_keys(2, 5, window_size=(1, 0))) == [[0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]
    assert ints(visible_keys(3, 3, causal=False, window_size=(0, 1))) == [[1, 1, 0], [0, 1, 1], [0, 0, 1]]
    assert ints(visible_keys(1, 4, window_size=(0, 0))) == [[0, 0, 0, 1]]
    assert visible_keys(3, 4, causal=False).all()


def test_tree_by_hand():
    """Tokens 2..5 are a tree after a past of 2: root 2, its children 3 and 4, and 5 below 3."""
    tree = torch.tensor([0b0001, 0b0011, 0b0101, 0b1011])
    assert ints(visible_keys(4, 6, tree_mask=tree)) == [
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 0, 1, 0],
        [1, 1, 1, 1, 0, 1],
    ]


def test_window_over_a_tree_counts_depth():
    """Of its three newest ancestors, itself included, a leaf at depth 2 keeps the root and drops all the past."""
    tree = torch.tensor([0b0001, 0b0011, 0b0101, 0b1011])
    assert ints(visible_keys(4, 6, tree_mask=tree, window_size=(2, 0))) == [
        [1, 1, 1, 0, 0, 0],
        [0, 1, 1, 1, 0, 0],
        [0, 1, 1, 0, 1, 0],
        [0, 0, 1, 1, 0, 1],
    ]


def test_a_tree_that_is_a_chain_is_causal():
    chain = torch.tensor([(1 << i + 1) - 1 for i in range(6)])
    assert torch.equal(visible_keys(6, 9, tree_mask=chain), visible_keys(6, 9))
    assert torch.equal(visible_keys(6, 9, tree_mask=chain, window_size=(2, 0)), visible_keys(6, 9, window_size=(2, 0)))


def test_the_63rd_bit_of_a_tree():
    star = torch.tensor([1] + [1 | 1 << i for i in range(1, 63)])
    seen = visible_keys(63, 63, tree_mask=star)
    assert torch.equal(seen, torch.eye(63, dtype=torch.bool) | (torch.arange(63) == 0)[None, :])


def test_negative_lengths_are_refused():
    with pytest.raises(ValueError, match="q_len is -1"):
        visible_keys(-1, 4)


# -------------------------------------------------------------------------------------------------- attend_one


def test_rows_that_see_no_key():
    q, k, v = random(5, 2)
    out, lse = attend_one(q, k, v)
    assert (out[:3] == 0).all()
    assert (lse[:, :3] == -INF).all()
    assert torch.isfinite(out).all()
    assert torch.isfinite(lse[:, 3:]).all()
    torch.testing.assert_close(out[3], v[0].repeat_interleave(2, dim=0))


def test_no_keys_at_all():
    q, k, v = random(3, 0)
    out, lse = attend_one(q, k, v)
    assert out.shape == q.shape
    assert (out == 0).all()
    assert (lse == -INF).all()


def test_no_queries():
    q, k, v = random(0, 4)
    out, lse = attend_one(q, k, v)
    assert out.shape == (0, 4, 8)
    assert lse.shape == (4, 0)


def test_very_negative_scores_are_not_masked_ones():
    q, k, v = one_head([1, 2, 3, 6], q=1.0, k=-6e4)
    out, lse = attend_one(q, k, v, softmax_scale=1.0)
    assert math.isclose(out.item(), 3.0)
    assert math.isclose(lse.item(), -6e4 + math.log(4))
    low, low_lse = attend_one(q.float(), k.float(), v.float(), softmax_scale=1.0, dtype=torch.float32)
    assert math.isclose(low.item(), 3.0, rel_tol=1e-6)
    assert math.isclose(low_lse.item(), -59998.6137, abs_tol=0.01)


def test_large_scores_do_not_overflow():
    q, k, v = one_head([1, 2, 3, 6], q=1.0, k=200.0)
    out, lse = attend_one(q.float(), k.float(), v.float(), softmax_scale=1.0, dtype=torch.float32)
    assert math.isclose(out.item(), 3.0, rel_tol=1e-6)
    assert math.isclose(lse.item(), 200 + math.log(4), rel_tol=1e-6)


def test_softcap_leaves_masked_keys_masked():
    q, _, v = one_head([5, 7], q_len=2, q=1.0)
    k = torch.tensor([1.0, 3.0], dtype=torch.float64).reshape(2, 1, 1)
    out, lse = attend_one(q, k, v, softmax_scale=1.0, softcap=1.0)
    assert out[0].item() == 5.0
    assert math.isclose(lse[0, 0].item(), math.tanh(1))
    a, b = math.exp(math.tanh(1)), math.exp(math.tanh(3))
    assert math.isclose(out[1].item(), (5 * a + 7 * b) / (a + b))


def test_one_query_over_four_keys():
    out, lse = attend_one(*one_head([0, 1, 2, 3]))
    assert out.item() == 1.5
    assert math.isclose(lse.item(), math.log(4))


def test_first_row_of_a_prefill_is_its_own_value():
    q, k, v = random(4, 4)
    assert torch.equal(attend_one(q, k, v)[0][0], v[0].repeat_interleave(2, dim=0))


def test_window_by_hand():
    out, _ = attend_one(*one_head([0, 1, 2, 3], q_len=4), window_size=(1, 0))
    assert out.flatten().tolist() == [0.0, 0.5, 1.5, 2.5]


def test_sink_takes_a_share_of_the_denominator():
    q, k, v = one_head([4, 8])
    out, lse = attend_one(q, k, v, sinks=torch.tensor([math.log(2)]))
    assert math.isclose(out.item(), (4 + 8) / 4, rel_tol=1e-6)
    assert math.isclose(lse.item(), math.log(4), rel_tol=1e-6)


def test_sink_is_neither_scaled_nor_capped():
    q, k, v = one_head([4, 8])
    plain = attend_one(q, k, v, sinks=torch.tensor([3.0]))
    other = attend_one(q, k, v, sinks=torch.tensor([3.0]), softmax_scale=0.01, softcap=0.5)
    assert torch.equal(plain[0], other[0])
    assert torch.equal(plain[1], other[1])


def test_sink_of_a_row_that_sees_no_key():
    q, k, v = random(3, 0)
    out, lse = attend_one(q, k, v, sinks=torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert (out == 0).all()
    torch.testing.assert_close(lse, torch.arange(1.0, 5.0, dtype=torch.float64)[:, None].expand(4, 3))


def test_sink_of_minus_infinity_is_none():
    q, k, v = random()
    torch.testing.assert_close(attend_one(q, k, v, sinks=torch.full((4,), -INF)), attend_one(q, k, v))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (5, 1), (14, 2)])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (7, 7), (3, 10)])
def test_equals_pytorch(heads, kv_heads, q_len, kv_len):
    q, k, v = random(q_len, kv_len, heads, kv_heads)
    mask = torch.ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len)
    want = functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=mask, enable_gqa=True
    ).transpose(0, 1)
    torch.testing.assert_close(attend_one(q, k, v)[0], want)


def test_v_may_be_wider_than_k():
    q, k, _ = random()
    v = torch.randn(9, 2, 5, dtype=torch.float64)
    out, _ = attend_one(q, k, v)
    assert out.shape == (5, 4, 5)
    torch.testing.assert_close(out[..., :3], attend_one(q, k, v[..., :3])[0])


def test_dtypes():
    q, k, v = random(dtype=torch.bfloat16)
    assert attend_one(q, k, v)[0].dtype == torch.float64
    out, lse = attend_one(q, k, v, dtype=None)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    out, lse = attend_one(q, k, v, dtype=torch.float32)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    ("named", "change"),
    [
        ("softcap is nan", {"softcap": math.nan}),
        ("softcap is inf", {"softcap": INF}),
        ("softcap is -1", {"softcap": -1.0}),
        ("softmax_scale is nan", {"softmax_scale": math.nan}),
        ("softmax_scale is inf", {"softmax_scale": INF}),
        ("sinks have shape", {"sinks": torch.zeros(2)}),
        ("sinks have shape", {"sinks": torch.zeros(4, 1)}),
        ("v has shape", {"v": torch.zeros(8, 2, 8)}),
        ("v has shape", {"v": torch.zeros(1, 2, 8)}),
        ("v has shape", {"v": torch.zeros(9, 1, 8)}),
        ("v has shape", {"v": torch.zeros(9, 4, 8)}),
        ("k has shape", {"k": torch.zeros(9, 2, 4)}),
        ("k has shape", {"k": torch.zeros(9, 8)}),
        ("q has shape", {"q": torch.zeros(1, 5, 4, 8)}),
        ("tree_mask is", {"tree_mask": torch.ones(5, dtype=torch.int32)}),
        ("tree_mask is", {"tree_mask": torch.ones(5)}),
        ("tree_mask is", {"tree_mask": torch.ones(4, dtype=torch.int64)}),
    ],
)
def test_attend_one_refuses(named, change):
    q, k, v = random()
    arguments = {"q": q, "k": k, "v": v, **change}
    with pytest.raises(ValueError, match=f"^{named}"):
        attend_one(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


@pytest.mark.parametrize(("q_len", "kv_len"), [(64, 64), (66, 80), (5, 2)])
def test_a_tree_has_63_tokens_and_all_are_keys(q_len, kv_len):
    with pytest.raises(ValueError, match=f"tree_mask has {q_len} tokens"):
        visible_keys(q_len, kv_len, tree_mask=torch.ones(q_len, dtype=torch.int64))


def test_heads_must_divide():
    q, k, v = random(heads=4, kv_heads=3)
    with pytest.raises(ValueError, match="4 heads and k 3"):
        attend_one(q, k, v)


# ------------------------------------------------------------------------------------------------------- paged


def paged(lengths, q_lens, block_size, fill=0.0, heads=4, kv_heads=2, dim=8, seed=0):
    """Ragged sequences in shuffled pages of a pool filled with ``fill``, and the same tensors dense."""
    g = torch.Generator().manual_seed(seed)
    pages = [-(-n // block_size) for n in lengths]
    order = torch.randperm(sum(pages) + 3, generator=g).tolist()
    pool_k = torch.full((len(order), block_size, kv_heads, dim), fill, dtype=torch.float64)
    pool_v = pool_k.clone()
    table = torch.full((len(lengths), max([*pages, 1]) + 1), -1, dtype=torch.int32)
    dense, qs = [], []
    for b, (length, q_len) in enumerate(zip(lengths, q_lens, strict=True)):
        q, k, v = (
            torch.randn(n, h, dim, generator=g, dtype=torch.float64)
            for n, h in ((q_len, heads), (length, kv_heads), (length, kv_heads))
        )
        for i in range(pages[b]):
            page = order.pop()
            table[b, i] = page
            part = slice(i * block_size, min((i + 1) * block_size, length))
            pool_k[page, : part.stop - part.start] = k[part]
            pool_v[page, : part.stop - part.start] = v[part]
        dense.append((q, k, v))
        qs.append(q)
    starts = torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32)
    layout = dict(block_table=table, cu_seqlens_q=starts, seqused_k=torch.tensor(lengths, dtype=torch.int32))  # noqa: C408
    return torch.cat(qs), pool_k, pool_v, layout, dense


OPTIONS = [
    {},
    {"window_size": (3, 0)},
    {"softcap": 2.0},
    {"sinks": torch.tensor([0.0, 1.0, -1.0, 2.0])},
    {"causal": False},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_paged_equals_dense(block_size, options):
    lengths, q_lens = [0, 1, 3, 4, 5, 17, 9], [0, 1, 2, 4, 1, 5, 0]
    q, k, v, layout, dense = paged(lengths, q_lens, block_size)
    out, lse = attention(q, k, v, **layout, return_lse=True, **options)
    pairs = [attend_one(*one, **options) for one in dense]
    assert torch.equal(out, torch.cat([pair[0] for pair in pairs]))
    assert torch.equal(lse, torch.cat([pair[1] for pair in pairs], dim=1))


def test_unused_slots_never_reach_the_output():
    results = [
        attention(*p[:3], **p[3]) for p in (paged([5, 7], [1, 7], 4, fill) for fill in (0.0, 1e4, INF, math.nan))
    ]
    assert all(torch.equal(results[0], other) for other in results[1:])
    assert torch.isfinite(results[0]).all()


def test_entries_past_the_last_block_may_hold_anything():
    q, k, v, layout, _ = paged([5, 3], [1, 1], 4)
    want = attention(q, k, v, **layout)
    layout["block_table"][1, 1:] = 10_000
    layout["block_table"][0, 2:] = -7
    assert torch.equal(attention(q, k, v, **layout), want)


def test_empty_request_beside_a_full_one():
    q, k, v, layout, dense = paged([0, 17], [1, 1], 16)
    out = torch.full_like(q, math.nan)
    result, lse = attention(q, k, v, **layout, out=out, return_lse=True)
    assert result is out
    assert (out[0] == 0).all()
    assert (lse[:, 0] == -INF).all()
    assert torch.equal(out[1:], attend_one(*dense[1])[0])


def test_tree_masks_are_each_sequences_own():
    q, k, v, layout, dense = paged([6, 5], [4, 2], 4)
    tree = torch.tensor([0b0001, 0b0011, 0b0101, 0b1011, 0b01, 0b10])
    out = attention(q, k, v, **layout, tree_mask=tree)
    assert torch.equal(out[:4], attend_one(*dense[0], tree_mask=tree[:4])[0])
    assert torch.equal(out[4:], attend_one(*dense[1], tree_mask=tree[4:])[0])


def test_short_table_is_refused():
    q, k, v, layout, _ = paged([5, 3], [1, 1], 4)
    with pytest.raises(ValueError, match=r"block_table\[0\].*5 tokens need 2 pages"):
        attention(q, k, v, **{**layout, "block_table": layout["block_table"][:, :1]})
    layout["block_table"][0, 1] = -1
    with pytest.raises(ValueError, match=r"block_table\[0\]"):
        attention(q, k, v, **layout)


@pytest.mark.parametrize(
    ("named", "change"),
    [
        ("cu_seqlens_q is", {"cu_seqlens_q": [0, 8, 6]}),
        ("cu_seqlens_q is", {"cu_seqlens_q": [0, 7, 6]}),
        ("cu_seqlens_q is", {"cu_seqlens_q": [1, 2, 6]}),
        ("cu_seqlens_q is", {"cu_seqlens_q": [0, 1, 5]}),
        ("cu_seqlens_q is", {"cu_seqlens_q": [0, 1, 9]}),
        ("cu_seqlens_q is", {"cu_seqlens_q": [0, 6]}),
        ("cu_seqlens_q is", {"cu_seqlens_q": [0, 1, 2, 6]}),
        ("seqused_k is", {"seqused_k": [-3, 7]}),
        ("seqused_k is", {"seqused_k": torch.tensor([5.0, 7.0])}),
        ("block_table is", {"block_table": torch.zeros(2, 2)}),
        ("block_table is", {"block_table": [[0, 1]]}),
        ("block_table is", {"block_table": [0, 1]}),
        (r"block_table\[1\] begins \[0, 99\]", {"block_table": [[0, 1], [0, 99]]}),
        (r"block_table\[1\] begins \[-2, 0\]", {"block_table": [[0, 1], [-2, 0]]}),
        ("tree_mask has shape", {"tree_mask": torch.ones(5, dtype=torch.int64)}),
        ("out is", {"out": torch.zeros(6, 4, 8, dtype=torch.int64)}),
        ("out is", {"out": torch.zeros(1, 4, 8)}),
        ("out is", {"out": torch.zeros(2, 6, 4, 8)}),
        ("v_cache has shape", {"v_cache": torch.zeros(7, 8, 2, 8)}),
        ("v_cache has shape", {"v_cache": torch.zeros(2, 4, 2, 8)}),
        ("v_cache has shape", {"v_cache": torch.zeros(7, 4, 1, 8)}),
        ("q is", {"q": torch.zeros(6, 32)}),
    ],
)
def test_attention_refuses(named, change):
    q, k, v, layout, _ = paged([5, 7], [1, 5], 4)
    change = {n: torch.tensor(x, dtype=torch.int32) if isinstance(x, list) else x for n, x in change.items()}
    arguments = {"q": q, "k_cache": k, "v_cache": v, **layout, **change}
    with pytest.raises(ValueError, match=f"^{named}"):
        attention(arguments.pop("q"), arguments.pop("k_cache"), arguments.pop("v_cache"), **arguments)


def test_low_precision_run_of_the_same_lines():
    q, k, v, layout, _ = paged([5, 17], [1, 5], 4)
    exact = attention(q, k, v, **layout)
    low, lse = attention(q.half(), k.half(), v.half(), **layout, dtype=None, return_lse=True)
    assert low.dtype == torch.float16
    assert lse.dtype == torch.float32
    assert 0 < (low - exact).abs().max() < 0.02


def test_dense_form():
    g = torch.Generator().manual_seed(0)
    q = torch.randn(2, 3, 4, 8, generator=g)
    k, v = torch.randn(2, 5, 2, 8, generator=g), torch.randn(2, 5, 2, 8, generator=g)
    out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert (out.shape, lse.shape) == ((2, 3, 4, 8), (2, 4, 3))
    for b in range(2):
        assert torch.equal(out[b], attend_one(q[b], k[b], v[b])[0])
    assert torch.equal(flash_attn_func(q, k, v)[0], attend_one(q[0], k[0], v[0], causal=False)[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, None])
def test_dense_form_of_no_sequences(dtype):
    one = [torch.zeros(1, 3, heads, 8) for heads in (4, 2, 2)]
    got, want = (flash_attn_func(*(x[:n] for x in one), return_lse=True, dtype=dtype) for n in (0, 1))
    for empty, full in zip(got, want, strict=True):
        assert (empty.shape, empty.dtype) == ((0, *full.shape[1:]), full.dtype)


@pytest.mark.parametrize("batches", [(2, 1, 1), (1, 2, 2), (2, 2, 1)])
def test_dense_form_needs_one_batch_size(batches):
    tensors = [torch.zeros(n, 3, heads, 8) for n, heads in zip(batches, (4, 2, 2), strict=True)]
    with pytest.raises(ValueError, match="q, k and v have shapes"):
        flash_attn_func(*tensors)
    with pytest.raises(ValueError, match="q, k and v have shapes"):
        flash_attn_func(*(x[0] for x in tensors))


# --- tiles -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 0), (0, 5), (5, 0), (1, 1), (7, 7), (3, 20), (20, 3), (16, 24)])
@pytest.mark.parametrize(("M", "N"), [(1, 1), (4, 4), (3, 7), (16, 8), (64, 64)])
def test_kinds_of_tiles_are_those_of_the_mask(q_len, kv_len, M, N):
    seen = visible_keys(q_len, kv_len)
    cut = [[seen[i : i + M, j : j + N] for j in range(0, kv_len, N)] for i in range(0, q_len, M)]
    expected = [[int(t.any()) + int(t.all() and t.shape[1] == N) for t in row] for row in cut]
    assert tile_kinds(q_len, kv_len, M, N).tolist() == expected


def test_tiles_without_a_query_or_a_key_are_refused():
    for bad in ((0, 4), (4, -1)):
        with pytest.raises(ValueError, match="a tile has 1 query"):
            tile_kinds(4, 4, *bad)
