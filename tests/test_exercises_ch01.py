"""Chapter 01's checkers pass what is right, however it was written, and refuse what is wrong."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from kvlab import costs, exercises, reference
from kvlab.exercises import ExerciseError
from kvlab.rope import rotate

IDS = ["01.1", "01.2", "01.3", "01.4", "01.5"]


def rope(x, positions, theta):
    size = x.shape[-1]
    angle = positions[:, None, None] * theta ** (-torch.arange(0, size, 2) / size)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1).flatten(-2)


def rope_by_permutation(x, positions, theta):
    """The library's pairing between two permutations, in float64."""
    size = x.shape[-1]
    order = torch.cat([torch.arange(0, size, 2), torch.arange(1, size, 2)])
    angle = positions[:, None].double() * theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    both = torch.cat([angle, angle], dim=1)
    return rotate(x.double()[..., order], both.cos(), both.sin())[..., order.argsort()]


def rope_halves(x, positions, theta):
    size = x.shape[-1]
    angle = positions[:, None] * theta ** (-torch.arange(0, size, 2) / size)
    both = torch.cat([angle, angle], dim=1)
    return rotate(x, both.cos(), both.sin())


def rope_backwards(x, positions, theta):
    return rope(x, -positions, theta)


def rope_in_place(x, positions, theta):
    x.copy_(rope(x, positions, theta))
    return x


def rope_slow_pairs(x, positions, theta):
    size = x.shape[-1]
    angle = positions[:, None, None] * theta ** (-torch.arange(size // 2) / size)  # half the exponent
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1).flatten(-2)


def rope_complex(x, positions, theta):
    return rope(x, positions, theta) + 1j


def window_step(q, k, v, window):
    group = q.shape[0] // k.shape[1]
    k, v = (t[-window:].repeat_interleave(group, dim=1) for t in (k, v))
    scores = torch.einsum("hd,khd->hk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("hk,khd->hd", scores.softmax(dim=-1), v)


def window_by_sdpa(q, k, v, window):
    first = max(0, len(k) - window)
    k, v = (t[first:].transpose(0, 1) for t in (k, v))
    return functional.scaled_dot_product_attention(q[:, None], k, v, enable_gqa=True)[:, 0]


def window_off_by_one(q, k, v, window):
    return window_step(q, k, v, window + 1)


def window_too_short(q, k, v, window):
    return window_step(q, k, v, max(1, window - 1))


def window_masks_scores_only(q, k, v, window):
    return reference.attend_one(q[None], k, v, window_size=(window - 1, 0), dtype=None)[0][0]


def window_wrong_heads(q, k, v, window):
    group = q.shape[0] // k.shape[1]
    k, v = (t[-window:].repeat(1, group, 1) for t in (k, v))
    scores = torch.einsum("hd,khd->hk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("hk,khd->hd", scores.softmax(dim=-1), v)


def window_unscaled(q, k, v, window):
    return window_step(q * q.shape[-1] ** 0.5, k, v, window)


def chunk(position_fault=0, diagonal_fault=False, whole_row=False, keep_raw=False, forget_v=False):
    """The exercise's function, with faults to choose."""

    def chunk_attention(q, k, v, k_row, v_row, past, cos, sin):
        new = len(q)
        at = torch.arange(past, past + new) + position_fault * (past > 0)
        if position_fault and past:
            at = at.clamp(max=len(cos) - 1)
        raw = k
        q, k = rotate(q, cos[at], sin[at]), rotate(k, cos[at], sin[at])
        k_row[past : past + new] = raw if keep_raw else k
        if not forget_v:
            v_row[past : past + new] = v
        end = len(k_row) if whole_row else past + new
        group = q.shape[1] // k.shape[1]
        keys, values = (t[:end].repeat_interleave(group, dim=1) for t in (k_row, v_row))
        scores = torch.einsum("qhd,khd->hqk", q, keys) * q.shape[-1] ** -0.5
        seen = torch.ones(new, end, dtype=torch.bool).tril(diagonal=0 if diagonal_fault else past)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, values)

    return chunk_attention


def chunk_by_reference(q, k, v, k_row, v_row, past, cos, sin):
    new = slice(past, past + len(q))
    k_row[new], v_row[new] = rotate(k, cos[new], sin[new]), v
    out, _ = reference.attend_one(rotate(q, cos[new], sin[new]), k_row[: new.stop], v_row[: new.stop], dtype=None)
    return out


def flops_saved(c, prompt_len, new_tokens):
    ends = range(prompt_len + 1, prompt_len + new_tokens)
    return sum(costs.forward(c, [n], [n]).flops - costs.forward(c, [1], [n]).flops for n in ends)


def flops_saved_in_closed_form(c, prompt_len, new_tokens):
    """Each later pass saves the n - 1 old tokens: their weights, and the triangle of their own pairs."""
    p = costs.num_parameters(c)
    total = 0
    for old in range(prompt_len, prompt_len + new_tokens - 1):
        total += 2 * old * (p.attention + p.mlp)
        total += c.num_layers * 4 * c.num_heads * c.head_dim * old * (old + 1) // 2
    return total


def flops_saved_weights_only(c, prompt_len, new_tokens):
    p = costs.num_parameters(c)
    return sum(2 * old * (p.attention + p.mlp) for old in range(prompt_len, prompt_len + new_tokens - 1))


def flops_saved_one_pass_more(c, prompt_len, new_tokens):
    return flops_saved(c, prompt_len, new_tokens + 1)


def flops_saved_without_a_prompt(c, prompt_len, new_tokens):
    ends = range(prompt_len, prompt_len + new_tokens)
    return sum(costs.forward(c, [n], [n]).flops - costs.forward(c, [1], [n]).flops for n in ends)


RIGHT = {
    "01.1": [(6225, 149), [6225, 149], (np.int64(6225), torch.tensor(149))],
    "01.2": [rope, rope_by_permutation],
    "01.3": [window_step, window_by_sdpa],
    "01.4": [chunk(), chunk_by_reference],
    "01.5": [flops_saved, flops_saved_in_closed_form],
}
WRONG = {
    "01.1": [(6225, 150), (6275, 149), (149, 6225), (6225, 49), 149, (6225.0, 149), ("6225", "149"), (True, 149)],
    "01.2": [rope_halves, rope_backwards, rope_in_place, rope_slow_pairs, rope_complex, lambda x, positions, theta: x],
    "01.3": [window_off_by_one, window_too_short, window_masks_scores_only, window_wrong_heads, window_unscaled],
    "01.4": [
        chunk(position_fault=1),
        chunk(diagonal_fault=True),
        chunk(position_fault=1, diagonal_fault=True),
        chunk(whole_row=True),
        chunk(keep_raw=True),
        chunk(forget_v=True),
    ],
    "01.5": [
        flops_saved_weights_only,
        flops_saved_one_pass_more,
        flops_saved_without_a_prompt,
        lambda *_: 0,
        lambda c, prompt_len, new: flops_saved(c, prompt_len, new) if new > 1 else False,
    ],
}


@pytest.mark.parametrize("name", IDS)
def test_right_answers_pass(name: str) -> None:
    assert len(RIGHT[name]) >= 2
    for answer in RIGHT[name]:
        for _ in range(3):  # the checks draw anew each time
            exercises.check(name, answer)


@pytest.mark.parametrize(("name", "number"), [(name, i) for name in IDS for i in range(len(WRONG[name]))])
def test_wrong_answers_are_refused(name: str, number: int) -> None:
    for _ in range(3):
        with pytest.raises(ExerciseError):
            exercises.check(name, WRONG[name][number])


@pytest.mark.parametrize("name", IDS)
def test_a_stub_is_no_error(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    exercises.check(name, ...)
    if name != "01.1":
        exercises.check(name, lambda *_: ...)
    assert "not yet" in capsys.readouterr().out.lower()


def test_a_wrong_answer_is_told_what_is_wrong() -> None:
    with pytest.raises(ExerciseError, match="50th new token"):
        exercises.check("01.1", (6225, 150))
    with pytest.raises(ExerciseError, match="neighbours"):
        exercises.check("01.2", rope_halves)
    with pytest.raises(ExerciseError, match="NaN"):
        exercises.check("01.3", window_masks_scores_only)
    with pytest.raises(ExerciseError, match="k_row"):
        exercises.check("01.4", chunk(position_fault=1))
    with pytest.raises(ExerciseError, match="prompt of 1 and 2 new tokens"):
        exercises.check("01.5", flops_saved_weights_only)
