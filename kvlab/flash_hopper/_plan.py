"""In which order the tiles of a ragged batch are taken, found on the device: the host does not know the lengths."""

from __future__ import annotations

from kvlab.runtime import counted, tl, triton


@counted
@triton.jit(do_not_specialize=["batch"])
def plan_tiles_kernel(
    plan_ptr, cu_q_ptr, cu_k_ptr, used_ptr, batch, TOKENS: tl.constexpr, PAGED: tl.constexpr, CAUSAL: tl.constexpr,
    WIDTH: tl.constexpr, LONGER_THAN: tl.constexpr = 0,
):  # fmt: skip
    """Write the list (sequence, tile of TOKENS queries), those with the most keys first; each tile counts for itself
    how many come before it. Sequences of LONGER_THAN queries or fewer have none. plan_ptr: [0] the number of tiles,
    then from [2] on two numbers a tile.

    Source: chapter 03b.
    """
    seq = tl.program_id(0)
    m = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    q_len = tl.load(cu_q_ptr + seq + 1) - tl.load(cu_q_ptr + seq)
    if PAGED:
        kv_len = tl.load(used_ptr + seq)
    else:
        kv_len = tl.load(cu_k_ptr + seq + 1) - tl.load(cu_k_ptr + seq)
    end = m * 0 + kv_len  # the position one past the last key that a tile sees, for its place in the order
    if CAUSAL:
        end = kv_len - q_len + (m + 1) * TOKENS
    before = m * 0
    if not CAUSAL:
        before = m
    tiles = 0
    for start in range(0, batch, WIDTH):
        other = start + tl.arange(0, WIDTH)
        there = other < batch
        q = tl.load(cu_q_ptr + other + 1, mask=there, other=0) - tl.load(cu_q_ptr + other, mask=there, other=0)
        if PAGED:
            kv = tl.load(used_ptr + other, mask=there, other=0)
        else:
            kv = tl.load(cu_k_ptr + other + 1, mask=there, other=0) - tl.load(cu_k_ptr + other, mask=there, other=0)
        count = tl.where(q > LONGER_THAN, tl.cdiv(q, TOKENS), 0)
        tiles += tl.sum(count)
        if CAUSAL:
            reach = tl.maximum(end[:, None] - (kv - q)[None, :], 0)
            longer = count[None, :] - tl.minimum(reach // TOKENS, count[None, :])
            place = reach // TOKENS
            tie = (reach % TOKENS == 0) & (place >= 1) & (place <= count[None, :]) & (other < seq)[None, :]
            before += tl.sum(longer + tie.to(tl.int32), axis=1)
        else:
            first = (kv[None, :] > end[:, None]) | ((kv[None, :] == end[:, None]) & (other < seq)[None, :])
            before += tl.sum(tl.where(first, count[None, :], 0), axis=1)
    mine = (m < tl.cdiv(q_len, TOKENS)) & (q_len > LONGER_THAN)
    tl.store(plan_ptr + 2 + 2 * before, m * 0 + seq, mask=mine)
    tl.store(plan_ptr + 3 + 2 * before, m, mask=mine)
    if (seq == 0) & (tl.program_id(1) == 0):
        tl.store(plan_ptr, tiles)
