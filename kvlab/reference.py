"""The float64 oracle: attention written so that it can be checked by eye, and used to check everything else.

Every kernel of the book must equal these few lines. Nothing here is fast, and nothing here may become so.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

_INTEGERS = (torch.int32, torch.int64)


def visible_keys(
    q_len: int,
    kv_len: int,
    *,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    tree_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Which keys each query sees: a boolean [q_len, kv_len].

    The q_len queries are the last of the kv_len tokens, so query i stands at position kv_len - q_len + i: causality
    is aligned bottom-right. ``window_size`` is (left, right) in tokens, inclusive, -1 unlimited. ``tree_mask``
    [q_len] int64 replaces causality among the new tokens by its bits, and measures the window by depth.

    Raises: ValueError where a length is negative, or ``tree_mask`` is of another shape or type, has over 63 tokens, or
    more than ``kv_len``.

    Source: chapter 01; FlashAttention's conventions.
    """
    if q_len < 0 or kv_len < 0:
        raise ValueError(f"q_len is {q_len} and kv_len {kv_len}; both must be 0 or more")
    if tree_mask is not None:
        if tree_mask.shape != (q_len,) or tree_mask.dtype != torch.int64:
            raise ValueError(f"tree_mask is {_described(tree_mask)}; it must be [{q_len}] of torch.int64")
        if q_len > min(63, kv_len):
            raise ValueError(f"tree_mask has {q_len} tokens; a tree has 63 at most, all among the {kv_len} keys")
    past = kv_len - q_len
    q_slot = past + torch.arange(q_len, device=device)[:, None]
    k_slot = torch.arange(kv_len, device=device)[None, :]
    if tree_mask is None:
        q_pos, k_pos = q_slot, k_slot
        seen = k_pos <= q_pos if causal else torch.ones(q_len, kv_len, dtype=torch.bool, device=device)
    else:
        new = torch.arange(q_len, device=device)
        bits = (tree_mask.to(device)[:, None] >> new[None, :]) & 1
        depth = past + bits.sum(1) - 1
        q_pos = depth[:, None]
        k_pos = torch.cat([torch.arange(past, device=device), depth])[None, :]
        seen = torch.cat([torch.ones(q_len, past, dtype=torch.bool, device=device), bits.bool()], dim=1)
    left, right = window_size
    if left >= 0:
        seen = seen & (k_pos >= q_pos - left)
    if right >= 0:
        seen = seen & (k_pos <= q_pos + right)
    return seen


def tile_kinds(q_len: int, kv_len: int, M: int, N: int) -> Tensor:
    """What a causal mask leaves of each tile of M queries and N keys: 0 nothing, 1 a part (an edge), 2 everything.

    A tile that reaches past the last key is an edge, as what is not there must not be seen; rows past the last query
    ask for nothing.

    Shapes and units: lengths and tile sizes in tokens; gives int64 [ceil(q_len / M), ceil(kv_len / N)].

    Raises: ValueError where M or N is under 1, or as ``visible_keys``.

    Source: chapter 03; Dao et al. 2022.
    """
    if M < 1 or N < 1:
        raise ValueError(f"M is {M} and N {N}; a tile has 1 query and 1 key or more")
    seen = functional.pad(visible_keys(q_len, kv_len), (0, -kv_len % N))
    some, every = (functional.pad(seen, (0, 0, 0, -q_len % M), value=fill) for fill in (False, True))
    shape = (some.shape[0] // M, M, some.shape[1] // N, N)
    return some.view(shape).any(3).any(1).long() + every.view(shape).all(3).all(1).long()


def _described(x: Tensor) -> str:
    return f"{list(x.shape)} of {x.dtype}"


def attend_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    dtype: torch.dtype | None = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Attention of one sequence: scores, mask, softmax, weighted sum.

    Shapes and units: q [Lq, H, D], k [Lk, H_kv, D], v [Lk, H_kv, Dv], sinks [H]; gives out [Lq, H, Dv] in q's dtype
    (float64 where ``dtype`` is float64) and lse [H, Lq], the natural logarithm of the softmax denominator, -inf for
    a row that sees no key and has no sink (its output is 0). ``dtype`` is what everything is computed in; None keeps
    q's own, which is the "plain PyTorch in the same low precision" of the tolerance rule.

    Raises: ValueError where H is no multiple of H_kv, shapes do not fit together, the scale or the softcap is no finite
    number or the softcap is negative, or as ``visible_keys``.

    Source: chapter 01; Vaswani et al. 2017.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            raise ValueError(f"{name} has shape {list(x.shape)}; it must be [tokens, heads, head size]")
    if k.shape[2] != q.shape[2]:
        raise ValueError(f"k has shape {list(k.shape)}; its head size must be that of q, {q.shape[2]}")
    if v.shape[:2] != k.shape[:2]:
        raise ValueError(f"v has shape {list(v.shape)}; its tokens and heads must be those of k, {list(k.shape[:2])}")
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise ValueError(f"sinks have shape {list(sinks.shape)}; it must be [{q.shape[1]}], one a head")
    if not (math.isfinite(softcap) and softcap >= 0):
        raise ValueError(f"softcap is {softcap}; it must be 0 (off) or a positive number")
    if softmax_scale is not None and not math.isfinite(softmax_scale):
        raise ValueError(f"softmax_scale is {softmax_scale}; it must be a finite number")
    (q_len, num_heads, head_dim), (kv_len, num_kv_heads) = q.shape, k.shape[:2]
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(f"q has {num_heads} heads and k {num_kv_heads}; the first must be a multiple of the second")
    work = q.dtype if dtype is None else dtype
    group = num_heads // num_kv_heads
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    queries = q.to(work).transpose(0, 1)  # [H, Lq, D]
    keys = k.to(work).repeat_interleave(group, dim=1).transpose(0, 1)  # [H, Lk, D]
    values = v.to(work).repeat_interleave(group, dim=1).transpose(0, 1)  # [H, Lk, Dv]
    scores = queries @ keys.transpose(1, 2) * scale  # [H, Lq, Lk]
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seen = visible_keys(q_len, kv_len, causal=causal, window_size=window_size, tree_mask=tree_mask, device=q.device)
    scores = scores.masked_fill(~seen, float("-inf"))
    logits = scores
    if sinks is not None:  # one more logit a head, in the denominator alone
        sink = sinks.to(work).reshape(num_heads, 1, 1).expand(num_heads, q_len, 1)
        logits = torch.cat([scores, sink], dim=2)
    wide = logits if work == torch.float64 else logits.float()
    if logits.shape[2] == 0:
        lse = torch.full((num_heads, q_len), float("-inf"), dtype=wide.dtype, device=q.device)
    else:
        lse = torch.logsumexp(wide, dim=2)
    weights = torch.softmax(logits, dim=2)[:, :, :kv_len].masked_fill(~seen, 0.0)  # a row that sees nothing: all 0
    out = (weights @ values).transpose(0, 1)
    return (out if dtype == torch.float64 else out.to(q.dtype)), lse


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    dtype: torch.dtype | None = torch.float64,
) -> Tensor | tuple[Tensor, Tensor]:
    """The one attention signature of the book, over paged keys and values, one sequence at a time.

    Shapes and units: q and the result [total_q, H, D]; k_cache, v_cache [num_blocks, block_size, H_kv, D];
    block_table [B, max_blocks] int32; cu_seqlens_q [B + 1] int32; seqused_k [B] int32, tokens of each sequence in
    the cache, the new ones included; sinks [H]; tree_mask [total_q] int64; lse [H, total_q] natural log.
    ``max_seqlen_q`` and ``max_seqlen_k`` are bounds in tokens that this version does not need.

    Raises: ValueError as ``attend_one``, where shapes or types do not fit together, ``cu_seqlens_q`` does not rise from
    0 to total_q, and where a sequence has more tokens than its row of the table has pages, or a page it needs is not in
    the cache.

    Source: chapter 02; vLLM's and FlashAttention's paged interface.
    """
    if q.dim() != 3 or k_cache.dim() != 4 or k_cache.shape[1] == 0:
        raise ValueError(
            f"q is {_described(q)} and k_cache {_described(k_cache)}; they must be [total_q, H, D] and [num_blocks, "
            "block_size, H_kv, D]"
        )
    if v_cache.dim() != 4 or v_cache.shape[:3] != k_cache.shape[:3]:
        raise ValueError(
            f"v_cache has shape {list(v_cache.shape)}; it must be {list(k_cache.shape[:3])} and a head size"
        )
    batch = seqused_k.numel()
    for name, x, shape in (
        ("block_table", block_table, (batch, *block_table.shape[1:2])),
        ("cu_seqlens_q", cu_seqlens_q, (batch + 1,)),
        ("seqused_k", seqused_k, (batch,)),
    ):
        if x.shape != shape or x.dim() != (2 if name == "block_table" else 1) or x.dtype not in _INTEGERS:
            raise ValueError(
                f"{name} is {_described(x)}; it must be of int32, a row or entry for each of {batch} sequences"
            )
    block_size = k_cache.shape[1]
    starts, lengths = cu_seqlens_q.tolist(), seqused_k.tolist()
    if starts[0] != 0 or starts[-1] != q.shape[0] or starts != sorted(starts):
        raise ValueError(f"cu_seqlens_q is {starts}; it must rise from 0 to {q.shape[0]}, the tokens of q")
    if min(lengths, default=0) < 0:
        raise ValueError(f"seqused_k is {lengths}; lengths must be 0 or more")
    if tree_mask is not None and tree_mask.shape != q.shape[:1]:
        raise ValueError(
            f"tree_mask has shape {list(tree_mask.shape)}; it must be [{q.shape[0]}], one entry a token of q"
        )
    num_heads, result_dtype = q.shape[1], torch.float64 if dtype == torch.float64 else q.dtype
    if out is not None and (out.shape != (*q.shape[:2], v_cache.shape[3]) or not out.is_floating_point()):
        raise ValueError(
            f"out is {_described(out)}; it must be {[*q.shape[:2], v_cache.shape[3]]} of a floating-point type"
        )
    result = torch.zeros(q.shape[0], num_heads, v_cache.shape[3], dtype=result_dtype, device=q.device)
    lse = torch.full((num_heads, q.shape[0]), float("-inf"), dtype=torch.float64, device=q.device)
    for b, kv_len in enumerate(lengths):
        rows = slice(starts[b], starts[b + 1])
        blocks = block_table[b, : -(-kv_len // block_size)].long()
        if kv_len > blocks.numel() * block_size or (blocks < 0).any() or (blocks >= len(k_cache)).any():
            raise ValueError(
                f"block_table[{b}] begins {blocks.tolist()}; {kv_len} tokens need {-(-kv_len // block_size)} pages of "
                f"{block_size}, each of them between 0 and {len(k_cache) - 1}"
            )
        keys = k_cache[blocks].flatten(0, 1)[:kv_len]
        values = v_cache[blocks].flatten(0, 1)[:kv_len]
        mask = None if tree_mask is None else tree_mask[rows]
        result[rows], lse[:, rows] = attend_one(
            q[rows], keys, values, softmax_scale=softmax_scale, causal=causal, window_size=window_size,
            softcap=softcap, sinks=sinks, tree_mask=mask, dtype=dtype,
        )  # fmt: skip
    lse = lse if dtype == torch.float64 else lse.float()
    if out is not None:
        result = out.copy_(result)
    return (result, lse) if return_lse else result


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    dtype: torch.dtype | None = torch.float64,
) -> Tensor | tuple[Tensor, Tensor]:
    """The dense form: every sequence has the same length.

    Shapes and units: q [B, Lq, H, D], k and v [B, Lk, H_kv, D]; gives [B, Lq, H, D] and lse [B, H, Lq].

    Raises: ValueError as ``attend_one``, and where q, k and v are not of the same number of sequences.

    Source: chapter 03; FlashAttention's ``flash_attn_func``.
    """
    if not q.dim() == k.dim() == v.dim() == 4 or not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(
            f"q, k and v have shapes {list(q.shape)}, {list(k.shape)} and {list(v.shape)}; each must be "
            "[B, tokens, heads, head size] of the same B"
        )
    pairs = [
        attend_one(
            q[b], k[b], v[b], softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
            sinks=sinks, dtype=dtype,
        )
        for b in range(q.shape[0])
    ]  # fmt: skip
    if not pairs:
        wide = torch.float64 if dtype == torch.float64 or (dtype or q.dtype) == torch.float64 else torch.float32
        out = q.new_empty(*q.shape[:3], v.shape[3], dtype=torch.float64 if dtype == torch.float64 else q.dtype)
        return (out, q.new_empty(0, q.shape[2], q.shape[1], dtype=wide)) if return_lse else out
    out = torch.stack([pair[0] for pair in pairs])
    return (out, torch.stack([pair[1] for pair in pairs])) if return_lse else out
