"""Flash attention's public functions, and the choice between its three implementations."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvlab import paged, reference, runtime
from kvlab.flash import _kernel
from kvlab.flash._checks import check_dense, check_offsets, check_paged

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256
SHORT_ROWS = 64  # rows of one KV head up to which the Hopper kernel, made for long prompts, is not taken unasked


@dataclass(frozen=True)
class Choice:
    """What a call runs, and why; ``str`` gives one line.

    Shapes and units: ``impl`` is "torch", "triton" or "hopper"; ``why`` one clause; ``config`` the tile of a kernel,
    such as M rows of queries by N keys, warps and stages; empty for torch.

    Source: chapter 03.
    """

    impl: str
    why: str
    config: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        tile = ", ".join(f"{name} {value}" for name, value in self.config.items())
        return f"{self.impl}: {self.why}" + (f" ({tile})" if tile else "")


def attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, block_table: Tensor, cu_seqlens_q: Tensor, seqused_k: Tensor,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, softmax_scale: float | None = None,
    causal: bool = True, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, sinks: Tensor | None = None,
    tree_mask: Tensor | None = None, out: Tensor | None = None, return_lse: bool = False, impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of new tokens over pages, in one pass over the keys: the one signature of the book.

    Prompts, chunks of prompts and single new tokens may stand in one batch. Nothing is gathered: memory beyond the
    arguments is the output.

    Shapes and units: q and the result [total_q, H, D or Dv]; k_cache, v_cache [num_blocks, block_size, H_kv, D or Dv];
    block_table [B, max_blocks], cu_seqlens_q [B + 1], seqused_k [B], all int32; ``max_seqlen_q`` and ``max_seqlen_k``
    bound the new tokens and the keys of any sequence (default: total_q, and all that a row of the table holds); sinks
    [H] float32; tree_mask [total_q] int64; lse [H, total_q] float32, natural log. ``impl`` is "torch", "triton",
    "hopper" or None (see ``explain``).

    Raises: ValueError as ``runtime.check_attention``, and where the implementation named cannot take these arguments;
    RuntimeError where it cannot run on this machine.

    Source: chapter 03; Dao 2023 (FlashAttention-2), and FlashAttention's and vLLM's paged interface.
    """
    check_paged(q, k_cache, v_cache, block_table, cu_seqlens_q, seqused_k, max_seqlen_q, max_seqlen_k, softmax_scale,
                 causal, window_size, softcap, sinks, tree_mask, out)  # fmt: skip
    bounds = _paged_bounds(q, k_cache, block_table, max_seqlen_q, max_seqlen_k)
    return _run(
        q, k_cache, v_cache, out, return_lse, impl, block_table=block_table, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=None, seqused_k=seqused_k, max_seqlen_q=bounds[0], max_seqlen_k=bounds[1],
        softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap, sinks=sinks,
        tree_mask=tree_mask,
    )  # fmt: skip


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, sinks: Tensor | None = None,
    return_lse: bool = False, impl: str | None = None, out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """The dense form: B sequences of one length, with FlashAttention's argument names.

    Causality is aligned bottom-right: the last query sees all keys.

    Shapes and units: q [B, Lq, H, D], k [B, Lk, H_kv, D], v [B, Lk, H_kv, Dv], of any strides but within a head; gives
    [B, Lq, H, Dv] and, with ``return_lse``, lse [B, H, Lq] float32, natural log; sinks [H] float32; ``window_size`` in
    tokens, inclusive; ``impl`` as ``attention``.

    Raises: ValueError that names the argument that does not fit; RuntimeError where ``impl`` cannot run here.

    Source: chapter 03; FlashAttention's ``flash_attn_func``.
    """
    check_dense(q, k, v, None, None, None, None, softmax_scale, causal, window_size, softcap, sinks, out)
    return _run(
        q, k, v, out, return_lse, impl, block_table=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_k=None,
        max_seqlen_q=q.shape[1], max_seqlen_k=k.shape[1], softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, sinks=sinks, tree_mask=None,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, sinks: Tensor | None = None,
    return_lse: bool = False, impl: str | None = None, out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """The ragged form: B sequences end to end, with FlashAttention's argument names.

    Shapes and units: q [total_q, H, D], k [total_k, H_kv, D], v [total_k, H_kv, Dv]; cu_seqlens_q and cu_seqlens_k
    [B + 1] int32, where each sequence begins, and the total; gives [total_q, H, Dv] and, with ``return_lse``, lse
    [H, total_q] float32, natural log; the bounds ``max_seqlen_q`` and ``max_seqlen_k`` default to the totals; the rest
    as ``flash_attn_func``.

    Raises: ValueError that names the argument that does not fit; RuntimeError where ``impl`` cannot run here.

    Source: chapter 03; FlashAttention's ``flash_attn_varlen_func``.
    """
    check_dense(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size,
                softcap, sinks, out)  # fmt: skip
    return _run(
        q, k, v, out, return_lse, impl, block_table=None, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        seqused_k=None, max_seqlen_q=q.shape[0] if max_seqlen_q is None else max_seqlen_q,
        max_seqlen_k=k.shape[0] if max_seqlen_k is None else max_seqlen_k, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, sinks=sinks, tree_mask=None,
    )  # fmt: skip


def explain(
    q: Tensor, k: Tensor, v: Tensor, *, block_table: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, seqused_k: Tensor | None = None, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, softmax_scale: float | None = None, causal: bool | None = None,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, sinks: Tensor | None = None,
    tree_mask: Tensor | None = None, impl: str | None = None,
) -> Choice:  # fmt: skip
    """Which implementation the same arguments would run, why, and with which tile. Launches and times nothing.

    Shapes and units: as ``attention`` where there is a ``block_table``, as ``flash_attn_varlen_func`` where there is
    ``cu_seqlens_k``, else as ``flash_attn_func``; ``causal`` None means the default of that function. The tile is the
    one known for this class of shapes; a class that was not timed yet shows the first of its list.

    Raises: as the function that it explains.

    Source: chapter 03.
    """
    causal = (block_table is not None) if causal is None else causal
    if block_table is not None:
        if cu_seqlens_q is None or seqused_k is None:
            raise ValueError("cu_seqlens_q or seqused_k is None; with a block_table both must be given")
        check_paged(q, k, v, block_table, cu_seqlens_q, seqused_k, max_seqlen_q, max_seqlen_k, softmax_scale,
                     causal, window_size, softcap, sinks, tree_mask, None)  # fmt: skip
        bounds = _paged_bounds(q, k, block_table, max_seqlen_q, max_seqlen_k)
    else:
        if tree_mask is not None:
            raise ValueError("tree_mask is given; it must be None without a block_table")
        check_dense(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size,
                     softcap, sinks, None)  # fmt: skip
        at = 1 if cu_seqlens_q is None else 0
        bounds = (max_seqlen_q if max_seqlen_q is not None else q.shape[at],
                  max_seqlen_k if max_seqlen_k is not None else k.shape[at])  # fmt: skip
    name, why = _choose(
        impl, q, k, v, paged=block_table is not None, max_seqlen_q=bounds[0], softmax_scale=softmax_scale,
        window_size=window_size, softcap=softcap, sinks=sinks, tree_mask=tree_mask,
    )  # fmt: skip
    if name == "torch":
        return Choice(name, why)
    if name == "hopper":
        from kvlab import flash_hopper

        return Choice(name, why, flash_hopper.tiling(q.shape[-1], v.shape[-1]))
    config = _kernel.configuration(
        q, k, v, paged=block_table is not None, max_seqlen_q=bounds[0], max_seqlen_k=bounds[1], causal=causal,
        window_size=window_size, softcap=softcap, tree=tree_mask is not None,
    )  # fmt: skip
    return Choice(name, why, asdict(config))


def _paged_bounds(
    q: Tensor, k_cache: Tensor, block_table: Tensor, max_seqlen_q: int | None, max_seqlen_k: int | None
) -> tuple[int, int]:
    room = block_table.shape[1] * k_cache.shape[1]
    return q.shape[0] if max_seqlen_q is None else max_seqlen_q, room if max_seqlen_k is None else max_seqlen_k


# --- the choice ------------------------------------------------------------------------------------------------------


def _choose(
    impl: str | None, q: Tensor, k: Tensor, v: Tensor, *, paged: bool, max_seqlen_q: int, **options: Any
) -> tuple[str, str]:
    """The implementation and why. One that was asked for is never replaced by another: it runs, or it is refused."""
    if impl not in (None, "torch", "triton", "hopper"):
        raise ValueError(f'impl is {impl!r}; it must be "torch", "triton", "hopper" or None')
    if impl == "torch":
        return "torch", "asked for"
    if impl is None and q.device.type == "cpu":
        return "torch", "tensors on the CPU"
    if impl is None and not runtime.can_launch(q.device):
        runtime.warn_fallback("flash.attention")
        return "torch", "no kernel can be launched here"
    if impl == "triton":
        runtime.require_launch("flash.attention", q.device)
        why = "asked for, and Triton's interpreter runs it" if runtime.INTERPRET else "asked for"
    else:
        instead = _instead_of_hopper(impl, q, k, v, max_seqlen_q, paged=paged, **options)
        if instead is None:
            pages = f", pages of {k.shape[1]} by TMA" if paged else ""
            return "hopper", f"sm_90, {str(q.dtype).removeprefix('torch.')}, head size {q.shape[-1]}{pages}"
        why = instead
    if q.dtype not in KERNEL_DTYPES:
        raise ValueError(f"q is {q.dtype}; for a kernel it must be one of {', '.join(map(str, KERNEL_DTYPES))}")
    if max(q.shape[-1], v.shape[-1]) > MAX_HEAD_DIM:
        raise ValueError(f"head sizes are {q.shape[-1]} and {v.shape[-1]}; for a kernel they must be 256 at most")
    return "triton", why


def _instead_of_hopper(
    impl: str | None, q: Tensor, k: Tensor, v: Tensor, max_seqlen_q: int, **options: Any
) -> str | None:
    """Why the Hopper kernel is not taken, as one clause; None where it is."""
    from kvlab import flash_hopper

    why = flash_hopper.unavailable(q.device)
    if why is not None:
        if impl == "hopper":
            raise RuntimeError(f"impl='hopper' cannot run: {why}")
        return why
    why = flash_hopper.refusal(q, k, v, **options)
    if why is not None:
        if impl == "hopper":
            raise ValueError(f"impl is 'hopper'; for these arguments it must be another: {why}")
        return f"hopper refuses: {why}"
    rows = max_seqlen_q * (q.shape[-2] // k.shape[-2])
    if impl is None and rows <= SHORT_ROWS:
        return f"{rows} rows a KV head at most, too few for hopper"
    return None


def _run(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, return_lse: bool, impl: str | None, *,
    softmax_scale: float | None, tree_mask: Tensor | None, **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Allocate what is to be written, and hand over to the implementation chosen."""
    picked = {name: options[name] for name in ("max_seqlen_q", "window_size", "softcap", "sinks")}
    name, _ = _choose(impl, q, k, v, paged=options["block_table"] is not None, softmax_scale=softmax_scale,
                      tree_mask=tree_mask, **picked)  # fmt: skip
    if out is None:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
    lse = None
    if return_lse:
        shape = (q.shape[0], q.shape[2], q.shape[1]) if q.ndim == 4 else (q.shape[1], q.shape[0])
        lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    options["softmax_scale"] = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    if name == "torch" and options["block_table"] is not None:
        del options["cu_seqlens_k"]
        return paged.attention(q, k, v, out=out, return_lse=return_lse, tree_mask=tree_mask, impl="torch", **options)
    if name == "torch":
        _attend_each(q, k, v, out, lse, **options)
    else:
        _hand_over(name, q, k, v, out, lse, tree_mask=tree_mask, **options)
    return out if lse is None else (out, lse)


def attend_longer(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None, *, longer_than: int,
    impl: str | None, softmax_scale: float, tree_mask: Tensor | None, **options: Any,
) -> None:  # fmt: skip
    """``attention`` by a kernel for those sequences alone that have more than ``longer_than`` new tokens; rows of the
    others are not written. The arguments have been checked.

    Shapes and units: as ``attention``; all options are given, and both bounds.

    Raises: ValueError or RuntimeError where ``impl`` cannot run.

    Source: chapter 04.
    """
    picked = {name: options[name] for name in ("max_seqlen_q", "window_size", "softcap", "sinks")}
    name, _ = _choose(impl, q, k_cache, v_cache, paged=True, softmax_scale=softmax_scale, tree_mask=tree_mask, **picked)
    _hand_over(name, q, k_cache, v_cache, out, lse, softmax_scale=softmax_scale, tree_mask=tree_mask,
               cu_seqlens_k=None, longer_than=longer_than, **options)  # fmt: skip


def _hand_over(
    name: str, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, *, tree_mask: Tensor | None,
    **options: Any,
) -> None:  # fmt: skip
    """Launch one of the two kernels."""
    if name == "triton":
        _kernel.launch(q, k, v, out, lse, tree_mask=tree_mask, **options)
    else:
        from kvlab import flash_hopper

        flash_hopper.forward(q, k, v, out=out, lse=lse, **options)


def _attend_each(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, *, cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None, softmax_scale: float, causal: bool, window_size: tuple[int, int], softcap: float,
    sinks: Tensor | None, **_: Any,
) -> None:  # fmt: skip
    """The dense and ragged forms in PyTorch: one sequence at a time, all its scores at once."""
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        check_offsets(cu_seqlens_q, q.shape[0], "cu_seqlens_q")
        check_offsets(cu_seqlens_k, k.shape[0], "cu_seqlens_k")
        rows, keys = ([slice(a, b) for a, b in itertools.pairwise(cu.tolist())] for cu in (cu_seqlens_q, cu_seqlens_k))
        places = [(r, s, (slice(None), r)) for r, s in zip(rows, keys, strict=True)]
    else:
        places = [(b, b, b) for b in range(q.shape[0])]  # type: ignore[misc]
    for rows_of_q, rows_of_k, place in places:
        one, logs = reference.attend_one(
            q[rows_of_q], k[rows_of_k], v[rows_of_k], softmax_scale=softmax_scale, causal=causal,
            window_size=window_size, softcap=softcap, sinks=sinks, dtype=None,
        )  # fmt: skip
        out[rows_of_q] = one
        if lse is not None:
            lse[place] = logs.float()
