"""Split-KV decoding for Hopper, in Gluon: one CTA a multiprocessor, two warps that load pages, four that compute.

All blocks of keys of all sequences and KV heads stand in one line, which is cut into equal shares, one a CTA. A CTA's
share covers the end of one item (a sequence and KV head), whole items, and the beginning of another; whoever brings the
last piece of an item merges its pieces. Chapter 04 tells why; the device functions of chapter 03b are used again.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from kvlab.flash_hopper._kernel import (
    INF,
    LN2,
    LOG2E,
    Plan,
    bar_arrive,
    bar_sync,
    load_block,
    pack,
    pages_of,
    rescale,
    softmax,
    thread_sum,
    unpack,
)
from kvlab.runtime import counted

thread_barrier = gl.constexpr(gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier)
# Named barriers: the compiler takes the first four, and six stages of K and of V the other twelve.
K_FREE, V_FREE = gl.constexpr(4), gl.constexpr(10)
ROWS = gl.constexpr(4)  # merged at a time


@dataclass(frozen=True)
class DecodePlan(Plan):
    """Everything about a launch that is compiled in; ``group`` may be any number here.

    Shapes and units: as ``Plan``; ``batch`` bounds the sequences, a power of two of 32 or more; ``live`` the rows of
    one item, a power of two of ``ROWS`` or more.

    Source: chapter 04.
    """

    batch: int = 32
    live: int = 4

    @property
    def consumers(self) -> int:
        """Warpgroups that compute: one keeps up with the memory. Source: chapter 04."""
        return 1


# --- who reads which blocks ------------------------------------------------------------------------------------------


@gluon.jit
def lengths_of(seq, there, work, C: gl.constexpr):
    """A sequence's first row of q, its lengths, the first block of keys that any of its queries sees, and the number of
    blocks: one at least, but none where there is no query or there are more rows than this kernel takes.

    Shapes and units: int32 scalars, or vectors of the shape of ``seq``.

    Source: chapter 04.
    """
    cu_q, used = work[0], work[1]
    first = gl.load(cu_q + seq, mask=there, other=0)
    q_len = gl.load(cu_q + seq + 1, mask=there, other=0) - first
    kv_len = gl.load(used + seq, mask=there, other=0)
    low = kv_len * 0
    if C.left >= 0:
        low = gl.minimum(gl.maximum(kv_len - q_len - C.left, 0), gl.maximum(kv_len - 1, 0)) // C.N
    blocks = (gl.maximum(kv_len, 1) + (C.N - 1)) // C.N - low
    taken = (q_len > 0) & (q_len * C.group <= C.M)
    return first, q_len, kv_len, low, gl.where(taken, blocks, 0)


@gluon.jit
def add(a, b):
    """a + b, for a scan. Source: chapter 04."""
    return a + b


@gluon.jit
def share_of(work, C: gl.constexpr):
    """This CTA's share of the line: the length of a share, its own first block and number of blocks, and which
    sequence, KV head and block of theirs it begins with.

    Source: chapter 04; stream-K, and FlashInfer's scheduler.
    """
    batch, kv_heads = work[2], work[3]
    ALL: gl.constexpr = gl.BlockedLayout([C.batch // 128 if C.batch > 128 else 1], [32], [4], [0])
    seqs = gl.arange(0, C.batch, ALL)
    _first, _q_len, _kv_len, _low, blocks = lengths_of(seqs, seqs < batch, work, C)
    ends = gl.associative_scan(blocks, 0, add) * kv_heads
    total = gl.max(ends, 0)
    share = gl.maximum(gl.cdiv(total, gl.num_programs(0)), 1)
    begin = gl.program_id(0) * share
    count = gl.maximum(gl.minimum(share, total - begin), 0)
    before = ends <= begin
    seq = gl.sum(before.to(gl.int32), 0)
    rest = begin - gl.max(gl.where(before, ends, 0), 0)
    each = gl.maximum(gl.sum(gl.where(seqs == seq, blocks, 0), 0), 1)
    return share, begin, count, seq, rest // each, rest % each


@gluon.jit
def next_item(seq, head, work, C: gl.constexpr):
    """The item after this one: the next KV head, or the first of the next sequence that has blocks.

    Source: chapter 04.
    """
    batch, kv_heads = work[2], work[3]
    head += 1
    if head == kv_heads:
        head = head * 0
        seq += 1
        _first, _q_len, _kv_len, _low, blocks = lengths_of(seq, seq < batch, work, C)
        while (blocks == 0) & (seq < batch):
            seq += 1
            _first, _q_len, _kv_len, _low, blocks = lengths_of(seq, seq < batch, work, C)
    return seq, head


# --- the warps that load ---------------------------------------------------------------------------------------------


@gluon.jit
def load_items(desc, full, buffers, share, table, work, FREE: gl.constexpr, C: gl.constexpr):
    """Keep the copies of K, or of V, running ahead of the warps that compute. Source: chapter 04."""
    _share, _begin, left, seq, head, block = share
    table_ptr, table_row = table
    n = 0
    while left > 0:
        _first, _q_len, kv_len, low, blocks = lengths_of(seq, True, work, C)
        todo = gl.minimum(left, blocks - block)
        pages_ptr = table_ptr + seq.to(gl.int64) * table_row
        for i in range(todo):
            at = low + block + i
            stage = n % C.stages
            pages = pages_of(pages_ptr, kv_len, at, C)
            if n >= C.stages:
                bar_sync(FREE + stage, 128 + 32)
            load_block(desc, full.index(stage), buffers.index(stage), (seq, head, 0, kv_len, at), pages, C)
            n += 1
        left -= todo
        block = block * 0
        if left > 0:
            seq, head = next_item(seq, head, work, C)


# --- the warps that compute ------------------------------------------------------------------------------------------


@gluon.jit
def write_out(acc, total, peak, rows, first, q_len, head, outputs, C: gl.constexpr, D: gl.constexpr):
    """Add the sink, which is a key of its own without a value, divide, and write rows and their log-sum-exps: sums acc
    [R, D] and total [R], measured by 2**peak [R].

    Source: chapter 04.
    """
    out_ptr, lse_ptr, sink_ptr, out_token, out_head, lse_head = outputs
    live = rows < q_len * C.group
    heads = head * C.group + rows % C.group
    peak = gl.where(total > 0, peak, -INF)
    if C.sinks:
        sink = gl.load(sink_ptr + heads, mask=live, other=-INF) * LOG2E
        higher = gl.maximum(peak, sink)
        safe = gl.where(higher == -INF, 0.0, higher)
        shrink = gl.exp2(peak - safe)
        acc = acc * shrink[:, None]
        total = total * shrink + gl.exp2(sink - safe)
        peak = higher
    some = total > 0
    total = gl.where(some, total, 1.0)
    out = acc * (1.0 / total)[:, None]
    token = (first + rows // C.group).to(gl.int64)
    columns = gl.arange(0, C.wide_v, D)
    place = token * out_token + heads.to(gl.int64) * out_head
    mask = live[:, None] & (columns < C.dim_v)[None, :]
    gl.store(out_ptr + place[:, None] + columns[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)
    if C.lse:
        lse = gl.where(some, (peak + gl.log2(total)) * LN2, -INF)
        gl.store(lse_ptr + heads.to(gl.int64) * lse_head + token, lse, mask=live)


@gluon.jit
def merge_pieces(pieces, first_cta, late, first, q_len, head, parts, outputs, C: gl.constexpr):
    """Add up the pieces of an item in the order of the line, each by the measure of its sums, and write its rows. Only
    the first piece may not be the first of its CTA (``late``).

    Source: chapter 04.
    """
    part_ptr, peak_ptr, total_ptr = parts
    WIDE: gl.constexpr = C.wide_v
    PIECES: gl.constexpr = 4096 // WIDE if WIDE > 128 else 32  # at a time: as many as a thread has registers for
    A: gl.constexpr = gl.BlockedLayout([PIECES, 1, WIDE // 32], [1, 1, 32], [1, ROWS, 1], [2, 1, 0])
    P: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, A))
    R: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, A))
    D: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, A))
    OUT: gl.constexpr = gl.SliceLayout(0, A)
    ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    columns = gl.arange(0, WIDE, D)
    for r in range(0, q_len * C.group, ROWS):
        rows = r + gl.arange(0, ROWS, R)
        peak = gl.full([ROWS], -INF, gl.float32, R)
        total = gl.zeros([ROWS], gl.float32, R)
        acc = gl.zeros([ROWS, WIDE], gl.float32, OUT)
        for s in range(0, pieces, PIECES):
            piece = s + gl.arange(0, PIECES, P)
            slot = 2 * (first_cta + piece) + gl.where(piece == 0, late, 0)
            at = slot[:, None] * C.live + gl.expand_dims(rows, 0)
            there = (piece < pieces)[:, None] & gl.expand_dims(rows < gl.minimum(q_len * C.group, C.live), 0)
            peaks = gl.load(peak_ptr + at, mask=there, other=-INF, cache_modifier=".cg")
            totals = gl.load(total_ptr + at, mask=there, other=0.0, cache_modifier=".cg")
            place = gl.expand_dims(at.to(gl.int64) * C.dim_v, 2) + gl.expand_dims(gl.expand_dims(columns, 0), 0)
            mask = gl.expand_dims(there, 2) & gl.expand_dims(gl.expand_dims(columns < C.dim_v, 0), 0)
            part = gl.load(part_ptr + place, mask=mask, other=0.0, cache_modifier=".cg")
            new = gl.maximum(peak, gl.max(peaks, 0))
            safe = gl.where(new == -INF, 0.0, new)
            weight = gl.exp2(peaks - gl.expand_dims(safe, 0))
            shrink = gl.exp2(peak - safe)
            total = total * shrink + gl.sum(weight * totals, 0)
            added = gl.sum(part * gl.expand_dims(weight, 2), 0)
            acc = acc * gl.expand_dims(gl.convert_layout(shrink, ROW), 1) + added
            peak = new
        write_out(acc, gl.convert_layout(total, ROW), gl.convert_layout(peak, ROW), r + gl.arange(0, ROWS, ROW), first,
                  q_len, head, outputs, C, gl.SliceLayout(0, OUT))  # fmt: skip


@gluon.jit
def finish_item(acc, total, peak, place, share, lengths, outputs, parts, arrived, work, C: gl.constexpr,
                S: gl.constexpr, O: gl.constexpr):  # fmt: skip
    """Write an item's rows, or leave this CTA's piece of it, and merge all pieces if this one is the last to come. A
    piece is left as sums and their measure: a log-sum-exp would round by its own size.

    Source: chapter 04.
    """
    seq, head, begin, blocks, block = place
    size, share_begin = share
    first, q_len = lengths
    part_ptr, peak_ptr, total_ptr = parts
    ROW: gl.constexpr = gl.SliceLayout(1, O)
    total = gl.convert_layout(gl.sum(total, 1), ROW)
    peak = gl.convert_layout(peak, ROW)
    rows = gl.arange(0, C.M, ROW)
    item = begin - block  # where it begins in the line
    first_cta = item // size
    pieces = (item + blocks - 1) // size - first_cta + 1
    if pieces == 1:
        write_out(acc, total, peak, rows, first, q_len, head, outputs, C, gl.SliceLayout(0, O))
    else:
        slot = 2 * gl.program_id(0) + (begin != share_begin).to(gl.int32)
        columns = gl.arange(0, C.wide_v, gl.SliceLayout(0, O))
        live = rows < gl.minimum(q_len * C.group, C.live)  # a bound that was too small does not write outside
        at = slot * C.live + rows
        mask = live[:, None] & (columns < C.dim_v)[None, :]
        gl.store(part_ptr + (at.to(gl.int64) * C.dim_v)[:, None] + columns[None, :], acc, mask=mask)
        gl.store(peak_ptr + at, peak, mask=live)
        gl.store(total_ptr + at, total, mask=live)
        thread_barrier()  # all of this CTA's numbers are written before it counts itself
        counter = arrived + seq * work[3] + head
        if gl.atomic_add(counter, 1, sem="acq_rel") == pieces - 1:
            gl.store(counter, 0)  # for the next launch
            late = (item > first_cta * size).to(gl.int32)
            merge_pieces(pieces, first_cta, late, first, q_len, head, parts, outputs, C)


@gluon.jit
def attend_items(q, qb, kb, vb, k_full, v_full, share, outputs, parts, arrived, work, scale, softcap, C: gl.constexpr):
    """Item after item of this CTA's share: scores, weights, sums, and what is to be written. Source: chapter 04."""
    size, share_begin, count, seq, head, block = share
    q_ptr, q_token, q_head = q
    M: gl.constexpr = C.M
    N: gl.constexpr = C.N
    WIDE: gl.constexpr = C.wide
    WIDE_V: gl.constexpr = C.wide_v
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, C.N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, C.wide_v, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O, k_width=2)
    W: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, M, gl.SliceLayout(1, W))
    columns = gl.arange(0, WIDE, gl.SliceLayout(0, W))
    n = 0
    left = count
    while left > 0:
        first, q_len, kv_len, low, blocks = lengths_of(seq, True, work, C)
        todo = gl.minimum(left, blocks - block)
        place = (first + rows // C.group).to(gl.int64) * q_token + (head * C.group + rows % C.group).to(
            gl.int64
        ) * q_head
        mask = (rows < q_len * C.group)[:, None] & (columns < C.dim)[None, :]
        qb.store(gl.load(q_ptr + place[:, None] + columns[None, :], mask=mask, other=0.0))
        hopper.fence_async_shared()
        thread_barrier()
        clear = kv_len  # blocks that end here or before need no mask
        if C.causal:
            clear = gl.minimum(clear, kv_len - q_len + 1)
        if C.right >= 0:
            clear = gl.minimum(clear, kv_len - q_len + 1 + C.right)
        acc = gl.zeros([M, WIDE_V], gl.float32, O)
        total = thread_sum(gl.zeros([M, N], gl.float32, S))
        peak = gl.full([M], -INF, gl.float32, gl.SliceLayout(1, S))
        for i in range(todo):
            stage = n % C.stages
            phase = (n // C.stages) & 1
            first_key = (low + block + i) * N
            mbarrier.wait(k_full.index(stage), phase)
            zero = gl.zeros([M, N], gl.float32, S)
            scores = warpgroup_mma(qb, kb.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
            bar_arrive(K_FREE + stage, 128 + 32)
            p, shrink, peak, total = softmax(scores, peak, total, scale, softcap, (0, q_len, kv_len), first_key,
                                             (first_key + N > clear) | (C.left >= 0), C, S)  # fmt: skip
            acc = rescale(acc, shrink, O)
            mbarrier.wait(v_full.index(stage), phase)
            acc = warpgroup_mma(unpack(pack(p, qb.dtype), qb.dtype, OPERAND), vb.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            bar_arrive(V_FREE + stage, 128 + 32)
            n += 1
        finish_item(acc, total, peak, (seq, head, share_begin + count - left, blocks, block), (size, share_begin),
                    (first, q_len), outputs, parts, arrived, work, C, S, O)  # fmt: skip
        left -= todo
        block = block * 0
        if left > 0:
            seq, head = next_item(seq, head, work, C)


@counted
@gluon.jit
def flash_decoding_hopper_kernel(
    q_ptr, k_desc, v_desc, out_ptr, lse_ptr, sink_ptr, table_ptr, cu_q, used, part_ptr, peak_ptr, total_ptr, arrived,
    table_row, q_token, q_head, out_token, out_head, lse_head, batch, kv_heads, scale, softcap, C: gl.constexpr,
):  # fmt: skip
    """Attention of a few rows of each sequence over its pages, its keys dealt out to all CTAs. Source: chapter 04."""
    dtype: gl.constexpr = k_desc.dtype
    Q: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C.M, C.wide], dtype)
    K: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C.N, C.wide], dtype)
    V: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C.N, C.wide_v], dtype)
    B: gl.constexpr = mbarrier.MBarrierLayout()
    qb = gl.allocate_shared_memory(dtype, [C.M, C.wide], Q)
    kb = gl.allocate_shared_memory(dtype, [C.stages, C.N, C.wide], K)
    vb = gl.allocate_shared_memory(dtype, [C.stages, C.N, C.wide_v], V)
    k_full = gl.allocate_shared_memory(gl.int64, [C.stages, 1], B)
    v_full = gl.allocate_shared_memory(gl.int64, [C.stages, 1], B)
    for i in gl.static_range(C.stages + 0):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
    work = (cu_q, used, batch, kv_heads)
    share = share_of(work, C)
    q = (q_ptr, q_token, q_head)
    outputs = (out_ptr, lse_ptr, sink_ptr, out_token, out_head, lse_head)
    parts = (part_ptr, peak_ptr, total_ptr)
    table = (table_ptr, table_row)
    gl.warp_specialize([
        (attend_items, (q, qb, kb, vb, k_full, v_full, share, outputs, parts, arrived, work, scale, softcap, C)),
        (load_items, (k_desc, k_full, kb, share, table, work, K_FREE, C)),
        (load_items, (v_desc, v_full, vb, share, table, work, V_FREE, C)),
    ], [1, 1], [40, 40])  # fmt: skip
