"""The portable flash attention kernel: one pass over the keys, for pages, for dense tensors and for ragged ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvlab import runtime
from kvlab.flash import _tune
from kvlab.runtime import cap, cdiv, counted, dot, finish, key_range, load_rows, tl, triton, visible

LOG2E = tl.constexpr(1.4426950408889634)  # exp(x) is exp2(x · log2 e), and the hardware has exp2 alone
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def find_tile(cu_ptr, block, tiles, batch, GROUP: tl.constexpr, M: tl.constexpr, SEARCH: tl.constexpr):
    """Which sequence a program works on, and which tile of M rows of it.

    Where every sequence is given ``tiles`` of them that is a division. With SEARCH the tiles of sequence b begin at
    cu[b] · GROUP // M + b, which leaves room for all of them and at most one more, and b is found by bisection: few
    programs of a ragged batch are idle, and the host need not know its lengths.

    Shapes and units: cu_ptr [batch + 1] int32; block the number of a program; gives two int32 scalars.

    Source: chapter 03; vLLM's unified attention kernel.
    """
    if SEARCH:
        seq = block * 0
        above = batch
        while above - seq > 1:
            middle = (seq + above) // 2
            begun = tl.load(cu_ptr + middle).to(tl.int64) * GROUP // M + middle <= block
            seq = tl.where(begun, middle, seq)
            above = tl.where(begun, above, middle)
        tile = block - (tl.load(cu_ptr + seq).to(tl.int64) * GROUP // M).to(tl.int32) - seq
    else:
        seq, tile = block // tiles, block % tiles
    return seq, tile


@triton.jit
def find_lengths(cu_q_ptr, cu_k_ptr, used_ptr, seq, q_len, kv_len):
    """A sequence's first row of q and of k, and how many new tokens and how many keys it has.

    Shapes and units: cu_q_ptr, cu_k_ptr [B + 1] and used_ptr [B] int32, or None: then rows are counted from the
    sequence's own first, and lengths are those given; gives four scalars, the second int64.

    Source: chapter 03.
    """
    first, first_key = 0, 0
    if cu_q_ptr is not None:
        first = tl.load(cu_q_ptr + seq)
        q_len = tl.load(cu_q_ptr + seq + 1) - first
    if used_ptr is not None:
        kv_len = tl.load(used_ptr + seq)
    elif cu_k_ptr is not None:
        first_key = tl.load(cu_k_ptr + seq).to(tl.int64)
        kv_len = (tl.load(cu_k_ptr + seq + 1) - first_key).to(tl.int32)
    return first, first_key, q_len, kv_len


@triton.jit
def clear_range(q_start, q_count, q_len, kv_len, low, high, N: tl.constexpr, CAUSAL: tl.constexpr, LEFT: tl.constexpr,
                RIGHT: tl.constexpr, TREE: tl.constexpr):  # fmt: skip
    """Which blocks of N keys need no mask, because all of a tile's queries see all of their keys.

    Blocks begin at multiples of N, so that none straddles a page that N divides.

    Shapes and units: as ``runtime.key_range``, whose results are ``low`` and ``high``; gives three int32 slots: where
    the first block begins, where the first clear one does, and one past the last clear one.

    Source: chapter 03.
    """
    past = kv_len - q_len
    last = tl.minimum(q_start + q_count, q_len) - 1
    begin = low // N * N
    if TREE:  # depths lie between past and the last slot
        high = tl.minimum(high, past)
        last = q_len - 1
    else:
        if CAUSAL:
            high = tl.minimum(high, past + q_start + 1)
        if RIGHT >= 0:
            high = tl.minimum(high, past + q_start + 1 + RIGHT)
    if LEFT >= 0:
        low = tl.maximum(low, past + last - LEFT)
    low, high = tl.cdiv(low, N) * N, tl.maximum(high, 0) // N * N
    return begin, tl.where(low < high, low, begin), tl.where(low < high, high, begin)


@triton.jit
def find_rows(table_ptr, start, high, k_page, v_page, K_SLOT: tl.constexpr, V_SLOT: tl.constexpr, N: tl.constexpr,
              BLOCK_SIZE: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Where keys start .. start + N and their values lie: offsets that all N share, and one for each.

    Shapes and units: table_ptr the sequence's row of the block table, or None where keys lie one after the other;
    ``high`` one past the last key; strides in elements; gives two int64 scalars, of k and v, and two [N].

    Source: chapter 03.
    """
    i = tl.arange(0, N)
    if N * K_SLOT >= 2**30 or N * V_SLOT >= 2**30:
        i = i.to(tl.int64)
    if table_ptr is None:
        at = start.to(tl.int64)
        return at * K_SLOT, at * V_SLOT, i * K_SLOT, i * V_SLOT
    elif BLOCK_SIZE % N == 0:  # the tile lies within one page: one look-up
        page = tl.load(table_ptr + start // BLOCK_SIZE, mask=start < high, other=0).to(tl.int64)
        at = (start % BLOCK_SIZE).to(tl.int64)
        return page * k_page + at * K_SLOT, page * v_page + at * V_SLOT, i * K_SLOT, i * V_SLOT
    else:
        mask = start + i < high if MASKED else None
        page = tl.load(table_ptr + (start + i) // BLOCK_SIZE, mask=mask).to(tl.int64)
        at, none = ((start + i) % BLOCK_SIZE).to(tl.int64), start.to(tl.int64) * 0
        return none, none, page * k_page + at * K_SLOT, page * v_page + at * V_SLOT


@counted
@triton.jit(do_not_specialize=["q_len", "kv_len", "longer_than", "tiles", "batch", "lse_seq", "lse_head", "table_row"])
def flash_attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, table_ptr, cu_q_ptr, cu_k_ptr, used_ptr, sink_ptr, tree_ptr, scale, softcap,
    q_len, kv_len, longer_than, tiles, batch, q_seq, q_token, q_head, k_seq, k_page, k_head, v_seq, v_page, v_head,
    o_seq, o_token, o_head, lse_seq, lse_head, table_row,
    K_SLOT: tl.constexpr, V_SLOT: tl.constexpr, BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, WIDE_D: tl.constexpr, WIDE_DV: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    SEARCH: tl.constexpr, CAUSAL: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """M rows, each a new token under one of the GROUP heads that share a KV head, against all keys they see, once.

    Source: chapter 03; Dao 2023 (FlashAttention-2).
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # a sequence's last tile sees most keys: it begins first
    kv_head = tl.program_id(1).to(tl.int64)
    seq, tile = find_tile(cu_q_ptr, block, tiles, batch, GROUP, M, SEARCH)
    first, first_key, q_len, kv_len = find_lengths(cu_q_ptr, cu_k_ptr, used_ptr, seq, q_len, kv_len)
    if (tile * M >= q_len * GROUP) | (q_len <= longer_than):
        return
    seq = seq.to(tl.int64)
    if table_ptr is not None:
        table_ptr += seq * table_row
    k_ptr += seq * k_seq + first_key * K_SLOT + kv_head * k_head
    v_ptr += seq * v_seq + first_key * V_SLOT + kv_head * v_head
    rows = tile * M + tl.arange(0, M)
    q_index, head = rows // GROUP, kv_head * GROUP + rows % GROUP
    q_start = tile * M // GROUP
    q_count = (tile * M + M - 1) // GROUP + 1 - q_start
    live = q_index < q_len
    token = (first + q_index).to(tl.int64)
    d, dv = tl.arange(0, WIDE_D), tl.arange(0, WIDE_DV)
    q = load_rows(q_ptr + seq * q_seq, token[:, None] * q_token + head[:, None] * q_head + d[None, :],
                  live[:, None] & (d < D)[None, :])  # fmt: skip
    TREE: tl.constexpr = tree_ptr is not None
    bits, key_bits = tl.full([M], 0, tl.int64), tl.full([N], 0, tl.int64)
    if TREE:
        bits = tl.load(tree_ptr + token, mask=live, other=0)
    low, high = key_range(q_start, q_count, q_len, kv_len, CAUSAL, LEFT, RIGHT, TREE)
    begin, clear, end = clear_range(q_start, q_count, q_len, kv_len, low, high, N, CAUSAL, LEFT, RIGHT, TREE)
    before = clear - begin  # keys at the left edge, which a window has

    unit = LOG2E if CAP else scale * LOG2E
    peak = tl.full([M], float("-inf"), tl.float32)  # the largest score of each row so far, times log2 e
    total = tl.zeros([M], tl.float32)  # the sum of exp2(score - peak)
    acc = tl.zeros([M, WIDE_DV], tl.float32)  # the sum of exp2(score - peak) * value
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + head, mask=live, other=float("-inf")) * LOG2E
        peak = sink
    for edge in tl.static_range(2):  # first the blocks that all rows see whole, then those at the edges
        for j in range(0, before + high - end if edge else end - clear, N):
            start = j + (tl.where(j < before, begin, end - before) if edge else clear)
            k_index = start + tl.arange(0, N)
            there = (k_index >= low) & (k_index < high) if edge else tl.full([N], True, tl.int1)
            to_k, to_v, k_rows, v_rows = find_rows(
                table_ptr, start, high, k_page, v_page, K_SLOT, V_SLOT, N, BLOCK_SIZE, edge
            )
            k = load_rows(k_ptr + to_k, k_rows[None, :] + d[:, None], there[None, :] & (d < D)[:, None])
            scores = dot(q, k, tl.zeros([M, N], tl.float32))
            if CAP:
                scores = cap(scores * scale, softcap)
            if edge:
                if TREE:
                    new = k_index - (kv_len - q_len)
                    key_bits = tl.load(tree_ptr + first + new, mask=there & (new >= 0), other=0)
                seen = visible(q_index, k_index, bits, key_bits, q_len, kv_len, CAUSAL, LEFT, RIGHT, TREE)
                scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(peak, tl.max(scores, axis=1) * unit)
            stable = tl.where(higher == float("-inf"), 0.0, higher) if edge else higher  # a row that sees nothing yet
            weight = tl.exp2(scores * unit - stable[:, None])
            shrink = tl.exp2(peak - stable)  # what was summed so far, measured by the new peak
            total = total * shrink + tl.sum(weight, axis=1)
            v = load_rows(v_ptr + to_v, v_rows[:, None] + dv[None, :], there[:, None] & (dv < DV)[None, :])
            acc = dot(weight.to(v.dtype), v, acc * shrink[:, None])
            peak = higher
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    if sink_ptr is not None:
        total += tl.where(live, tl.exp2(sink - peak), 0.0)
    out, lse = finish(acc, total, peak * LN2)
    tl.store(out_ptr + seq * o_seq + token[:, None] * o_token + head[:, None] * o_head + dv[None, :],
             out.to(out_ptr.dtype.element_ty), mask=live[:, None] & (dv < DV)[None, :])  # fmt: skip
    if lse_ptr is not None:
        tl.store(lse_ptr + seq * lse_seq + head * lse_head + token, lse, mask=live)


def launch(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, *, block_table: Tensor | None,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, seqused_k: Tensor | None, max_seqlen_q: int,
    max_seqlen_k: int, softmax_scale: float, causal: bool, window_size: tuple[int, int], softcap: float,
    sinks: Tensor | None, tree_mask: Tensor | None, longer_than: int = 0,
) -> None:  # fmt: skip
    """Launch ``flash_attention_kernel`` on arguments that were checked; ``out`` and ``lse`` are written.

    Shapes and units: dense q [B, Lq, H, D] with k, v [B, Lk, H_kv, D or Dv], out like q and lse [B, H, Lq]; ragged q
    [total_q, H, D] with k, v [total_k, H_kv, D or Dv] and both cu_seqlens [B + 1]; paged q as ragged with k, v
    [num_blocks, block_size, H_kv, D or Dv], block_table [B, max_blocks] and seqused_k [B]; lse [H, total_q].
    ``max_seqlen_q`` and ``max_seqlen_k`` bound the tokens of a sequence. Sequences of ``longer_than`` new tokens or
    fewer are left out.

    Raises: RuntimeError where no kernel can be launched.

    Source: chapter 03.
    """
    dense = cu_seqlens_q is None
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    total_q = q.shape[0] * q.shape[1] if dense else q.shape[0]
    heads, head_dim = q.shape[-2:]
    kv_heads, v_dim = v.shape[-2:]
    if total_q == 0 or max_seqlen_q == 0 or batch == 0:
        return
    if softmax_scale <= 0:  # a maximum of scores is one of scaled scores only where the scale is positive
        q, softmax_scale = q * (-1.0 if softmax_scale else 0.0), -softmax_scale or 1.0
    group = heads // kv_heads
    left, right = (min(w, 2**30) for w in window_size)  # no 32-bit sum of positions may wrap around
    paged = block_table is not None
    strides = [
        *(q.stride()[:3] if dense else (0, *q.stride()[:2])),
        *(x for t in (k, v) for x in (t.stride(0) if dense else 0, t.stride(0) if paged else 0, t.stride(-2))),
        *(out.stride()[:3] if dense else (0, *out.stride()[:2])),
        *((0, 0) if lse is None else lse.stride()[:2] if dense else (0, lse.stride(0))),
        0 if block_table is None else block_table.stride(0),
    ]  # fmt: skip

    def run(config: _tune.Config, kernel: Any = flash_attention_kernel) -> None:
        tiles = cdiv(max_seqlen_q * group, config.M)
        search = not dense and tiles * batch > total_q * group // config.M + batch
        blocks = total_q * group // config.M + batch if search else tiles * batch
        with torch.cuda.device_of(q):
            kernel[(blocks, kv_heads)](
                q, k, v, out, lse, block_table, cu_seqlens_q, cu_seqlens_k, seqused_k, sinks, tree_mask, softmax_scale,
                softcap, q.shape[1] if dense else 0, k.shape[1] if dense else 0, longer_than, tiles, batch, *strides,
                K_SLOT=k.stride(-3), V_SLOT=v.stride(-3), BLOCK_SIZE=k.shape[1] if paged else 1, GROUP=group,
                D=head_dim, DV=v_dim, WIDE_D=_tune.padded(head_dim), WIDE_DV=_tune.padded(v_dim), M=config.M,
                N=config.N, SEARCH=search, CAUSAL=causal, LEFT=left, RIGHT=right, CAP=softcap > 0,
                num_warps=config.num_warps, num_stages=config.num_stages,
            )  # fmt: skip

    def measure(config: _tune.Config) -> float | None:
        return _tune.time_launch(lambda: run(config, flash_attention_kernel.fn))  # a trial does not count as a launch

    run(configuration(
        q, k, v, paged=paged, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, causal=causal,
        window_size=window_size, softcap=softcap, tree=tree_mask is not None,
        measure=measure if _tune.may_tune(q.device) else None,
    ))  # fmt: skip


def attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, block_table: Tensor, cu_seqlens_q: Tensor, seqused_k: Tensor,
    softmax_scale: float | None = None, causal: bool = True, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, sinks: Tensor | None = None, tree_mask: Tensor | None = None, out: Tensor | None = None,
    return_lse: bool = False, impl: str = "triton",
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """``flash.attention`` by this kernel alone and without checks: what ``testing.planted`` copies with the kernel.

    Shapes and units: as ``flash.attention``.

    Source: chapter 03.
    """
    out = q.new_empty(*q.shape[:2], v_cache.shape[3]) if out is None else out
    lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device) if return_lse else None
    launch(
        q, k_cache, v_cache, out, lse, block_table=block_table, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=None,
        seqused_k=seqused_k, max_seqlen_q=q.shape[0], max_seqlen_k=block_table.shape[1] * k_cache.shape[1],
        softmax_scale=q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, sinks=sinks, tree_mask=tree_mask,
    )  # fmt: skip
    return out if lse is None else (out, lse)


def configuration(
    q: Tensor, k: Tensor, v: Tensor, *, paged: bool, max_seqlen_q: int, max_seqlen_k: int, causal: bool,
    window_size: tuple[int, int], softcap: float, tree: bool, measure: Any = None,
) -> _tune.Config:  # fmt: skip
    """The tile that a launch on these arguments takes; with ``measure``, found by timing where it is not known.

    Shapes and units: as ``launch``.

    Source: chapter 03.
    """
    group, page = q.shape[-2] // k.shape[-2], k.shape[1] if paged else 0
    name, capability, shared = _tune.chip(q.device)
    found = _tune.candidates(
        capability=capability, shared=shared, width=_tune.padded(q.shape[-1]),
        v_width=_tune.padded(v.shape[-1]), itemsize=q.element_size(), rows=max_seqlen_q * group, indirect=paged,
    )  # fmt: skip
    key = _tune.shape_class(
        code=_code(), gpu=name, dtype=str(q.dtype).removeprefix("torch."), D=q.shape[-1], Dv=v.shape[-1], group=group,
        page=page, causal=causal, window="".join("+-"[w < 0] for w in window_size), cap=softcap > 0, tree=tree,
        max_q=max_seqlen_q, max_k=max_seqlen_k,
    )  # fmt: skip
    return _tune.choose(key, found, measure)


def _code() -> str:
    return _tune.code(__file__, str(runtime.__file__))
