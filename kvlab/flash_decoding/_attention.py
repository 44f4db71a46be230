"""Flash-decoding's public functions: the one signature, the choice between kernels, the merge of partial results."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from kvlab import flash_hopper, paged, reference, runtime
from kvlab.flash import Choice, _tune
from kvlab.flash._attention import KERNEL_DTYPES, MAX_HEAD_DIM, attend_longer
from kvlab.flash._checks import check_paged
from kvlab.flash_decoding import _launch
from kvlab.flash_decoding._splits import max_rows, plan


def attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, block_table: Tensor, cu_seqlens_q: Tensor, seqused_k: Tensor,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, softmax_scale: float | None = None,
    causal: bool = True, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, sinks: Tensor | None = None,
    tree_mask: Tensor | None = None, out: Tensor | None = None, return_lse: bool = False, impl: str | None = None,
    num_splits: int = 0, split_size: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of new tokens over pages, with the keys of each sequence shared out among programs: the one signature.

    Sequences of up to 64 rows, new tokens times group, are read by the split-KV kernel (32 where heads of float32 are
    over 128); longer ones go to chapter 03's kernels, in the same call. Give ``max_seqlen_q``: a call whose bound is
    over 64 rows launches both. The grid depends on shapes and bounds alone, nothing waits for the device, and once warm
    nothing is allocated but the result, so that a captured call replays while lengths grow up to the bounds.

    Shapes and units: q and the result [total_q, H, D or Dv]; k_cache, v_cache [num_blocks, block_size, H_kv, D or Dv];
    block_table [B, max_blocks], cu_seqlens_q [B + 1], seqused_k [B], all int32; ``max_seqlen_q`` and ``max_seqlen_k``
    bound the new tokens and the keys of any sequence (default: total_q, and all that a row of the table holds); sinks
    [H] float32; tree_mask [total_q] int64; lse [H, total_q] float32, natural log. ``impl`` is "torch", "triton",
    "hopper" or None (by device and shape, see ``explain``). ``num_splits`` 0 deals the keys of all sequences
    into chunks of one size (``choose_splits``), n cuts each sequence in n. ``split_size`` cuts at multiples of so many
    keys, with a tile that nothing but the head sizes, types and page size decide: then a sequence of up to 64 rows gets
    the same result, bit for bit, alone and in any company. "hopper" deals the keys itself, and takes neither.

    Raises: ValueError as ``runtime.check_attention``, for splits that are none, and where a kernel cannot take these
    arguments; RuntimeError where "triton" cannot be launched.

    Source: chapter 04; Dao et al. 2023 (Flash-Decoding), FlashInfer, and He et al. 2025 on batch invariance.
    """
    check_paged(q, k_cache, v_cache, block_table, cu_seqlens_q, seqused_k, max_seqlen_q, max_seqlen_k, softmax_scale,
                causal, window_size, softcap, sinks, tree_mask, out)  # fmt: skip
    name, _ = _choose(impl, q, k_cache, v_cache, num_splits, split_size, batch=seqused_k.shape[0],
                      softmax_scale=softmax_scale, window_size=window_size, softcap=softcap, sinks=sinks,
                      tree_mask=tree_mask)  # fmt: skip
    if out is None:
        out = q.new_empty(*q.shape[:2], v_cache.shape[3])
    lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device) if return_lse else None
    options: dict[str, Any] = {
        "block_table": block_table, "cu_seqlens_q": cu_seqlens_q, "seqused_k": seqused_k, "causal": causal,
        "softmax_scale": q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale, "window_size": window_size,
        "softcap": softcap, "sinks": sinks, "tree_mask": tree_mask,
    }  # fmt: skip
    if name == "torch":
        if num_splits < 2 and split_size is None:
            return paged.attention(q, k_cache, v_cache, out=out, return_lse=return_lse, impl="torch", **options)
        _split_and_merge(q, k_cache, v_cache, out, lse, num_splits=num_splits, split_size=split_size, **options)
        return out if lse is None else (out, lse)
    options["max_seqlen_q"], options["max_seqlen_k"] = _bounds(q, k_cache, block_table, max_seqlen_q, max_seqlen_k)
    if name == "hopper":
        from kvlab.flash_decoding import _hopper_launch

        _hopper_launch.launch(q, k_cache, v_cache, out, lse, **options)
    else:
        _launch.launch(q, k_cache, v_cache, out, lse, num_splits=num_splits, split_size=split_size, **options)
    few = _most_rows(q, v_cache) // (q.shape[1] // k_cache.shape[2])  # new tokens of a sequence that has few rows
    if options["max_seqlen_q"] > few:
        attend_longer(q, k_cache, v_cache, out, lse, longer_than=few, impl=impl, **options)
    return out if lse is None else (out, lse)


def explain(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, block_table: Tensor, cu_seqlens_q: Tensor, seqused_k: Tensor,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, softmax_scale: float | None = None,
    causal: bool = True, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, sinks: Tensor | None = None,
    tree_mask: Tensor | None = None, impl: str | None = None, num_splits: int = 0, split_size: int | None = None,
) -> Choice:  # fmt: skip
    """Which implementation ``attention`` would run on the same arguments, how it would split, and with which tile.

    Launches and times nothing; a class of shapes that was not timed yet shows the first tile of its list.

    Shapes and units: as ``attention``.

    Raises: as ``attention``.

    Source: chapter 04.
    """
    check_paged(q, k_cache, v_cache, block_table, cu_seqlens_q, seqused_k, max_seqlen_q, max_seqlen_k, softmax_scale,
                causal, window_size, softcap, sinks, tree_mask, None)  # fmt: skip
    name, why = _choose(impl, q, k_cache, v_cache, num_splits, split_size, batch=seqused_k.shape[0],
                        softmax_scale=softmax_scale, window_size=window_size, softcap=softcap, sinks=sinks,
                        tree_mask=tree_mask)  # fmt: skip
    if name == "torch":
        return Choice(name, why)
    bounds = _bounds(q, k_cache, block_table, max_seqlen_q, max_seqlen_k)
    batch, group, kv_heads = seqused_k.shape[0], q.shape[1] // k_cache.shape[2], k_cache.shape[2]
    most = _most_rows(q, v_cache)
    if group > most:
        return Choice(name, f"{why}: group {group} is more than {most} rows, so flash.attention takes all")
    longer = (
        f"; sequences of more than {most // group} new tokens by flash.attention" if bounds[0] * group > most else ""
    )
    if name == "hopper":
        from kvlab.flash_decoding import _hopper_launch

        keys = _hopper_launch.keys_of_multiprocessor(q, k_cache, batch, bounds[1])
        tile = _hopper_launch.tiling(q.shape[2], v_cache.shape[3], keys)
        return Choice(name, f"{why}: split-KV, an equal share of all keys for each CTA{longer}", tile._asdict())
    config = _launch.configuration(
        q, k_cache, v_cache, batch=batch, max_seqlen_q=bounds[0], max_seqlen_k=bounds[1], causal=causal,
        window_size=window_size, softcap=softcap, tree=tree_mask is not None, fixed=split_size is not None,
    )  # fmt: skip
    rows = bounds[0] * group
    splits = plan(num_splits, split_size, batch=max(batch, 1), kv_heads=kv_heads, rows=max(1, min(rows, most)),
                  max_seqlen_k=bounds[1], multiprocessors=_launch.multiprocessors(q.device), tile=config.N)  # fmt: skip
    return Choice(name, f"{why}: split-KV, {splits}{longer}", asdict(config))


def merge_states(outs: Tensor, lses: Tensor, *, impl: str | None = None) -> tuple[Tensor, Tensor]:
    """Merge results of attention over disjoint sets of keys into the result over all of them.

    Each part is weighed by exp(lse), its share of the denominator. A part that saw no key, with an lse of -inf, counts
    for nothing whatever its output holds; without any other the result is (0, -inf), and one part alone comes back bit
    for bit. Parts may be merged in any order, and in groups, up to rounding. A sink must be in one part only.

    Shapes and units: outs [S, ..., D] and lses [S, ...] float32 or float64, natural log; gives out [..., D] in the type
    of ``outs`` and lse [...] in that of ``lses``, in which everything is computed. ``impl`` is "torch", "triton" or
    None (by device; float64 is torch's).

    Raises: ValueError where shapes, types or devices do not fit, or there is no part.

    Source: chapter 04; Dao et al. 2023, and FlashInfer's ``merge_states``.
    """
    if outs.ndim < 2 or outs.shape[0] < 1 or lses.shape != outs.shape[:-1]:
        raise ValueError(
            f"outs and lses have shapes {list(outs.shape)} and {list(lses.shape)}; they must be [S, ..., D] and "
            "[S, ...], with one part or more"
        )
    if not outs.is_floating_point() or lses.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"outs are {outs.dtype} and lses {lses.dtype}; they must be of floats, and float32 or float64")
    if outs.device != lses.device:
        raise ValueError(f"lses are on {lses.device}; they must be on {outs.device}, as outs")
    runtime.require_no_grad(outs, lses)
    wide = torch.float64 in (outs.dtype, lses.dtype)
    name = runtime.choose("torch" if wide and impl is None else impl, outs.device, "merge_states")
    if name == "triton":
        if wide:
            raise ValueError(f"outs are {outs.dtype} and lses {lses.dtype}; for a kernel neither may be float64")
        return _launch.merge(outs, lses)
    empty = lses == float("-inf")
    peak = lses.amax(0)
    peak = torch.where(peak == float("-inf"), 0.0, peak)
    weights = (lses - peak).exp()
    total = weights.sum(0)
    parts = outs.to(lses.dtype).masked_fill(empty[..., None], 0.0)
    out = (weights[..., None] * parts).sum(0) / torch.where(total == 0, 1.0, total)[..., None]
    return out.to(outs.dtype), peak + total.log()


# --- in PyTorch ------------------------------------------------------------------------------------------------------


def _split_and_merge(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None, *, block_table: Tensor,
    cu_seqlens_q: Tensor, seqused_k: Tensor, softmax_scale: float, causal: bool, window_size: tuple[int, int],
    softcap: float, sinks: Tensor | None, tree_mask: Tensor | None, num_splits: int, split_size: int | None,
) -> None:  # fmt: skip
    """``attention`` by hand: attend to each split alone, then merge. One step more precise than the inputs, because a
    log-sum-exp rounds by its own size and not by that of the weights."""
    runtime.check_contents(k_cache, q.shape[0], block_table, cu_seqlens_q, seqused_k, tree_mask)
    wide = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else torch.float64
    for b, (start, stop) in enumerate(itertools.pairwise(cu_seqlens_q.tolist())):
        length = int(seqused_k[b])
        if start == stop:
            continue
        k, v = (paged.gather(c, block_table[b : b + 1], seqused_k[b : b + 1], length)[0] for c in (k_cache, v_cache))
        seen = reference.visible_keys(
            stop - start, length, causal=causal, window_size=window_size, device=q.device,
            tree_mask=None if tree_mask is None or length == 0 else tree_mask[start:stop],
        )  # fmt: skip
        pieces = _cuts(length, num_splits, split_size)
        if (stop - start) * (q.shape[1] // k.shape[1]) > _most_rows(q, v_cache):
            pieces = [(0, length)]
        parts = [
            _attend_part(q[start:stop].to(wide), k[low:high].to(wide), v[low:high].to(wide), seen[:, low:high],
                         softmax_scale, softcap)
            for low, high in pieces
        ]  # fmt: skip
        if sinks is not None:  # a key of its own, without a value
            shape = (q.shape[1], stop - start)
            parts.append((torch.zeros_like(parts[0][0]), sinks.to(wide)[:, None].expand(shape)))
        outs, lses = torch.stack([o for o, _ in parts]), torch.stack([s.T for _, s in parts])
        merged, logs = merge_states(outs, lses, impl="torch")
        out[start:stop] = merged.to(q.dtype)
        if lse is not None:
            lse[:, start:stop] = logs.T.float()


def _cuts(length: int, num_splits: int, split_size: int | None) -> list[tuple[int, int]]:
    """First and one past the last key of each split; some may be empty."""
    if split_size is not None:
        bounds = [*range(0, length, split_size), length]
    else:
        num_splits = min(num_splits, max(length, 1))
        bounds = [length * i // num_splits for i in range(num_splits + 1)]
    return list(itertools.pairwise(bounds)) or [(0, 0)]


def _attend_part(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, softmax_scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """out [Lq, H, Dv] and lse [H, Lq] of q [Lq, H, D] over the keys of one split, of which seen [Lq, n] may be used."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, keys) * softmax_scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if k.shape[0] == 0:
        lse = scores.new_full(scores.shape[:2], float("-inf"))
    else:
        lse = scores.logsumexp(-1)
    weights = (scores - torch.where(lse == float("-inf"), 0.0, lse)[..., None]).exp()
    return torch.einsum("hqk,khd->qhd", weights, values), lse


# --- the choice ------------------------------------------------------------------------------------------------------


def _choose(
    impl: str | None, q: Tensor, k_cache: Tensor, v_cache: Tensor, num_splits: int, split_size: int | None,
    **options: Any,
) -> tuple[str, str]:  # fmt: skip
    """The implementation and why; refuses what it cannot take. One that was asked for is never replaced by another."""

    def is_count(value: object, least: int) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= least

    if not is_count(num_splits, 0):
        raise ValueError(f"num_splits is {num_splits!r}; it must be an integer, 0 (chosen) or more")
    if split_size is not None and not is_count(split_size, 1):
        raise ValueError(f"split_size is {split_size!r}; it must be an integer, 1 or more, or None")
    if split_size is not None and num_splits:
        raise ValueError(f"num_splits is {num_splits}; with a split_size it must be 0")
    if impl not in (None, "torch", "triton", "hopper"):
        raise ValueError(f'impl is {impl!r}; it must be "torch", "triton", "hopper" or None')
    name = runtime.choose(None if impl == "hopper" else impl, q.device, "flash_decoding.attention")
    if name == "torch" and impl != "hopper":
        on_cpu = impl is None and q.device.type == "cpu"
        return name, "asked for" if impl else "tensors on the CPU" if on_cpu else "no kernel can be launched here"
    why = "asked for, and Triton's interpreter runs it" if runtime.INTERPRET else "asked for"
    if impl in (None, "hopper"):
        instead = _instead_of_hopper(impl, q, k_cache, v_cache, num_splits, split_size, **options)
        if instead is None:
            return "hopper", f"sm_90, {str(q.dtype).removeprefix('torch.')}, pages of {k_cache.shape[1]} by TMA"
        why = instead
    if q.dtype not in KERNEL_DTYPES:
        raise ValueError(f"q is {q.dtype}; for a kernel it must be one of {', '.join(map(str, KERNEL_DTYPES))}")
    if max(q.shape[2], v_cache.shape[3]) > MAX_HEAD_DIM:
        raise ValueError(f"head sizes are {q.shape[2]} and {v_cache.shape[3]}; for a kernel they must be 256 at most")
    if split_size is not None:
        tile = _fixed_tile(q, v_cache)
        if split_size % tile:
            raise ValueError(f"split_size is {split_size}; it must be a multiple of the tile, {tile} keys")
    return name, why


def _instead_of_hopper(
    impl: str | None, q: Tensor, k_cache: Tensor, v_cache: Tensor, num_splits: int, split_size: int | None,
    **options: Any,
) -> str | None:  # fmt: skip
    """Why the Hopper kernel is not taken, as one clause; None where it is. Raises where it was asked for."""
    why = flash_hopper.unavailable(q.device)
    if why is not None:
        if impl == "hopper":
            raise RuntimeError(f"impl='hopper' cannot run: {why}")
        return why
    from kvlab.flash_decoding import _hopper_launch

    why = _hopper_launch.refusal(q, k_cache, v_cache, num_splits=num_splits, split_size=split_size, **options)
    if why is None:
        return None
    if impl == "hopper":
        raise ValueError(f"impl is 'hopper'; for these arguments it must be another: {why}")
    return f"hopper refuses: {why}"


def _fixed_tile(q: Tensor, v_cache: Tensor) -> int:
    """Keys of the one tile that a given split_size uses."""
    _, capability, shared = _tune.chip(q.device)
    found = _launch.candidates(
        capability=capability, shared=shared, width=_tune.padded(q.shape[2]), v_width=_tune.padded(v_cache.shape[3]),
        itemsize=q.element_size(), rows=1, fixed=True,
    )  # fmt: skip
    return found[0].N


def _most_rows(q: Tensor, v_cache: Tensor) -> int:
    return max_rows(q.element_size(), max(q.shape[2], v_cache.shape[3]))


def _bounds(
    q: Tensor, k_cache: Tensor, block_table: Tensor, max_seqlen_q: int | None, max_seqlen_k: int | None
) -> tuple[int, int]:
    room = block_table.shape[1] * k_cache.shape[1]
    return q.shape[0] if max_seqlen_q is None else max_seqlen_q, room if max_seqlen_k is None else min(
        max_seqlen_k, room
    )
