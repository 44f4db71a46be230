"""The kernels that judge drafts: one program a sequence walks down its chain or tree."""

from __future__ import annotations

from kvlab.runtime import counted, tl, triton


@triton.jit
def subtract_draft(p_ptr, q_ptr, to_ptr, scale, token, vocab, BLOCK: tl.constexpr):
    """Write the positive part of p · scale - q, and give its sum; without q_ptr all of q stands on ``token``.

    Shapes and units: p_ptr, q_ptr and to_ptr rows of ``vocab`` float32 numbers; ``scale`` and the sum float64.

    Source: chapter 05; Leviathan et al. 2023.
    """
    mass = tl.full([], 0.0, tl.float64)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        p = tl.load(p_ptr + at, mask=at < vocab, other=0.0).to(tl.float64) * scale
        if q_ptr is None:
            q = (at == token).to(tl.float64)
        else:
            q = tl.load(q_ptr + at, mask=at < vocab, other=0.0).to(tl.float64)
        left = p - tl.where(q > 0.0, q, 0.0)  # a NaN in q counts as 0, one in p stays
        left = tl.where(left < 0.0, 0.0, left)
        tl.store(to_ptr + at, left.to(tl.float32), mask=at < vocab)
        mass += tl.sum(left, axis=0)
    return mass


@triton.jit
def draw_token(p_ptr, uniform, vocab, BLOCK: tl.constexpr):
    """Invert the cumulative distribution of one row at a uniform number; -1 where the row is no distribution.

    Shapes and units: p_ptr a row of ``vocab`` float32 numbers, not normalised; ``uniform`` float64 in [0, 1).

    Source: chapter 05; ``sampling.draw``.
    """
    total = tl.full([], 0.0, tl.float64)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(p_ptr + at, mask=at < vocab, other=0.0).to(tl.float64), axis=0)
    goal, before = uniform * total, tl.full([], 0.0, tl.float64)
    token, last = vocab, -1
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        p = tl.load(p_ptr + at, mask=at < vocab, other=0.0).to(tl.float64)
        reached = (before + tl.cumsum(p, axis=0) > goal) & (p > 0.0)
        token = tl.minimum(token, tl.min(tl.where(reached, at, vocab), axis=0))
        last = tl.maximum(last, tl.max(tl.where(p > 0.0, at, -1), axis=0))
        before += tl.sum(p, axis=0)
    token = tl.minimum(token, last)  # where rounding kept the sums under the goal
    return tl.where((total > 0.0) & (total < float("inf")), token, -1)


@counted
@triton.jit(do_not_specialize=["drafts"])
def rejection_kernel(
    token_ptr, draft_ptr, target_ptr, parent_ptr, accept_ptr, sample_ptr, left_ptr, out_ptr, node_ptr, count_ptr,
    vocab, drafts, draft_seq, draft_row, target_seq, target_row, BLOCK: tl.constexpr,
):  # fmt: skip
    """Accept or reject the drafts of one sequence, and draw the token that follows the accepted ones.

    Source: chapter 05; Leviathan et al. 2023, Chen et al. 2023; Miao et al. 2023 for several siblings.
    """
    seq = tl.program_id(0).to(tl.int64)
    first = seq * drafts
    draft_at = seq * draft_seq
    target_ptr += seq * target_seq
    left_ptr += seq * 2 * vocab
    out_ptr += first + seq
    depth, at = 0, -1  # how many were accepted, and which of them last
    p_ptr, scale, spare = target_ptr, tl.full([], 1.0, tl.float64), 0
    for i in range(0, drafts):
        token = tl.load(token_ptr + first + i)
        parent = i - 1
        if parent_ptr is not None:
            parent = tl.load(parent_ptr + first + i)
        if (parent == at) & (token >= 0) & (token < vocab):
            p = tl.load(p_ptr + token).to(tl.float64) * scale
            q = tl.full([], 1.0, tl.float64)
            q_ptr = None
            if draft_ptr is not None:
                q_ptr = draft_ptr + draft_at + i * draft_row
                q = tl.load(q_ptr + token).to(tl.float64)
            if (q > 0.0) & (tl.load(accept_ptr + first + i) * q < p):
                tl.store(out_ptr + depth, token)
                tl.store(node_ptr + first + depth, i)
                depth, at = depth + 1, i
                p_ptr, scale = target_ptr + (i + 1) * target_row, tl.full([], 1.0, tl.float64)
            else:  # its probability is used up: what is left is for its siblings, or for the target itself
                to_ptr = left_ptr + spare * vocab
                mass = subtract_draft(p_ptr, q_ptr, to_ptr, scale, token, vocab, BLOCK)
                tl.debug_barrier()  # what one thread wrote, another reads
                if mass > 0.0:
                    p_ptr, scale, spare = to_ptr, 1.0 / mass, 1 - spare
    uniform = tl.load(sample_ptr + first + seq + at + 1)
    tl.store(out_ptr + depth, draw_token(p_ptr, uniform, vocab, BLOCK))
    tl.store(count_ptr + seq, depth)


@counted
@triton.jit(do_not_specialize=["drafts"])
def greedy_kernel(token_ptr, target_ptr, parent_ptr, out_ptr, node_ptr, count_ptr, drafts):
    """Accept the drafts of one sequence that are the target's own choice, and give its choice after the last.

    Source: chapter 05.
    """
    seq = tl.program_id(0).to(tl.int64)
    first = seq * drafts
    target_ptr += first + seq
    out_ptr += first + seq
    depth, at = 0, -1
    wanted = tl.load(target_ptr)
    for i in range(0, drafts):
        parent = i - 1
        if parent_ptr is not None:
            parent = tl.load(parent_ptr + first + i)
        if (parent == at) & (tl.load(token_ptr + first + i) == wanted):
            tl.store(out_ptr + depth, wanted)
            tl.store(node_ptr + first + depth, i)
            depth, at = depth + 1, i
            wanted = tl.load(target_ptr + i + 1)
    tl.store(out_ptr + depth, wanted)
    tl.store(count_ptr + seq, depth)
