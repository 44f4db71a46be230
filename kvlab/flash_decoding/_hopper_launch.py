"""From tensors to a launch of the Hopper kernel: what it takes, its tiles, and its memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvlab import flash_hopper
from kvlab.flash_decoding._launch import forgotten_if_it_fails, reserve
from kvlab.flash_decoding._splits import MAX_BATCH, MAX_ROWS
from kvlab.flash_hopper import _launch as prefill
from kvlab.runtime import cdiv, multiprocessors, next_power_of_2

LEAST_BATCH = 32  # sequences that a warp looks at together
LEAST_LIVE = 4
MOST_LIVE = 16  # rows of an item: more make pieces that cost more than they win
MOST_WIDE = 128  # of heads: the sums of wider ones leave no register to count chunks in
FEW_KEYS = 512
REGISTERS = 65536  # of a multiprocessor
THREADS = 256  # that a CTA has registers for: four warps that compute, and a warpgroup for the two that load


def refusal(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, batch: int, num_splits: int, split_size: int | None,
    softmax_scale: float | None, window_size: tuple[int, int], softcap: float, sinks: Tensor | None,
    tree_mask: Tensor | None,
) -> str | None:  # fmt: skip
    """Why the kernel does not take these arguments, in one clause; None where it takes them.

    Shapes and units: as ``flash_decoding.attention``; ``batch`` sequences.

    Source: chapter 04.
    """
    if num_splits or split_size is not None:
        return "the splits are given, and it deals them out itself"
    if batch > MAX_BATCH:
        return f"{batch} sequences are more than {MAX_BATCH}"
    if q.shape[1] // k_cache.shape[2] > MAX_ROWS:
        return f"a group of {q.shape[1] // k_cache.shape[2]} heads is more than {MAX_ROWS} rows"
    return flash_hopper.refusal(
        q, k_cache, v_cache, paged=True, softmax_scale=softmax_scale, window_size=window_size, softcap=softcap,
        sinks=sinks, tree_mask=tree_mask,
    )  # fmt: skip


class Tiling(NamedTuple):
    """Tile sizes, and how many CTAs share a multiprocessor.

    Shapes and units: ``wide``, ``wide_v`` the padded head sizes, ``N`` keys of a block, ``stages`` blocks of K
    and of V.

    Source: chapter 04.
    """

    wide: int
    wide_v: int
    N: int
    stages: int
    ctas: int

    @property
    def maxnreg(self) -> int | None:
        """Registers of a thread as the launch is told, so that the CTAs fit side by side. Source: chapter 04."""
        return REGISTERS // (THREADS * self.ctas) if self.ctas > 1 else None


def tiling(dim: int, dim_v: int, keys: int) -> Tiling:
    """The tiles for a head size: as many stages as the shared memory holds, so that loads run far ahead. Two CTAs share
    a multiprocessor where they fit: while one waits for its tensor cores or for a maximum, the other computes. But few
    keys are read before that matters, and one CTA leaves fewer pieces to merge.

    Shapes and units: ``keys`` that a multiprocessor reads, at most.

    Source: chapter 04.
    """
    wide, wide_v = (max(64, next_power_of_2(d)) for d in (dim, dim_v))
    few = (64, 6, 1) if keys <= FEW_KEYS else (64, 3, 2)
    n, stages, ctas = {64: (128, 3, 2), 128: few, 256: (64, 3, 1)}[max(wide, wide_v)]
    return Tiling(wide, wide_v, n, stages, ctas)


def leaves_over(tile: Tiling, live: int) -> bool:
    """Whether blocks may be left over, to be dealt out as chunks, where there are enough of them.

    Shapes and units: ``live`` as ``DecodePlan``. Source: chapter 04.
    """
    return live <= MOST_LIVE and max(tile.wide, tile.wide_v) <= MOST_WIDE


def keys_of_multiprocessor(q: Tensor, k_cache: Tensor, batch: int, max_seqlen_k: int) -> int:
    """Keys that a multiprocessor reads at most, by the bounds. Shapes and units: as ``launch``. Source: chapter 04."""
    return batch * k_cache.shape[2] * max_seqlen_k // multiprocessors(q.device)


def launch(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None, *, block_table: Tensor,
    cu_seqlens_q: Tensor, seqused_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float, causal: bool,
    window_size: tuple[int, int], softcap: float, sinks: Tensor | None, tree_mask: Tensor | None = None,
) -> None:  # fmt: skip
    """Run the kernel for the sequences that have up to 64 rows; ``out`` and ``lse`` are written there.

    Shapes and units: as ``flash_decoding.attention``; the arguments were checked, and not refused.

    Source: chapter 04.
    """
    from kvlab.flash_decoding._hopper import CHUNKS, ENOUGH, LOG2E, DecodePlan, flash_decoding_hopper_kernel

    (total_q, heads, dim), (_, block_size, kv_heads, dim_v) = q.shape, v_cache.shape
    batch, group = seqused_k.shape[0], heads // kv_heads
    if total_q == 0 or batch == 0:
        return
    left, right = (min(w, prefill.FAR) for w in window_size)
    live = next_power_of_2(max(LEAST_LIVE, min(max_seqlen_q * group, MAX_ROWS)))
    tile = tiling(dim, dim_v, keys_of_multiprocessor(q, k_cache, batch, max_seqlen_k))
    blocks = batch * cdiv(max(max_seqlen_k, 1), tile.N)  # of a KV head, at most
    groups = min(max(1, tile.ctas * multiprocessors(q.device) // kv_heads), blocks)
    programs = groups * kv_heads
    plan = DecodePlan(
        form="paged", group=group, share=1, dim=dim, dim_v=dim_v, causal=causal, left=left, right=right,
        block_size=block_size, softcap=softcap > 0, sinks=sinks is not None, lse=lse is not None,
        batch=next_power_of_2(max(LEAST_BATCH, batch)), live=live, wide=tile.wide, wide_v=tile.wide_v, N=tile.N,
        stages=tile.stages, chunked=leaves_over(tile, live) and blocks >= ENOUGH.value * groups,
    )  # fmt: skip
    pieces = (2 + CHUNKS.value) * programs + 2 * batch * kv_heads  # no more than items and cuts, in either line
    slots = pieces * live
    room, arrived = reserve(q.device, slots * (dim_v + 2), batch * kv_heads + 1)
    descs = [
        prefill.bounded_descriptor(x, plan.rows, 1, wide) for x, wide in ((k_cache, plan.wide), (v_cache, plan.wide_v))
    ]
    with forgotten_if_it_fails(q.device), torch.cuda.device_of(q):
        flash_decoding_hopper_kernel[(programs,)](
            q, *descs, out, lse, sinks, block_table, cu_seqlens_q, seqused_k, room[2 * slots :], room, room[slots:],
            arrived, block_table.stride(0), *q.stride()[:2], *out.stride()[:2], 0 if lse is None else lse.stride(0),
            batch, kv_heads, softmax_scale * (1.0 if softcap > 0 else LOG2E.value), softcap, C=plan, num_warps=4,
            maxnreg=tile.maxnreg, launch_pdl=True,
        )  # fmt: skip
