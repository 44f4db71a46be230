"""From tensors to a launch: which arguments the Hopper kernel takes, its descriptors, and its plan."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from kvlab import runtime
from kvlab.flash_hopper._plan import plan_tiles_kernel
from kvlab.runtime import cdiv, multiprocessors, next_power_of_2

try:
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.language import bfloat16 as gl_bfloat16
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from kvlab.flash_hopper._kernel import LOG2E, Plan, flash_hopper_kernel

    MISSING: str | None = None
except ImportError as error:  # no Triton on this machine, or one without Gluon
    MISSING = f"Gluon cannot be imported ({error})"

FAR = 1 << 30  # the extent of a bounded dimension; as ``_kernel.FAR``
MOST = 0x7FFF0000  # an extent that no coordinate reaches
PLAN_WIDTH = 64


def unavailable(on: torch.device) -> str | None:
    """Why no Hopper kernel can run on this device; None where one can. Source: chapter 03b."""
    if MISSING:
        return MISSING
    if on.type != "cuda":
        return f"the tensors are on the {'CPU' if on.type == 'cpu' else on.type}"
    if runtime.INTERPRET:
        return "Triton's interpreter is on, and Gluon has none"
    major, minor = runtime.capability(on)
    if (major, minor) != (9, 0):
        return f"this GPU is sm_{major}{minor} and the kernel is for sm_90"
    return None


def refusal(
    q: Tensor, k: Tensor, v: Tensor, *, paged: bool, softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
) -> str | None:  # fmt: skip
    """Why the kernel does not take these arguments, in one clause; None where it takes them.

    Shapes and units: q [B, Lq, H, D] or [total_q, H, D]; k, v [B, Lk, H_kv, D or Dv], [total_k, H_kv, D or Dv] or, with
    ``paged``, [num_blocks, block_size, H_kv, D or Dv].

    Source: chapter 03b.
    """
    dim, dim_v = q.shape[-1], v.shape[-1]
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"{str(q.dtype).removeprefix('torch.')} has no place in wgmma's 16-bit products"
    if max(dim, dim_v) > 256:
        return f"head size {max(dim, dim_v)} is over 256"
    if tree_mask is not None:
        return "there is a tree mask"
    if softmax_scale is not None and softmax_scale <= 0:
        return f"softmax_scale {softmax_scale} is not positive"
    if min(k.shape) == 0 or min(v.shape) == 0 or min(q.shape) == 0:
        return "a tensor is empty"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if (why := _misfit(name, x)) is not None:
            return why
    if paged:
        block_size = k.shape[1]
        if block_size < 8 or block_size & (block_size - 1):
            return f"pages of {block_size} tokens: a copy takes 8, 16, 32, …"
        for name, x in (("k_cache", k), ("v_cache", v)):
            if x.shape[0] > 1 and x.stride(0) != block_size * x.stride(1):
                return f"the pages of {name} do not follow each other"
        if k.shape[0] * block_size >= FAR:
            return f"{k.shape[0]} pages of {block_size} tokens are more than a coordinate can count"
    return None


def _misfit(name: str, x: Tensor) -> str | None:
    """Why the copy engine cannot address a 16-bit tensor; None where it can."""
    if x.data_ptr() % 16:
        return f"{name} does not begin on 16 bytes"
    wrong = [s for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1 and s % 8]
    if wrong or x.stride(-1) != 1:
        return f"{name} is strided by {(wrong or [x.stride(-1)])[-1]} elements, no multiple of 16 bytes"
    return None


def tiling(dim: int, dim_v: int) -> dict[str, int]:
    """Tile sizes by head size: keys of a block, buffers of K and V and of Q, and ``Plan.late``. Source: chapter 03b."""
    wide, wide_v = (max(64, next_power_of_2(d)) for d in (dim, dim_v))
    largest = max(wide, wide_v)
    sizes = {64: {"N": 128, "stages": 3, "q_stages": 2}, 128: {"N": 128, "stages": 2, "q_stages": 2}}
    return {"wide": wide, "wide_v": wide_v, **sizes.get(largest, {"N": 64, "stages": 2, "q_stages": 1, "late": True})}


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, lse: Tensor | None = None, block_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, sinks: Tensor | None = None,
    longer_than: int = 0, **tiles: int | bool,
) -> None:  # fmt: skip
    """Launch the kernel; ``out`` and ``lse`` are written. The arguments have been checked, and not refused.

    Shapes and units: dense q [B, Lq, H, D], k, v [B, Lk, H_kv, ·]; ragged q [total_q, H, D], k, v [total_k, H_kv, ·]
    with both cu_seqlens [B + 1]; paged k, v [num_blocks, block_size, H_kv, ·] with block_table, cu_seqlens_q and
    seqused_k; lse [B, H, Lq] or [H, total_q]. Ragged or paged sequences of ``longer_than`` queries or fewer are left
    out. ``tiles`` replaces sizes of ``tiling``, for measurements.

    Source: chapter 03b.
    """
    form = "paged" if block_table is not None else "dense" if cu_seqlens_q is None else "ragged"
    heads, kv_heads, dim, dim_v = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    group = heads // kv_heads
    packed = group if group & (group - 1) == 0 and group <= 64 else 1  # a copy's box wants powers of two
    left, right = (min(w, FAR) for w in window_size)
    chosen: dict[str, int | bool] = {**tiling(dim, dim_v), **tiles}
    if chosen["q_stages"] > 1 and chosen["wide"] == chosen["wide_v"]:  # rows wait in the buffer of their queries
        chosen.setdefault("copies_out", _misfit("out", out) is None)
    plan = Plan(
        form=form, group=packed, share=group // packed, dim=dim, dim_v=dim_v, causal=causal, left=left, right=right,
        block_size=k.shape[1] if form == "paged" else 1, softcap=softcap > 0, sinks=sinks is not None,
        lse=lse is not None, **chosen,  # type: ignore[arg-type]
    )  # fmt: skip
    packs, tokens = heads // packed, plan.consumers * plan.queries
    q_desc, k_desc, v_desc, out_desc = _descriptors(q, k, v, out, plan, packs)
    sms = multiprocessors(q.device)
    q_len = kv_len = num_tiles = 0
    if form == "dense":
        q_len, kv_len = q.shape[1], k.shape[1]
        q_tiles = cdiv(q_len, tokens)
        num_tiles = bound = q.shape[0] * packs * q_tiles
        order = q  # not read
    else:
        assert cu_seqlens_q is not None
        batch = cu_seqlens_q.shape[0] - 1
        q_tiles = q.shape[0] // tokens + batch  # no batch of these sizes has more
        bound = q_tiles * packs
        order = torch.empty(2 + 2 * q_tiles, dtype=torch.int32, device=q.device)
        longest = q.shape[0] if max_seqlen_q is None else min(max_seqlen_q, q.shape[0])
        plan_tiles_kernel[(batch, cdiv(cdiv(longest, tokens), PLAN_WIDTH))](
            order, cu_seqlens_q, cu_seqlens_k, seqused_k, batch, TOKENS=tokens, PAGED=form == "paged", CAUSAL=causal,
            WIDTH=PLAN_WIDTH, LONGER_THAN=longer_than, num_warps=4,
        )  # fmt: skip
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    strides = (out.stride(0), out.stride(1), out.stride(2)) if form == "dense" else (0, out.stride(0), out.stride(1))
    rows = (0, 0) if lse is None else (lse.stride(0), lse.stride(1)) if form == "dense" else (0, lse.stride(0))
    flash_hopper_kernel[(min(sms, bound),)](
        q_desc, k_desc, v_desc, out_desc, out, lse, sinks, block_table, order, _counter(q.device), cu_seqlens_q,
        cu_seqlens_k, seqused_k, 0 if block_table is None else block_table.stride(0), *strides, *rows, packs, q_tiles,
        q_len, kv_len, num_tiles, max(1, 2 * sms // q_tiles), scale * (1.0 if softcap > 0 else LOG2E.value), softcap,
        C=plan, num_warps=4,
    )  # fmt: skip


def _descriptor(x: Tensor, shape: list[int], strides: list[int], block: list[int]) -> TensorDescriptor:
    """How the copy engine sees a 16-bit tensor; on its layout only the 16 bits have a say."""
    strides = [s if n > 1 else 8 for s, n in zip(strides[:-1], shape[:-1], strict=True)] + [1]
    return TensorDescriptor(x, shape, strides, block, _layout(tuple(block)))


@functools.cache
def _layout(block: tuple[int, ...]) -> NVMMASharedLayout:
    return NVMMASharedLayout.get_default_for(list(block), gl_bfloat16)


def bounded_descriptor(x: Tensor, rows: int, heads: int, wide: int) -> TensorDescriptor:
    """How the copy engine sees a ragged tensor or pages, so that a copy can end anywhere: with two more dimensions in
    front, whose strides add up to nothing. Coordinates (FAR, first + valid, FAR - valid + i) address row first + i, and
    from row ``valid`` on lie out of bounds, where a copy in fills in zeros and a copy out writes nothing.

    Shapes and units: x [..., tokens, heads, size], pages one after the other; a copy is of ``rows`` tokens, ``heads``
    heads and ``wide`` numbers of each.

    Source: chapter 03b.
    """
    row = x.stride(-3)
    shape = [MOST, MOST, FAR, x.shape[-2], x.shape[-1]]
    return _descriptor(x, shape, [2**34 - row, row, row, x.stride(-2), 1], [1, 1, rows, heads, wide])


def _descriptors(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, plan: Plan, packs: int
) -> tuple[TensorDescriptor | Tensor, ...]:
    """How the copy engine sees the tensors: of q, k, v, and of the output where it is to write that."""
    group, dense = plan.group, plan.form == "dense"

    def packed(x: Tensor, wide: int) -> TensorDescriptor:
        length, (row, head) = x.shape[-3], x.stride()[-3:-1]
        batch, seq = (x.shape[0], x.stride(0)) if x.ndim == 4 else (1, 8)
        shape, strides = [batch, length, packs, group, x.shape[-1]], [seq, row, group * head, head, 1]
        return _descriptor(x, shape, strides, [1, plan.queries, 1, group, wide])

    kv = [
        _descriptor(x, list(x.shape), list(x.stride()), [1, plan.N, 1, wide]) if dense
        else bounded_descriptor(x, plan.rows, 1, wide)
        for x, wide in ((k, plan.wide), (v, plan.wide_v))
    ]  # fmt: skip
    out_desc: TensorDescriptor | Tensor = out  # not read
    if plan.copies_out:
        out_desc = packed(out, plan.wide_v) if dense else bounded_descriptor(out, plan.queries, group, plan.wide_v)
    return (packed(q, plan.wide), *kv, out_desc)


_counters: dict[tuple[torch.device, int], Tensor] = {}


def _counter(on: torch.device) -> Tensor:
    """A zero from which tiles are counted off; the kernel leaves it zero. One a stream, and a new one for each launch
    that a graph captures: two launches at once must not share it."""
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=on)
    key = (on, torch.cuda.current_stream(on).cuda_stream)
    if key not in _counters:
        _counters[key] = torch.zeros(1, dtype=torch.int32, device=on)
    return _counters[key]
