"""Moving keys and values into pages, and attention that reads them there. Written to be read; later chapters make it
fast."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from kvlab import reference, runtime
from kvlab.batch import as_int
from kvlab.runtime import cap, cdiv, counted, dot, finish, key_range, load_rows, next_power_of_2, tl, triton, visible


@counted
@triton.jit
def reshape_and_cache_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slot_ptr,
    k_token, k_head, v_token, v_head, kc_block, kc_slot, kc_head, vc_block, vc_slot, vc_head,
    BLOCK_SIZE: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Copy one token's keys and values to its slot: one program a token. Source: chapter 02."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    if slot >= 0:  # -1 is padding: nothing is written
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        i = tl.arange(0, WIDTH)
        head, d = (i // D).to(tl.int64), i % D
        k = tl.load(k_ptr + token * k_token + head * k_head + d, mask=head < H)
        tl.store(k_cache_ptr + block * kc_block + offset * kc_slot + head * kc_head + d, k, mask=head < H)
        head, d = (i // DV).to(tl.int64), i % DV
        v = tl.load(v_ptr + token * v_token + head * v_head + d, mask=head < H)
        tl.store(v_cache_ptr + block * vc_block + offset * vc_slot + head * vc_head + d, v, mask=head < H)


def reshape_and_cache(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, *, impl: str | None = None
) -> None:
    """Write each new token's key and value into its slot, for all sequences in one launch.

    Shapes and units: k [T, H_kv, D], v [T, H_kv, Dv]; k_cache, v_cache [num_blocks, block_size, H_kv, D or Dv], changed
    in place and in their own dtype; slot_mapping [T] int64, block · block_size + offset, -1 for a token that is not
    written. ``impl`` is "torch", "triton" or None (by device).

    Raises: ValueError where shapes, dtypes or devices do not fit; RuntimeError where "triton" cannot be launched.

    Source: chapter 02; vLLM's kernel of this name.
    """
    if not (k.ndim == v.ndim == 3 and k_cache.ndim == v_cache.ndim == 4):
        raise ValueError(
            f"k, v, k_cache and v_cache have {k.ndim}, {v.ndim}, {k_cache.ndim} and {v_cache.ndim} dimensions; they "
            "must be [T, H_kv, D] and [num_blocks, block_size, H_kv, D]"
        )
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if x.shape[1:] != cache.shape[2:]:
            raise ValueError(f"{name} has heads {list(x.shape[1:])} and {name}_cache {list(cache.shape[2:])}; as many")
        if any(t.shape[-1] > 1 and t.stride(-1) != 1 for t in (x, cache)):
            raise ValueError(f"{name} or {name}_cache is not contiguous within a head")
    if k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(
            f"k_cache is {list(k_cache.shape)} and v_cache {list(v_cache.shape)}; they must agree but in D"
        )
    if min(k_cache.shape[1:]) < 1 or v_cache.shape[3] < 1:
        raise ValueError(
            f"k_cache is {list(k_cache.shape)} and v_cache {list(v_cache.shape)}; no block or head may be empty"
        )
    if len(slot_mapping) > 1 and slot_mapping.stride(0) != 1:
        raise ValueError(f"slot_mapping is strided by {slot_mapping.stride(0)}; it must be contiguous")
    if slot_mapping.shape != (k.shape[0],) or v.shape[0] != k.shape[0] or slot_mapping.dtype != torch.int64:
        raise ValueError(
            f"slot_mapping is {slot_mapping.dtype} {list(slot_mapping.shape)}, v has {v.shape[0]} tokens; with k's "
            f"{k.shape[0]} it must be torch.int64 [{k.shape[0]}]"
        )
    devices = {t.device for t in (k, v, k_cache, v_cache, slot_mapping)}
    if len(devices) > 1:
        raise ValueError(f"the tensors are on {sorted(map(str, devices))}; they must be on one device")
    runtime.require_no_grad(k, v, k_cache, v_cache)
    if runtime.CHECK and slot_mapping.numel():
        slots, room = slot_mapping[slot_mapping >= 0], k_cache.shape[0] * k_cache.shape[1]
        if int(slot_mapping.max()) >= room or len(slots.unique()) != len(slots):
            raise ValueError(
                f"slot_mapping {slot_mapping.tolist()} names a slot twice or one past the last, {room - 1}"
            )
    if k.shape[0] == 0 or k.shape[1] == 0:
        return
    if runtime.choose(impl, k.device, "reshape_and_cache") == "torch":
        written = slot_mapping >= 0
        block, offset = slot_mapping[written] // k_cache.shape[1], slot_mapping[written] % k_cache.shape[1]
        k_cache[block, offset] = k[written].to(k_cache.dtype)
        v_cache[block, offset] = v[written].to(v_cache.dtype)
        return
    width = next_power_of_2(k.shape[1] * max(k.shape[2], v.shape[2]))
    reshape_and_cache_kernel[(k.shape[0],)](
        k, v, k_cache, v_cache, slot_mapping, *k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:3],
        *v_cache.stride()[:3], BLOCK_SIZE=k_cache.shape[1], H=k.shape[1], D=k.shape[2], DV=v.shape[2], WIDTH=width,
        num_warps=max(1, min(8, width // 256)),
    )  # fmt: skip


def gather(cache: Tensor, block_table: Tensor, seqused_k: Tensor, max_seqlen_k: int | None = None) -> Tensor:
    """Copy the pages of each sequence together, in order: what attention sees, without pages.

    Shapes and units: cache [num_blocks, block_size, H_kv, D], block_table [B, max_blocks] int32, seqused_k [B] int32;
    gives [B, L, H_kv, D] with L = ``max_seqlen_k`` tokens (default: max_blocks · block_size), 0 past a sequence's end.

    Raises: ValueError where shapes do not fit, or ``max_seqlen_k`` is more than the table holds.

    Source: chapter 02.
    """
    if cache.ndim != 4 or block_table.ndim != 2 or seqused_k.shape != block_table.shape[:1] or cache.shape[0] == 0:
        raise ValueError(
            f"cache {list(cache.shape)}, block_table {list(block_table.shape)} and seqused_k {list(seqused_k.shape)} "
            "must be [num_blocks, block_size, H_kv, D], [B, max_blocks] and [B], with a block or more"
        )
    num_blocks, block_size = cache.shape[:2]
    room = block_table.shape[1] * block_size
    length = room if max_seqlen_k is None else max_seqlen_k
    if not 0 <= length <= room:
        raise ValueError(f"max_seqlen_k is {max_seqlen_k}; the table holds 0 to {room} tokens")
    pages = block_table[:, : -(-length // block_size)].long().clamp(0, num_blocks - 1)  # padding may hold anything
    dense = cache[pages].flatten(1, 2)[:, :length]
    used = torch.arange(length, device=cache.device)[None, :] < seqused_k[:, None]
    return torch.where(used[:, :, None, None], dense, torch.zeros((), dtype=cache.dtype, device=cache.device))


@counted
@triton.jit
def paged_attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, table_ptr, cu_ptr, used_ptr, sink_ptr, tree_ptr, scale, softcap,
    q_token, q_head, k_block, k_slot, k_head, v_block, v_slot, v_head, o_token, o_head, lse_head, table_row,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_SIZE: tl.constexpr, QUERIES: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, WIDE_D: tl.constexpr, WIDE_DV: tl.constexpr, CAUSAL: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, TREE: tl.constexpr,
    LSE: tl.constexpr,
):  # fmt: skip
    """QUERIES new tokens of a sequence, with the GROUP query heads of one KV head, against all keys they see.

    Source: chapter 02.
    """
    tile, kv_head, seq = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    first = tl.load(cu_ptr + seq)
    q_len = tl.load(cu_ptr + seq + 1) - first
    kv_len = tl.load(used_ptr + seq)
    q_start = tile * QUERIES
    if q_start >= q_len:
        return
    rows = tl.arange(0, M)
    q_index = q_start + rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    live = (rows < QUERIES * GROUP) & (q_index < q_len)
    token = (first + q_index).to(tl.int64)
    d, dv = tl.arange(0, WIDE_D), tl.arange(0, WIDE_DV)
    q = load_rows(q_ptr, token[:, None] * q_token + head[:, None] * q_head + d[None, :],
                  live[:, None] & (d < D)[None, :])  # fmt: skip
    bits = tl.full([M], 0, tl.int64)
    key_bits = tl.full([N], 0, tl.int64)
    if TREE:
        bits = tl.load(tree_ptr + token, mask=live, other=0)
    low, high = key_range(q_start, QUERIES, q_len, kv_len, CAUSAL, LEFT, RIGHT, TREE)

    peak = tl.full([M], float("-inf"), tl.float32)  # the largest score of each row
    total = tl.zeros([M], tl.float32)  # the sum of exp(score - peak)
    acc = tl.zeros([M, WIDE_DV], tl.float32)  # the sum of exp(score - peak) * value
    if SINKS:
        sink = tl.load(sink_ptr + head, mask=live, other=float("-inf"))
        peak = sink
    for second in tl.static_range(2):  # first pass: the maximum; second pass: the sums
        for start in range(low, high, N):
            k_index = start + tl.arange(0, N)
            there = k_index < high
            page = tl.load(table_ptr + seq * table_row + k_index // BLOCK_SIZE, mask=there, other=0)
            page, slot = page.to(tl.int64), (k_index % BLOCK_SIZE).to(tl.int64)
            k = load_rows(k_ptr, page[None, :] * k_block + slot[None, :] * k_slot + kv_head * k_head + d[:, None],
                          there[None, :] & (d < D)[:, None])  # fmt: skip
            scores = dot(q, k, tl.zeros([M, N], tl.float32)) * scale
            if CAP:
                scores = cap(scores, softcap)
            if TREE:
                new = k_index - (kv_len - q_len)
                key_bits = tl.load(tree_ptr + first + new, mask=there & (new >= 0), other=0)
            seen = visible(q_index, k_index, bits, key_bits, q_len, kv_len, CAUSAL, LEFT, RIGHT, TREE)
            scores = tl.where(seen, scores, float("-inf"))
            if second == 0:
                peak = tl.maximum(peak, tl.max(scores, axis=1))
            else:
                v = load_rows(v_ptr, page[:, None] * v_block + slot[:, None] * v_slot + kv_head * v_head + dv[None, :],
                              there[:, None] & (dv < DV)[None, :])  # fmt: skip
                weight = tl.exp(scores - peak[:, None])
                total += tl.sum(weight, axis=1)
                acc = dot(weight.to(v.dtype), v, acc)
        if second == 0:
            peak = tl.where(peak == float("-inf"), 0.0, peak)  # a row that sees nothing: exp(-inf - 0) is 0
    if SINKS:
        total += tl.where(live, tl.exp(sink - peak), 0.0)
    out, lse = finish(acc, total, peak)
    tl.store(out_ptr + token[:, None] * o_token + head[:, None] * o_head + dv[None, :], out,
             mask=live[:, None] & (dv < DV)[None, :])  # fmt: skip
    if LSE:
        tl.store(lse_ptr + head * lse_head + token, lse, mask=live)


def attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, block_table: Tensor, cu_seqlens_q: Tensor, seqused_k: Tensor,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, softmax_scale: float | None = None,
    causal: bool = True, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, sinks: Tensor | None = None,
    tree_mask: Tensor | None = None, out: Tensor | None = None, return_lse: bool = False, impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of new tokens over pages: the one signature of the book, read straight from the block table.

    Two passes over the keys, the first for each row's maximum and the second for the sums; chapter 03 needs one.

    Shapes and units: q and the result [total_q, H, D or Dv]; k_cache, v_cache [num_blocks, block_size, H_kv, D or Dv];
    block_table [B, max_blocks], cu_seqlens_q [B + 1], seqused_k [B], all int32; ``max_seqlen_q`` bounds the new tokens
    of any sequence (default: total_q) and sets the grid; ``max_seqlen_k`` is not needed; sinks [H] float32; tree_mask
    [total_q] int64; lse [H, total_q] float32, natural log. ``impl`` is "torch", "triton" or None (by device).

    Raises: ValueError as ``runtime.check_attention``, or for a head size over 256; RuntimeError where "triton" cannot
    be launched.

    Source: chapter 02; Kwon et al. 2023 (PagedAttention), and vLLM's and FlashAttention's paged interface.
    """
    runtime.check_attention(
        q, k_cache, v_cache, block_table=block_table, cu_seqlens_q=cu_seqlens_q, seqused_k=seqused_k,
        max_seqlen_q=max_seqlen_q, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        sinks=sinks, tree_mask=tree_mask, out=out,
    )  # fmt: skip
    (total_q, heads, head_dim), kv_heads, v_dim = q.shape, k_cache.shape[2], v_cache.shape[3]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    if runtime.choose(impl, q.device, "paged.attention") == "torch":
        return _gather_and_attend(
            q, k_cache, v_cache, block_table, cu_seqlens_q, seqused_k, out, return_lse, softmax_scale=scale,
            causal=causal, window_size=window_size, softcap=softcap, sinks=sinks, tree_mask=tree_mask,
        )  # fmt: skip
    if max(head_dim, v_dim) > 256:
        raise ValueError(f"head sizes are {head_dim} and {v_dim}; the kernel takes 256 at most")
    if out is None:
        out = q.new_empty(total_q, heads, v_dim)
    lse = torch.empty(heads, total_q, dtype=torch.float32, device=q.device) if return_lse else None
    batch, group = seqused_k.shape[0], heads // kv_heads
    rows = max(16, next_power_of_2(group), 16 if (max_seqlen_q or total_q) * group <= 16 else 64)
    queries = rows // group  # query tokens in a tile of `rows` rows; a group that is no power of two leaves some idle
    grid = (cdiv(total_q if max_seqlen_q is None else max_seqlen_q, queries), kv_heads, batch)
    left, right = (min(w, 2**30) for w in window_size)  # no 32-bit sum of positions may wrap around
    wide, wide_v = (max(16, next_power_of_2(x)) for x in (head_dim, v_dim))
    if min(grid) > 0 and total_q > 0:
        paged_attention_kernel[grid](
            q, k_cache, v_cache, out, lse, block_table, cu_seqlens_q, seqused_k, sinks, tree_mask, scale, softcap,
            *q.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3], *out.stride()[:2],
            lse.stride(0) if lse is not None else 0, block_table.stride(0), GROUP=group, D=head_dim, DV=v_dim,
            BLOCK_SIZE=k_cache.shape[1], QUERIES=queries, M=rows, N=8192 // max(wide, 64), WIDE_D=wide,
            WIDE_DV=wide_v, CAUSAL=causal, LEFT=left, RIGHT=right, CAP=softcap > 0,
            SINKS=sinks is not None, TREE=tree_mask is not None, LSE=return_lse, num_warps=4,
        )  # fmt: skip
    return (out, lse) if lse is not None else out


def _gather_and_attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, cu_seqlens_q: Tensor, seqused_k: Tensor,
    out: Tensor | None, return_lse: bool, *, tree_mask: Tensor | None, **options: object,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """``attention`` in PyTorch: gather the pages, then attend densely, one sequence at a time."""
    runtime.check_contents(k_cache, q.shape[0], block_table, cu_seqlens_q, seqused_k, tree_mask)
    starts, lengths = cu_seqlens_q.tolist(), seqused_k.tolist()
    if out is None:
        out = q.new_empty(q.shape[0], q.shape[1], v_cache.shape[3])
    lse = torch.full((q.shape[1], q.shape[0]), float("-inf"), dtype=torch.float32, device=q.device)
    for b, length in enumerate(lengths):
        rows = slice(starts[b], starts[b + 1])
        if starts[b] == starts[b + 1]:
            continue
        k = gather(k_cache, block_table[b : b + 1], seqused_k[b : b + 1], length)[0]
        v = gather(v_cache, block_table[b : b + 1], seqused_k[b : b + 1], length)[0]
        mask = None if tree_mask is None or length == 0 else tree_mask[rows]  # length 0: a spare row sees no key
        out[rows], lse[:, rows] = reference.attend_one(q[rows], k, v, tree_mask=mask, dtype=None, **options)  # type: ignore[arg-type]
    return (out, lse) if return_lse else out


def to_flashinfer(block_table: Tensor, seqused_k: Tensor, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """A block table in FlashInfer's form: all tables end to end, with pointers.

    Shapes and units: block_table [B, max_blocks] int32, seqused_k [B] int32, block_size in tokens; gives kv_indptr
    [B + 1], kv_indices [blocks in use] and kv_last_page_len [B], all int32. A sequence of 0 tokens has no page, and 0.

    Raises: ValueError for a block size under 1, or shapes that do not fit.

    Source: chapter 02; FlashInfer's page table layout.
    """
    if not all(t.dtype == torch.int32 for t in (block_table, seqused_k)):
        raise ValueError(
            f"block_table is {block_table.dtype} and seqused_k {seqused_k.dtype}; both must be torch.int32"
        )
    block_size = as_int(block_size, "block_size")
    if block_size < 1 or block_table.ndim != 2 or seqused_k.shape != block_table.shape[:1]:
        raise ValueError(
            f"block_table {list(block_table.shape)}, seqused_k {list(seqused_k.shape)} and block_size {block_size} "
            "must be [B, max_blocks], [B] and 1 or more"
        )
    if runtime.CHECK or seqused_k.device.type == "cpu":
        wrong = [n for n in seqused_k.tolist() if not 0 <= n <= block_table.shape[1] * block_size]
        if wrong:
            raise ValueError(
                f"seqused_k holds {wrong[0]}; the table has room for 0 to {block_table.shape[1] * block_size}"
            )
    counts = (seqused_k + block_size - 1) // block_size
    indptr = torch.zeros(len(counts) + 1, dtype=torch.int32, device=counts.device)
    indptr[1:] = counts.cumsum(0)
    used = torch.arange(block_table.shape[1], device=counts.device)[None, :] < counts[:, None]
    last = torch.where(seqused_k > 0, (seqused_k - 1) % block_size + 1, 0)
    return indptr, block_table[used], last.to(torch.int32)


def from_flashinfer(
    kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_len: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """The way back: (block_table [B, max_blocks], padded with -1, and seqused_k [B]), both int32.

    Shapes and units: as ``to_flashinfer``; reads the lengths on the host.

    Raises: ValueError where a tensor is not int32 and flat, kv_indptr does not rise from 0 to the number of indices, a
    page is negative, or a last page is over-full.

    Source: chapter 02; FlashInfer's page table layout.
    """
    for name, x in (("kv_indptr", kv_indptr), ("kv_indices", kv_indices), ("kv_last_page_len", kv_last_page_len)):
        if x.dtype != torch.int32 or x.ndim != 1:
            raise ValueError(f"{name} is {x.dtype} {list(x.shape)}; it must be torch.int32 and flat")
    if len(kv_indices) and int(kv_indices.min()) < 0:
        raise ValueError(f"kv_indices holds {int(kv_indices.min())}; pages are 0 or more")
    ends, last = kv_indptr.tolist(), kv_last_page_len.tolist()
    counts = [b - a for a, b in itertools.pairwise(ends)]
    if (
        not ends
        or ends[0] != 0
        or ends[-1] != len(kv_indices)
        or min(counts, default=0) < 0
        or len(last) != len(counts)
    ):
        raise ValueError(f"kv_indptr is {ends}; for {len(last)} sequences it must rise from 0 to {len(kv_indices)}")
    for b, (count, length) in enumerate(zip(counts, last, strict=True)):
        if not (0 < length <= block_size if count else length == 0):
            raise ValueError(f"kv_last_page_len[{b}] is {length} of {count} pages of {block_size} tokens")
    table = torch.full((len(counts), max(counts, default=0)), -1, dtype=torch.int32, device=kv_indices.device)
    used = [(count - 1) * block_size + length if count else 0 for count, length in zip(counts, last, strict=True)]
    for b, count in enumerate(counts):
        table[b, :count] = kv_indices[ends[b] : ends[b + 1]]
    return table, torch.tensor(used, dtype=torch.int32, device=kv_indices.device)
