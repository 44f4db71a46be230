"""The split-KV kernels: a sequence's keys shared out among programs, and their partial results merged."""

from __future__ import annotations

from kvlab.flash._kernel import LN2, LOG2E, find_rows
from kvlab.runtime import cap, counted, dot, finish, key_range, load_rows, tl, triton, visible

MERGE_STAGES = tl.constexpr(3)  # of the loop over splits in a merge: its loads run ahead as those of keys do

# --- who reads which keys --------------------------------------------------------------------------------------------


@triton.jit
def read_lengths(cu_ptr, used_ptr, seq, there, GROUP: tl.constexpr, MAX_ROWS: tl.constexpr, CAUSAL: tl.constexpr,
                 LEFT: tl.constexpr, RIGHT: tl.constexpr, TREE: tl.constexpr):  # fmt: skip
    """The lengths of sequences, which of their slots any query sees, and whether they are this kernel's at all: those
    without new tokens are nobody's, and those of more than MAX_ROWS rows are another kernel's.

    Shapes and units: cu_ptr [B + 1] and used_ptr [B] int32; seq and there scalars or vectors; gives, of their shape,
    the first row of q, q_len, kv_len, the first slot seen, one past the last, and a bool.

    Source: chapter 04.
    """
    first = tl.load(cu_ptr + seq, mask=there, other=0)
    q_len = tl.load(cu_ptr + seq + 1, mask=there, other=0) - first
    kv_len = tl.load(used_ptr + seq, mask=there, other=0)
    low, high = key_range(0, q_len, q_len, kv_len, CAUSAL, LEFT, RIGHT, TREE)
    short = (q_len > 0) & (q_len * GROUP <= MAX_ROWS)
    return first, q_len, kv_len, low + q_len * 0, high, short


@triton.jit
def count_splits(low, high, short, chunk, limit, N: tl.constexpr, RULE: tl.constexpr):
    """Into how many splits keys low .. high are cut: one at least, for a row that sees nothing is written too.

    Shapes and units: low, high and short as ``read_lengths`` gives them; ``chunk`` in tiles of N keys under "balanced",
    in keys under "size" and not read under "count"; never more than ``limit``.

    Source: chapter 04.
    """
    tiles = tl.cdiv(high, N) - low // N
    if RULE == "balanced":
        splits = tl.cdiv(tiles, chunk)
    elif RULE == "size":
        splits = tl.cdiv(high, chunk) - low // chunk
    else:
        splits = tiles
    return tl.where(short, tl.maximum(tl.minimum(splits, limit), 1), 0)


@triton.jit
def deal_chunks(cu_ptr, used_ptr, batch, wave, limit, GROUP: tl.constexpr, MAX_ROWS: tl.constexpr, N: tl.constexpr,
                LONGEST: tl.constexpr, BATCH: tl.constexpr, CAUSAL: tl.constexpr, LEFT: tl.constexpr,
                RIGHT: tl.constexpr, TREE: tl.constexpr):  # fmt: skip
    """The tiles of all sequences dealt into chunks of one size, so that a long sequence gets many programs.

    So many chunks that ``wave`` programs have one each, unless that makes them longer than LONGEST; but never more than
    ``limit``, and one for each sequence.

    Shapes and units: chunk sizes in tiles of N keys; gives that of this batch, and the number of splits of each of
    BATCH sequences (a power of two, ``batch`` or more), int32.

    Source: chapter 04; FlashInfer's and FlashAttention-3's schedulers.
    """
    seq = tl.arange(0, BATCH)
    _, _, _, low, high, short = read_lengths(
        cu_ptr, used_ptr, seq, seq < batch, GROUP, MAX_ROWS, CAUSAL, LEFT, RIGHT, TREE
    )
    total = tl.sum(tl.where(short, tl.cdiv(high, N) - low // N, 0), axis=0)
    chunk = tl.maximum(tl.cdiv(total, limit), tl.minimum(tl.cdiv(total, wave), LONGEST))
    chunk = tl.maximum(chunk, 1)
    return chunk, count_splits(low, high, short, chunk, limit, N, "balanced")


@triton.jit
def deal_chunks_kernel(cu_ptr, used_ptr, counts_ptr, batch, wave, limit, GROUP: tl.constexpr, MAX_ROWS: tl.constexpr,
                       N: tl.constexpr, LONGEST: tl.constexpr, BATCH: tl.constexpr):  # fmt: skip
    """How many splits each sequence gets, to counts_ptr [BATCH] int32: what one program can tell of ``deal_chunks``.

    Source: chapter 04.
    """
    _, counts = deal_chunks(cu_ptr, used_ptr, batch, wave, limit, GROUP, MAX_ROWS, N, LONGEST, BATCH, True, -1, -1,
                            False)  # fmt: skip
    tl.store(counts_ptr + tl.arange(0, BATCH), counts)


@triton.jit
def find_split(slot, cu_ptr, used_ptr, batch, wave, limit, chunk, GROUP: tl.constexpr, MAX_ROWS: tl.constexpr,
               N: tl.constexpr, LONGEST: tl.constexpr, BATCH: tl.constexpr, RULE: tl.constexpr, CAUSAL: tl.constexpr,
               LEFT: tl.constexpr, RIGHT: tl.constexpr, TREE: tl.constexpr):  # fmt: skip
    """Which sequence a program works on, which split of it, and the size of a chunk; past the last sequence: none.

    Shapes and units: ``slot`` counts the programs of a KV head; int32 scalars.

    Source: chapter 04.
    """
    if RULE == "balanced":
        chunk, counts = deal_chunks(
            cu_ptr, used_ptr, batch, wave, limit, GROUP, MAX_ROWS, N, LONGEST, BATCH, CAUSAL, LEFT, RIGHT, TREE
        )
        ends = tl.cumsum(counts, axis=0)
        before = ends <= slot
        seq = tl.sum(before.to(tl.int32), axis=0)
        split = slot - tl.max(tl.where(before, ends, 0), axis=0)
    else:
        seq, split = slot // limit, slot % limit
    return seq, split, chunk


@triton.jit
def split_range(low, high, split, splits, chunk, N: tl.constexpr, RULE: tl.constexpr):
    """The tiles that one split reads: its first, and one past its last. Shapes and units: scalars, as ``count_splits``.

    "size" cuts at multiples of ``chunk`` keys; the other rules cut as evenly as tiles allow.

    Source: chapter 04.
    """
    first, last = low // N, tl.cdiv(high, N)
    if RULE == "size":
        begin = (low // chunk + split) * (chunk // N)
        end = tl.where(split == splits - 1, last, begin + chunk // N)
        begin = tl.maximum(begin, first)
    else:
        share, rest = (last - first) // splits, (last - first) % splits
        begin = first + split * share + tl.minimum(split, rest)
        end = begin + share + (split < rest).to(tl.int32)
    return begin, end


# --- merging ---------------------------------------------------------------------------------------------------------


@triton.jit
def merge_splits(acc_ptr, peak_ptr, total_ptr, rows, live, splits, acc_split, acc_row, stat_split, DV: tl.constexpr,
                 WIDE_DV: tl.constexpr, S: tl.constexpr, R: tl.constexpr, UNIT: tl.constexpr):  # fmt: skip
    """R rows of all splits added up in the order of the splits, S at a time, each weighed by the base of its sums.

    A split that saw nothing has a peak of -inf, and whatever it holds is not read.

    Shapes and units: acc_ptr [splits, rows, DV], peak_ptr and total_ptr [splits, rows]; without total_ptr each split's
    total is 1 and its peak the log-sum-exp. Peaks times UNIT are exponents of 2. Gives acc [R, WIDE_DV], total and peak
    [R], as one pass over all keys would.

    Source: chapter 04.
    """
    peak = tl.full([R], float("-inf"), tl.float32)
    total = tl.zeros([R], tl.float32)
    acc = tl.zeros([R, WIDE_DV], tl.float32)
    dv = tl.arange(0, WIDE_DV)
    for s in tl.range(0, splits, S, num_stages=MERGE_STAGES):
        split = (s + tl.arange(0, S)).to(tl.int64)
        there = (split < splits)[:, None] & live[None, :]
        at = split[:, None] * stat_split + rows[None, :]
        peaks = tl.load(peak_ptr + at, mask=there, other=float("-inf"), cache_modifier=".cg")
        some = peaks != float("-inf")
        totals = some.to(tl.float32)
        if total_ptr is not None:
            totals = tl.load(total_ptr + at, mask=there, other=0.0, cache_modifier=".cg")
        part = tl.load(acc_ptr + split[:, None, None] * acc_split + rows[None, :, None] * acc_row + dv[None, None, :],
                       mask=there[:, :, None] & (dv < DV)[None, None, :], other=0.0,
                       cache_modifier=".cg")  # fmt: skip
        part = tl.where(some[:, :, None], part.to(tl.float32), 0.0)
        higher = tl.maximum(peak, tl.max(peaks, axis=0))
        stable = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2((peaks - stable[None, :]) * UNIT)
        shrink = tl.exp2((peak - stable) * UNIT)
        total = total * shrink + tl.sum(weight * totals, axis=0)
        acc = acc * shrink[:, None] + tl.sum(weight[:, :, None] * part, axis=0)
        peak = higher
    return acc, total, peak


@triton.jit
def write_rows(out_ptr, lse_ptr, sink_ptr, acc, total, peak, rows, live, first, kv_head, o_token, o_head, lse_head,
               GROUP: tl.constexpr, DV: tl.constexpr, WIDE_DV: tl.constexpr):  # fmt: skip
    """Add the sink, which is a key of its own without a value, divide, and write output rows and their lse.

    Shapes and units: rows [R] of one sequence and KV head, GROUP a token; acc [R, WIDE_DV], total and peak [R], the
    peak in base 2.

    Source: chapter 04.
    """
    token, head = (first + rows // GROUP).to(tl.int64), kv_head * GROUP + rows % GROUP
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + head, mask=live, other=float("-inf")) * LOG2E
        higher = tl.maximum(peak, sink)
        stable = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(peak - stable)
        acc, total, peak = acc * shrink[:, None], total * shrink + tl.exp2(sink - stable), stable
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    out, lse = finish(acc, total, peak * LN2)
    dv = tl.arange(0, WIDE_DV)
    tl.store(out_ptr + token[:, None] * o_token + head[:, None] * o_head + dv[None, :],
             out.to(out_ptr.dtype.element_ty), mask=live[:, None] & (dv < DV)[None, :])  # fmt: skip
    if lse_ptr is not None:
        tl.store(lse_ptr + head * lse_head + token, lse, mask=live)


@triton.jit
def write_part(part_ptr, stat_ptr, acc, total, peak, rows, live, slot, kv_head, kv_heads, part_rows, DV: tl.constexpr,
               WIDE_DV: tl.constexpr):  # fmt: skip
    """Leave one split's sums for the merge.

    Shapes and units: as ``merge_and_write``; acc [M, WIDE_DV], total and peak [M].

    Source: chapter 04.
    """
    at, dv = slot.to(tl.int64) * kv_heads + kv_head, tl.arange(0, WIDE_DV)
    tl.store(part_ptr + (at * part_rows + rows)[:, None] * DV + dv[None, :], acc,
             mask=live[:, None] & (dv < DV)[None, :])  # fmt: skip
    tl.store(stat_ptr + at * 2 * part_rows + rows, peak, mask=live)
    tl.store(stat_ptr + (at * 2 + 1) * part_rows + rows, total, mask=live)


@triton.jit
def merge_and_write(part_ptr, stat_ptr, out_ptr, lse_ptr, sink_ptr, slot, splits, first, q_rows, kv_head, kv_heads,
                    part_rows, o_token, o_head, lse_head, GROUP: tl.constexpr, DV: tl.constexpr, WIDE_DV: tl.constexpr,
                    S: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """Merge the splits of one sequence and KV head, R rows at a time, and write the result.

    Shapes and units: part_ptr [slots, H_kv, part_rows, DV] and stat_ptr [slots, H_kv, 2, part_rows] (peak, total)
    float32; ``slot`` is that of the first split.

    Source: chapter 04.
    """
    at = slot.to(tl.int64) * kv_heads + kv_head
    part_ptr += at * part_rows * DV
    stat_ptr += at * 2 * part_rows
    stride = (kv_heads * part_rows).to(tl.int64)
    for r in range(0, q_rows, R):
        rows = r + tl.arange(0, R)
        live = rows < q_rows
        acc, total, peak = merge_splits(part_ptr, stat_ptr, stat_ptr + part_rows, rows, live, splits, stride * DV, DV,
                                        stride * 2, DV, WIDE_DV, S, R, 1.0)  # fmt: skip
        write_rows(out_ptr, lse_ptr, sink_ptr, acc, total, peak, rows, live, first, kv_head, o_token, o_head, lse_head,
                   GROUP, DV, WIDE_DV)  # fmt: skip


# --- the kernels -----------------------------------------------------------------------------------------------------


@counted
@triton.jit(do_not_specialize=["batch", "wave", "limit", "chunk", "kv_heads", "part_rows", "lse_head", "table_row"])
def flash_decoding_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, table_ptr, cu_ptr, used_ptr, sink_ptr, tree_ptr, part_ptr, stat_ptr,
    arrived_ptr, scale, softcap, batch, wave, limit, chunk, kv_heads, part_rows,
    q_token, q_head, k_page, k_head, v_page, v_head, o_token, o_head, lse_head, table_row,
    K_SLOT: tl.constexpr, V_SLOT: tl.constexpr, BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, WIDE_D: tl.constexpr, WIDE_DV: tl.constexpr, M: tl.constexpr, N: tl.constexpr, S: tl.constexpr,
    R: tl.constexpr, MAX_ROWS: tl.constexpr, RULE: tl.constexpr, BATCH: tl.constexpr, LONGEST: tl.constexpr,
    CAUSAL: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """All rows of one sequence and KV head against one split of its keys; whoever finishes last merges the splits.

    Source: chapter 04; Dao et al. 2023 (Flash-Decoding), and stream-K's last block.
    """
    kv_head, slot = (tl.program_id(0) % kv_heads).to(tl.int64), tl.program_id(0) // kv_heads
    TREE: tl.constexpr = tree_ptr is not None
    seq, split, chunk = find_split(slot, cu_ptr, used_ptr, batch, wave, limit, chunk, GROUP, MAX_ROWS, N, LONGEST,
                                   BATCH, RULE, CAUSAL, LEFT, RIGHT, TREE)  # fmt: skip
    first, q_len, kv_len, low, high, short = read_lengths(
        cu_ptr, used_ptr, seq, seq < batch, GROUP, MAX_ROWS, CAUSAL, LEFT, RIGHT, TREE
    )
    splits = count_splits(low, high, short, chunk, limit, N, RULE)
    if split >= splits:  # a spare program, and any past the last sequence
        return
    begin, end = split_range(low, high, split, splits, chunk, N, RULE)
    table_ptr += seq.to(tl.int64) * table_row
    k_ptr += kv_head * k_head
    v_ptr += kv_head * v_head
    rows = tl.arange(0, M)
    q_index, head = rows // GROUP, kv_head * GROUP + rows % GROUP
    live = rows < q_len * GROUP
    token = (first + q_index).to(tl.int64)
    d, dv = tl.arange(0, WIDE_D), tl.arange(0, WIDE_DV)
    q = load_rows(q_ptr, token[:, None] * q_token + head[:, None] * q_head + d[None, :],
                  live[:, None] & (d < D)[None, :])  # fmt: skip
    bits, key_bits = tl.full([M], 0, tl.int64), tl.full([N], 0, tl.int64)
    if TREE:
        bits = tl.load(tree_ptr + token, mask=live, other=0)

    unit = LOG2E if CAP else scale * LOG2E
    peak = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, WIDE_DV], tl.float32)
    for tile in range(0, end - begin):
        start = (begin + tile) * N
        k_index = start + tl.arange(0, N)
        there = (k_index >= low) & (k_index < high)
        to_k, to_v, k_rows, v_rows = find_rows(
            table_ptr, start, high, k_page, v_page, K_SLOT, V_SLOT, N, BLOCK_SIZE, True
        )
        k = load_rows(k_ptr + to_k, k_rows[None, :] + d[:, None], there[None, :] & (d < D)[:, None])
        scores = dot(q, k, tl.zeros([M, N], tl.float32))
        if CAP:
            scores = cap(scores * scale, softcap)
        if TREE:
            new = k_index - (kv_len - q_len)
            key_bits = tl.load(tree_ptr + first + new, mask=there & (new >= 0), other=0)
        seen = visible(q_index, k_index, bits, key_bits, q_len, kv_len, CAUSAL, LEFT, RIGHT, TREE) & there[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1) * unit)
        stable = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(scores * unit - stable[:, None])
        shrink = tl.exp2(peak - stable)
        total = total * shrink + tl.sum(weight, axis=1)
        v = load_rows(v_ptr + to_v, v_rows[:, None] + dv[None, :], there[:, None] & (dv < DV)[None, :])
        acc = dot(weight.to(v.dtype), v, acc * shrink[:, None])
        peak = higher
    if splits == 1:
        write_rows(out_ptr, lse_ptr, sink_ptr, acc, total, peak, rows, live, first, kv_head, o_token, o_head, lse_head,
                   GROUP, DV, WIDE_DV)  # fmt: skip
    else:
        write_part(part_ptr, stat_ptr, acc, total, peak, rows, live, slot, kv_head, kv_heads, part_rows, DV, WIDE_DV)
        if arrived_ptr is not None:
            tl.debug_barrier()  # all of this program's numbers are written before it counts itself
            counter = arrived_ptr + seq * kv_heads + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel") == splits - 1:
                tl.store(counter, 0)  # for the next launch
                merge_and_write(part_ptr, stat_ptr, out_ptr, lse_ptr, sink_ptr, slot - split, splits, first,
                                q_len * GROUP, kv_head, kv_heads, part_rows, o_token, o_head, lse_head, GROUP, DV,
                                WIDE_DV, S, R)  # fmt: skip


@counted
@triton.jit(do_not_specialize=["batch", "wave", "limit", "chunk", "kv_heads", "part_rows", "lse_head"])
def merge_kernel(
    out_ptr, lse_ptr, cu_ptr, used_ptr, sink_ptr, part_ptr, stat_ptr, batch, wave, limit, chunk, kv_heads, part_rows,
    o_token, o_head, lse_head, GROUP: tl.constexpr, DV: tl.constexpr, WIDE_DV: tl.constexpr, N: tl.constexpr,
    S: tl.constexpr, R: tl.constexpr, MAX_ROWS: tl.constexpr, RULE: tl.constexpr, BATCH: tl.constexpr,
    LONGEST: tl.constexpr, CAUSAL: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """The second of two launches: one program merges what ``flash_decoding_kernel`` left of a sequence and KV head.

    Source: chapter 04; Dao et al. 2023 (Flash-Decoding).
    """
    kv_head, seq = (tl.program_id(0) % kv_heads).to(tl.int64), tl.program_id(0) // kv_heads
    slot = seq * limit
    if RULE == "balanced":
        chunk, counts = deal_chunks(
            cu_ptr, used_ptr, batch, wave, limit, GROUP, MAX_ROWS, N, LONGEST, BATCH, CAUSAL, LEFT, RIGHT, TREE
        )
        slot = tl.sum(tl.where(tl.arange(0, BATCH) < seq, counts, 0), axis=0)
    first, q_len, _, low, high, short = read_lengths(
        cu_ptr, used_ptr, seq, True, GROUP, MAX_ROWS, CAUSAL, LEFT, RIGHT, TREE
    )
    splits = count_splits(low, high, short, chunk, limit, N, RULE)
    if splits > 1:  # one that stood alone has written its rows itself
        merge_and_write(part_ptr, stat_ptr, out_ptr, lse_ptr, sink_ptr, slot, splits, first, q_len * GROUP, kv_head,
                        kv_heads, part_rows, o_token, o_head, lse_head, GROUP, DV, WIDE_DV, S, R)  # fmt: skip


@counted
@triton.jit(do_not_specialize=["splits", "rows"])
def merge_states_kernel(
    part_ptr, part_lse_ptr, out_ptr, lse_ptr, splits, rows, DV: tl.constexpr, WIDE_DV: tl.constexpr, S: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    """R rows of finished results, each with its log-sum-exp, merged. Source: chapter 04; FlashInfer's merge_states."""
    row = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    live = row < rows
    stride = rows.to(tl.int64)
    acc, total, peak = merge_splits(part_ptr, part_lse_ptr, None, row, live, splits, stride * DV, DV, stride, DV,
                                    WIDE_DV, S, R, LOG2E)  # fmt: skip
    out, lse = finish(acc, total, tl.where(peak == float("-inf"), 0.0, peak))
    dv = tl.arange(0, WIDE_DV)
    tl.store(out_ptr + row[:, None] * DV + dv[None, :], out.to(out_ptr.dtype.element_ty),
             mask=live[:, None] & (dv < DV)[None, :])  # fmt: skip
    tl.store(lse_ptr + row, lse, mask=live)
