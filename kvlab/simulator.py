"""A chip in small: programs that share its units and wait for one another, so that overlap can be seen and counted;
and a grid of programs that waits for places on it.

A program is a generator of steps::

    ("start", unit, amount, label)   begin so much work on a unit, once the program's work before it there has ended
    ("wait", unit, count)            go on when at most ``count`` pieces of the program's own work are left there
    ("give", token, count)           give tokens to whoever takes them
    ("take", token, count)           go on when there are so many tokens, and take them
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Span = tuple[float, float, str]


def simulate(programs: Mapping[str, Iterator[tuple[Any, ...]]]) -> tuple[dict[tuple[str, str], list[Span]], float]:
    """Run programs side by side to their ends; a unit serves all who ask at once, each at an equal share.

    Shapes and units: ``programs`` by name; amounts of work in cycles of a unit that serves one alone. Gives {(program,
    unit): [(start, end, label)]} and the cycle in which the last work ends.

    Raises: ValueError for a step of another kind; RuntimeError where programs wait for one another for ever.

    Source: chapter 03b.
    """
    queues: dict[tuple[str, str], list[list[Any]]] = {}  # of each program on each unit: [left, begun, label]
    spans: dict[tuple[str, str], list[Span]] = {}
    tokens: Counter[str] = Counter()
    now, steps = 0.0, {name: next(program, None) for name, program in programs.items()}

    def may(name: str, kind: str, what: str, amount: float) -> bool:
        if kind == "take":
            return tokens[what] >= amount
        waiting = len(queues.get((name, what), ()))
        return kind == "give" or waiting <= (amount if kind == "wait" else 0)

    while True:
        moved = True
        while moved:  # everyone goes as far as they may
            moved = False
            for name, step in steps.items():
                if step is None:
                    continue
                kind, what, amount = step[:3]
                if kind not in ("start", "wait", "give", "take"):
                    raise ValueError(f"{name} yields {step!r}; a step is a start, a wait, a give or a take")
                if may(name, kind, what, amount):
                    if kind == "start":
                        queues.setdefault((name, what), []).append([amount, now, step[3]])
                    elif kind != "wait":
                        tokens[what] += amount if kind == "give" else -amount
                    steps[name], moved = next(programs[name], None), True
        running = {key: queue[0] for key, queue in queues.items() if queue}
        if not running:
            stuck = {name: step for name, step in steps.items() if step is not None}
            if stuck:
                raise RuntimeError(f"deadlock after {now:g} cycles: {stuck}")
            return spans, now
        users = Counter(unit for _, unit in running)
        passed = min(work[0] * users[unit] for (_, unit), work in running.items())  # until the next work ends
        now += passed
        for key, work in running.items():
            work[0] -= passed / users[key[1]]
            if work[0] < 1e-6:
                spans.setdefault(key, []).append((work[1], now, work[2]))
                queues[key].pop(0)


def queue(work: Iterable[tuple[float, str]], places: int) -> tuple[list[list[Span]], float]:
    """Work off a grid in its order: a place that is free takes the next program.

    Shapes and units: ``work`` is (time, label) of each program; gives for each place its [(start, end, label)], and the
    time at which the last program ends, in the same unit.

    Raises: ValueError where there is no place, or a time is negative.

    Source: chapter 04.
    """
    if places < 1:
        raise ValueError(f"places is {places}; it must be 1 or more")
    lanes: list[list[Span]] = [[] for _ in range(places)]
    free, last = [(0.0, place) for place in range(places)], 0.0
    for time, label in work:
        if not time >= 0:
            raise ValueError(f"work holds {label!r} of time {time}; it must be 0 or more")
        start, place = heapq.heappop(free)
        lanes[place].append((start, start + time, label))
        heapq.heappush(free, (start + time, place))
        last = max(last, start + time)
    return lanes, last


def pieces(blocks: Mapping[str, int], size: int) -> list[tuple[int, int, str]]:
    """Items laid end to end in a line that is cut into equal shares; a piece ends where a share does, or an item.

    Shapes and units: ``blocks`` of each item, 0 or more; ``size`` blocks a share; gives (first block, past its last,
    item) of each piece, blocks counted along the line.

    Raises: ValueError for a share without a block, or an item of fewer than none.

    Source: chapter 04; stream-K (Osama et al. 2023).
    """
    if size < 1 or min(blocks.values(), default=0) < 0:
        raise ValueError(f"size is {size} and blocks {dict(blocks)}; they must be 1 or more, and 0 or more")
    ends = list(itertools.accumulate(blocks.values()))
    bounds = itertools.pairwise(sorted({0, *ends, *range(0, ends[-1] if ends else 0, size)}))
    return [(a, b, next(item for item, end in zip(blocks, ends, strict=True) if a < end)) for a, b in bounds]
