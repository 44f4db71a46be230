"""How close is close enough: the one tolerance rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvlab import reference


def tolerance(dtype: torch.dtype, oracle: Tensor, plain: Tensor | None) -> float:
    """The largest absolute error that a result in ``dtype`` may have.

    Twice the error of a plain PyTorch run in the same precision, plus a rounding allowance of four units in the last
    place of the largest element. Why so: a kernel may round as often as plain code does, but in another order, so no
    fixed number is right for all shapes; twice the plain error is. The allowance is for results that plain code happens
    to hit exactly, and for the final rounding. A wrong mask or a lost rescale is wrong by far more.

    Shapes and units: ``oracle`` (float64) and ``plain`` (the plain run; None counts as exact) have the result's shape.

    Source: chapter 03; FlashAttention's tests.
    """
    scale = max(_largest(oracle), 2.0**-10)
    allowance = 4 * torch.finfo(dtype).eps * scale
    return allowance if plain is None else 2 * _largest(plain.double() - oracle.double()) + allowance


def assert_close(
    out: Tensor, oracle: Tensor, plain: Tensor | None, dtype: torch.dtype | None = None, what: str = "out"
) -> float:
    """Assert that a result is as close to the float64 oracle as ``tolerance`` asks; gives its largest error.

    Shapes and units: all tensors have one shape; ``dtype`` defaults to the result's. Infinities must agree exactly and
    NaN is never right.

    Raises: AssertionError naming the place of the largest error; ValueError where the oracle is not float64 or holds
    NaN, or the plain run has another shape.

    Source: chapter 03.
    """
    if oracle.dtype != torch.float64:
        raise ValueError(f"oracle is {oracle.dtype}; it must be float64")
    if bool(oracle.isnan().any()):
        raise ValueError(f"oracle is NaN in {int(oracle.isnan().sum())} places; it says what is right nowhere there")
    if plain is not None and plain.shape != oracle.shape:
        raise ValueError(f"plain has shape {list(plain.shape)}; it must be the oracle's, {list(oracle.shape)}")
    assert out.shape == oracle.shape, f"{what} has shape {list(out.shape)}; it must be {list(oracle.shape)}"
    if out.numel() == 0:
        return 0.0
    got, want = out.detach().cpu().double(), oracle.cpu()
    nan = got.isnan()
    assert not bool(nan.any()), f"{what} is NaN in {int(nan.sum())} places, first at {nan.nonzero()[0].tolist()}"
    infinite = want.isinf() | got.isinf()
    wrong = infinite & (got != want)
    assert not bool(wrong.any()), (
        f"{what} is {got[wrong][0].item()} at {wrong.nonzero()[0].tolist()}; it must be {want[wrong][0].item():g}"
    )
    error = (got - want).masked_fill(infinite, 0.0).abs()
    bound = tolerance(dtype or out.dtype, want, None if plain is None else plain.detach().cpu())
    worst = float(error.max())
    if worst > bound:
        at = (error == error.max()).nonzero()[0].tolist()
        raise AssertionError(
            f"{what} is off by {worst:.3g} at {at} (allowed {bound:.3g}): {got[tuple(at)].item():g} "
            f"instead of {want[tuple(at)].item():g}"
        )
    return worst


def assert_attention(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, q_lens: Sequence[int] | None = None,
    kv_lens: Sequence[int] | None = None, **options: Any,
) -> float:  # fmt: skip
    """Assert that ``out`` is attention of q over k and v, of one sequence or of many laid end to end; gives its error.

    Shapes and units: out [total_q, H, Dv], q [total_q, H, D], k [total_k, H_kv, D], v [total_k, H_kv, Dv]; ``q_lens``
    and ``kv_lens`` are the sequences' lengths, None for one; ``options`` as ``reference.attend_one`` takes them.

    Raises: AssertionError as ``assert_close``; ValueError for lengths of which there are not as many, or that do not
    add up.

    Source: chapter 03.
    """
    new, cached = list(q_lens or [len(q)]), list(kv_lens or [len(k)])
    for name, rows, each in (("out", out, new), ("q", q, new), ("k", k, cached), ("v", v, cached)):
        if sum(each) != len(rows) or len(each) != len(new):
            raise ValueError(f"{name} has {len(rows)} rows; the lengths are {each}, and there are {len(new)} sequences")
    worst = 0.0
    for i, (got, *qkv) in enumerate(zip(out.split(new), q.split(new), k.split(cached), v.split(cached), strict=True)):
        oracle, plain = (reference.attend_one(*qkv, dtype=dtype, **options)[0] for dtype in (torch.float64, None))
        worst = max(worst, assert_close(got, oracle, plain, what=f"sequence {i} of out"))
    return worst


def _largest(x: Tensor) -> float:
    """The largest finite magnitude; 0 where there is none."""
    finite = x.double()[x.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0
