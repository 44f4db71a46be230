"""From tensors to launches, and the memory between them: workspace and counters that outlive a call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kvlab import runtime
from kvlab.flash import _tune
from kvlab.flash_decoding import _kernel
from kvlab.flash_decoding._kernel import flash_decoding_kernel, merge_kernel, merge_states_kernel
from kvlab.flash_decoding._splits import MAX_ROWS, Splits, candidates, max_rows, merge_tile, plan
from kvlab.runtime import cdiv, multiprocessors, next_power_of_2


def launch(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None, *, block_table: Tensor,
    cu_seqlens_q: Tensor, seqused_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float, causal: bool,
    window_size: tuple[int, int], softcap: float, sinks: Tensor | None, tree_mask: Tensor | None, num_splits: int = 0,
    split_size: int | None = None, one_launch: bool = True,
) -> None:  # fmt: skip
    """Run split-KV decoding for the sequences of a batch that have few rows; ``out`` and ``lse`` are written there.

    Shapes and units: as ``flash_decoding.attention``; ``one_launch`` False merges in a second kernel.

    Raises: RuntimeError where no kernel can be launched.

    Source: chapter 04.
    """
    (total_q, heads, head_dim), (_, block_size, kv_heads, v_dim) = q.shape, v_cache.shape
    batch, group = seqused_k.shape[0], heads // kv_heads
    most = max_rows(q.element_size(), max(head_dim, v_dim))
    rows = min(max_seqlen_q * group, most)
    if total_q == 0 or batch == 0 or rows < group:
        return
    if softmax_scale <= 0:  # a maximum of scores is one of scaled scores only where the scale is positive
        q, softmax_scale = q * (-1.0 if softmax_scale else 0.0), -softmax_scale or 1.0
    left, right = (min(w, 2**30) for w in window_size)  # no 32-bit sum of positions may wrap around
    wide_v = _tune.padded(v_dim)
    s, r = merge_tile(wide_v)
    sizes = {"GROUP": group, "DV": v_dim, "WIDE_DV": wide_v, "S": s, "R": r, "MAX_ROWS": most, "CAUSAL": causal,
             "LEFT": left, "RIGHT": right}  # fmt: skip
    lse_head = 0 if lse is None else lse.stride(0)

    def run(config: _tune.Config, first: Any = flash_decoding_kernel, second: Any = merge_kernel) -> None:
        splits = plan(num_splits, split_size, batch=batch, kv_heads=kv_heads, rows=rows, max_seqlen_k=max_seqlen_k,
                      multiprocessors=multiprocessors(q.device), tile=config.N)  # fmt: skip
        # As many rows as a tile has: a sequence longer than its bound writes nothing outside.
        part, stat, arrived = workspace(q.device, splits, batch, kv_heads, config.M, v_dim)
        numbers = (batch, splits.wave, splits.limit, splits.chunk, kv_heads, config.M)
        looked_at = next_power_of_2(batch) if splits.rule == "balanced" else 1
        rule = {"N": config.N, "RULE": splits.rule, "BATCH": looked_at, "LONGEST": splits.longest}
        with torch.cuda.device_of(q):
            first[(splits.programs * kv_heads,)](
                q, k_cache, v_cache, out, lse, block_table, cu_seqlens_q, seqused_k, sinks, tree_mask, part, stat,
                arrived if one_launch else None, softmax_scale, softcap, *numbers, *q.stride()[:2], k_cache.stride(0),
                k_cache.stride(2), v_cache.stride(0), v_cache.stride(2), *out.stride()[:2], lse_head,
                block_table.stride(0), K_SLOT=k_cache.stride(1), V_SLOT=v_cache.stride(1), BLOCK_SIZE=block_size,
                D=head_dim, WIDE_D=_tune.padded(head_dim), M=config.M, CAP=softcap > 0, **sizes, **rule,
                num_warps=config.num_warps, num_stages=config.num_stages,
            )  # fmt: skip
            if not one_launch:
                second[(batch * kv_heads,)](
                    out, lse, cu_seqlens_q, seqused_k, sinks, part, stat, *numbers, *out.stride()[:2], lse_head,
                    TREE=tree_mask is not None, **sizes, **rule, num_warps=config.num_warps,
                )  # fmt: skip

    def measure(config: _tune.Config) -> float | None:  # a trial does not count as a launch
        return _tune.time_launch(lambda: run(config, flash_decoding_kernel.fn, merge_kernel.fn))

    with forgotten_if_it_fails(q.device):
        run(configuration(
            q, k_cache, v_cache, batch=batch, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, causal=causal,
            window_size=window_size, softcap=softcap, tree=tree_mask is not None, fixed=split_size is not None,
            measure=measure if _tune.may_tune(q.device) else None,
        ))  # fmt: skip


def configuration(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, batch: int, max_seqlen_q: int, max_seqlen_k: int, causal: bool,
    window_size: tuple[int, int], softcap: float, tree: bool, fixed: bool, measure: Any = None,
) -> _tune.Config:  # fmt: skip
    """The tile that a launch on these arguments takes; with ``measure``, found by timing where it is not known.

    Shapes and units: as ``launch``; ``fixed`` as ``candidates``.

    Source: chapter 04.
    """
    group = q.shape[1] // k_cache.shape[2]
    name, capability, shared = _tune.chip(q.device)
    found = candidates(
        capability=capability, shared=shared, width=_tune.padded(q.shape[2]), v_width=_tune.padded(v_cache.shape[3]),
        itemsize=q.element_size(), rows=max_seqlen_q * group, fixed=fixed,
    )  # fmt: skip
    key = _tune.shape_class(
        code=_code(), gpu=name, dtype=str(q.dtype).removeprefix("torch."), D=q.shape[2], Dv=v_cache.shape[3],
        group=group, kv_heads=k_cache.shape[2], page=k_cache.shape[1], causal=causal,
        window="".join("+-"[w < 0] for w in window_size), cap=softcap > 0, tree=tree, max_batch=batch,
        max_q=min(max_seqlen_q, MAX_ROWS), max_k=max_seqlen_k,
    )  # fmt: skip
    return _tune.choose(key, found, measure)


def _code() -> str:
    return _tune.code(__file__, str(_kernel.__file__), str(runtime.__file__))


# --- memory between programs -----------------------------------------------------------------------------------------

_SLAB = 1 << 20  # counters that captured launches take from one allocation
_buffers: dict[tuple[torch.device, int], tuple[Tensor, Tensor]] = {}
_slabs: dict[torch.device, tuple[Tensor, int]] = {}


def workspace(
    on: torch.device, splits: Splits, batch: int, kv_heads: int, rows: int, v_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the sums of every split, for their peaks and totals, and a counter for each sequence and KV head.

    Shapes and units: float32 of [programs, H_kv, rows, Dv] and of [programs, H_kv, 2, rows], flat; int32 of [B, H_kv].

    Source: chapter 04.
    """
    stats = _rounded(2 * splits.programs * kv_heads * rows) if splits.limit > 1 else 0
    room, arrived = reserve(on, stats + stats // 2 * v_dim, batch * kv_heads)
    return room[stats:], room, arrived


def reserve(on: torch.device, need: int, counters: int) -> tuple[Tensor, Tensor]:
    """So many float32 numbers, of any value, and so many counters, all 0.

    One buffer a stream is kept and grown, so that a call allocates nothing once it is warm. A launch that a CUDA graph
    captures may run again at any time, beside others: it gets memory of its own from the graph's pool, and counters
    that no other launch will ever have. Every counter is 0 before a launch, and after it.

    Shapes and units: float32 [need or more], int32 [counters or more].

    Source: chapter 04.
    """
    counters = _rounded(counters)
    if on.type == "cuda" and torch.cuda.is_current_stream_capturing():
        room, arrived = torch.empty(need, dtype=torch.float32, device=on), _captured_counters(on, counters)
    else:
        key = _stream(on)
        room, arrived = _buffers.get(key) or (torch.empty(0, device=on), torch.empty(0, device=on))
        if room.numel() < need:
            room = torch.empty(need, dtype=torch.float32, device=on)
        if arrived.numel() < counters:
            arrived = torch.zeros(counters, dtype=torch.int32, device=on)
        _buffers[key] = (room, arrived)
        if on.type == "cuda" and on not in _slabs:
            _slabs[on] = (torch.zeros(_SLAB, dtype=torch.int32, device=on), 0)
    return room, arrived


@contextlib.contextmanager
def forgotten_if_it_fails(on: torch.device) -> Iterator[None]:
    """Forget a stream's memory where what runs in it is interrupted: its counters may not be 0 any more.

    Source: chapter 04.
    """
    try:
        yield
    except BaseException:
        _buffers.pop(_stream(on), None)
        raise


def _stream(on: torch.device) -> tuple[torch.device, int]:
    return on, torch.cuda.current_stream(on).cuda_stream if on.type == "cuda" else 0


def _rounded(count: int) -> int:
    """Up to whole lines of 128 bytes, so that no alignment differs from one call to the next."""
    return -(-count // 32) * 32


def _captured_counters(on: torch.device, count: int) -> Tensor:
    """Zeros that nobody had before, without a kernel in the graph that clears them; with one where the slab is used
    up, or there is none because nothing ran before the capture."""
    slab, used = _slabs.get(on, (None, 0))
    if slab is None or used + count > slab.numel():
        return torch.zeros(count, dtype=torch.int32, device=on)
    _slabs[on] = (slab, used + count)
    return slab[used : used + count]


# --- merging finished results ----------------------------------------------------------------------------------------


def merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Launch ``merge_states_kernel`` on arguments that were checked. Shapes and units: as ``merge_states``.

    Source: chapter 04.
    """
    splits, size = outs.shape[0], outs.shape[-1]
    outs, lses = outs.contiguous(), lses.contiguous()
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    s, r = merge_tile(_tune.padded(size))
    if lse.numel():
        with torch.cuda.device_of(outs):
            merge_states_kernel[(cdiv(lse.numel(), r),)](
                outs, lses, out, lse, splits, lse.numel(), DV=size, WIDE_DV=_tune.padded(size), S=s, R=r, num_warps=4
            )
    return out, lse
