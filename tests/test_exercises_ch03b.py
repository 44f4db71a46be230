"""Chapter 03b's checkers pass what is right, however it was written, and refuse what is wrong."""

from __future__ import annotations

import heapq
import random

import exercising
import numpy as np
import pytest
import torch

from kvlab import exercises
from kvlab.exercises import ExerciseError, ch03b

IDS = ["03b.1", "03b.2", "03b.3", "03b.4", "03b.5"]


# --- 03b.1 ---


def block_cycles(M, N, D, flops, exps):
    tensor, exp = 4 * M * N * D / flops, M * N / exps
    return tensor, exp, "both" if tensor == exp else "tensor" if tensor > exp else "exp"


def cycles_by_product(M, N, D, flops, exps):
    """Each product by itself, in NumPy; the limit from the head size at which both take as long."""
    scores, output = np.float64(2 * M * N * D) / flops, np.float64(2 * M * D * N) / flops
    even = flops / (4 * exps)
    limit = {True: "tensor", False: "exp"}[even < D]
    return [scores + output, torch.tensor(M * N / exps, dtype=torch.float64), "both" if even == D else limit]


def cycles_off(tensor=1.0, exp=1.0, limit=None):
    def wrong(M, N, D, flops, exps):
        a, b, which = block_cycles(M, N, D, flops, exps)
        return a * tensor, b * (D if exp == "D" else exp), limit or which

    return wrong


def cycles_serial(M, N, D, flops, exps):
    a, b, _ = block_cycles(M, N, D, flops, exps)
    return a + b, b, "tensor"


# --- 03b.2 ---


def kv_buffers(D, M, N, element_bytes, budget):
    left = budget - M * D * element_bytes - 2 * 8
    return max(0, left // (2 * N * D * element_bytes + 4 * 8))


def buffers_by_counting(D, M, N, element_bytes, budget):
    """Another way to write it: one pair after the other, until it no longer fits."""
    used, pairs = (M * D * element_bytes + 16), -1
    while used <= budget:
        pairs, used = pairs + 1, used + 2 * N * D * element_bytes + 32
    return np.int64(max(pairs, 0))


def buffers_off(q=1, q_barriers=16, barriers=32, tiles=2, floor=0):
    def wrong(D, M, N, element_bytes, budget):
        left = budget - q * M * D * element_bytes - q_barriers
        return max(floor, left // (tiles * N * D * element_bytes + barriers))

    return wrong


# --- 03b.3 ---


def schedule(costs, programs):
    """Longest first, each to the program that is free first."""
    free, taken = [(0, p) for p in range(programs)], [[] for _ in range(programs)]
    for tile in sorted(range(len(costs)), key=lambda t: -costs[t]):
        end, p = free[0]
        taken[p].append(tile)
        heapq.heapreplace(free, (end + costs[tile], p))
    return taken


def snake(costs, programs):
    """Longest first, dealt to and fro; no costs are added up."""
    order = np.argsort(-np.array(costs, dtype=np.float64), kind="stable")
    laps = [order[i : i + programs] for i in range(0, len(order), programs)]
    taken = [[] for _ in range(programs)]
    for lap, tiles in enumerate(laps):
        for at, tile in enumerate(tiles):
            taken[at if lap % 2 == 0 else programs - 1 - at].append(tile)
    return tuple(tuple(t) for t in taken)


def in_order(order):
    """Each to the program that is free first, in another order."""

    def wrong(costs, programs):
        free, taken = [(0, p) for p in range(programs)], [[] for _ in range(programs)]
        for tile in order(costs):
            end, p = heapq.heappop(free)
            taken[p].append(tile)
            heapq.heappush(free, (end + costs[tile], p))
        return taken

    return wrong


def schedule_in_turn(costs, programs):
    return [list(range(p, len(costs), programs)) for p in range(programs)]


def schedule_in_chunks(costs, programs):
    return [list(range(p * len(costs) // programs, (p + 1) * len(costs) // programs)) for p in range(programs)]


def schedule_dealt(costs, programs):
    order = sorted(range(len(costs)), key=lambda t: -costs[t])
    return [order[p::programs] for p in range(programs)]


def schedule_loses_one(costs, programs):
    taken = schedule(costs, programs)
    if taken[0]:
        taken[0].pop()
    return taken


def schedule_repeats_one(costs, programs):
    taken = schedule(costs, programs)
    return [taken[0] + taken[0][-1:], *taken[1:]]


def schedule_of_costs(costs, programs):
    return [[costs[t] for t in tiles] for tiles in schedule(costs, programs)]


def schedule_flat(costs, programs):
    owner = [0] * len(costs)
    for p, tiles in enumerate(schedule(costs, programs)):
        for t in tiles:
            owner[t] = p
    return owner


def schedule_empties_costs(costs, programs):
    taken = schedule(costs, programs)
    costs.clear()
    return taken


# --- 03b.4 ---


def phases(i, buffers):
    return i % buffers, i // buffers % 2 ^ 1, i // buffers & 1


def phases_by_walking(i, buffers):
    """Another way to write it: as a kernel does that counts a buffer and a parity on; from the last buffer down."""
    buffer, parity = buffers - 1, 0
    for _ in range(i):
        buffer -= 1
        if buffer < 0:
            buffer, parity = buffers - 1, 1 - parity
    return [buffer, not parity, np.int32(parity)]


# --- 03b.5 ---


def consumer(tiles, buffers):
    it = 0
    for blocks in tiles:
        for _ in range(blocks):
            yield "wait", it % buffers, it // buffers % 2
            yield "mma", it % buffers
            yield "mma_wait", 0
            yield "arrive", it % buffers
            it += 1


def consumer_in_flight(tiles, buffers):
    """Another right one: a product is left in flight while the next begins; a buffer is given back one block later."""
    steps, buffer, parity, held = [], 0, False, None
    for blocks in tiles:
        for _ in range(blocks):
            steps += [("wait", buffer, parity), ("mma", buffer)]
            if held is not None:
                steps += [["mma_wait", 1], ["arrive", held]]
            held, buffer = buffer, buffer + 1
            if buffer == buffers:
                buffer, parity = 0, not parity
    return [*steps, *([("mma_wait", 0), ("arrive", held)] if held is not None else [])]


def planted(resets=True, early=True):
    """The exercise's consumer, with both faults or one."""

    def consumer(tiles, buffers):
        it = 0
        for blocks in tiles:
            if resets:
                it = 0
            for _ in range(blocks):
                buffer, parity = it % buffers, it // buffers % 2
                yield "wait", buffer, parity
                yield "mma", buffer
                if early:
                    yield "arrive", buffer
                    yield "mma_wait", 0
                else:
                    yield "mma_wait", 0
                    yield "arrive", buffer
                it += 1

    return consumer


def consumer_off(fault):
    def wrong(tiles, buffers):
        it = 0
        for blocks in tiles:
            for block in range(blocks):
                buffer, parity = it % buffers, it // buffers % 2
                if fault != "does not wait":
                    yield "wait", buffer, parity ^ (fault == "the other parity")
                yield "mma", buffer
                yield "mma_wait", 1 if fault == "one too few awaited" else 0
                if fault != "never arrives" and not (fault == "keeps a tile's last" and block == blocks - 1):
                    yield "arrive", buffer
                if fault == "arrives twice":
                    yield "arrive", buffer
                if fault == "an unknown step":
                    yield "sleep", buffer
                if fault == "a step of one number":
                    yield 3
                if fault == "buffer out of range":
                    yield "arrive", buffers
                it += 1
            if fault == "one tile only":
                return

    wrong.__name__ = fault
    return wrong


CONSUMER_FAULTS = [
    "does not wait", "the other parity", "one too few awaited", "never arrives", "keeps a tile's last", "arrives twice",
    "an unknown step", "a step of one number", "buffer out of range", "one tile only",
]  # fmt: skip


RIGHT = {
    "03b.1": [block_cycles, cycles_by_product],
    "03b.2": [kv_buffers, buffers_by_counting],
    "03b.3": [schedule, snake],
    "03b.4": [phases, phases_by_walking],
    "03b.5": [consumer, consumer_in_flight],
}
WRONG = {
    "03b.1": [
        cycles_off(tensor=0.5), cycles_off(tensor=0.25), cycles_off(tensor=2), cycles_off(exp="D"), cycles_off(exp=2),
        cycles_off(limit="tensor"), cycles_off(limit="exp"), cycles_off(limit="both"), cycles_off(limit="memory"),
        cycles_serial, lambda *a: block_cycles(*a)[:2], lambda M, N, D, *_: block_cycles(M, N, D, 4096, 16),
        lambda *_: None, lambda *_: 1 / 0,
    ],
    "03b.2": [
        buffers_off(q=0), buffers_off(q=2), buffers_off(q_barriers=0), buffers_off(barriers=0),
        buffers_off(q_barriers=0, barriers=0), buffers_off(tiles=1), buffers_off(floor=-99), buffers_off(floor=1),
        lambda D, M, N, size, budget: kv_buffers(D, M, N, 2, budget),
        lambda D, M, N, size, budget: kv_buffers(D, M, N, size, 227 * 1024),
        lambda D, M, N, size, budget: kv_buffers(D, M, N, size, budget // 1024 * 1000),
        lambda *a: float(kv_buffers(*a)), lambda *a: kv_buffers(*a) + 1, lambda *_: None, lambda *_: 1 / 0,
    ],
    "03b.3": [
        schedule_in_turn, schedule_in_chunks, schedule_dealt, schedule_loses_one, schedule_repeats_one,
        schedule_of_costs, schedule_flat, schedule_empties_costs, in_order(lambda costs: range(len(costs))),
        in_order(lambda costs: range(len(costs) - 1, -1, -1)),
        in_order(lambda costs: sorted(range(len(costs)), key=lambda t: costs[t])),
        lambda costs, programs: schedule(costs, programs)[:-1], lambda costs, programs: schedule(costs, programs + 1),
        lambda costs, programs: [list(range(len(costs)))] + [[]] * (programs - 1), lambda *_: None, lambda *_: 1 / 0,
    ],
    "03b.4": [
        lambda i, n: (i % n, i // n & 1, i // n & 1), lambda i, n: (i % n, i // n & 1, i // n & 1 ^ 1),
        lambda i, n: (i % n, i // n & 1 ^ 1, i // n & 1 ^ 1), lambda i, n: (i % n, i & 1 ^ 1, i & 1),
        lambda i, n: (i % n, 1, 0), lambda i, n: (i % n, 0, 0), lambda i, n: (0, i & 1 ^ 1, i & 1),
        lambda i, n: (i % n, i // n ^ 1, i // n), lambda i, n: (i, 1, 0), lambda i, n: (i % n + 1, 1, 0),
        lambda i, n: (i % max(1, n - 1), i // max(1, n - 1) & 1 ^ 1, i // max(1, n - 1) & 1),
        lambda i, n: (i % n, i // n & 1 ^ 1), lambda i, n: (float(i % n), i // n & 1 ^ 1, i // n & 1),
        lambda i, n: (i % 2, i // 2 & 1 ^ 1, i // 2 & 1), lambda *_: None, lambda *_: 1 / 0,
    ],
    "03b.5": [
        planted(), planted(resets=False), planted(early=False), *map(consumer_off, CONSUMER_FAULTS),
        lambda tiles, buffers: [], lambda *_: None, lambda *_: 1 / 0, lambda *_: "wait",
    ],
}  # fmt: skip


class TestAnswers(exercising.Answers):
    RIGHT, WRONG = RIGHT, WRONG


@pytest.mark.parametrize("name", IDS)
def test_a_function_that_is_a_stub_is_no_error(name: str) -> None:
    assert exercises.outcome(name, lambda *_: ...) == "not yet"


def test_a_chapter_with_a_letter_has_its_own_exercises() -> None:
    assert exercises.exercises("03b") == IDS
    assert not set(IDS) & set(exercises.exercises("03"))


def test_the_faulty_consumer_is_right_where_the_exercise_says_so() -> None:
    """One tile, and products that end at once."""
    for kind, order in ch03b._orders(random.Random(exercises.SEED)):
        if kind == "fast products":
            for blocks in (1, 2, 5, 9):
                ch03b._run_consumer(planted(), [blocks], 2, kind, order)


def test_a_fresh_barrier_lets_parity_1_pass() -> None:
    barrier = ch03b._Barrier(2)
    seen = []
    for _ in range(4):
        seen.append((barrier.phase, barrier.passes(0), barrier.passes(1)))
        barrier.arrive()
    assert seen == [(0, False, True), (0, False, True), (1, True, False), (1, True, False)]


def test_a_wrong_answer_is_told_what_is_wrong() -> None:
    for name, wrong, match in [
        ("03b.1", cycles_off(tensor=0.5), "two products"),
        ("03b.1", cycles_off(tensor=0.25), "two operations"),
        ("03b.1", cycles_off(exp="D"), "each score"),
        ("03b.1", cycles_off(limit="tensor"), "tensor is no longer than the other"),
        ("03b.2", buffers_off(q=0), "a place of its own"),
        ("03b.2", buffers_off(q_barriers=0, barriers=0), "the barriers lie in shared"),
        ("03b.2", buffers_off(q_barriers=0), "two barriers of its own"),
        ("03b.2", buffers_off(barriers=0), "each pair has four"),
        ("03b.2", buffers_off(tiles=1), "a tile of K and a tile of V"),
        ("03b.2", buffers_off(floor=-99), "must be 0"),
        ("03b.3", schedule_in_turn, "after the ideal"),
        ("03b.3", schedule_loses_one, "to nobody"),
        ("03b.3", schedule_repeats_one, "and to program 0"),
        ("03b.3", schedule_empties_costs, "changed costs"),
        ("03b.4", WRONG["03b.4"][0], r"deadlock: the producer waits for parity 0 of empty\[0\], which is in phase 0"),
        ("03b.4", WRONG["03b.4"][2], "race: consumer . reads buffer 0 for block 0; it holds nothing|before block 0"),
        ("03b.4", WRONG["03b.4"][6], "loaded ahead"),
        ("03b.5", planted(early=False), "deadlock|race"),
        ("03b.5", planted(resets=False), "gives buffer . back while its product"),
        ("03b.5", consumer_off("does not wait"), "race"),
        ("03b.5", consumer_off("one tile only"), "ends after|deadlock"),
        ("03b.5", consumer_off("an unknown step"), "a step is one of"),
    ]:
        with pytest.raises(ExerciseError, match=match):
            exercises.check(name, wrong)
