"""The forward kernel for Hopper, in Gluon: one CTA a multiprocessor, two warps that load, warpgroups that compute.
Chapter 03b builds it step by step."""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from kvlab.runtime import counted

copy_out = gl.constexpr(tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global)
copy_in = gl.constexpr(tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared)
FAR = gl.constexpr(1 << 30)  # beyond this coordinate a bounded copy fills in zeros
INF = gl.constexpr(float("inf"))
LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)
GROWTH = gl.constexpr(8.0)  # in powers of two: how far scores may pass the running maximum before it moves
# Named barriers, of which a CTA has 16: the compiler takes the first four.
K_FREE, V_FREE, TURN = gl.constexpr(4), gl.constexpr(8), gl.constexpr(12)
# How much a consumer is told of a tile, and of how many tiles at once.
FIELDS, RING = gl.constexpr(9), gl.constexpr(8)


@dataclass(frozen=True)
class Plan:
    """Everything about a launch that is compiled in.

    Shapes and units: ``form`` "dense", "ragged" or "paged"; ``group`` query heads packed into a tile, ``share`` packs
    that read one KV head; ``dim``, ``dim_v`` numbers of a head as stored, ``wide``, ``wide_v`` as tiled; ``M`` rows of
    a consumer, ``N`` keys of a block; ``stages`` buffers of K and of V, ``q_stages`` of Q; ``left``, ``right`` the
    window, -1 for none; ``turns`` whether the consumers take turns at the tensor cores; ``late`` whether weights are
    packed, and sums rescaled, at a step's end and not in the shadow of the next step's first product (fewer registers);
    ``copies_out`` whether the copy engine writes the output.

    Source: chapter 03b.
    """

    form: str
    group: int
    share: int
    dim: int
    dim_v: int
    wide: int
    wide_v: int
    N: int
    M: int = 64
    stages: int = 2
    q_stages: int = 1
    block_size: int = 1
    causal: bool = False
    left: int = -1
    right: int = -1
    softcap: bool = False
    sinks: bool = False
    lse: bool = False
    turns: bool = True
    late: bool = False
    copies_out: bool = False

    @property
    def consumers(self) -> int:
        """Warpgroups that compute: with three, each has too few registers. Source: chapter 03b."""
        return 2

    @property
    def staged(self) -> bool:
        """Whether rows leave through the buffer of their queries: there must be another for the next tile's.

        Source: chapter 03b."""
        return self.q_stages > 1 and self.wide == self.wide_v

    @property
    def queries(self) -> int:
        """Query tokens of one consumer. Source: chapter 03b."""
        return self.M // self.group

    @property
    def rows(self) -> int:
        """Keys that one copy brings: a page, or a block where pages are larger. Source: chapter 03b."""
        return min(self.block_size, self.N) if self.form == "paged" else self.N


# --- small tools -----------------------------------------------------------------------------------------------------


@gluon.jit
def bar_sync(bar, COUNT: gl.constexpr):
    """Wait at a named barrier until COUNT threads have come. Source: chapter 03b."""
    gl.inline_asm_elementwise(
        "bar.sync $1, $2; mov.b32 $0, 0;", "=r,r,n", [bar, COUNT], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def bar_arrive(bar, COUNT: gl.constexpr):
    """Come to a named barrier and go on. Source: chapter 03b."""
    gl.inline_asm_elementwise(
        "bar.arrive $1, $2; mov.b32 $0, 0;", "=r,r,n", [bar, COUNT], dtype=gl.int32, is_pure=False, pack=1
    )


def _scaling(n: int) -> tuple[str, str]:
    """The PTX of ``rescale`` for n numbers of a thread, and its operands: n results, n numbers, n factors. A thread
    holds two rows, two numbers of the one and then two of the other."""
    lines = [
        "{ .reg .pred p, q;",
        f"setp.neu.f32 p, ${2 * n}, 0f3F800000;",
        f"setp.neu.or.f32 p, ${2 * n + 2}, 0f3F800000, p;",
        "vote.sync.any.pred q, p, 0xffffffff;",
        *(f"mov.f32 ${i}, ${n + i};" for i in range(n)),
        "@!q bra.uni DONE;",
        *(f"mul.f32 ${i}, ${i}, ${2 * n + i % 4};" for i in range(n)),
        "DONE: }",
    ]
    return " ".join(lines), ",".join(["=&f"] * n + ["f"] * (2 * n))


SCALE_32, OF_32 = map(gl.constexpr, _scaling(32))
SCALE_64, OF_64 = map(gl.constexpr, _scaling(64))


@gluon.jit
def rescale(acc, factor, O: gl.constexpr):
    """Multiply each row by its factor, unless all factors of a warp are one: then its threads jump over the products.
    [M, D], [M] -> [M, D].

    Source: chapter 03b.
    """
    factors = gl.convert_layout(factor, gl.SliceLayout(1, O))[:, None].broadcast_to(acc.shape)
    if acc.shape[1] == 64:
        return gl.inline_asm_elementwise(SCALE_32, OF_32, [acc, factors], dtype=gl.float32, is_pure=True, pack=32)
    else:
        return gl.inline_asm_elementwise(SCALE_64, OF_64, [acc, factors], dtype=gl.float32, is_pure=True, pack=64)


@gluon.jit
def pack(p, DTYPE: gl.constexpr):
    """Two neighbouring weights of a row in one 32-bit register. [M, N] float32 -> [M, N / 2] int32.

    Source: chapter 03b.
    """
    low, high = gl.split(p.reshape([p.shape[0], p.shape[1] // 2, 2]))
    if DTYPE == gl.bfloat16:  # noqa: SIM300
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], dtype=gl.int32, is_pure=True, pack=1
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], dtype=gl.int32, is_pure=True, pack=1
        )


@gluon.jit
def unpack(packed, DTYPE: gl.constexpr, OPERAND: gl.constexpr):
    """The way back, as the left operand of a product from registers. [M, N / 2] int32 -> [M, N].

    Source: chapter 03b.
    """
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [packed], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    both = gl.join(low.to(DTYPE, bitcast=True), high.to(DTYPE, bitcast=True))
    return gl.convert_layout(both.reshape([packed.shape[0], packed.shape[1] * 2]), OPERAND)


@gluon.jit
def row_max(x, S: gl.constexpr):
    """The largest of each row, by a tree: [M, N] -> [M]. Source: chapter 03b."""
    halves = gl.max(gl.max(x.reshape([x.shape[0], 2, 2, x.shape[1] // 4]), 1), 1)
    return gl.convert_layout(gl.max(halves, 1), gl.SliceLayout(1, S))


@gluon.jit
def thread_sum(p):
    """Sums of what each thread holds of a row, so that no thread waits for another: [M, N] -> [M, 4].

    Source: chapter 03b.
    """
    return gl.sum(gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


# --- which tile ------------------------------------------------------------------------------------------------------


@gluon.jit
def describe(t, work, C: gl.constexpr):
    """Tile t: its sequence, head, first query, first row in memory, lengths, and its range of key blocks.

    Source: chapter 03b.
    """
    plan_ptr, cu_q, cu_k, used, heads, q_tiles, q_len, kv_len, num_tiles, width = work
    seq = t
    first = t * 0
    first_k = t * 0
    chunk = t // (width * q_tiles)  # `width` heads at a time share the L2; the longest tiles first
    rest = t - chunk * (width * q_tiles)
    if C.form == "dense":
        wide = gl.minimum(width, num_tiles // q_tiles - chunk * width)
        seq_head = chunk * width + rest % wide
        m = q_tiles - 1 - rest // wide
        seq = seq_head // heads
        head = seq_head % heads
    else:
        wide = gl.minimum(width, heads - chunk * width)
        head = chunk * width + rest % wide
        place = plan_ptr + 2 + 2 * (rest // wide)
        seq = gl.load(place)
        m = gl.load(place + 1)
        first = gl.load(cu_q + seq)
        q_len = gl.load(cu_q + seq + 1) - first
        if C.form == "ragged":
            first_k = gl.load(cu_k + seq)
            kv_len = gl.load(cu_k + seq + 1) - first_k
        else:
            kv_len = gl.load(used + seq)
    start = m * (C.consumers * C.queries)
    past = kv_len - q_len
    end = past + gl.minimum(start + C.consumers * C.queries, q_len)
    high = kv_len
    if C.causal:
        high = gl.minimum(high, end)
    if C.right >= 0:
        high = gl.minimum(high, end + C.right)
    high = gl.cdiv(gl.maximum(high, 1), C.N)  # a tile that sees nothing still reads one block, all masked
    low = high * 0
    if C.left >= 0:
        low = gl.minimum(gl.maximum(past + start - C.left, 0) // C.N, high - 1)
    return seq, head, start, first, first_k, q_len, kv_len, low, high


@gluon.jit
def tell(ring, slot, value, i: gl.constexpr):
    """Write field i of a tile's description where the consumers find it. Source: chapter 03b."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    ring.index(slot * FIELDS + i).store(gl.full([1], value, gl.int32, one))


@gluon.jit
def told(ring, slot, i: gl.constexpr, WARPS: gl.constexpr = 4):
    """Read field i of a tile's description. Source: chapter 03b."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.max(ring.index(slot * FIELDS + i).load(one), 0)


# --- the warps that load --------------------------------------------------------------------------------------------


@gluon.jit
def pages_of(table, kv_len, block, C: gl.constexpr):
    """The pages of a block of keys: one for each copy. Source: chapter 03b."""
    pages = ()
    if C.form == "paged":
        for j in gl.static_range(C.N // C.rows):
            key = block * C.N + j * C.rows
            pages = pages + (gl.load(table + key // C.block_size, mask=key < kv_len, other=0),)  # type: ignore[assignment]  # noqa: RUF005
    return pages


@gluon.jit
def load_block(desc, full, buffer, where, pages, C: gl.constexpr):
    """Start the copies of one block of K or V; ``full`` is signalled when all of it has come. What lies past a
    sequence's end arrives as zeros: a bounded copy (see the descriptors) never reads it.

    Source: chapter 03b.
    """
    seq, head, first_k, kv_len, block = where
    mbarrier.expect(full, desc.block_type.nbytes * (C.N // C.rows))
    if C.form == "dense":
        copy_in(desc, [seq, block * C.N, head, 0], full, buffer)
    elif C.form == "ragged":
        copy_in(desc, [FAR, first_k + kv_len, FAR - kv_len + block * C.N, head, 0], full, buffer)
    else:
        for j in gl.static_range(C.N // C.rows):
            key = block * C.N + j * C.rows
            valid = gl.minimum(gl.maximum(kv_len - key, 0), C.rows)
            row = pages[j] * C.block_size + key % C.block_size
            copy_in(desc, [FAR, row + valid, FAR - valid, head, 0], full, buffer.slice(j * C.rows, C.rows, 0))


@gluon.jit
def wait_free(base: gl.constexpr, count, C: gl.constexpr):
    """Wait until the consumers have let go of the buffer that use number ``count`` will fill. Source: chapter 03b."""
    if count >= C.stages:
        bar_sync(base + count % C.stages, C.consumers * 128 + 32)


@gluon.jit
def announce(ring, n, t, work, C: gl.constexpr):
    """Tell the consumers, and this warp for later, what tile t is, their tile number n. A tile past the last one has no
    blocks.

    Source: chapter 03b.
    """
    at = n % RING
    if t < work[8]:
        seq, head, start, first, first_k, q_len, kv_len, low, high = describe(t, work, C)
        tell(ring, at, seq, 0)
        tell(ring, at, head, 1)
        tell(ring, at, start, 2)
        tell(ring, at, first, 3)
        tell(ring, at, q_len, 4)
        tell(ring, at, kv_len, 5)
        tell(ring, at, low, 6)
        tell(ring, at, high, 7)
        tell(ring, at, first_k, 8)
    else:
        tell(ring, at, 0, 6)
        tell(ring, at, 0, 7)


@gluon.jit
def pages_start(table, seq, otherwise, C: gl.constexpr):
    """Where a sequence's row of the block table begins. Source: chapter 03b."""
    place = otherwise  # not read
    if C.form == "paged":
        table_ptr, table_row = table
        place = table_ptr + seq.to(gl.int64) * table_row
    return place


@gluon.jit
def load_keys(descs, buffers, table, counter, work, C: gl.constexpr):
    """Take tile after tile, announce each, and keep the copies of Q and K running ahead of the consumers. The next tile
    is taken and described while the buffers are full, so that its first copies start at once.

    Source: chapter 03b.
    """
    q_desc, k_desc, _v_desc = descs
    qs, kb, _vb, q_full, q_free, k_full, _v_full, ring = buffers
    count = 0
    n = 0
    announce(ring, 0, gl.program_id(0), work, C)
    high = told(ring, 0, 7, 1)
    while high > 0:
        at = n % RING
        seq = told(ring, at, 0, 1)
        head = told(ring, at, 1, 1)
        slot = n % C.q_stages
        for c in gl.static_range(C.consumers + 0):
            mbarrier.wait(q_free.index(c * C.q_stages + slot), ((n // C.q_stages) & 1) ^ 1)
            full = q_full.index(c * C.q_stages + slot)
            mbarrier.expect(full, q_desc.block_type.nbytes)
            row = told(ring, at, 3, 1) + told(ring, at, 2, 1) + c * C.queries
            copy_in(q_desc, [seq if C.form == "dense" else 0, row, head, 0, 0], full,
                    qs.index(c * C.q_stages + slot).reshape([1, C.queries, 1, C.group, C.wide]))  # fmt: skip
        pages_ptr = pages_start(table, seq, counter, C)
        kv_len = told(ring, at, 5, 1)
        first_k = told(ring, at, 8, 1)
        blocks = high - told(ring, at, 6, 1)
        for i in range(blocks):
            block = high - 1 - i
            stage = count % C.stages
            pages = pages_of(pages_ptr, kv_len, block, C)
            wait_free(K_FREE, count, C)
            where = (seq, head // C.share, first_k, kv_len, block)
            load_block(k_desc, k_full.index(stage), kb.index(stage), where, pages, C)
            count += 1
            if i == gl.minimum(C.stages, blocks) - 1:
                taken = gl.atomic_add(counter, 1)
                if taken == work[8] - 1:  # the last one taken: ready for the next launch
                    gl.store(counter, 0)
                announce(ring, n + 1, taken + gl.num_programs(0), work, C)
        n += 1
        high = told(ring, n % RING, 7, 1)
    for c in gl.static_range(C.consumers + 0):  # no more tiles: what was announced says so
        slot = n % C.q_stages
        mbarrier.wait(q_free.index(c * C.q_stages + slot), ((n // C.q_stages) & 1) ^ 1)
        mbarrier.arrive(q_full.index(c * C.q_stages + slot), count=1)


@gluon.jit
def load_values(descs, buffers, table, counter, work, C: gl.constexpr):
    """The same for V, in a warp of its own: with small pages one warp cannot start copies fast enough for both. It
    learns of a tile as the consumers do, when the first queries have come.

    Source: chapter 03b.
    """
    _q_desc, _k_desc, v_desc = descs
    _qs, _kb, vb, q_full, _q_free, _k_full, v_full, ring = buffers
    count = 0
    n = 0
    mbarrier.wait(q_full.index(0), 0)
    high = told(ring, 0, 7, 1)
    while high > 0:
        at = n % RING
        seq = told(ring, at, 0, 1)
        head = told(ring, at, 1, 1)
        pages_ptr = pages_start(table, seq, counter, C)
        kv_len = told(ring, at, 5, 1)
        first_k = told(ring, at, 8, 1)
        for i in range(high - told(ring, at, 6, 1)):
            block = high - 1 - i
            stage = count % C.stages
            pages = pages_of(pages_ptr, kv_len, block, C)
            wait_free(V_FREE, count, C)
            where = (seq, head // C.share, first_k, kv_len, block)
            load_block(v_desc, v_full.index(stage), vb.index(stage), where, pages, C)
            count += 1
        n += 1
        mbarrier.wait(q_full.index(n % C.q_stages), (n // C.q_stages) & 1)
        high = told(ring, n % RING, 7, 1)


# --- the warpgroups that compute -------------------------------------------------------------------------------------


@gluon.jit
def mask(scores, tile, first_key, C: gl.constexpr, S: gl.constexpr):
    """-inf where a query does not see a key. Source: chapter 03b."""
    first_query, q_len, kv_len = tile
    rows = gl.arange(0, C.M, gl.SliceLayout(1, S))
    keys = first_key + gl.arange(0, C.N, gl.SliceLayout(0, S))
    position = kv_len - q_len + first_query + rows // C.group
    last = position * 0 + (kv_len - 1)
    if C.causal:
        last = gl.minimum(last, position)
    if C.right >= 0:
        last = gl.minimum(last, position + C.right)
    seen = keys[None, :] <= last[:, None]
    if C.left >= 0:
        seen = seen & (keys[None, :] >= (position - C.left)[:, None])
    return gl.where(seen, scores, -INF)


@gluon.jit
def softmax(scores, peak, total, scale, softcap, tile, first_key, at_edge, C: gl.constexpr, S: gl.constexpr):
    """One block's weights, the factor by which the older sums shrink, and the new running maximum and sums (base 2).

    Source: chapter 03b.
    """
    if C.softcap:
        x = scores * (2.0 * LOG2E * scale / softcap)
        scores = (softcap * LOG2E) * (1.0 - 2.0 / (gl.exp2(x) + 1.0))
        scale = 1.0
    if at_edge:
        scores = mask(scores, tile, first_key, C, S)
    new = row_max(scores, S) * scale
    new = gl.where(new - peak > GROWTH, new, peak)  # any maximum near enough will do, and one that stays is free
    safe = gl.where(new == -INF, 0.0, new)  # a row that has seen nothing yet: exp2(-inf - 0) is 0
    p = gl.exp2(scores * scale - safe[:, None])
    shrink = gl.exp2(peak - safe)
    part = thread_sum(p)
    total = total * gl.convert_layout(shrink, gl.SliceLayout(1, part.type.layout))[:, None] + part
    return p, shrink, new, total


@gluon.jit
def my_turn(WHO: gl.constexpr, C: gl.constexpr):
    """Wait until the consumer before this one has put its products in the queue. Source: chapter 03b."""
    if C.turns:
        bar_sync(TURN + WHO, 256)


@gluon.jit
def next_turn(WHO: gl.constexpr, C: gl.constexpr):
    """Let the consumer after this one queue its products. Source: chapter 03b."""
    if C.turns:
        bar_arrive(TURN + (WHO + 1) % C.consumers, 256)


@gluon.jit
def step(q, kb, vb, k_full, v_full, acc, p, shrink, peak, total, count, alive, more, scale, softcap, tile, first_key,
         at_edge, ENDS: gl.constexpr, WHO: gl.constexpr, C: gl.constexpr, S: gl.constexpr,
         O: gl.constexpr):  # fmt: skip
    """Scores of the next block, while the last one's weights meet their values. Source: chapter 03b."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O, k_width=2)
    M: gl.constexpr = C.M
    N: gl.constexpr = C.N
    behind = count % C.stages
    ahead = (count + 1) % C.stages
    my_turn(WHO, C)
    zero = gl.zeros([M, N], gl.float32, S)
    scores = warpgroup_mma(q, kb.index(ahead).permute((1, 0)), zero, use_acc=False, is_async=True)
    # Also keeps what follows behind the first product: the compiler moves nothing across this loop.
    mbarrier.wait(v_full.index(behind), (count // C.stages) & 1)
    if not C.late:
        acc = rescale(acc, shrink, O)
        p = pack(p, q.dtype)
    acc = warpgroup_mma(unpack(p, q.dtype, OPERAND), vb.index(behind), acc, is_async=True)
    next_turn(WHO, C)
    scores = warpgroup_mma_wait(1, deps=[scores])
    p, shrink, peak, total = softmax(scores, peak, total, scale, softcap, tile, first_key, at_edge, C, S)
    count += 1
    # Keeps the wait for the product below the softmax.
    mbarrier.wait(k_full.index((count + 1) % C.stages), ((count + 1) // C.stages) & 1, pred=more)
    acc = warpgroup_mma_wait(0, deps=[acc])
    if alive:
        bar_arrive(K_FREE + ahead, C.consumers * 128 + 32)
    bar_arrive(V_FREE + behind, C.consumers * 128 + 32)
    if C.late:
        p = pack(p, q.dtype)
        if not ENDS:
            acc = rescale(acc, shrink, O)
    return acc, p, shrink, peak, total, count


@gluon.jit
def start(ring, n, WHO: gl.constexpr, C: gl.constexpr):
    """What a consumer must know of tile n: its queries and lengths, the end of its blocks, how many they are, and which
    of them need a mask: the first ``top``, and from ``bottom`` on.

    Source: chapter 03b.
    """
    at = n % RING
    first_query = told(ring, at, 2) + WHO * C.queries
    q_len = told(ring, at, 4)
    kv_len = told(ring, at, 5)
    high = told(ring, at, 7)
    blocks = high - told(ring, at, 6)
    # Blocks are taken from the last to the first. Those at the diagonal and at the window's edge need a mask.
    clear = kv_len
    past = kv_len - q_len
    if C.causal:
        clear = gl.minimum(clear, past + first_query + 1)
    if C.right >= 0:
        clear = gl.minimum(clear, past + first_query + 1 + C.right)
    top = gl.minimum(high - gl.maximum(clear, 0) // C.N, blocks)
    bottom = blocks
    if C.left >= 0:
        edge = gl.maximum(past + gl.minimum(first_query + C.queries, q_len) - 1 - C.left, 0)
        bottom = gl.maximum(gl.minimum(blocks, high - gl.cdiv(edge, C.N)), top)
    return (first_query, q_len, kv_len), high, blocks, top, bottom


@gluon.jit
def nothing_seen(ring, n, sink_ptr, C: gl.constexpr, S: gl.constexpr):
    """The running maximum and sums of tile n before its first key. Source: chapter 03b."""
    M: gl.constexpr = C.M
    N: gl.constexpr = C.N
    total = thread_sum(gl.zeros([M, N], gl.float32, S))
    peak = gl.full([M], -INF, gl.float32, gl.SliceLayout(1, S))
    if C.sinks:
        rows = gl.arange(0, M, gl.SliceLayout(1, S))
        peak = gl.load(sink_ptr + told(ring, n % RING, 1) * C.group + rows % C.group) * LOG2E
    return peak, total


@gluon.jit
def consumer(out_desc, outputs, buffers, scale, softcap, WHO: gl.constexpr, C: gl.constexpr):
    """Rows WHO * M .. of each tile, from the scores to the output. The first scores of a tile are computed beside the
    last product of the tile before, so that the tensor cores have work while rows are written.

    Source: chapter 03b.
    """
    qs, kb, vb, q_full, q_free, k_full, v_full, ring = buffers
    sink_ptr = outputs[2]
    M: gl.constexpr = C.M
    N: gl.constexpr = C.N
    WIDE: gl.constexpr = C.wide_v
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, C.N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, C.wide_v, 16])
    if C.turns and C.consumers - 1 == WHO:
        next_turn(WHO, C)  # consumer 0 may begin
    count = 0
    n = 0
    mbarrier.wait(q_full.index(WHO * C.q_stages), 0)
    tile, high, blocks, top, bottom = start(ring, 0, WHO, C)
    peak, total = nothing_seen(ring, 0, sink_ptr, C, S)
    mbarrier.wait(k_full.index(0), 0, pred=high > 0)
    zero = gl.zeros([M, N], gl.float32, S)
    first_q = qs.index(WHO * C.q_stages)
    scores = warpgroup_mma(first_q, kb.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    if high > 0:
        bar_arrive(K_FREE, C.consumers * 128 + 32)
    p, shrink, peak, total = softmax(scores, peak, total, scale, softcap, tile, (high - 1) * C.N, True, C, S)
    if C.late:
        p = pack(p, qs.dtype)
    mbarrier.wait(k_full.index(1 % C.stages), 1 // C.stages, pred=blocks > 1)
    while high > 0:
        slot = WHO * C.q_stages + n % C.q_stages
        q = qs.index(slot)
        acc = gl.zeros([M, WIDE], gl.float32, O)
        for i in range(1, blocks):
            acc, p, shrink, peak, total, count = step(
                q, kb, vb, k_full, v_full, acc, p, shrink, peak, total, count, True, i + 1 < blocks, scale, softcap,
                tile, (high - 1 - i) * C.N, (i < top) | (i >= bottom), False, WHO, C, S, O)  # fmt: skip
        if not C.staged:
            mbarrier.arrive(q_free.index(slot), count=1)
        n += 1
        slot_next = WHO * C.q_stages + n % C.q_stages
        mbarrier.wait(q_full.index(slot_next), (n // C.q_stages) & 1)
        inverse = denominators(outputs, ring, (n - 1) % RING, total, peak, WHO, C, S)
        tile, high, blocks, top, bottom = start(ring, n, WHO, C)
        peak, total = nothing_seen(ring, n, sink_ptr, C, S)
        alive = high > 0
        mbarrier.wait(k_full.index((count + 1) % C.stages), ((count + 1) // C.stages) & 1, pred=alive)
        acc, p, shrink, peak, total, count = step(
            qs.index(slot_next), kb, vb, k_full, v_full, acc, p, shrink, peak, total, count, alive, blocks > 1, scale,
            softcap, tile, (high - 1) * C.N, (top > 0) | (bottom <= 0), True, WHO, C, S, O)  # fmt: skip
        store(out_desc, outputs, q, ring, (n - 1) % RING, acc, inverse, WHO, C, S, O)
        if C.staged:
            mbarrier.arrive(q_free.index(slot), count=1)


@gluon.jit
def denominators(outputs, ring, at, total, peak, WHO: gl.constexpr, C: gl.constexpr, S: gl.constexpr):
    """What a consumer's rows are to be multiplied by; their log-sum-exps are written here, before the last product, so
    that nothing else of a tile has to be kept while the next begins.

    Source: chapter 03b.
    """
    lse_ptr, sink_ptr, lse_seq, lse_head = outputs[1], outputs[2], outputs[6], outputs[7]
    head = told(ring, at, 1) * C.group
    total = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, S))
    rows = gl.arange(0, C.M, gl.SliceLayout(1, S))
    if C.sinks:
        sink = gl.load(sink_ptr + head + rows % C.group) * LOG2E
        total += gl.exp2(sink - gl.where(peak == -INF, 0.0, peak))
    empty = total == 0.0
    total = gl.where(empty, 1.0, total)
    if C.lse:
        query = told(ring, at, 2) + WHO * C.queries + rows // C.group
        lse = gl.where(empty, -INF, (peak + gl.log2(total)) * LN2)
        place = (head + rows % C.group).to(gl.int64) * lse_head + told(ring, at, 3) + query
        if C.form == "dense":
            place += told(ring, at, 0).to(gl.int64) * lse_seq
        gl.store(lse_ptr + place, lse, mask=query < told(ring, at, 4))
    return 1.0 / total


@gluon.jit
def store(out_desc, outputs, q, ring, at, acc, inverse,
          WHO: gl.constexpr, C: gl.constexpr, S: gl.constexpr, O: gl.constexpr):  # fmt: skip
    """Divide by the denominator and write a consumer's rows, through the buffer of its queries where that is free: from
    there the copy engine takes them, or, where its strides do not fit, threads that write each row whole.

    Source: chapter 03b.
    """
    out_ptr, out_seq, out_token, out_head = outputs[0], outputs[3], outputs[4], outputs[5]
    head = told(ring, at, 1) * C.group
    first_query = told(ring, at, 2) + WHO * C.queries
    first = told(ring, at, 3)
    q_len = told(ring, at, 4)
    out = (acc * gl.convert_layout(inverse, gl.SliceLayout(1, O))[:, None]).to(q.dtype)
    if C.copies_out:  # bounded as a copy in: rows past the last query are not written
        q.store(out)
        hopper.fence_async_shared()
        if C.form == "dense":
            place = [told(ring, at, 0), first_query, told(ring, at, 1), 0, 0]
            copy_out(out_desc, place, q.reshape([1, C.queries, 1, C.group, C.wide_v]))
        else:
            place = [FAR, first + q_len, FAR - q_len + first_query, head, 0]
            copy_out(out_desc, place, q.reshape([1, 1, C.queries, C.group, C.wide_v]))
        tma.store_wait(0)
        return
    LANES: gl.constexpr = min(16, C.wide_v // 8)
    W: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0]) if C.staged else O
    if C.staged:
        q.store(out)
        out = q.load(W)
        hopper.fence_async_shared()
    if C.form == "dense":
        out_ptr += told(ring, at, 0).to(gl.int64) * out_seq
    rows_w = gl.arange(0, C.M, gl.SliceLayout(1, W))
    query_w = first_query + rows_w // C.group
    columns = gl.arange(0, C.wide_v, gl.SliceLayout(0, W))
    row = (first + query_w).to(gl.int64) * out_token + (head + rows_w % C.group).to(gl.int64) * out_head
    mask = (query_w < q_len)[:, None] & (columns < C.dim_v)[None, :]
    gl.store(out_ptr + row[:, None] + columns[None, :], out, mask=mask)


@counted
@gluon.jit(do_not_specialize=["table_row", "q_tiles", "width"])  # a server's change every step
def flash_hopper_kernel(
    q_desc, k_desc, v_desc, out_desc, out_ptr, lse_ptr, sink_ptr, table_ptr, plan_ptr, counter, cu_q, cu_k, used,
    table_row, out_seq, out_token, out_head, lse_seq, lse_head, heads, q_tiles, q_len, kv_len, num_tiles, width,
    scale, softcap, C: gl.constexpr,
):  # fmt: skip
    """Flash attention's forward pass: a persistent CTA that takes tiles until none is left. Source: chapter 03b."""
    dtype: gl.constexpr = q_desc.dtype
    if C.form != "dense":  # only the device knows the lengths
        q_tiles = gl.load(plan_ptr)
        num_tiles = q_tiles * heads
    Q: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C.M, C.wide], dtype)
    K: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C.N, C.wide], dtype)
    V: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C.N, C.wide_v], dtype)
    B: gl.constexpr = mbarrier.MBarrierLayout()
    qs = gl.allocate_shared_memory(dtype, [C.consumers * C.q_stages, C.M, C.wide], Q)
    kb = gl.allocate_shared_memory(dtype, [C.stages, C.N, C.wide], K)
    vb = gl.allocate_shared_memory(dtype, [C.stages, C.N, C.wide_v], V)
    q_full = gl.allocate_shared_memory(gl.int64, [C.consumers * C.q_stages, 1], B)
    q_free = gl.allocate_shared_memory(gl.int64, [C.consumers * C.q_stages, 1], B)
    k_full = gl.allocate_shared_memory(gl.int64, [C.stages, 1], B)
    v_full = gl.allocate_shared_memory(gl.int64, [C.stages, 1], B)
    ring = gl.allocate_shared_memory(gl.int32, [RING * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for i in gl.static_range(C.consumers * C.q_stages):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_free.index(i), count=1)
    for i in gl.static_range(C.stages + 0):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
    work = (plan_ptr, cu_q, cu_k, used, heads, q_tiles, q_len, kv_len, num_tiles, width)
    outputs = (out_ptr, lse_ptr, sink_ptr, out_seq, out_token, out_head, lse_seq, lse_head)
    buffers = (qs, kb, vb, q_full, q_free, k_full, v_full, ring)
    descs = (q_desc, k_desc, v_desc)
    table = (table_ptr, table_row)
    gl.warp_specialize([
        (consumer, (out_desc, outputs, buffers, scale, softcap, 0, C)),
        (consumer, (out_desc, outputs, buffers, scale, softcap, 1, C)),
        (load_keys, (descs, buffers, table, counter, work, C)),
        (load_values, (descs, buffers, table, counter, work, C)),
    ], [4, 1, 1], [240, 24, 24])  # fmt: skip
