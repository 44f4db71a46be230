"""Chapter 06's checkers pass what is right, however it was written, and refuse what is wrong."""

from __future__ import annotations

import itertools
import random

import exercising
import numpy as np
import pytest
import torch
from faulty import Faulty

from kvlab import exercises, runtime
from kvlab.exercises import ExerciseError, ch06
from kvlab.runtime import tl, triton

needs_triton = pytest.mark.skipif(not runtime.can_launch(), reason="no kernel can be launched here")


# --- 06.1 ---


def chunk_costs(prompt_len, budget, running):
    chunk = budget - running
    ends = [min(i + chunk, prompt_len) for i in range(0, prompt_len, chunk)]
    return len(ends), sum(ends), prompt_len * (prompt_len + 1) // 2


def costs_token_by_token(prompt_len, budget, running):
    done = steps = keys = pairs = 0
    while done < prompt_len:
        new = min(budget - running, prompt_len - done)
        pairs += sum(done + i + 1 for i in range(new))
        done, steps, keys = done + new, steps + 1, keys + done + new
    return [np.int64(steps), torch.tensor(keys), pairs]


def costs_with(**slip):
    def function(*case):
        right = dict(zip(ch06._NUMBERS, chunk_costs(*case), strict=True))
        return tuple(slip.get(name, lambda *c, v=value: v)(*case) for name, value in right.items())

    return function


# --- 06.2 ---


def latencies(arrival, times):
    gaps = np.diff(times)
    return times[0] - arrival, float(gaps.mean()) if len(gaps) else None, float(gaps.max()) if len(gaps) else None


def latencies_plainly(arrival, times):
    if len(times) == 1:
        return [times[0] - arrival, None, None]
    return [
        times[0] - arrival, (times[-1] - times[0]) / (len(times) - 1),
        max(b - a for a, b in itertools.pairwise(times)),
    ]  # fmt: skip


# --- 06.3 ---


def plan_step(requests, budget, longest):
    given = [int(c > 0 and n - c == 1) for c, n in requests]
    for i, (c, n) in enumerate(requests):
        if not given[i]:
            given[i] = min(n - c, longest, budget - sum(given))
    return given


def plan_without(fault):
    def plan(requests, budget, longest):
        decodes = [c > 0 and n - c == 1 for c, n in requests]
        if fault == "first come alone":
            decodes = [False] * len(requests)
        given = [int(d) for d in decodes]
        order = reversed(range(len(requests))) if fault == "last come" else range(len(requests))
        for i in order:
            c, n = requests[i]
            if not decodes[i]:
                left = budget if fault == "budget for each" else budget - sum(given)
                most = 10**9 if fault == "no longest" else longest
                given[i] = min(n - c, most, left)
                if fault == "one prompt a step" and given[i]:
                    break
        return given[:-1] if fault == "one short" else given

    plan.__name__ = fault
    return plan


PLAN_FAULTS = ["first come alone", "last come", "budget for each", "no longest", "one prompt a step", "one short"]


# --- 06.4 ---


@triton.jit
def slots_kernel(table_ptr, starts_ptr, lens_ptr, out_ptr, max_blocks, P: tl.constexpr, N: tl.constexpr):
    b = tl.program_id(0)
    start, stop = tl.load(starts_ptr + b), tl.load(starts_ptr + b + 1)
    past = tl.load(lens_ptr + b) - (stop - start)
    for first in range(0, stop - start, N):
        i = first + tl.arange(0, N)
        there = i < stop - start
        block = tl.load(table_ptr + b * max_blocks + (past + i) // P, mask=there, other=0).to(tl.int64)
        tl.store(out_ptr + start + i, block * P + (past + i) % P, mask=there)


@triton.jit
def slots_one_by_one(table_ptr, starts_ptr, lens_ptr, out_ptr, max_blocks, P: tl.constexpr, N: tl.constexpr):
    b = tl.program_id(0)
    stop = tl.load(starts_ptr + b + 1)
    length = tl.load(lens_ptr + b)
    for row in range(tl.load(starts_ptr + b), stop):
        at = length - (stop - row)
        tl.store(out_ptr + row, tl.load(table_ptr + b * max_blocks + at // P).to(tl.int64) * P + at % P)


def slots_in_torch(table, starts, lens, P):
    found = []
    for b, (start, stop) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        at = torch.arange(int(lens[b]) - (stop - start), int(lens[b]))
        found.append(table[b, at // P].long() * P + at % P)
    return torch.cat(found)


@triton.jit
def faulty_slots_kernel(
    table_ptr, starts_ptr, lens_ptr, out_ptr, max_blocks, P: tl.constexpr, N: tl.constexpr, FAULT: tl.constexpr
):
    b = tl.program_id(0)
    start, stop = tl.load(starts_ptr + b), tl.load(starts_ptr + b + 1)
    past = 0 if FAULT == "counts from 0" else tl.load(lens_ptr + b) - (stop - start)
    for first in range(0, N if FAULT == "one tile" else stop - start, N):
        i = first + tl.arange(0, N)
        there = i < stop - start
        size = N if FAULT == "blocks of N" else P
        row = 0 if FAULT == "the first table only" else b
        mask = there | (FAULT == "unmasked")
        block = tl.load(table_ptr + row * max_blocks + (past + i) // size, mask=mask, other=0)
        if FAULT != "wraps":
            block = block.to(tl.int64)
        mask = there | (FAULT == "stores past the end")
        tl.store(out_ptr + start + i, block * P + (past + i) % P, mask=mask)


FAULTS = [
    "wraps",
    "counts from 0",
    "unmasked",
    "stores past the end",
    "the first table only",
    "one tile",
    "blocks of N",
]


def faulty(fault):
    return Faulty(faulty_slots_kernel, fault)


# --- 06.5 ---

IDLE = ([(0, 10), (0, 3)], 5, 100)
QUEUE = ([(0, 4), (0, 1)], 4, 100)
BOTH = ([(0, 4), (0, 1)], 3, 100)
FOUND = {"one": ("idle", IDLE), "three": ("queue", QUEUE)}

RIGHT = {
    "06.1": [chunk_costs, costs_token_by_token],
    "06.2": [latencies, latencies_plainly],
    "06.3": [plan_step, lambda *case: tuple(np.array(ch06._plan(*case)))],
    "06.4": [slots_kernel, slots_one_by_one]
    if runtime.can_launch()
    else [slots_in_torch, lambda *a: slots_in_torch(*a)],
    "06.5": [FOUND, {"three": ["queue", QUEUE], "one": ["idle", [[[0, 9], [4, 5]], 5, 8]]}],
}
WRONG = {
    "06.1": [
        *[costs_with(**{name: slip}) for name, (_, slips) in ch06._NUMBERS.items() for slip in slips.values()],
        lambda *case: chunk_costs(*case)[:2],
        lambda *case: chunk_costs(*case)[::-1],
    ],
    "06.2": [
        lambda a, t: (t[0], *latencies(a, t)[1:]),
        lambda a, t: (t[0] - a, (t[-1] - t[0]) / len(t), latencies(a, t)[2]),
        lambda a, t: (t[0] - a, (t[-1] - a) / len(t), latencies(a, t)[2]),
        lambda a, t: (t[0] - a, latencies(a, t)[1] or 0.0, latencies(a, t)[2]),
        lambda a, t: (*latencies(a, t)[:2], max(t) - min(t)),
    ],
    "06.3": [
        *map(plan_without, PLAN_FAULTS),
        ch06.plan_one, ch06.plan_three,
    ],
    "06.4": [*map(faulty, FAULTS), slots_in_torch] if runtime.can_launch() else [lambda *a: a[0], lambda *a: a[1]],
    "06.5": [
        {}, {"one": FOUND["one"]}, {**FOUND, "two": ("idle", IDLE)}, {**FOUND, "one": ("stall", IDLE)},
        {**FOUND, "three": ("queue", BOTH)}, {**FOUND, "four": ("idle", IDLE)},
        {**FOUND, "one": ("idle", ([(0, 1)], 5, 9))},
        {**FOUND, "one": ("idle", ([(5, 3)], 5, 9))}, {**FOUND, "one": ("idle", ([(5, 6)] * 3, 2, 9))},
    ],
}  # fmt: skip


class TestAnswers(exercising.Answers):
    RIGHT, WRONG, KERNEL, UNTRACED = RIGHT, WRONG, "06.4", FAULTS.index("unmasked")


def test_there_are_five_exercises() -> None:
    assert exercises.exercises("06") == list(RIGHT)


def test_a_wrong_answer_is_told_what_is_wrong() -> None:
    for name, wrong, match in [
        ("06.1", WRONG["06.1"][0], "token of each step first"),
        ("06.1", WRONG["06.1"][2], "all chunks before it"),
        ("06.2", WRONG["06.2"][1], "there are 2 gaps"),
        ("06.2", WRONG["06.2"][2], "counts from the arrival"),
        ("06.3", plan_without("first come alone"), "every decode gets its token"),
        ("06.3", plan_without("budget for each"), "the budget is"),
        ("06.3", plan_without("no longest"), "at most"),
        ("06.3", ch06.plan_one, "left unused"),
        ("06.5", {"two": ("idle", IDLE)}, "'two' is right"),
        ("06.5", {"three": ("queue", BOTH)}, "'one' is wrong too"),
        ("06.5", {"one": FOUND["one"]}, "1 of the 3 versions"),
    ]:
        with pytest.raises(ExerciseError, match=match):
            exercises.check(name, wrong)


@needs_triton
@pytest.mark.skipif(not runtime.INTERPRET, reason="accesses are watched in the interpreter")
def test_a_wrong_kernel_is_told_what_is_wrong() -> None:
    for fault, match in {
        "unmasked": "reads row|must be|could not be run",
        "stores past the end": "writes to row .* of out|must be",
        "one tile": "not written",
    }.items():
        with pytest.raises(ExerciseError, match=match):
            exercises.check("06.4", faulty(fault))


def test_slots_past_the_end_of_an_int_are_told() -> None:
    table, starts, lens, expected = ch06._tables(random.Random(0), [3], [9], 4, True)
    assert min(expected) > 2**32
    wrapped = torch.tensor([e - 2**32 for e in expected])
    with pytest.raises(ExerciseError, match="64 bits"):
        ch06._judge_slots(wrapped, expected, "these")
    ch06._judge_slots(slots_in_torch(table, starts, lens, 4), expected, "these")
