"""Split-KV decoding for Hopper, in Gluon: a CTA (a program) has two warps that load pages and four that compute.

For each KV head all blocks of keys of all sequences stand in a line, which is cut into equal shares, one a CTA. Heads
take turns: neighbouring CTAs read the same keys of neighbouring heads, which lie side by side in memory, at about the
same time. But the memory serves some multiprocessors faster than others. So where there is much to read, an eighth is
left over, in a line of its own, and whoever is done takes chunks of that one. A share or a chunk covers the end of one
item (a sequence and a KV head), whole items, and the beginning of another; whoever brings the last piece of an item
merges its pieces. The cuts depend on nothing but lengths, so results do not depend on who took what. Chapter 04 tells
why; the device functions of chapter 03b are used again.
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
# Blocks are left over where each CTA has ENOUGH, of items of LONG ones. They are dealt out in so many CHUNKS for each
# CTA or fewer, of LEAST_CHUNK blocks or more.
ENOUGH, LONG, CHUNKS, LEAST_CHUNK = gl.constexpr(16), gl.constexpr(64), gl.constexpr(4), gl.constexpr(8)


@dataclass(frozen=True)
class DecodePlan(Plan):
    """Everything about a launch that is compiled in; ``group`` may be any number here.

    Shapes and units: as ``Plan``; ``batch`` bounds the sequences, a power of two of 32 or more; ``live`` the rows of
    one item, a power of two of 4 or more; ``chunked`` whether there may be enough blocks to leave some over.

    Source: chapter 04.
    """

    batch: int = 32
    live: int = 4
    chunked: bool = False

    @property
    def merged(self) -> tuple[int, int]:
        """How many pieces, and rows of them, are merged at a time: as much as a thread has registers for.

        Source: chapter 04.
        """
        rows = min(self.live, 16)
        return 128 * 128 // (rows * max(128, self.wide_v)), rows

    @property
    def heard(self) -> int:
        """Chunks that a CTA's warps may have heard of and not begun. Source: chapter 04."""
        return self.stages + 2

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
def after_the_kernel_before():
    """Wait until all that earlier kernels wrote can be seen, and let the next kernel come as soon as there is room for
    it: programmatic dependent launch, by which a launch costs no time of its own.

    Source: chapter 04; PTX ISA, griddepcontrol.
    """
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r", [], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def lengths_of(seq, there, work, C: gl.constexpr):
    """A sequence's first row of q, its lengths, the first block of keys that any of its queries sees, and the number of
    blocks: one at least, but none where there is no query or there are more rows than this kernel takes.

    Shapes and units: int32 scalars, or vectors of the shape of ``seq``.

    Source: chapter 04.
    """
    cu_q, used = work[0], work[1]
    first = gl.load(cu_q + seq, mask=there, other=0, eviction_policy="evict_last")
    q_len = gl.load(cu_q + seq + 1, mask=there, other=0, eviction_policy="evict_last") - first
    kv_len = gl.load(used + seq, mask=there, other=0, eviction_policy="evict_last")
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
def parts_of(seq, blocks, chunk, C: gl.constexpr):
    """An item's blocks in the line of shares, and in that of chunks. Source: chapter 04."""
    over = blocks * 0
    if C.chunked:
        over = gl.where(chunk > 0, left_over(seq, blocks), 0)
    return blocks - over, over


@gluon.jit
def share_of(work, C: gl.constexpr):
    """This CTA's share, as a portion (see ``find_chunk``), and the number of blocks left over.

    Source: chapter 04; stream-K, and FlashInfer's scheduler.
    """
    batch, kv_heads = work[2], work[3]
    group = gl.program_id(0) // kv_heads
    groups = gl.num_programs(0) // kv_heads
    ALL: gl.constexpr = gl.BlockedLayout([C.batch // 128 if C.batch > 128 else 1], [32], [4], [0])
    seqs = gl.arange(0, C.batch, ALL)
    _first, _q_len, _kv_len, _low, blocks = lengths_of(seqs, seqs < batch, work, C)
    total = gl.sum(blocks, 0)
    left = total * 0
    chunk = total * 0
    if C.chunked:
        left = gl.where(total >= ENOUGH * groups, gl.sum(left_over(seqs, blocks), 0), 0)
        chunk = gl.where(left > 0, gl.maximum(gl.cdiv(left, CHUNKS * groups), LEAST_CHUNK), 0)
        total -= left
    share = gl.maximum(gl.cdiv(total, groups), 1)
    at = group * share
    own, over = parts_of(seqs, blocks, chunk, C)
    before = gl.associative_scan(own, 0, add) <= at
    seq = gl.sum(before.to(gl.int32), 0)
    begin = gl.sum(gl.where(before, own, 0), 0)
    late = total * 0
    if C.chunked:
        late = gl.sum(gl.where(before, over, 0), 0)
    count = gl.maximum(gl.minimum(share, total - at), 0)
    return (seq, gl.program_id(0) % kv_heads, at - begin, count, batch * 0, begin, late, share, chunk), left


@gluon.jit
def find_chunk(head, at, count, share, chunk, work, C: gl.constexpr):
    """The portion of ``count`` blocks from number ``at`` on of a KV head's line of chunks: its sequence, the head and
    the sequence's block in that line; how many blocks; which line, 0 for shares and 1 for chunks; where the sequence
    begins in either line; and the size of shares and of chunks.

    Source: chapter 04.
    """
    batch = work[2]
    ALL: gl.constexpr = gl.BlockedLayout([C.looked // 32], [32], [1], [0])
    seq = at * 0
    begin = at * 0
    late = at * 0
    passed = at * 0
    for base in range(0, batch, C.looked):  # one warp looks at so many sequences together
        seqs = base + gl.arange(0, C.looked, ALL)
        _first, _q_len, _kv_len, _low, blocks = lengths_of(seqs, seqs < batch, work, C)
        own, over = parts_of(seqs, blocks, chunk, C)
        before = passed + gl.associative_scan(over, 0, add) <= at
        passed += gl.sum(over, 0)
        seq += gl.sum(before.to(gl.int32), 0)
        begin += gl.sum(gl.where(before, own, 0), 0)
        late += gl.sum(gl.where(before, over, 0), 0)
    return gl.minimum(seq, batch - 1), head, at - late, count, batch * 0 + 1, begin, late, share, chunk


@gluon.jit
def next_sequence(seq, own, over, begin, late, line, chunk, work, C: gl.constexpr):
    """The next sequence that has blocks in this line, and where it begins in either line, after one that has ``own``
    and ``over`` of them.

    Source: chapter 04.
    """
    batch = work[2]
    more = seq >= 0
    while more:
        begin += own
        late += over
        seq += 1
        _first, _q_len, _kv_len, _low, blocks = lengths_of(seq, seq < batch, work, C)
        own, over = parts_of(seq, blocks, chunk, C)
        more = (gl.where(line == 1, over, own) == 0) & (seq < batch)
    return seq, begin, late


# --- what the warps of a CTA tell each other --------------------------------------------------------------------------


@gluon.jit
def announce(ring, told_full, n, portion, C: gl.constexpr):
    """Tell all warps what the CTA's n-th chunk is. The ring is long enough: when a chunk is announced, all warps have
    begun all but the last ``stages`` + 1 before it, for a block of each was read.

    Source: chapter 04.
    """
    for i in gl.static_range(FIELDS):
        tell(ring, n % C.heard, portion[i], i)
    mbarrier.arrive(told_full.index(n % C.heard), count=1)


@gluon.jit
def hear(ring, told_full, n, WARPS: gl.constexpr, C: gl.constexpr):
    """Wait for the n-th chunk, and read what it is. Source: chapter 04."""
    slot = n % C.heard
    mbarrier.wait(told_full.index(slot), (n // C.heard) & 1)
    portion = ()
    for i in gl.static_range(FIELDS):
        portion = portion + (told(ring, slot, i, WARPS),)  # type: ignore[assignment]  # noqa: RUF005
    return portion


# --- the warps that load ---------------------------------------------------------------------------------------------


@gluon.jit
def load_portion(desc, full, buffers, portion, n, table, work, FREE: gl.constexpr, C: gl.constexpr):
    """Start the copies of K, or of V, of one portion; ``n`` counts blocks. Source: chapter 04."""
    seq, head, block, left, line, begin, late, _share, chunk = portion
    table_ptr, table_row = table
    while left > 0:
        _first, _q_len, kv_len, low, blocks = lengths_of(seq, True, work, C)
        own, over = parts_of(seq, blocks, chunk, C)
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
            seq, begin, late = next_sequence(seq, own, over, begin, late, line, chunk, work, C)
    return n


@gluon.jit
def load_keys(desc, full, buffers, ring, told_full, taken, portion, left, table, work, C: gl.constexpr):
    """Keep the copies of K running ahead of the warps that compute: of this CTA's share, and then of chunks of what is
    left over, which it takes and announces as long as there are any.

    Source: chapter 04.
    """
    share, chunk = portion[7], portion[8]
    kv_heads = work[3]
    chunks = left * 0
    if chunk > 0:
        chunks = gl.cdiv(left, chunk) * kv_heads
    n = 0
    heard = 0
    more = (portion[3] > 0) | (chunks > 0)
    while more:
        n = load_portion(desc, full, buffers, portion, n, table, work, K_FREE, C)
        more = chunks > 0
        if C.chunked:
            number = left * 0
            if more:
                number = gl.atomic_add(taken, 1)
                if number == chunks + gl.num_programs(0) - 1:  # nobody comes after: ready for the next launch
                    gl.store(taken, 0)
            at = number // kv_heads * chunk  # heads take turns, as they do among the shares
            count = gl.where(more, gl.maximum(gl.minimum(chunk, left - at), 0), 0)
            head = number % kv_heads
            portion = find_chunk(head, at, count, share, chunk, work, C)  # not under an if: Triton 3.6 fails there
            if more:
                announce(ring, told_full, heard, portion, C)
            heard += 1
            more = count > 0


@gluon.jit
def load_values(desc, full, buffers, ring, told_full, portion, table, work, C: gl.constexpr):
    """The same copies of V. Source: chapter 04."""
    n = 0
    heard = 0
    chunked = portion[8] > 0
    more = (portion[3] > 0) | chunked
    while more:
        n = load_portion(desc, full, buffers, portion, n, table, work, V_FREE, C)
        more = chunked
        if C.chunked:
            if chunked:
                portion = hear(ring, told_full, heard, 1, C)
                heard += 1
            more = chunked & (portion[3] > 0)


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
def places_of(s, r, pieces, slots, q_len, head, kv_heads, PIECES: gl.constexpr, ROWS: gl.constexpr, P: gl.constexpr,
              R: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """Where rows from r on of pieces from s on lie, [PIECES, ROWS], and whether they are there. Source: chapter 04."""
    piece = s + gl.arange(0, PIECES, P)
    rows = r + gl.arange(0, ROWS, R)
    slot, own_pieces, late_slot = slots
    lies = gl.where(piece < own_pieces, slot + piece, late_slot + piece - own_pieces)
    there = (piece < pieces)[:, None] & (rows < gl.minimum(q_len * C.group, C.live))[None, :]
    return (lies * kv_heads + head)[:, None] * C.live + rows[None, :], there


@gluon.jit
def merge_pieces(pieces, slots, first, q_len, head, kv_heads, parts, outputs, C: gl.constexpr):
    """Add up the pieces of an item in the order of their keys, each by the measure of its sums, and write its rows.
    ``slots``: among its KV head's pieces, where its first one lies, how many lie there, and where the rest do.

    Source: chapter 04.
    """
    part_ptr, peak_ptr, total_ptr = parts
    WIDE: gl.constexpr = C.wide_v
    PIECES: gl.constexpr = C.merged[0]
    ROWS: gl.constexpr = C.merged[1]
    A: gl.constexpr = gl.BlockedLayout([PIECES, ROWS // 4, WIDE // 32], [1, 1, 32], [1, 4, 1], [2, 1, 0])
    P: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, A))
    R: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, A))
    D: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, A))
    OUT: gl.constexpr = gl.SliceLayout(0, A)
    ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    # Of a row's weights each thread has one piece's.
    W: gl.constexpr = gl.BlockedLayout([1, ROWS // 4], [32, 1], [1, 4], [0, 1])
    columns = gl.arange(0, WIDE, D)
    for r in range(0, q_len * C.group, ROWS):
        peak = gl.full([ROWS], -INF, gl.float32, gl.SliceLayout(0, W))
        total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(0, W))
        acc = gl.zeros([ROWS, WIDE], gl.float32, OUT)
        for s in range(0, pieces, PIECES):
            at, there = places_of(s, r, pieces, slots, q_len, head, kv_heads, PIECES, ROWS, gl.SliceLayout(1, W),
                                  gl.SliceLayout(0, W), C)  # fmt: skip
            peaks = gl.load(peak_ptr + at, mask=there, other=-INF, cache_modifier=".cg")
            totals = gl.load(total_ptr + at, mask=there, other=0.0, cache_modifier=".cg")
            at, there = places_of(s, r, pieces, slots, q_len, head, kv_heads, PIECES, ROWS, P, R, C)
            place = gl.expand_dims(at.to(gl.int64) * C.dim_v, 2) + gl.expand_dims(gl.expand_dims(columns, 0), 0)
            mask = gl.expand_dims(there, 2) & gl.expand_dims(gl.expand_dims(columns < C.dim_v, 0), 0)
            part = gl.load(part_ptr + place, mask=mask, other=0.0, cache_modifier=".cg")
            new = gl.maximum(peak, gl.max(peaks, 0))
            safe = gl.where(new == -INF, 0.0, new)
            weight = gl.exp2(peaks - safe[None, :])
            shrink = gl.exp2(peak - safe)
            total = total * shrink + gl.sum(weight * totals, 0)
            added = gl.sum(part * gl.expand_dims(gl.convert_layout(weight, gl.SliceLayout(2, A)), 2), 0)
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
    cut, pieces = cuts(begin, own, share)
    late_cut, late_pieces = cuts(late, over, chunk)
    if pieces + late_pieces == 1:
        write_out(acc, total, peak, rows, first, q_len, head, outputs, C, gl.SliceLayout(0, O))
    else:
        batch, kv_heads = work[2], work[3]
        late_seq = gl.num_programs(0) // kv_heads + batch + seq
        mine = gl.where(line == 1, late_seq + (late + block) // gl.maximum(chunk, 1), seq + (begin + block) // share)
        columns = gl.arange(0, C.wide_v, gl.SliceLayout(0, O))
        live = rows < gl.minimum(q_len * C.group, C.live)  # a bound that was too small does not write outside
        at = (mine * kv_heads + head) * C.live + rows
        mask = live[:, None] & (columns < C.dim_v)[None, :]
        gl.store(part_ptr + (at.to(gl.int64) * C.dim_v)[:, None] + columns[None, :], acc, mask=mask)
        gl.store(peak_ptr + at, peak, mask=live)
        gl.store(total_ptr + at, total, mask=live)
        thread_barrier()  # all of this CTA's numbers are written before it counts itself
        counter = arrived + seq * kv_heads + head
        if gl.atomic_add(counter, 1, sem="acq_rel") == pieces + late_pieces - 1:
            gl.store(counter, 0)  # for the next launch
            slots = (seq + cut, pieces, late_seq + late_cut)
            merge_pieces(pieces + late_pieces, slots, first, q_len, head, kv_heads, parts, outputs, C)


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
        own, over = parts_of(seq, blocks, chunk, C)
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
            seq, begin, late = next_sequence(seq, own, over, begin, late, line, chunk, work, C)
    return n


@gluon.jit
def attend(q, qb, kb, vb, k_full, v_full, ring, told_full, portion, outputs, parts, arrived, work, scale, softcap,
           C: gl.constexpr):  # fmt: skip
    """The CTA's share, and then chunk after chunk as they are announced. Source: chapter 04."""
    n = 0
    heard = 0
    chunked = portion[8] > 0
    more = (portion[3] > 0) | chunked
    while more:
        n = attend_portion(q, qb, kb, vb, k_full, v_full, portion, n, outputs, parts, arrived, work, scale, softcap, C)
        more = chunked
        if C.chunked:
            if chunked:
                portion = hear(ring, told_full, heard, 4, C)
                heard += 1
            more = chunked & (portion[3] > 0)


@counted
@gluon.jit(do_not_specialize=["table_row"], do_not_specialize_on_alignment=["batch"])  # a server's change every step
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
    ring = gl.allocate_shared_memory(gl.int32, [C.heard * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    told_full = gl.allocate_shared_memory(gl.int64, [C.heard, 1], B)
    for i in gl.static_range(C.stages + 0):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
    if C.chunked:  # else nobody waits for them, and the compiler gives their memory to what the warps are handed
        for i in gl.static_range(C.heard + 0):
            mbarrier.init(told_full.index(i), count=1)
    after_the_kernel_before()
    work = (cu_q, used, batch, kv_heads)
    share, left = share_of(work, C)
    q = (q_ptr, q_token, q_head)
    outputs = (out_ptr, lse_ptr, sink_ptr, out_token, out_head, lse_head)
    parts = (part_ptr, peak_ptr, total_ptr)
    table = (table_ptr, table_row)
    taken = arrived + batch * kv_heads
    gl.warp_specialize([
        (attend, (q, qb, kb, vb, k_full, v_full, ring, told_full, share, outputs, parts, arrived, work, scale, softcap,
                  C)),
        (load_keys, (k_desc, k_full, kb, ring, told_full, taken, share, left, table, work, C)),
        (load_values, (v_desc, v_full, vb, ring, told_full, share, table, work, C)),
    ], [1, 1], [40, 40])  # fmt: skip
