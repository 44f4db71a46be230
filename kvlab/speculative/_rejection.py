"""Rejection sampling: which drafts the target accepts, so that its distribution is kept exactly."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvlab import runtime
from kvlab.sampling import inverse_cdf
from kvlab.speculative._kernel import greedy_kernel, rejection_kernel

_BLOCK, _WARPS = 2048, 8  # tokens of the vocabulary at a time


@dataclass(frozen=True)
class Accepted:
    """What became of the drafts of B sequences.

    Shapes and units: ``tokens`` [B, N + 1] int64, the accepted drafts and then the token that the target adds, -1
    after it (and in its place where a target row was no distribution); ``nodes`` [B, N] int64, which drafts they were,
    in order, -1 after; ``num_accepted`` [B] int64.

    Source: chapter 05.
    """

    tokens: Tensor
    nodes: Tensor
    num_accepted: Tensor


def rejection_sample(
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    accept_uniforms: Tensor,
    sample_uniforms: Tensor,
    *,
    parents: Tensor | None = None,
    impl: str | None = None,
) -> Accepted:
    """Judge the drafts of B sequences at once, so that what is emitted is distributed as the target alone would.

    A draft x, drawn from q, is accepted with probability min(1, p(x) / q(x)). After a rejection p becomes the positive
    part of p - q, normalised: the next sibling, if there is one, is judged by that, and if none is left the token is
    drawn from it. Where all are accepted, one more token is drawn from the last row. Both p and q are the processed
    distributions, q exactly what the draft was drawn from, given the siblings drawn before it.

    What cannot be is harmless: a draft with q(x) = 0 or NaN is rejected, a q that is NaN somewhere counts as 0 there,
    p = q accepts always and would leave p.

    Shapes and units: draft_tokens [B, N] int64, a token outside the vocabulary (such as -1) is no draft; draft_probs
    [B, N, vocab] float32, None where each draft was certain (n-gram, greedy); target_probs [B, N + 1, vocab] float32,
    row 0 follows the text and row i + 1 draft i, rows that are 0 or more and need not add up to 1; accept_uniforms
    [B, N] and sample_uniforms [B, N + 1] float64 in [0, 1), the latter one a row of target_probs; parents [B, N] int32,
    the draft that each one follows, -1 for the text, None for chains. ``impl`` is "torch", "triton" or None (by
    device). Nothing waits for the device.

    Raises: ValueError naming the argument whose shape, dtype or device does not fit; RuntimeError where "triton" cannot
    be launched.

    Source: chapter 05; Leviathan et al. 2023, Chen et al. 2023; Miao et al. 2023 (SpecInfer) for siblings.
    """
    runtime.require_tensor("target_probs", target_probs)
    if target_probs.ndim != 3 or target_probs.shape[2] == 0:
        raise ValueError(f"target_probs has shape {list(target_probs.shape)}; it must be [B, N + 1, vocab]")
    batch, rows, vocab = target_probs.shape
    drafts = rows - 1
    on = _check_drafts(draft_tokens, parents, batch, drafts, target_probs.device)
    if draft_probs is not None:
        _require("draft_probs", draft_probs, (batch, drafts, vocab), torch.float32, on)
    for name, x, shape, dtype in (
        ("target_probs", target_probs, (batch, rows, vocab), torch.float32),
        ("accept_uniforms", accept_uniforms, (batch, drafts), torch.float64),
        ("sample_uniforms", sample_uniforms, (batch, rows), torch.float64),
    ):
        _require(name, x, shape, dtype, on)
    runtime.require_no_grad(draft_probs, target_probs)
    if runtime.choose(impl, on, "rejection_sample") == "torch":
        if draft_probs is None:
            certain = draft_tokens.masked_fill((draft_tokens < 0) | (draft_tokens >= vocab), vocab)
            draft_probs = functional.one_hot(certain, vocab + 1)[..., :vocab].float()
        return _reference(draft_tokens, draft_probs, target_probs, accept_uniforms, sample_uniforms, parents)
    made = _empty(batch, drafts, on)
    q = None if draft_probs is None else _rows_contiguous(draft_probs)
    p = _rows_contiguous(target_probs)
    left = torch.empty(batch, 2, vocab, dtype=torch.float32, device=on)
    if batch:
        with torch.cuda.device_of(p):
            rejection_kernel[(batch,)](
                draft_tokens.contiguous(), q, p, None if parents is None else parents.contiguous(),
                accept_uniforms.contiguous(), sample_uniforms.contiguous(), left, made.tokens, made.nodes,
                made.num_accepted, vocab, drafts, *((0, 0) if q is None else q.stride()[:2]), *p.stride()[:2],
                BLOCK=min(_BLOCK, max(16, runtime.next_power_of_2(vocab))), num_warps=_WARPS,
            )  # fmt: skip
    return made


def greedy_sample(
    draft_tokens: Tensor, target_tokens: Tensor, *, parents: Tensor | None = None, impl: str | None = None
) -> Accepted:
    """Judge the drafts of B greedy sequences: accepted is what the target would have chosen. No randomness is used.

    Shapes and units: draft_tokens [B, N] int64, target_tokens [B, N + 1] int64, the target's choice after the text and
    after each draft; parents and impl as ``rejection_sample``.

    Raises: ValueError and RuntimeError as ``rejection_sample``.

    Source: chapter 05; Leviathan et al. 2023.
    """
    runtime.require_tensor("target_tokens", target_tokens)
    if target_tokens.ndim != 2 or target_tokens.shape[1] == 0:
        raise ValueError(f"target_tokens has shape {list(target_tokens.shape)}; it must be [B, N + 1]")
    batch, drafts = target_tokens.shape[0], target_tokens.shape[1] - 1
    on = _check_drafts(draft_tokens, parents, batch, drafts, target_tokens.device)
    _require("target_tokens", target_tokens, (batch, drafts + 1), torch.int64, on)
    if runtime.choose(impl, on, "greedy_sample") == "torch":
        return _greedy_reference(draft_tokens, target_tokens, parents)
    made = _empty(batch, drafts, on)
    if batch:
        with torch.cuda.device_of(target_tokens):
            greedy_kernel[(batch,)](
                draft_tokens.contiguous(), target_tokens.contiguous(),
                None if parents is None else parents.contiguous(), made.tokens, made.nodes, made.num_accepted, drafts,
                num_warps=1,
            )  # fmt: skip
    return made


def residual(p: Tensor, q: Tensor) -> Tensor:
    """What the target still has to give after a draft from q was rejected: the positive part of p - q, normalised.

    Where nothing is left (p = q: no draft is ever rejected) it is p itself; a NaN in q counts as 0.

    Shapes and units: p and q [..., vocab]; gives float64 [..., vocab].

    Raises: ValueError for what are no tensors of one shape on one device.

    Source: chapter 05; Leviathan et al. 2023.
    """
    for name, x in (("p", p), ("q", q)):
        runtime.require_tensor(name, x)
    if p.ndim == 0:
        raise ValueError("p has no dimension; it must be [..., vocab]")
    if q.shape != p.shape or q.device != p.device:
        raise ValueError(f"q is {list(q.shape)} on {q.device}; it must be {list(p.shape)} on {p.device}, as p")
    left = (p.double() - q.double().nan_to_num(0.0)).clamp(min=0)
    mass = left.sum(-1, keepdim=True)
    return torch.where(mass > 0, left / mass, p.double())


def _reference(
    draft_tokens: Tensor, draft_probs: Tensor, target_probs: Tensor, accept_uniforms: Tensor, sample_uniforms: Tensor,
    parents: Tensor | None,
) -> Accepted:  # fmt: skip
    """The specification, for all sequences side by side: parents stand before their nodes, so one pass is enough."""
    (batch, drafts), vocab = draft_tokens.shape, target_probs.shape[2]
    rows = torch.arange(batch, device=draft_tokens.device)
    made = _empty(batch, drafts, draft_tokens.device)
    at = torch.full_like(made.num_accepted, -1)  # the draft that was accepted last
    p = target_probs[:, 0].double()
    for i in range(drafts):
        token, q = draft_tokens[:, i], draft_probs[:, i]
        tried = (at == (i - 1 if parents is None else parents[:, i])) & (token >= 0) & (token < vocab)
        p_x, q_x = (x[rows, token.clamp(0, vocab - 1)].double() for x in (p, q))
        accepted = tried & (q_x > 0) & (accept_uniforms[:, i] * q_x < p_x)
        p = torch.where((tried & ~accepted)[:, None], residual(p, q), p)
        p = torch.where(accepted[:, None], target_probs[:, i + 1].double(), p)
        at = _take(made, accepted, token, i, at)
    final = inverse_cdf(p, sample_uniforms[rows, at + 1])
    total = p.sum(1)
    final = final.masked_fill(~((total > 0) & total.isfinite()), -1)
    made.tokens[rows, made.num_accepted] = final
    return made


def _greedy_reference(draft_tokens: Tensor, target_tokens: Tensor, parents: Tensor | None) -> Accepted:
    batch, drafts = draft_tokens.shape
    made = _empty(batch, drafts, draft_tokens.device)
    at, wanted = torch.full_like(made.num_accepted, -1), target_tokens[:, 0]
    for i in range(drafts):
        token = draft_tokens[:, i]
        accepted = (at == (i - 1 if parents is None else parents[:, i])) & (token == wanted)
        wanted = torch.where(accepted, target_tokens[:, i + 1], wanted)
        at = _take(made, accepted, token, i, at)
    made.tokens[torch.arange(batch, device=at.device), made.num_accepted] = wanted
    return made


def _take(made: Accepted, accepted: Tensor, token: Tensor, node: int, at: Tensor) -> Tensor:
    """Note one draft in the sequences that accept it; gives the draft accepted last, [B]."""
    depth = made.num_accepted[:, None]
    for kept, value in ((made.tokens, token), (made.nodes, torch.full_like(token, node))):
        kept.scatter_(1, depth, torch.where(accepted, value, kept.gather(1, depth)[:, 0])[:, None])
    made.num_accepted.add_(accepted)
    return torch.where(accepted, node, at)


def _empty(batch: int, drafts: int, on: torch.device) -> Accepted:
    tokens = torch.full((batch, drafts + 1), -1, device=on)
    nodes = torch.full((batch, drafts), -1, device=on)
    return Accepted(tokens, nodes, torch.zeros(batch, dtype=torch.int64, device=on))


def _rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


def _check_drafts(
    draft_tokens: Tensor, parents: Tensor | None, batch: int, drafts: int, on: torch.device
) -> torch.device:
    _require("draft_tokens", draft_tokens, (batch, drafts), torch.int64, on)
    if parents is not None:
        _require("parents", parents, (batch, drafts), torch.int32, on)
    return on


def _require(name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, on: torch.device) -> None:
    runtime.require_tensor(name, x)
    if x.shape != shape or x.dtype != dtype or x.device != on:
        raise ValueError(f"{name} is {x.dtype} {list(x.shape)} on {x.device}; it must be {dtype} {list(shape)} on {on}")
