"""What flash attention refuses before anything is launched; reads shapes, types, devices and strides, not contents."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from kvlab import runtime
from kvlab.config import is_number


def check_paged(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, cu_seqlens_q: Tensor, seqused_k: Tensor,
    max_seqlen_q: int | None, max_seqlen_k: int | None, softmax_scale: float | None, causal: bool,
    window_size: tuple[int, int], softcap: float, sinks: Tensor | None, tree_mask: Tensor | None, out: Tensor | None,
) -> None:  # fmt: skip
    """``runtime.check_attention``, and the bound of the keys. Shapes and units: as ``flash.attention``.

    Raises: ValueError that names the argument.  Source: chapter 03.
    """
    runtime.check_attention(
        q, k_cache, v_cache, block_table=block_table, cu_seqlens_q=cu_seqlens_q, seqused_k=seqused_k,
        max_seqlen_q=max_seqlen_q, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        sinks=sinks, tree_mask=tree_mask, out=out,
    )  # fmt: skip
    if max_seqlen_k is not None:
        _need(_is_count(max_seqlen_k), "max_seqlen_k", max_seqlen_k, "an integer, 0 or more")


def check_dense(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None, max_seqlen_k: int | None, softmax_scale: float | None, causal: bool,
    window_size: tuple[int, int], softcap: float, sinks: Tensor | None, out: Tensor | None,
) -> None:  # fmt: skip
    """``runtime.check_attention`` for the dense form, and with cu_seqlens for the ragged one.

    Shapes and units: as ``flash.flash_attn_func`` and ``flash.flash_attn_varlen_func``.

    Raises: ValueError that names the argument, what it is and what it must be.

    Source: chapter 03.
    """
    ragged = cu_seqlens_q is not None or cu_seqlens_k is not None
    form = "[tokens, heads, D]" if ragged else "[B, tokens, heads, D]"
    for name, x in (("q", q), ("k", k), ("v", v)):
        _need(isinstance(x, Tensor), name, f"a {type(x).__name__}", "a tensor")
        _need(x.ndim == (3 if ragged else 4), name, f"of shape {list(x.shape)}", form)
        _need(x.is_floating_point() and x.dtype == q.dtype, name, x.dtype, "of one floating-point type with q, k and v")
        _need(x.shape[-1] > 0 and x.shape[-2] > 0, name, f"of shape {list(x.shape)}", "of one head and number or more")
        right = x.stride(-1) == 1 or x.shape[-1] < 2
        _need(right, name, f"strided by {x.stride(-1)} within a head", "contiguous there")
    _need(ragged or k.shape[0] == q.shape[0], "k", f"of {k.shape[0]} sequences", f"of {q.shape[0]}, as q")
    _need(k.shape[-1] == q.shape[-1], "k", f"of head size {k.shape[-1]}", f"of {q.shape[-1]}, as q")
    _need(v.shape[:-1] == k.shape[:-1], "v", f"of shape {list(v.shape)}", f"like k, {list(k.shape)}, but for D")
    heads, kv_heads = q.shape[-2], k.shape[-2]
    _need(heads % kv_heads == 0, "q", f"of {heads} heads", f"of a multiple of the {kv_heads} KV heads")
    others: dict[str, Tensor | None] = {"k": k, "v": v, "sinks": sinks, "out": out}
    if ragged:
        others |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        length = cu_seqlens_q.shape[0] if cu_seqlens_q is not None and cu_seqlens_q.ndim == 1 else 0
        for name, cu, total, bound in (
            ("q", cu_seqlens_q, q.shape[0], max_seqlen_q), ("k", cu_seqlens_k, k.shape[0], max_seqlen_k),
        ):  # fmt: skip
            shape = None if cu is None else list(cu.shape)
            _need(cu is not None, f"cu_seqlens_{name}", None, "an int32 tensor [B + 1], as the other one")
            assert cu is not None
            _need(length > 0 and shape == [length], f"cu_seqlens_{name}", f"of shape {shape}", "[B + 1], as the other")
            _need(cu.dtype == torch.int32, f"cu_seqlens_{name}", cu.dtype, "torch.int32")
            _need(length < 2 or cu.stride(0) == 1, f"cu_seqlens_{name}", f"strided by {cu.stride(0)}", "contiguous")
            fits = bound is None or (_is_count(bound) and (name == "k" or bound * (length - 1) >= total))
            must = f"an integer that bounds the {total} tokens of {length - 1} sequences"
            _need(fits, f"max_seqlen_{name}", bound, must)
    else:
        for name, bound, tokens in (("q", max_seqlen_q, q.shape[1]), ("k", max_seqlen_k, k.shape[1])):
            fits = bound is None or (_is_count(bound) and bound >= tokens)
            _need(fits, f"max_seqlen_{name}", bound, f"an integer, {tokens} or more")
    if sinks is not None:
        right = sinks.shape == (heads,) and sinks.is_contiguous() and sinks.dtype == torch.float32
        _need(right, "sinks", f"{sinks.dtype} {list(sinks.shape)}", f"torch.float32 [{heads}], contiguous")
    if out is not None:
        want = [*q.shape[:-1], v.shape[-1]]
        right = list(out.shape) == want and out.dtype == q.dtype and (out.stride(-1) == 1 or want[-1] < 2)
        must = f"{q.dtype} {want}, contiguous within a head"
        _need(right, "out", f"{out.dtype} {list(out.shape)} with strides {out.stride()}", must)
    for name, other in others.items():
        place = q.device if other is None else other.device
        _need(place == q.device, name, f"on {place}", f"on {q.device}, as q")
    two = isinstance(window_size, tuple | list) and len(window_size) == 2
    right = two and all(isinstance(w, int) and not isinstance(w, bool) and w >= -1 for w in window_size)
    _need(right, "window_size", window_size, "two integers, -1 or more")
    _need(isinstance(causal, bool), "causal", repr(causal), "True or False")
    _need(is_number(softcap) and softcap >= 0, "softcap", softcap, "a finite number, 0 (off) or more")
    right = softmax_scale is None or is_number(softmax_scale)
    _need(right, "softmax_scale", softmax_scale, "a finite number or None")
    runtime.require_no_grad(q, k, v, sinks, out)
    if runtime.CHECK and cu_seqlens_q is not None and cu_seqlens_k is not None:
        check_offsets(cu_seqlens_q, q.shape[0], "cu_seqlens_q")
        check_offsets(cu_seqlens_k, k.shape[0], "cu_seqlens_k")


def check_offsets(cu_seqlens: Tensor, total: int, name: str) -> None:
    """Refuse offsets that do not rise from 0 to the total; reads the device, and so waits for it.

    Shapes and units: cu_seqlens [B + 1] int32; total in tokens.

    Raises: ValueError that names the argument.

    Source: chapter 03.
    """
    starts = cu_seqlens.tolist()
    if starts[0] != 0 or starts[-1] != total or any(b < a for a, b in itertools.pairwise(starts)):
        raise ValueError(f"{name} is {starts}; it must rise from 0 to the total, {total}")


def _need(right: bool, name: str, what: object, must: str) -> None:
    if not right:
        raise ValueError(f"{name} is {what}; it must be {must}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
