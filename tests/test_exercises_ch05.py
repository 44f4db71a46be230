"""Chapter 05's checkers pass what is right, however it was written, and refuse what is wrong."""

from __future__ import annotations

import itertools
from typing import ClassVar

import exercising
import numpy as np
import pytest
import torch
from faulty import Faulty

from kvlab import exercises, runtime
from kvlab.exercises import ExerciseError, ch05
from kvlab.runtime import tl, triton

IDS = ["05.1", "05.2", "05.3", "05.4", "05.5"]
needs_triton = pytest.mark.skipif(not runtime.can_launch(), reason="no kernel can be launched here")


# --- 05.1 ---


def gain(alpha, gamma, cost):
    tokens = sum(alpha**i for i in range(gamma + 1))
    return tokens, tokens / (gamma * cost + 1)


def gain_closed(alpha, gamma, cost):
    """The closed form, with its hole at 1 filled; in NumPy."""
    tokens = np.float64(gamma + 1 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha))
    return [tokens, torch.tensor(tokens) / (1 + cost * gamma)]


# --- 05.2 ---


def speculate(p, q, tokens, accept, sample, fault=""):
    made = []
    for i, x in enumerate(tokens):
        ratio = p[i, x] / q[i, x] if fault != "roles" else q[i, x] / p[i, x].clamp(min=1e-9)
        if fault == "match":
            ratio = p[i, x]
        if accept[i] >= ratio if fault != "at most" else accept[i] > ratio:
            left = (p[i] - q[i]).clamp(min=0)
            if fault == "from p":
                left = p[i]
            if fault == "from q":
                left = q[i]
            if fault == "row off by one":
                left = (p[min(i + 1, len(tokens))] - q[i]).clamp(min=0)
            total = 1.0 if fault == "not normalised" else float(left.sum())
            token = int(torch.searchsorted(left.cumsum(0), torch.tensor(sample * total, dtype=left.dtype), right=True))
            return [*made, min(token, len(left) - 1)]
        made.append(x)
    if fault == "no bonus" and tokens:
        return made
    row = p[-2] if fault == "bonus from the row before" and len(p) > 1 else p[-1]
    return [*made, int(torch.searchsorted(row.cumsum(0), torch.tensor(sample, dtype=row.dtype), right=True))]


def speculate_in_numpy(p, q, tokens, accept, sample):
    """Another way: the first rejection found at once, its row by a search over sums."""
    p, q = p.numpy(), np.concatenate([q.numpy(), np.zeros((1, p.shape[1]))])
    at = np.arange(len(tokens))
    xs = np.array(tokens, dtype=int)
    wrong = np.flatnonzero(np.array(accept) * q[at, xs] >= p[at, xs])
    count = int(wrong[0]) if len(wrong) else len(tokens)
    left = np.maximum(p[count] - q[count], 0)
    sums = np.cumsum(left / left.sum())
    return (*tokens[:count], np.int64((sums > sample).argmax()))


# --- 05.3 ---


def tree_step(parents, tokens, choices, fault=""):
    masks = [1]
    for i, parent in enumerate(parents):
        above = masks[parent + 1] if fault != "siblings too" else masks[i]
        masks.append(above | (0 if fault == "not itself" else 1 << (i + 1)))
    if fault == "no root":
        masks = [m & ~1 | (i == 0) for i, m in enumerate(masks)]
    if fault == "without the root's":
        masks = [m >> 1 for m in masks[1:]]
    at, path = -1, []
    for node, parent in enumerate(parents):
        row = at + 1 if fault != "row off by one" else max(at, 0)
        if (parent == at or fault == "any parent") and tokens[node] == choices[row]:
            at = node
            path.append(node)
    return masks, [tokens[n] for n in path] if fault == "tokens" else path


def tree_step_from_the_leaves(parents, tokens, choices):
    """Another way: ancestors collected upwards, and the deepest node all of whose ancestors fit."""
    lines = []
    for node in range(len(parents)):
        line = [node]
        while parents[line[0]] >= 0:
            line.insert(0, parents[line[0]])
        lines.append(line)
    masks = [np.int64(1), *(1 + sum(2 ** (n + 1) for n in line) for line in lines)]
    fits = [line for line in lines if all(tokens[n] == choices[parents[n] + 1] for n in line)]
    return [masks, max(fits, key=len, default=[])]


# --- 05.4 ---


@triton.jit
def residual_kernel(p_ptr, q_ptr, u_ptr, out_ptr, V, BLOCK: tl.constexpr, FAULT: tl.constexpr = ""):
    """A right kernel, and wrong ones by name."""
    seq = tl.program_id(0)
    p_ptr += seq * V
    q_ptr += seq * V
    i = tl.arange(0, BLOCK)
    total, plain = 0.0, 0.0
    for start in range(0, V, BLOCK):
        there = start + i < V
        if FAULT == "reads past the end":
            there = i >= 0
        p = tl.load(p_ptr + start + i, mask=there, other=0.0)
        q = tl.load(q_ptr + start + i, mask=there, other=0.0)
        total += tl.sum(tl.maximum(p - q, 0.0))
        plain += tl.sum(p)
    same = total == 0.0
    if FAULT == "p = q":
        same = total < 0.0
    goal = tl.load(u_ptr + seq) * tl.where(same, plain, total)
    if FAULT == "not normalised":
        goal = tl.load(u_ptr + seq)
    if FAULT == "one uniform for all":
        goal = tl.load(u_ptr) * tl.where(same, plain, total)
    before, token, last = 0.0, V, -1
    for start in range(0, V, BLOCK):
        there = start + i < V
        p = tl.load(p_ptr + start + i, mask=there, other=0.0)
        q = tl.load(q_ptr + start + i, mask=there, other=0.0)
        left = tl.where(same, p, tl.maximum(p - q, 0.0))
        if FAULT == "from p":
            left = p
        if FAULT == "roles":
            left = tl.maximum(q - p, 0.0)
        sums = tl.cumsum(left, axis=0)
        if FAULT != "every tile anew":
            sums += before
        token = tl.minimum(token, tl.min(tl.where((sums > goal) & (left > 0.0), start + i, V)))
        last = tl.maximum(last, tl.max(tl.where(left > 0.0, start + i, -1)))
        before += tl.sum(left)
    if FAULT == "last tile only":
        token = tl.maximum(token, start)
    if FAULT == "writes to q":
        tl.store(q_ptr, 0.0)
    if FAULT != "writes nothing":
        tl.store(out_ptr + seq, tl.minimum(token, last).to(tl.int64))


def residual_in_torch(p, q, u):
    left = (p - q).clamp(min=0).double()
    left = torch.where(left.sum(1, keepdim=True) > 0, left, p.double())
    sums = left.cumsum(1)
    tokens = torch.searchsorted(sums, u.double()[:, None] * sums[:, -1:], right=True)[:, 0]
    return torch.minimum(tokens, left.shape[1] - 1 - (left.flip(1) > 0).int().argmax(1))


def residual_row_by_row(p, q, u):
    """Another way: the sums of a list."""
    found = []
    for row, other, uniform in zip(p.tolist(), q.tolist(), u.tolist(), strict=True):
        left = [max(a - b, 0.0) for a, b in zip(row, other, strict=True)]
        left = left if sum(left) > 0 else row
        sums = list(itertools.accumulate(left))
        likely = [i for i, x in enumerate(left) if x > 0]
        found.append(next((i for i in likely if sums[i] > uniform * sums[-1]), likely[-1]))
    return torch.tensor(found)


@triton.jit
def residual_all_at_once(p_ptr, q_ptr, u_ptr, out_ptr, V, BLOCK: tl.constexpr):
    """Another way: one wide vector, and a count of the sums that are not reached."""
    seq, i = tl.program_id(0), tl.arange(0, 128)
    p = tl.load(p_ptr + seq * V + i, mask=i < V, other=0.0)
    q = tl.load(q_ptr + seq * V + i, mask=i < V, other=0.0)
    left = tl.where(p > q, p - q, 0.0)
    left = tl.where(tl.sum(left) > 0.0, left, p)
    sums = tl.cumsum(left / tl.sum(left))
    token = tl.sum(((sums <= tl.load(u_ptr + seq)) & (i < V)).to(tl.int32))
    tl.store(out_ptr + seq, tl.minimum(token, tl.max(tl.where(left > 0.0, i, 0))).to(tl.int64))


@triton.jit
def stub_kernel(p_ptr, q_ptr, u_ptr, out_ptr, V, BLOCK: tl.constexpr):
    pass


FAULTS = [
    "reads past the end", "p = q", "not normalised", "one uniform for all", "from p", "roles", "every tile anew",
    "last tile only", "writes to q", "writes nothing",
]  # fmt: skip


def faulty(fault):
    return Faulty(residual_kernel, fault)


# --- 05.5 ---

CERTAIN = ([0.6, 0.4, 0.0], [1.0, 0.0, 0.0])  # a draft that is certain: exact match is right, a threshold is not
BESIDE = ([0.5, 0.5, 0.0], [0.4, 0.1, 0.5])  # what the draft has too much the target has not at all
FOUND = {"one": ("threshold", CERTAIN), "three": ("match", BESIDE)}
EQUAL = ([0.5, 0.5], [0.5, 0.5])
PLAIN = ([0.2, 0.3, 0.5], [0.4, 0.4, 0.2])


def with_fault(function, fault):
    def wrong(*args):
        return function(*args, fault=fault)

    wrong.__name__ = fault
    return wrong


STEP_FAULTS = [
    "roles", "match", "from p", "from q", "row off by one", "not normalised", "no bonus", "bonus from the row before",
]  # fmt: skip
TREE_FAULTS = ["siblings too", "not itself", "no root", "without the root's", "any parent", "row off by one", "tokens"]


class TestAnswers(exercising.Answers):
    RIGHT: ClassVar = {
        "05.1": [gain, gain_closed],
        "05.2": [speculate, speculate_in_numpy],
        "05.3": [tree_step, tree_step_from_the_leaves],
        "05.4": [residual_kernel, residual_all_at_once],
        "05.5": [FOUND, {k: (w, tuple(torch.tensor(x) for x in xs)) for k, (w, xs) in FOUND.items()}],
    }  # fmt: skip
    WRONG: ClassVar = {
        "05.1": [
            lambda a, g, c: (1 + a * g, (1 + a * g) / (g * c + 1)), lambda a, g, c: (a * g, a * g / (g * c + 1)),
            lambda a, g, c: (gain(a, g, c)[0] - 1, gain(a, g, c)[1]),
            lambda a, g, c: (gain(a, g, c)[0], gain(a, g, c)[0]),
            lambda a, g, c: (gain(a, g, c)[0], 1 / gain(a, g, c)[1]),
            lambda a, g, c: (gain(a, g, c)[0], gain(a, g, c)[0] / (c + 1)), lambda a, g, c: gain(a, g, c)[0],
            lambda a, g, c: (float("nan"), 1.0),
        ],
        "05.2": [*(with_fault(speculate, fault) for fault in STEP_FAULTS), lambda *_: [], lambda *_: 3,
                 lambda p, q, tokens, accept, sample: tokens],
        "05.3": [*(with_fault(tree_step, fault) for fault in TREE_FAULTS), lambda *_: ([1], []), lambda *_: 3],
        "05.4": [*(faulty(fault) for fault in FAULTS), stub_kernel, residual_in_torch],
        "05.5": [
            {"one": FOUND["one"]}, {"one": ("roles", CERTAIN), "three": FOUND["three"]}, {"one": ("threshold", EQUAL)},
            {"two": ("residual", PLAIN)}, {"one": ("threshold", PLAIN)}, {"four": FOUND["one"]},
            {"one": ("threshold", ([0.5, 0.4], [0.5, 0.5]))}, {"one": ("threshold", ([0.5, 0.5], [1.0]))},
            {"one": ("guess", CERTAIN)}, {"one": ("threshold", ([-1.0, 2.0], [1.0, 0.0]))}, [FOUND], {},
        ],
    }  # fmt: skip
    KERNEL = "05.4"
    UNTRACED = FAULTS.index("reads past the end")


def test_the_exercises_are_these():
    assert exercises.exercises("05") == IDS


@pytest.mark.parametrize("name", ["05.1", "05.2", "05.3"])
def test_a_function_that_is_a_stub_is_no_error(name):
    assert exercises.outcome(name, lambda *_: ...) == "not yet"


def test_where_nothing_can_be_launched_a_torch_function_is_judged(monkeypatch, capsys):
    monkeypatch.setattr(runtime, "can_launch", lambda on=None: False)
    assert exercises.outcome("05.4", residual_kernel) == "not yet"
    assert "05.4: skipped" in capsys.readouterr().out
    assert exercises.outcome("05.4", residual_in_torch) == "right"
    assert exercises.outcome("05.4", residual_row_by_row) == "right"
    wrong = [lambda p, q, u: residual_in_torch(p, 0 * q, u), lambda p, q, u: residual_in_torch(q, p, u)]
    exercises.assert_refuses("05.4", [*wrong, lambda p, q, u: p, *exercising.NOT_ANSWERS])


def test_the_versions_fail_only_where_the_exercise_says_so():
    for _ in range(200):
        p, q = (ch05._rows(1, 6)[0] for _ in range(2))
        torch.testing.assert_close(ch05.step_two(p, q), p)
        torch.testing.assert_close(ch05.step_one(p, p), p)
    for given, right in ((CERTAIN, "three"), (BESIDE, "one")):
        p, q = (torch.tensor(x, dtype=torch.float64) for x in given)
        torch.testing.assert_close(ch05._VERSIONS[right](p, q), p)


def test_a_wrong_answer_is_told_what_is_wrong():
    for name, wrong, match in [
        ("05.1", TestAnswers.WRONG["05.1"][0], "all before it"),
        ("05.1", TestAnswers.WRONG["05.1"][3], "drafting costs"),
        ("05.1", TestAnswers.WRONG["05.1"][5], "once for each"),
        ("05.2", with_fault(speculate, "no bonus"), "one more token"),
        ("05.2", lambda p, q, tokens, accept, sample: tokens[:1], "gave|must give"),
        ("05.3", with_fault(tree_step, "siblings too"), "no ancestor"),
        ("05.3", with_fault(tree_step, "not itself"), "sees itself"),
        ("05.3", with_fault(tree_step, "no root"), "sees the root"),
        ("05.5", {"two": ("residual", PLAIN)}, "'two' is right"),
        ("05.5", {"one": ("threshold", PLAIN)}, "'three' is wrong too"),
    ]:
        with pytest.raises(ExerciseError, match=match):
            exercises.check(name, wrong)


@needs_triton
@pytest.mark.skipif(not runtime.INTERPRET, reason="accesses are watched in the interpreter")
def test_a_wrong_kernel_is_told_what_is_wrong():
    for fault, match in {
        "reads past the end": "reads row .* of", "writes to q": "only out is its to write",
        "writes nothing": "nothing was written", "p = q": "drawn from p|vocabulary",
    }.items():  # fmt: skip
        with pytest.raises(ExerciseError, match=match):
            exercises.check("05.4", faulty(fault))
