"""Checkers of chapter 06: queues, lengths and times, drawn by one seed; no stored outputs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvlab.exercises import (
    SEED,
    ExerciseError,
    Tried,
    checker,
    faults_found,
    integer,
    launching,
    number,
    parts_of,
    same_function,
    where_to_launch,
    whole,
)
from kvlab.exercises.ch03 import _hint, _only_rows_of_out, _Rows, _watched

# --- predict the numbers -------------------------------------------------------------------------------------------


def _chunk(budget: int, running: int) -> int:
    return budget - running


def _steps(prompt: int, budget: int, running: int) -> int:
    return -(-prompt // _chunk(budget, running))


def _keys(prompt: int, budget: int, running: int) -> int:
    chunk = _chunk(budget, running)
    return sum(min(i * chunk, prompt) for i in range(1, _steps(prompt, budget, running) + 1))


def _pairs(prompt: int, budget: int, running: int) -> int:
    return prompt * (prompt + 1) // 2


_NUMBERS: dict[str, tuple[Callable[..., int], dict[str, Callable[..., Any]]]] = {
    "steps": (
        _steps,
        {
            "who decodes has a token of each step first": lambda p, b, r: -(-p // b),
            "the last chunk need not be full": lambda p, b, r: p // (b - r),
        },
    ),
    "keys": (
        _keys,
        {
            "a chunk reads the keys of all chunks before it, and its own": lambda p, b, r: p,
            "a chunk reads its own keys too": lambda p, b, r: _keys(p, b, r) - p,
            "the last chunk need not be full": lambda p, b, r: (b - r) * _steps(p, b, r) * (_steps(p, b, r) + 1) // 2,
        },
    ),
    "pairs": (
        _pairs,
        {
            "causal: a query sees the keys up to its own": lambda p, b, r: p * p,
            "a query sees the key of its own token too": lambda p, b, r: p * (p - 1) // 2,
            "a query sees earlier chunks whole, and its own up to itself": lambda p, b, r: sum(
                n * (n + 1) // 2
                for n in [min(_chunk(b, r), p - i * _chunk(b, r)) for i in range(_steps(p, b, r))]
            ),
        },
    ),
}  # fmt: skip


@checker("06.1")
def chunk_costs(function: Callable[..., Any]) -> None:
    """(steps, keys, pairs) of a prompt in chunks: prompt_len, budget, running. Raises: ExerciseError.

    Source: chapter 06.
    """
    rng = random.Random(SEED)
    cases: list[tuple[int, ...]] = [(16384, 544, 32), (1024, 64, 1), (1, 8, 0), (100, 50, 0), (7, 5, 4)]
    for _ in range(30):
        running = rng.randint(1, 64)
        cases.append((rng.randint(1, 3000), running + rng.randint(1, 700), running))
    answers: dict[str, list[int]] = {name: [] for name in _NUMBERS}
    shown = ["chunk_costs({}, {}, {})".format(*case) for case in cases]
    for case, what in zip(cases, shown, strict=True):
        parts = parts_of(function(*case), ", ".join(_NUMBERS), what)
        for (name, got), part in zip(answers.items(), parts, strict=True):
            got.append(integer(part, f"{what}: {name}"))
    for name, (right, slips) in _NUMBERS.items():
        hint = _hint(cases, answers[name], slips)
        for case, what, value in zip(cases, shown, answers[name], strict=True):
            if hint and value != right(*case):
                raise ExerciseError(f"{what}: {name} are {value:,}: {hint}")
            whole(value, right(*case), f"{what}: {name}")


# --- the field's figures -------------------------------------------------------------------------------------------


def _figures(arrival: float, times: Sequence[float]) -> tuple[float, float | None, float | None]:
    gaps = [b - a for a, b in itertools.pairwise(times)]
    return times[0] - arrival, sum(gaps) / len(gaps) if gaps else None, max(gaps) if gaps else None


@checker("06.2")
def latencies(function: Callable[..., Any]) -> None:
    """(TTFT, TPOT, longest gap) of a request: arrival, times of its tokens. Raises: ExerciseError.

    Source: chapter 06.
    """
    rng, cases = random.Random(SEED), [(2.0, [5.0, 6.0, 9.0]), (0.0, [0.5]), (1.0, [3.0, 3.5])]
    for _ in range(20):
        arrival, now = rng.uniform(0, 10), 0.0
        times = [now := (now or arrival) + rng.uniform(0.01, 2) for _ in range(rng.randint(1, 12))]
        cases.append((arrival, times))
    for arrival, times in cases:
        what = f"latencies({arrival:g}, {len(times)} times)"
        _, tpot, _ = parts_of(function(arrival, list(times)), "TTFT, TPOT, longest gap", what)
        if len(times) > 1 and tpot is not None:
            got, gaps = number(tpot, f"{what}: TPOT"), len(times) - 1
            if abs(got * len(times) - (times[-1] - times[0])) < 1e-9:
                raise ExerciseError(f"{what}: TPOT is divided by {len(times)}; there are {gaps} gaps")
            if abs(got * len(times) - (times[-1] - arrival)) < 1e-9 or abs(got * gaps - (times[-1] - arrival)) < 1e-9:
                raise ExerciseError(f"{what}: TPOT counts from the arrival; the wait for the first token is TTFT's")
    same_function(function, _figures, cases)


# --- one step ------------------------------------------------------------------------------------------------------


def _decodes(request: tuple[int, int]) -> bool:
    computed, known = request
    return computed > 0 and known - computed == 1


def _plan(requests: Sequence[tuple[int, int]], budget: int, longest: int) -> list[int]:
    """The rule of the exercise, written to be compared with."""
    given = [0] * len(requests)
    for decodes in (True, False):
        for i, request in enumerate(requests):
            if _decodes(request) is decodes:
                given[i] = min(request[1] - request[0], longest, budget)
                budget -= given[i]
    return given


def _requests(rng: random.Random, count: int) -> list[tuple[int, int]]:
    found = []
    for _ in range(count):
        known = rng.choice([1, rng.randint(2, 12), rng.randint(13, 200)])
        computed = rng.choice([0, known - 1, rng.randint(0, known - 1)])
        found.append((computed, known))
    return found


@checker("06.3")
def plan_step(function: Callable[..., Any]) -> None:
    """Tokens for each request in one step: requests as (computed, known), budget, longest. Raises: ExerciseError.

    Source: chapter 06.
    """
    rng = random.Random(SEED)
    cases: list[tuple[list[tuple[int, int]], int, int]] = [
        ([(0, 100), (9, 10), (20, 21)], 10, 100), ([(0, 100), (0, 7), (0, 3)], 16, 8), ([(4, 5)], 1, 1),
        ([(0, 1), (5, 6), (0, 9)], 2, 4), ([], 8, 8), ([(0, 5)] * 3, 100, 100), ([(0, 4), (0, 1)], 4, 100),
    ]  # fmt: skip
    for _ in range(40):
        requests = _requests(rng, rng.randint(1, 9))
        cases.append((requests, rng.randint(max(1, sum(map(_decodes, requests))), 120), rng.choice([1, 4, 16, 1000])))
    for requests, budget, longest in cases:
        what = f"plan_step({requests if len(requests) < 5 else f'{len(requests)} requests'}, {budget}, {longest})"
        given = function(list(requests), budget, longest)
        if not isinstance(given, list | tuple) or len(given) != len(requests):
            raise ExerciseError(f"{what} gave {given!r:.60}; it must give a list of {len(requests)} numbers")
        tokens = [integer(n, f"{what}[{i}]") for i, n in enumerate(given)]
        _judge_plan(tokens, requests, budget, longest, what)


def _judge_plan(
    tokens: Sequence[int], requests: Sequence[tuple[int, int]], budget: int, longest: int, what: str
) -> None:
    """Say what is wrong with the tokens that one step gives out."""
    if sum(tokens) > budget:
        raise ExerciseError(f"{what}: {sum(tokens)} tokens are given out; the budget is {budget}")
    for i, (n, (computed, known)) in enumerate(zip(tokens, requests, strict=True)):
        if not 0 <= n <= min(known - computed, longest):
            raise ExerciseError(
                f"{what}: request {i} gets {n}; it is {known - computed} behind, and a chunk has {longest} at most"
            )
        if _decodes((computed, known)) and n != 1:
            raise ExerciseError(f"{what}: request {i} decodes and gets {n}; every decode gets its token in each step")
    expected = _plan(requests, budget, longest)
    for i, (n, right) in enumerate(zip(tokens, expected, strict=True)):
        if n != right:
            left = budget - sum(tokens)
            why = (
                f"{left} tokens of the budget are left unused"
                if left and n < right
                else "who came first is served first"
            )
            raise ExerciseError(f"{what}: request {i} gets {n}: {why}")


# --- the kernel ----------------------------------------------------------------------------------------------------

_UNSET = -77


@checker("06.4")
def slots_kernel(kernel: Any) -> None:
    """The slot of every new token of a mixed batch: a Triton kernel, or a torch function where none can be launched.

    Raises: ExerciseError.  Source: chapter 06.
    """
    on, rng = where_to_launch("06.4", kernel), random.Random(SEED)
    cases = [([1], [64]), ([1], [5]), ([5], [5]), ([1, 0, 20], [9, 3, 33]), ([64, 1], [64, 1])]
    cases += [_mixed(rng) for _ in range(4)]
    for i, (q_lens, lens) in enumerate(cases):
        P, N, far = rng.choice([4, 16]), rng.choice([8, 16]), i % 2 == 0  # both kinds in every check
        table, starts, seq_lens, expected = _tables(rng, q_lens, lens, P, far)
        what = f"q_lens {q_lens}, seq_lens {lens}, P {P}, N {N}" + (", far blocks" if far else "")
        if on is not None:
            got = _launched(kernel, table.to(on), starts.to(on), seq_lens.to(on), P, N, what)
        else:
            got = kernel(table.clone(), starts.clone(), seq_lens.clone(), P)
        _judge_slots(got, expected, what)


def _mixed(rng: random.Random) -> tuple[list[int], list[int]]:
    q_lens = [rng.choice([0, 1, 1, rng.randint(2, 40)]) for _ in range(rng.randint(1, 6))]
    return q_lens, [max(1, q) + rng.randint(0, 60) for q in q_lens]


def _tables(
    rng: random.Random, q_lens: list[int], lens: list[int], P: int, far: bool
) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """table [B, max_blocks] and starts, lens as int32, and the right slots; unused entries hold anything."""
    width = max(-(-n // P) for n in lens) + (len(lens) > 1)
    numbers = rng.sample(range(500), len(lens) * width)
    base = 2**31 - 500 if far else 0  # block · P then passes 2**32 for every block
    table = [[base + numbers.pop() for _ in range(width)] for _ in lens]
    starts, expected = [0], []
    for row, q, n in zip(table, q_lens, lens, strict=True):
        expected += [row[i // P] * P + i % P for i in range(n - q, n)]
        starts.append(starts[-1] + q)
        for unused in range(-(-n // P), width):
            row[unused] = rng.choice([-1, 2**30])
    made = [torch.tensor(x, dtype=torch.int32) for x in (table, starts, lens)]
    return made[0], made[1], made[2], expected


def _launched(kernel: Any, table: Tensor, starts: Tensor, lens: Tensor, P: int, N: int, what: str) -> Tensor:
    """One launch amid poison; gives out [T]."""
    count = int(starts[-1])
    out = torch.full((count, 1), _UNSET, dtype=torch.int64, device=table.device)
    tensors = {"table": _Rows(table, -5), "starts": _Rows(starts[:, None], -5), "lens": _Rows(lens[:, None], -5)}
    tensors["out"] = _Rows(out, _UNSET)
    with launching(what), _watched(tensors):
        kernel[(len(lens),)](*(t.pointer for t in tensors.values()), table.shape[1], P=P, N=N)
        if table.is_cuda:
            torch.cuda.synchronize(table.device)
    _only_rows_of_out(tensors, what)
    return tensors["out"].inside.flatten().clone()


def _judge_slots(got: Any, expected: list[int], what: str) -> None:
    if not isinstance(got, Tensor) or got.shape != (len(expected),) or got.dtype != torch.int64:
        shown = f"{list(got.shape)} of {got.dtype}" if isinstance(got, Tensor) else type(got).__name__
        raise ExerciseError(f"{what}: the slots are {shown}; they must be [{len(expected)}] of torch.int64")
    for i, (slot, right) in enumerate(zip(got.tolist(), expected, strict=True)):
        if slot == _UNSET:
            raise ExerciseError(f"{what}: the slot of new token {i} was not written")
        if slot != right:
            wrapped = (slot - right) % 2**32 == 0
            why = "; block · P passed 2³¹ and wrapped around: compute it in 64 bits" if wrapped else ""
            raise ExerciseError(f"{what}: the slot of new token {i} is {slot}; it must be {right}{why}")


# --- find the planted bugs -----------------------------------------------------------------------------------------


def plan_one(requests: list[tuple[int, int]], budget: int, longest: int) -> list[int]:
    """One of three versions of 06.3, of which one is right; gives tokens of each request. Source: exercise 06.5"""
    given = [1 if known - computed == 1 and computed else 0 for computed, known in requests]
    left = budget - sum(given)
    for i, (computed, known) in enumerate(requests):
        if not given[i]:
            wanted = min(known - computed, longest)
            if wanted > left:
                break
            given[i], left = wanted, left - wanted
    return given


def plan_two(requests: list[tuple[int, int]], budget: int, longest: int) -> list[int]:
    """One of three versions of 06.3, of which one is right; gives tokens of each request. Source: exercise 06.5"""
    order = sorted(range(len(requests)), key=lambda i: (requests[i][1] - requests[i][0] != 1 or not requests[i][0], i))
    given = [0] * len(requests)
    for i in order:
        computed, known = requests[i]
        given[i] = max(0, min(known - computed, longest, budget - sum(given)))
    return given


def plan_three(requests: list[tuple[int, int]], budget: int, longest: int) -> list[int]:
    """One of three versions of 06.3, of which one is right; gives tokens of each request. Source: exercise 06.5"""
    given = [0] * len(requests)
    for first in (True, False):
        for i, (computed, known) in enumerate(requests):
            if (known - computed == 1) == first:
                given[i] = min(known - computed, longest, budget)
                budget -= given[i]
    return given


_VERSIONS = {"one": plan_one, "two": plan_two, "three": plan_three}
_FAULTS = {"one": "idle", "three": "queue"}
_WORDS = ("budget", "longest", "idle", "queue", "stall")


@checker("06.5")
def planted_bugs(answer: Any) -> None:
    """{version: (fault, (requests, budget, longest))}: inputs that show what is wrong. Raises: ExerciseError.

    Source: chapter 06.
    """
    faults_found(answer, _VERSIONS, _FAULTS, _WORDS, _tried)


def _tried(given: Any, what: str) -> Tried:
    requests, budget, longest = parts_of(given, "requests, budget, longest", f"{what}: the input")
    if not isinstance(requests, list | tuple) or not 1 <= len(requests) <= 64:
        raise ExerciseError(f"{what}: requests are {requests!r:.60}; they must be a list of 1 to 64 pairs")
    pairs = []
    for i, pair in enumerate(requests):
        computed, known = (integer(n, f"{what}: requests[{i}]") for n in parts_of(pair, "computed, known", what))
        if not 0 <= computed < known <= 10_000:
            raise ExerciseError(f"{what}: requests[{i}] is {pair!r}; it must be 0 <= computed < known <= 10000")
        pairs.append((computed, known))
    budget, longest = integer(budget, f"{what}: budget"), integer(longest, f"{what}: longest")
    if longest < 1 or budget < max(1, sum(map(_decodes, pairs))):
        raise ExerciseError(f"{what}: budget {budget}, longest {longest}; each 1 or more, and a token for every decode")
    right = _plan(pairs, budget, longest)
    off = {
        name: float(sum(abs(a - b) for a, b in zip(version(list(pairs), budget, longest), right, strict=True)))
        for name, version in _VERSIONS.items()
    }
    return Tried(f"your input for {what} ({len(pairs)} requests, budget {budget})", off, 0.0, 1.0)
