"""Chapter 03's checkers pass what is right, however it was written, and refuse what is wrong."""

from __future__ import annotations

import functools
from collections import namedtuple

import exercising
import numpy as np
import pytest
import torch
from faulty import Faulty

from kvlab import exercises, reference, runtime
from kvlab.exercises import ExerciseError, ch03
from kvlab.runtime import counted, dot, tl, triton

IDS = ["03.1", "03.2", "03.3", "03.4", "03.5"]
needs_triton = pytest.mark.skipif(not runtime.can_launch(), reason="no kernel can be launched here")


# --- 03.1 ---


def hbm_bytes(L, H, D, M):
    rows, scores = 2 * L * D, 2 * L * L
    return H * (4 * rows + 4 * scores), H * (2 * rows + 2 * rows * -(-L // M))


def bytes_kernel_by_kernel(L, H, D, M):
    """Each kernel by itself, each tile by itself, in floats."""
    first, softmax, second = 2 * L * D + L * L, L * L + L * L, L * L + L * D + L * D
    flash = sum(min(M, L - i) * D + 2 * L * D + min(M, L - i) * D for i in range(0, L, M))
    return [2.0 * H * (first + softmax + second), np.float64(2 * H * flash)]


def bytes_off(change):
    def wrong(L, H, D, M):
        rows, scores, tiles = 2 * L * D * H, 2 * L * L * H, -(-L // M)
        return change(rows, scores, tiles, L / M, H)

    return wrong


# --- 03.2 ---


def count_tiles(q_len, kv_len, M, N, window):
    past, skipped, masked, free = kv_len - q_len, 0, 0, 0
    for i in range(0, q_len, M):
        first, last = past + i, past + min(i + M, q_len) - 1  # positions of the tile's queries
        for j in range(0, kv_len, N):
            end = min(j + N, kv_len) - 1
            if j > last or end < 0 or last < 0 or (window >= 0 and end < first - window):
                skipped += 1
            elif j + N <= kv_len and end <= first and (window < 0 or j >= last - window):
                free += 1
            else:
                masked += 1
    return skipped, masked, free


def count_by_mask(q_len, kv_len, M, N, window):
    """The mask itself, padded: rows that are not there see all or nothing, keys that are not there are seen by none."""
    rows, columns = -(-q_len // M), -(-kv_len // N)
    mask = np.zeros((rows * M, columns * N), dtype=bool)
    mask[:q_len, :kv_len] = reference.visible_keys(q_len, kv_len, window_size=(window, 0)).numpy()
    some = mask.reshape(rows, M, columns, N).any(axis=(1, 3))
    mask[q_len:] = True
    every = mask.reshape(rows, M, columns, N).all(axis=(1, 3))
    return [np.int64((~some).sum()), int((some & ~every).sum()), int(every.sum())]


def counted_with(window_by=0, **options):
    def wrong(q_len, kv_len, M, N, window):
        window = max(0, window + window_by) if window >= 0 else window
        return ch03._counted(q_len, kv_len, M, N, window, **options)

    return wrong


def count_by_range(q_len, kv_len, M, N, window):
    """Every tile of the range is masked, as the simplest kernel has it."""
    skipped, masked, free = count_tiles(q_len, kv_len, M, N, window)
    return skipped, masked + free, 0


def count_without_empty_rows(q_len, kv_len, M, N, window):
    return count_tiles(min(q_len, kv_len), kv_len, M, N, window)


def count_without_window(q_len, kv_len, M, N, window):
    return count_tiles(q_len, kv_len, M, N, -1)


def count_rounded_down(q_len, kv_len, M, N, window):
    return count_tiles(q_len // M * M, kv_len // N * N, M, N, window)


# --- 03.3 ---


def online_softmax_step(state, scores, values):
    m, l, acc = state
    values = torch.where((scores > -torch.inf).any(0)[:, None], values, 0.0)
    new = torch.maximum(m, scores.max(1).values)
    safe = torch.where(new == -torch.inf, 0.0, new)
    p, alpha = torch.exp(scores - safe[:, None]), torch.exp(m - safe)
    return new, l * alpha + p.sum(1), acc * alpha[:, None] + p @ values


State = namedtuple("State", "m l acc")


def step_by_merge(state, scores, values):
    """Another way to write it: the tile's own softmax, merged with the state, row by row, in NumPy and float64."""
    m, l, acc = (x.double().numpy().copy() for x in state)
    scores, values = scores.double().numpy(), values.double().numpy()
    for r in range(len(m)):
        seen = np.isfinite(scores[r])
        if not seen.any():
            continue
        own = scores[r, seen].max()
        p = np.exp(scores[r, seen] - own)
        new = max(m[r], own)
        mine, old = np.exp(own - new), np.exp(m[r] - new)
        m[r], l[r] = new, l[r] * old + p.sum() * mine
        acc[r] = acc[r] * old + p @ values[seen] * mine
    return State(*map(torch.tensor, (m, l, acc)))


def step_in_place(state, scores, values):
    m, l, acc = state
    values[~torch.isfinite(scores).any(0)] = 0
    old = m.clone()
    m.copy_(torch.maximum(m, scores.amax(1)))
    alpha = torch.exp(old - m).nan_to_num_(0.0)
    scores.sub_(m[:, None]).exp_().nan_to_num_(0.0)
    l.mul_(alpha).add_(scores.sum(1))
    acc.mul_(alpha[:, None]).addmm_(scores, values)
    return [m, l, acc]


def faulty_step(fault):
    def step(state, scores, values):
        m, l, acc = state
        if fault != "lets NaN through":
            values = torch.where((scores > -torch.inf).any(0)[:, None], values, 0.0)
        new = torch.maximum(m, scores.amax(1))
        if fault == "maximum of the tile alone":
            new = scores.amax(1)
        if fault == "floor":
            new = new.clamp(min=-1e4)
        if fault == "no maximum":
            new = torch.zeros_like(m)
        safe = new if fault == "NaN in empty rows" else torch.where(new == -torch.inf, 0.0, new)
        p, alpha = torch.exp(scores - safe[:, None]), torch.exp(m - safe)
        if fault == "weighs empty rows":
            p = torch.where((new == -torch.inf)[:, None], 1.0, p)
        if fault == "alpha upside down":
            alpha = torch.where(m == -torch.inf, 0.0, torch.exp(safe - m))
        l_new = (l if fault == "l not rescaled" else l * alpha) + p.sum(1)
        acc_new = (acc if fault == "acc not rescaled" else acc * alpha[:, None]) + p @ values
        if fault == "divides at once":
            acc_new = acc_new / l_new.clamp(min=1e-9)[:, None]
        if fault == "keeps m":
            new = m
        if fault == "base 2":
            p2 = torch.exp2(scores - safe[:, None])
            l_new, acc_new = l * torch.exp2(m - safe) + p2.sum(1), acc * torch.exp2(m - safe)[:, None] + p2 @ values
        if fault == "m as a column":
            new = new[:, None]
        return (new, l_new, acc_new)[: 2 if fault == "no acc" else 3]

    step.__name__ = fault
    return step


STEP_FAULTS = [
    "lets NaN through", "maximum of the tile alone", "floor", "no maximum", "NaN in empty rows", "weighs empty rows",
    "alpha upside down", "l not rescaled", "acc not rescaled", "divides at once", "keeps m", "base 2", "m as a column",
    "no acc",
]  # fmt: skip


# --- 03.4 ---


@triton.jit
def flash_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, q_len, kv_len, scale, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * M
    row, d, past = first + tl.arange(0, M), tl.arange(0, D), kv_len - q_len
    live = (row < q_len)[:, None]
    q = tl.load(q_ptr + row[:, None] * D + d[None, :], mask=live, other=0)
    m, l, acc = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32), tl.zeros([M, D], tl.float32)
    for start in range(0, tl.minimum(kv_len, past + first + M), N):
        key = start + tl.arange(0, N)
        k = tl.load(k_ptr + key[None, :] * D + d[:, None], mask=(key < kv_len)[None, :], other=0)
        v = tl.load(v_ptr + key[:, None] * D + d[None, :], mask=(key < kv_len)[:, None], other=0)
        seen = (key < kv_len)[None, :] & (key[None, :] <= past + row[:, None])
        scores = tl.where(seen, dot(q, k, tl.zeros([M, N], tl.float32)) * scale, float("-inf"))
        new = tl.maximum(m, tl.max(scores, axis=1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        p, alpha = tl.exp(scores - safe[:, None]), tl.exp(m - safe)
        m, l, acc = new, l * alpha + tl.sum(p, axis=1), dot(p.to(v.dtype), v, acc * alpha[:, None])
    out = acc / tl.where(l == 0, 1.0, l)[:, None]
    tl.store(out_ptr + row[:, None] * D + d[None, :], out, mask=live)


@counted
@triton.jit
def backwards_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, q_len, kv_len, scale, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Another way to write it: the diagonal first, then towards key 0; base 2; a floor far below any score."""
    tile = tl.program_id(0)
    row = tile * M + tl.arange(0, M)
    d = tl.arange(0, D)
    q_ptrs = q_ptr + row[:, None] * D + d[None, :]
    q = tl.load(q_ptrs, mask=row[:, None] < q_len, other=0).to(tl.float32) * (scale * 1.4426950408889634)
    m = tl.full([M], -3.0e38, tl.float32)
    l = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    past = kv_len - q_len
    tiles = tl.maximum(0, (tl.minimum((tile + 1) * M, q_len) + past + N - 1) // N)
    for i in range(tiles):
        key = (tiles - 1 - i) * N + tl.arange(0, N)
        k = tl.load(k_ptr + key[:, None] * D + d[None, :], mask=key[:, None] < kv_len, other=0).to(tl.float32)
        v = tl.load(v_ptr + key[:, None] * D + d[None, :], mask=key[:, None] < kv_len, other=0).to(tl.float32)
        s = tl.dot(q, tl.trans(k))
        hidden = (key[None, :] > row[:, None] + past) | (key[None, :] >= kv_len)
        s = tl.where(hidden, float("-inf"), s)
        new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - new[:, None])
        alpha = tl.exp2(m - new)
        l = l * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + tl.dot(p, v)
        m = new
    out = tl.where((l > 0)[:, None], acc / l[:, None], 0.0)
    tl.store(out_ptr + row[:, None] * D + d[None, :], out.to(out_ptr.dtype.element_ty), mask=row[:, None] < q_len)


@triton.jit
def faulty_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, q_len, kv_len, scale, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    FAULT: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * M
    row, d, past = first + tl.arange(0, M), tl.arange(0, D), kv_len - q_len
    if FAULT == "top-left":
        past = 0
    live = (row < q_len)[:, None]
    if FAULT == "reads q past its end":
        q = tl.load(q_ptr + row[:, None] * D + d[None, :])
    else:
        q = tl.load(q_ptr + row[:, None] * D + d[None, :], mask=live, other=0)
    m, l, acc = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32), tl.zeros([M, D], tl.float32)
    if FAULT == "floor":
        m = tl.full([M], -1e4, tl.float32)
    end = tl.minimum(kv_len, past + first + M)
    if FAULT == "all tiles":
        end = kv_len
    if FAULT == "one tile short":
        end = tl.minimum(kv_len, past + first + 1)
    for start in range(0, end, N):
        key = start + tl.arange(0, N)
        there = key < kv_len
        k = tl.load(k_ptr + key[None, :] * D + d[:, None], mask=there[None, :], other=0)
        if FAULT == "reads v past its end":
            v = tl.load(v_ptr + key[:, None] * D + d[None, :])
        else:
            v = tl.load(v_ptr + key[:, None] * D + d[None, :], mask=there[:, None], other=0)
        seen = there[None, :] & (key[None, :] <= past + row[:, None])
        if FAULT == "no mask":
            seen = there[None, :] & (row[:, None] >= 0)
        if FAULT == "the diagonal is off":
            seen = there[None, :] & (key[None, :] < past + row[:, None])
        if FAULT == "no tail mask":
            seen = key[None, :] <= tl.maximum(past + row[:, None], kv_len)
        scores = dot(q, k, tl.zeros([M, N], tl.float32))
        if FAULT != "no scale":
            scores = scores * scale
        scores = tl.where(seen, scores, float("-inf"))
        new = tl.maximum(m, tl.max(scores, axis=1))
        if FAULT == "no maximum":
            new = tl.zeros([M], tl.float32)
        safe = tl.where(new == float("-inf"), 0.0, new)
        if FAULT == "NaN in empty rows":
            safe = new
        p, alpha = tl.exp(scores - safe[:, None]), tl.exp(m - safe)
        if FAULT == "acc not rescaled":
            acc = dot(p.to(v.dtype), v, acc)
        else:
            acc = dot(p.to(v.dtype), v, acc * alpha[:, None])
        if FAULT == "l not rescaled":
            alpha = tl.full([M], 1.0, tl.float32)
        m, l = new, l * alpha + tl.sum(p, axis=1)
    out = acc / tl.where(l == 0, 1.0, l)[:, None]
    if FAULT == "divides by 0":
        out = acc / l[:, None]
    if FAULT == "no division":
        out = acc
    if FAULT == "writes past the end":
        tl.store(out_ptr + row[:, None] * D + d[None, :], out)
    elif FAULT == "skips empty rows":
        tl.store(out_ptr + row[:, None] * D + d[None, :], out, mask=live & (past + row >= 0)[:, None])
    else:
        tl.store(out_ptr + row[:, None] * D + d[None, :], out, mask=live)
    if FAULT == "writes to q":
        tl.store(q_ptr + row[:, None] * D + d[None, :], q * 2, mask=live)


@triton.jit
def stub_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, q_len, kv_len, scale, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    return


@triton.jit
def kernel_of_other_arguments(q_ptr, out_ptr, D: tl.constexpr):
    tl.store(out_ptr, tl.load(q_ptr))


faulty = functools.partial(Faulty, faulty_kernel)

FAULTS = [
    "top-left", "reads q past its end", "floor", "all tiles", "one tile short", "reads v past its end", "no mask",
    "the diagonal is off", "no tail mask", "no scale", "no maximum", "NaN in empty rows", "acc not rescaled",
    "l not rescaled", "divides by 0", "no division", "writes past the end", "skips empty rows", "writes to q",
]  # fmt: skip


def flash_torch(q, k, v, scale, M, N):
    return ch03.flash_three(q * scale * q.shape[1] ** 0.5, k, v, M, N)


def flash_torch_by_step(q, k, v, scale, M, N):
    """Another way to write it, on the step of exercise 03.3."""
    past, tiles = len(k) - len(q), []
    for queries, i in zip(q.split(M), range(0, len(q), M), strict=False):
        state = torch.full([len(queries)], -torch.inf), torch.zeros(len(queries)), torch.zeros(len(queries), v.shape[1])
        for j in range(0, len(k), N):
            keys, row = torch.arange(j, min(j + N, len(k))), torch.arange(i, i + len(queries))
            hidden = keys > past + row[:, None]
            state = online_softmax_step(state, (queries @ k[keys].T * scale).masked_fill(hidden, -torch.inf), v[keys])
        tiles.append(torch.where((state[1] > 0)[:, None], state[2] / state[1][:, None], 0.0))
    return torch.cat(tiles) if tiles else torch.zeros_like(q)


def flash_torch_whole(q, k, v, scale, M, N):
    return reference.attend_one(q[:, None], k[:, None], v[:, None], softmax_scale=scale, dtype=None)[0][:, 0]


def flash_torch_rows(q, k, v, scale, M, N):
    """In tiles of queries only."""
    tiles = [flash_torch_whole(q[i : i + M], k[: max(0, len(k) - len(q) + i + M)], v[: max(0, len(k) - len(q) + i + M)],
                               scale, M, N) for i in range(0, len(q), M)]  # fmt: skip
    return torch.cat(tiles) if tiles else torch.zeros_like(q)


def flash_torch_floor(q, k, v, scale, M, N):
    return ch03.flash_one(q * scale * q.shape[1] ** 0.5, k, v, M, N)


def flash_torch_mask(q, k, v, scale, M, N):
    return ch03.flash_two(q * scale * q.shape[1] ** 0.5, k, v, M, N)


# --- 03.5 ---

RANDOM = torch.randn(8, 4)
LOW = torch.full((8, 4), 180.0), torch.full((8, 4), -180.0), torch.randn(8, 4), 4, 4
WIDE = torch.randn(8, 4), torch.randn(8, 4), torch.randn(8, 4), 8, 4
PAST = torch.randn(5, 6).double(), torch.randn(9, 6).double(), torch.randn(9, 6).double(), 3, 3
SQUARE = torch.randn(8, 4), torch.randn(8, 4), torch.randn(8, 4), 4, 4
FOUND = {"one": ("floor", LOW), "two": ("mask", WIDE)}
ONE_ROW = torch.tensor([[1.0]]), torch.tensor([[-2e4]]), torch.tensor([[1.0]]), 1, 1


RIGHT = {
    "03.1": [hbm_bytes, bytes_kernel_by_kernel],
    "03.2": [count_tiles, count_by_mask],
    "03.3": [online_softmax_step, step_by_merge, step_in_place],
    "03.4": [flash_kernel, backwards_kernel],
    "03.5": [FOUND, {"two": ["mask", PAST], "one": ("floor", ONE_ROW)}],
}
WRONG = {
    "03.1": [
        bytes_off(lambda rows, scores, tiles, part, H: (4 * rows + 2 * scores, 2 * rows + 2 * tiles * rows)),
        bytes_off(lambda rows, scores, tiles, part, H: (4 * rows + 3 * scores, 2 * rows + 2 * tiles * rows)),
        bytes_off(lambda rows, scores, tiles, part, H: (4 * scores, 2 * rows + 2 * tiles * rows)),
        bytes_off(lambda rows, scores, tiles, part, H: (4 * rows, 2 * rows + 2 * tiles * rows)),
        bytes_off(lambda rows, scores, tiles, part, H: (4 * rows + 8 * scores, 2 * rows + 2 * tiles * rows)),
        bytes_off(lambda rows, scores, tiles, part, H: (4 * rows + 4 * scores, 4 * rows)),
        bytes_off(lambda rows, scores, tiles, part, H: (4 * rows + 4 * scores, 2 * rows + 2 * part * rows)),
        bytes_off(lambda rows, scores, tiles, part, H: (4 * rows + 4 * scores, 2 * rows + 2 * int(part) * rows)),
        bytes_off(lambda rows, scores, tiles, part, H: (4 * rows + 4 * scores, 2 * tiles * rows)),
        bytes_off(lambda rows, scores, tiles, part, H: (4 * rows + 4 * scores, 2 * rows + tiles * rows)),
        lambda *a: [2 * n for n in hbm_bytes(*a)], lambda *a: [n / 2 for n in hbm_bytes(*a)],
        lambda L, H, D, M: hbm_bytes(L, 1, D, M), lambda *a: hbm_bytes(*a)[::-1], lambda *a: hbm_bytes(*a)[0],
        lambda *_: None, lambda *_: 1 / 0, lambda *_: (float("nan"), 0),
    ],
    "03.2": [
        counted_with(top_left=True), counted_with(window_by=-1), counted_with(window_by=1),
        counted_with(rows_count=True), counted_with(short_is_free=True), count_by_range, count_without_empty_rows,
        count_without_window, count_rounded_down, lambda *a: count_tiles(*a)[::-1], lambda *a: sum(count_tiles(*a)),
        lambda *a: [float(n) for n in count_tiles(*a)], lambda *_: None, lambda *_: 1 / 0,
    ],
    "03.3": [*map(faulty_step, STEP_FAULTS), lambda *_: None, lambda *_: 1 / 0, lambda state, *_: state],
    "03.4": [*map(faulty, FAULTS), stub_kernel, kernel_of_other_arguments, stub_kernel.fn, flash_torch],
    "03.5": [
        {}, {"one": FOUND["one"]}, {"two": FOUND["two"]}, {**FOUND, "three": ("empty", WIDE)},
        {**FOUND, "four": ("empty", WIDE)}, {"one": ("mask", LOW), "two": FOUND["two"]},
        {"one": FOUND["one"], "two": ("skip", WIDE)}, {"one": ("floor", SQUARE), "two": FOUND["two"]},
        {"one": FOUND["one"], "two": ("mask", SQUARE)}, {"one": ("something", LOW), "two": FOUND["two"]},
        {"one": LOW, "two": WIDE}, {"one": ("floor", LOW[:4]), "two": FOUND["two"]},
        {"one": ("floor", (*LOW[:3], 8, 4)), "two": FOUND["two"]},
        {"one": ("floor", (*LOW[:3], 0, 4)), "two": FOUND["two"]},
        {"one": FOUND["one"], "two": ("mask", (RANDOM, RANDOM[:, :3], RANDOM, 8, 4))},
        {"one": FOUND["one"], "two": ("mask", (RANDOM, RANDOM.log(), RANDOM, 8, 4))},
        {"one": FOUND["one"], "two": ("mask", (RANDOM, RANDOM, RANDOM.half(), 8, 4))},
        {"one": FOUND["one"], "two": ("mask", (RANDOM, RANDOM, torch.zeros(8, 4), 8, 4))},
        {"one": ("floor", (1e6 * LOW[0], LOW[1], *LOW[2:])), "two": FOUND["two"]},
    ],
}  # fmt: skip


class TestAnswers(exercising.Answers):
    RIGHT, WRONG = RIGHT, WRONG
    KERNEL, UNTRACED = "03.4", FAULTS.index("reads q past its end")


@pytest.mark.parametrize("name", ["03.1", "03.2", "03.3"])
def test_a_function_that_is_a_stub_is_no_error(name: str) -> None:
    assert exercises.outcome(name, lambda *_: ...) == "not yet"


def test_an_answer_with_a_stub_in_it_is_no_error() -> None:
    assert exercises.outcome("03.5", {"one": ("floor", ...)}) == "not yet"


def test_where_nothing_can_be_launched_a_torch_function_is_judged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runtime, "can_launch", lambda on=None: False)
    assert exercises.outcome("03.4", flash_kernel) == "not yet"
    assert "03.4: skipped" in capsys.readouterr().out
    assert exercises.outcome("03.4", lambda *_: ...) == "not yet"
    assert exercises.outcome("03.4", flash_torch) == "right"
    assert exercises.outcome("03.4", flash_torch_by_step) == "right"
    wrong = [flash_torch_whole, flash_torch_rows, flash_torch_floor, flash_torch_mask, lambda q, k, v, *_: v]
    exercises.assert_refuses("03.4", [*wrong, *exercising.NOT_ANSWERS])
    with pytest.raises(ExerciseError, match=r"elements was made"):
        exercises.check("03.4", flash_torch_whole)


def test_the_versions_fail_only_where_the_exercise_says_so() -> None:
    """Two faults that a square of random numbers does not show, and a version that only looks wrong."""
    for q_len, kv_len, M, N in [(8, 8, 4, 4), (16, 32, 8, 8), (8, 8, 2, 4), (9, 9, 3, 3)]:
        for name, version in ch03._VERSIONS.items():
            q, k, v = torch.randn(q_len, 4), torch.randn(kv_len, 4), torch.randn(kv_len, 4)
            expected = ch03._oracle(q, k, v, 0.5)
            assert torch.allclose(version(q, k, v, M, N).double(), expected, atol=1e-5), name
    for _ in range(200):
        q_len, kv_len, M, N = (int(torch.randint(0 if i < 2 else 1, 20, ())) for i in range(4))
        size, far = int(torch.randint(1, 5, ())), float(10 ** torch.empty(()).uniform_(-1, 2.2))
        q, k, v = far * torch.randn(q_len, size).double(), far * torch.randn(kv_len, size), torch.randn(kv_len, size)
        expected = ch03._oracle(q, k.double(), v.double(), size**-0.5)
        assert torch.allclose(ch03.flash_three(q, k.double(), v.double(), M, N), expected, atol=1e-9)


@needs_triton
def test_a_wrong_kernel_is_caught_where_accesses_cannot_be_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU. The tensors stand within larger ones, so that what is read beside them is wrong and harmless."""
    monkeypatch.setattr(ch03, "_builder", lambda: None)
    assert exercises.outcome("03.4", flash_kernel) == "right"
    for fault in FAULTS:
        if fault != "reads q past its end":  # those rows are not stored, so nothing shows
            with pytest.raises(ExerciseError):
                exercises.check("03.4", faulty(fault))


def test_a_wrong_answer_is_told_what_is_wrong() -> None:
    for name, wrong, match in [
        ("03.1", WRONG["03.1"][0], "two matrices"),
        ("03.1", WRONG["03.1"][5], "reads all keys and values anew"),
        ("03.1", WRONG["03.1"][7], "fewer than M"),
        ("03.1", lambda *a: [2 * n for n in hbm_bytes(*a)], "twice"),
        ("03.2", counted_with(top_left=True), "last query sees the last key"),
        ("03.2", counted_with(window_by=-1), "`window` places before"),
        ("03.2", counted_with(short_is_free=True), "needs a mask"),
        ("03.2", counted_with(rows_count=True), "not stored"),
        ("03.2", count_by_range, "needs no mask"),
        ("03.2", count_without_window, "there is a window"),
        ("03.2", counted_with(window_by=1), "too few skipped|too many masked|too few free"),
        ("03.2", count_without_empty_rows, "pairs in all"),
        ("03.3", faulty_step("lets NaN through"), "does not cover"),
        ("03.3", faulty_step("l not rescaled"), "l still counts"),
        ("03.3", faulty_step("acc not rescaled"), "acc still counts"),
        ("03.3", faulty_step("NaN in empty rows"), "-inf is NaN|inf\\) is NaN"),
        ("03.3", faulty_step("weighs empty rows"), "seen no key"),
        ("03.5", {"three": ("empty", WIDE)}, "'three' is right"),
        ("03.5", {"one": ("floor", (*LOW[:3], 8, 4))}, "'two' is wrong too"),
        ("03.5", {"one": ("mask", LOW)}, "not 'mask'"),
        ("03.5", {"one": ("floor", (1e6 * LOW[0], LOW[1], *LOW[2:]))}, "too coarsely"),
        ("03.5", {"one": FOUND["one"]}, "1 of the 3 versions"),
    ]:
        with pytest.raises(ExerciseError, match=match):
            exercises.check(name, wrong)


@needs_triton
@pytest.mark.skipif(not runtime.INTERPRET, reason="accesses are watched in the interpreter")
def test_a_wrong_kernel_is_told_what_is_wrong() -> None:
    for fault, match in {
        "reads q past its end": "reads row .* of q, which has 1 rows",
        "reads v past its end": "reads row .* of v",
        "writes past the end": "writes to row .* of out",
        "writes to q": "only out is its to write",
        "skips empty rows": "not written",
        "divides by 0": "must be 0",
        "all tiles": "end the loop before them",
        "top-left": "last query must see the last key",
        "floor": "every score -60000.*off by",
    }.items():
        with pytest.raises(ExerciseError, match=match):
            exercises.check("03.4", faulty(fault))
    with pytest.raises(ExerciseError, match="not written"):
        exercises.check("03.4", stub_kernel)
    with pytest.raises(ExerciseError, match=r"@triton\.jit"):
        exercises.check("03.4", flash_torch)
