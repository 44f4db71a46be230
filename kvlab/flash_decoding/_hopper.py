"""Split-KV decoding for Hopper, in Gluon: one CTA a multiprocessor, two warps that load pages, four that compute.

All blocks of keys of all items (a sequence and a KV head) stand in one line, which is cut into equal shares, one a CTA.
But the memory serves some multiprocessors faster than others. So where there is much to read, an eighth of it is left
over, in a line of its own, and whoever is done takes chunks of that one. A share or a chunk covers the end of one item,
whole items, and the beginning of another; whoever brings the last piece of an item merges its pieces. The cuts depend
on nothing but lengths, so results do not depend on who took what. Chapter 04 tells why; the device functions of chapter
03b are used again.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from kvlab.flash_hopper._kernel import (
    FIELDS,
    INF,
    LN2,
    LOG2E,
    RING,
    Plan,
    bar_arrive,
    bar_sync,
    load_block,
    pack,
    pages_of,
    rescale,
    softmax,
    tell,
    thread_sum,
    told,
    unpack,
)
from kvlab.runtime import counted

thread_barrier = gl.constexpr(gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier)
# Named barriers: the compiler takes the first four, and six stages of K and of V the other twelve.
K_FREE, V_FREE = gl.constexpr(4), gl.constexpr(10)
ROWS = gl.constexpr(4)  # merged at a time
# Blocks are left over where each CTA has ENOUGH, of items of LONG ones; they are dealt out in so many CHUNKS for each
# CTA, of LEAST_CHUNK or more.
ENOUGH, LONG, CHUNKS, LEAST_CHUNK = gl.constexpr(16), gl.constexpr(64), gl.constexpr(4), gl.constexpr(4)
LOADER_REGISTERS = gl.constexpr(40)


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
    def looked(self) -> int:
        """Sequences that a warp looks at together. Source: chapter 04."""
        return min(self.batch, 128)

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
def left_over(seq, blocks):
    """How many blocks at the end of an item are dealt out later, where any are: an eighth of a long one, and all of one
    in eight short ones.

    Source: chapter 04; guided self-scheduling (Polychronopoulos and Kuck 1987).
    """
    return gl.where(blocks >= LONG, blocks // 8, gl.where(seq % 8 == 7, blocks, 0))


@gluon.jit
def look_at(base, work, C: gl.constexpr):
    """Some sequences, from ``base`` on, that one warp looks at together: their numbers, and their items' blocks and
    blocks left over.

    Source: chapter 04.
    """
    ALL: gl.constexpr = gl.BlockedLayout([C.looked // 32], [32], [1], [0])
    seqs = base + gl.arange(0, C.looked, ALL)
    _first, _q_len, _kv_len, _low, blocks = lengths_of(seqs, seqs < work[2], work, C)
    return seqs, blocks, left_over(seqs, blocks)


@gluon.jit
def cut_line(work, C: gl.constexpr):
    """How the two lines are cut: the blocks of the first, the size of a share of it, the blocks left over, and the size
    of their chunks (0 where nothing is left over: there are too few blocks).

    Source: chapter 04.
    """
    batch, kv_heads = work[2], work[3]
    total = batch * 0
    late = batch * 0
    for base in range(0, batch, C.looked):
        _seqs, blocks, over = look_at(base, work, C)
        total += gl.sum(blocks, 0) * kv_heads
        late += gl.sum(over, 0) * kv_heads
    programs = gl.num_programs(0)
    late = gl.where(total >= ENOUGH * programs, late, 0)
    share = gl.maximum(gl.cdiv(total - late, programs), 1)
    chunk = gl.where(late > 0, gl.maximum(gl.cdiv(late, CHUNKS * programs), LEAST_CHUNK), 0)
    return total - late, share, late, chunk


@gluon.jit
def find_block(at, line, chunk, work, C: gl.constexpr):
    """Where block number ``at`` of a line is: its sequence, KV head, block of what they have in that line, and where
    their sequence begins in either line.

    Source: chapter 04.
    """
    batch, kv_heads = work[2], work[3]
    seq = at * 0
    begin = at * 0  # of the sequence, in the first line
    late = at * 0  # and in the line of what is left over
    for base in range(0, batch, C.looked):
        _seqs, blocks, over = look_at(base, work, C)
        over = gl.where(chunk > 0, over, 0)
        here = gl.where(line == 1, over, blocks - over)
        ends = gl.where(line == 1, late, begin) + gl.associative_scan(here, 0, add) * kv_heads
        before = ends <= at
        seq += gl.sum(before.to(gl.int32), 0)
        begin += gl.sum(gl.where(before, blocks - over, 0), 0) * kv_heads
        late += gl.sum(gl.where(before, over, 0), 0) * kv_heads
    seq = gl.minimum(seq, batch - 1)
    _first, _q_len, _kv_len, _low, blocks = lengths_of(seq, True, work, C)
    own, over = parts_of(seq, blocks, chunk)
    each = gl.maximum(gl.where(line == 1, over, own), 1)
    rest = at - gl.where(line == 1, late, begin)
    return seq, rest // each, rest % each, begin, late


@gluon.jit
def parts_of(seq, blocks, chunk):
    """An item's blocks in the first line, and in that of what is left over. Source: chapter 04."""
    over = gl.where(chunk > 0, left_over(seq, blocks), 0)
    return blocks - over, over


@gluon.jit
def next_item(seq, head, begin, late, line, chunk, work, C: gl.constexpr):
    """The item after this one that has blocks in this line: the next KV head, or the first of a later sequence; and
    where its sequence begins in either line.

    Source: chapter 04.
    """
    batch, kv_heads = work[2], work[3]
    head += 1
    if head == kv_heads:
        head = head * 0
        more = head == 0
        while more:
            _first, _q_len, _kv_len, _low, blocks = lengths_of(seq, seq < batch, work, C)
            own, over = parts_of(seq, blocks, chunk)
            begin += own * kv_heads
            late += over * kv_heads
            seq += 1
            _first, _q_len, _kv_len, _low, blocks = lengths_of(seq, seq < batch, work, C)
            own, over = parts_of(seq, blocks, chunk)
            more = (gl.where(line == 1, over, own) == 0) & (seq < batch)
    return seq, head, begin, late


# --- what the warps of a CTA tell each other --------------------------------------------------------------------------


@gluon.jit
def announce(ring, told_full, n, at, left, line, share, chunk, work, C: gl.constexpr):
    """Tell all warps what the CTA's n-th portion is: ``left`` blocks of a line from number ``at`` on. The ring is long
    enough: before a portion is announced, blocks have been read of all but the last ``stages`` + 1 before it.

    Source: chapter 04.
    """
    slot = n % RING
    seq, head, block, begin, late = find_block(at, line, chunk, work, C)  # not under an if: Triton 3.6 fails there
    tell(ring, slot, seq, 0)
    tell(ring, slot, head, 1)
    tell(ring, slot, block, 2)
    tell(ring, slot, left, 3)
    tell(ring, slot, line, 4)
    tell(ring, slot, begin, 5)
    tell(ring, slot, late, 6)
    tell(ring, slot, share, 7)
    tell(ring, slot, chunk, 8)
    mbarrier.arrive(told_full.index(slot), count=1)


@gluon.jit
def hear(ring, told_full, n, WARPS: gl.constexpr):
    """Wait for the n-th portion, and read what it is. Source: chapter 04."""
    slot = n % RING
    mbarrier.wait(told_full.index(slot), (n // RING) & 1)
    seq = told(ring, slot, 0, WARPS)
    head = told(ring, slot, 1, WARPS)
    block = told(ring, slot, 2, WARPS)
    left = told(ring, slot, 3, WARPS)
    line = told(ring, slot, 4, WARPS)
    begin = told(ring, slot, 5, WARPS)
    late = told(ring, slot, 6, WARPS)
    return seq, head, block, left, line, begin, late, told(ring, slot, 7, WARPS), told(ring, slot, 8, WARPS)


# --- the warps that load ---------------------------------------------------------------------------------------------


@gluon.jit
def load_portion(desc, full, buffers, portion, n, table, work, FREE: gl.constexpr, C: gl.constexpr):
    """Start the copies of K, or of V, of one portion; ``n`` counts blocks. Source: chapter 04."""
    seq, head, block, left, line, begin, late, _share, chunk = portion
    table_ptr, table_row = table
    while left > 0:
        _first, _q_len, kv_len, low, blocks = lengths_of(seq, True, work, C)
        own, over = parts_of(seq, blocks, chunk)
        low += gl.where(line == 1, own, 0)
        todo = gl.minimum(left, gl.where(line == 1, over, own) - block)
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
            seq, head, begin, late = next_item(seq, head, begin, late, line, chunk, work, C)
    return n


@gluon.jit
def load_keys(desc, full, buffers, ring, told_full, taken, table, work, C: gl.constexpr):
    """Announce this CTA's portions, its share and then chunks of what is left over as long as there are any, and keep
    the copies of K running ahead of the warps that compute.

    Source: chapter 04.
    """
    total, share, late, chunk = cut_line(work, C)
    at = gl.program_id(0) * share
    left = gl.maximum(gl.minimum(share, total - at), 0)
    chunks = late // gl.maximum(chunk, 1) + gl.where(late % gl.maximum(chunk, 1) > 0, 1, 0)
    line = left * 0
    portions = left * 0
    n = left * 0
    more = (left > 0) | (chunks > 0)
    while more:
        if left > 0:
            announce(ring, told_full, portions, at, left, line, share, chunk, work, C)
            n = load_portion(desc, full, buffers, hear(ring, told_full, portions, 1), n, table, work, K_FREE, C)
            portions += 1
        line = line * 0 + 1
        left = left * 0
        if chunks > 0:
            number = gl.atomic_add(taken, 1)
            if number == chunks + gl.num_programs(0) - 1:  # the last one: ready for the next launch
                gl.store(taken, 0)
            at = number * chunk
            left = gl.maximum(gl.minimum(chunk, late - at), 0)
        more = left > 0
    announce(ring, told_full, portions, at, line * 0, line, share, chunk, work, C)


@gluon.jit
def load_values(desc, full, buffers, ring, told_full, table, work, C: gl.constexpr):
    """The same copies of V, of the portions that are announced. Source: chapter 04."""
    portions = 0
    n = gl.program_id(0) * 0
    portion = hear(ring, told_full, portions, 1)
    while portion[3] > 0:
        n = load_portion(desc, full, buffers, portion, n, table, work, V_FREE, C)
        portions += 1
        portion = hear(ring, told_full, portions, 1)


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
def merge_pieces(pieces, slots, first, q_len, head, parts, outputs, C: gl.constexpr):
    """Add up the pieces of an item in the order of their keys, each by the measure of its sums, and write its rows.
    ``slots``: where its first piece lies, how many lie there, and where the rest do.

    Source: chapter 04.
    """
    part_ptr, peak_ptr, total_ptr = parts
    slot, own_pieces, late_slot = slots
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
            lies = gl.where(piece < own_pieces, slot + piece, late_slot + piece - own_pieces)
            at = lies[:, None] * C.live + gl.expand_dims(rows, 0)
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
def cuts(begin, blocks, size):
    """In which share or chunk an item begins, and how many have a part of it. Source: chapter 04."""
    size = gl.maximum(size, 1)
    first = begin // size
    return first, gl.where(blocks > 0, (begin + blocks - 1) // size - first + 1, 0)


@gluon.jit
def finish_item(acc, total, peak, portion, parted, lengths, outputs, parts, arrived, work, C: gl.constexpr,
                O: gl.constexpr):  # fmt: skip
    """Write an item's rows, or leave a piece of it, and merge all pieces if this one is the last to come. A piece is
    left as sums and their measure: a log-sum-exp would round by its own size. Counting the items before it and the cuts
    before it gives each piece a place of its own.

    Source: chapter 04.
    """
    seq, head, block, line, begin, late, share, chunk = portion
    own, over = parted
    first, q_len = lengths
    part_ptr, peak_ptr, total_ptr = parts
    ROW: gl.constexpr = gl.SliceLayout(1, O)
    total = gl.convert_layout(gl.sum(total, 1), ROW)
    peak = gl.convert_layout(peak, ROW)
    rows = gl.arange(0, C.M, ROW)
    begin += head * own
    late += head * over
    cut, pieces = cuts(begin, own, share)
    late_cut, late_pieces = cuts(late, over, chunk)
    if pieces + late_pieces == 1:
        write_out(acc, total, peak, rows, first, q_len, head, outputs, C, gl.SliceLayout(0, O))
    else:
        item = seq * work[3] + head
        late_slot = gl.num_programs(0) + work[2] * work[3] + item
        mine = gl.where(line == 1, late_slot + (late + block) // gl.maximum(chunk, 1), item + (begin + block) // share)
        columns = gl.arange(0, C.wide_v, gl.SliceLayout(0, O))
        live = rows < gl.minimum(q_len * C.group, C.live)  # a bound that was too small does not write outside
        at = mine * C.live + rows
        mask = live[:, None] & (columns < C.dim_v)[None, :]
        gl.store(part_ptr + (at.to(gl.int64) * C.dim_v)[:, None] + columns[None, :], acc, mask=mask)
        gl.store(peak_ptr + at, peak, mask=live)
        gl.store(total_ptr + at, total, mask=live)
        thread_barrier()  # all of this CTA's numbers are written before it counts itself
        counter = arrived + item
        if gl.atomic_add(counter, 1, sem="acq_rel") == pieces + late_pieces - 1:
            gl.store(counter, 0)  # for the next launch
            slots = (item + cut, pieces, late_slot + late_cut)
            merge_pieces(pieces + late_pieces, slots, first, q_len, head, parts, outputs, C)


@gluon.jit
def attend_portion(q, qb, kb, vb, k_full, v_full, portion, n, outputs, parts, arrived, work, scale, softcap,
                   C: gl.constexpr):  # fmt: skip
    """Item after item of a portion: scores, weights, sums, and what is to be written; ``n`` counts blocks.

    Source: chapter 04.
    """
    seq, head, block, left, line, begin, late, share, chunk = portion
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
    while left > 0:
        first, q_len, kv_len, low, blocks = lengths_of(seq, True, work, C)
        own, over = parts_of(seq, blocks, chunk)
        low += gl.where(line == 1, own, 0)
        todo = gl.minimum(left, gl.where(line == 1, over, own) - block)
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
        finish_item(acc, total, peak, (seq, head, block, line, begin, late, share, chunk), (own, over), (first, q_len),
                    outputs, parts, arrived, work, C, O)  # fmt: skip
        left -= todo
        block = block * 0
        if left > 0:
            seq, head, begin, late = next_item(seq, head, begin, late, line, chunk, work, C)
    return n


@gluon.jit
def attend(q, qb, kb, vb, k_full, v_full, ring, told_full, outputs, parts, arrived, work, scale, softcap,
           C: gl.constexpr):  # fmt: skip
    """Portion after portion, as they are announced. Source: chapter 04."""
    portions = 0
    n = gl.program_id(0) * 0
    portion = hear(ring, told_full, portions, 4)
    while portion[3] > 0:
        n = attend_portion(q, qb, kb, vb, k_full, v_full, portion, n, outputs, parts, arrived, work, scale, softcap, C)
        portions += 1
        portion = hear(ring, told_full, portions, 4)


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
    ring = gl.allocate_shared_memory(gl.int32, [RING * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    told_full = gl.allocate_shared_memory(gl.int64, [RING, 1], B)
    for i in gl.static_range(C.stages + 0):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
    for i in gl.static_range(RING):
        mbarrier.init(told_full.index(i), count=1)
    work = (cu_q, used, batch, kv_heads)
    q = (q_ptr, q_token, q_head)
    outputs = (out_ptr, lse_ptr, sink_ptr, out_token, out_head, lse_head)
    parts = (part_ptr, peak_ptr, total_ptr)
    table = (table_ptr, table_row)
    taken = arrived + batch * kv_heads
    gl.warp_specialize([
        (attend, (q, qb, kb, vb, k_full, v_full, ring, told_full, outputs, parts, arrived, work, scale, softcap, C)),
        (load_keys, (k_desc, k_full, kb, ring, told_full, taken, table, work, C)),
        (load_values, (v_desc, v_full, vb, ring, told_full, table, work, C)),
    ], [1, 1], [LOADER_REGISTERS, LOADER_REGISTERS])  # fmt: skip
