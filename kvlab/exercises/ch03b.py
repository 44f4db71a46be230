"""Checkers of chapter 03b: sums about a multiprocessor, schedules, and barriers simulated; no stored outputs."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from kvlab.exercises import SEED, ExerciseError, checker, integer, near, number, whole

# --- which unit limits ---------------------------------------------------------------------------------------------


@checker("03b.1")
def block_cycles(function: Callable[..., Any]) -> None:
    """(tensor, exp, limit) of one block: M, N, D, flops, exps a cycle. Raises: ExerciseError.  Source: chapter 03b."""
    rng = random.Random(SEED)
    chips = [(4096, 16), (8192, 16), (8192, 32), (1024, 16)]
    cases = [(128, 128, D, *chip) for D in (64, 128, 256) for chip in chips[:2]]
    while len(cases) < 30:
        M, N, D = rng.choice([64, 128, 192]), rng.choice([64, 80, 128, 176]), rng.choice([32, 64, 96, 128, 192, 256])
        flops, exps = rng.choice([*chips, (rng.randint(500, 9000), rng.randint(4, 64))])
        if (flops, exps) in chips or not 0.9 < 4 * D * exps / flops < 1.1:  # no rounding shall decide it
            cases.append((M, N, D, flops, exps))
    for M, N, D, flops, exps in cases:
        what = f"block_cycles({M}, {N}, {D}, {flops}, {exps})"
        value = function(M, N, D, flops, exps)
        if not isinstance(value, tuple | list) or len(value) != 3:
            raise ExerciseError(f"{what} gave {value!r}; it must give (tensor, exp, limit)")
        tensor, exp = 4 * M * N * D / flops, M * N / exps
        for name, got, expected, slips in (
            ("tensor", value[0], tensor, {2: "there are two products: scores, and weights times values",
                                          4: "a multiplication and an addition are two operations, in both products"}),
            ("exp", value[1], exp, {D: "one exponential for each score, not for each product in it"}),
        ):  # fmt: skip
            got = number(got, f"{what}: {name}")
            for factor, hint in slips.items():
                if got and abs(got * factor / expected - 1) < 1e-9:
                    raise ExerciseError(f"{what}: {name} is {got:g}: {hint}")
                if got and name == "exp" and abs(got / expected / factor - 1) < 1e-9:
                    raise ExerciseError(f"{what}: {name} is {got:g}: {hint}")
            near(got, expected, 1e-6, f"{what}: {name}")
        limit = "both" if 4 * D * exps == flops else "tensor" if tensor > exp else "exp"
        if value[2] not in ("tensor", "exp", "both"):
            raise ExerciseError(f'{what}: limit is {value[2]!r}; it must be "tensor", "exp" or "both"')
        if value[2] != limit:
            hint = "takes longer" if limit != "both" else "is no longer than the other"
            which = limit if limit != "both" else value[2]
            raise ExerciseError(f"{what}: limit is {value[2]!r}, with {tensor:g} and {exp:g} cycles: {which} {hint}")


# --- shared memory -------------------------------------------------------------------------------------------------


def _pairs(
    D: int, M: int, N: int, size: int, budget: int, *, q: int = 1, tiles: int = 2, own: int = 16, barriers: int = 32
) -> int:
    return max(0, (budget - q * M * D * size - own) // (tiles * N * D * size + barriers))


_SLIPS: dict[str, Callable[..., int]] = {
    "Q has a place of its own, all the time": lambda *c: _pairs(*c, q=0),
    "the barriers lie in shared memory, too": lambda *c: _pairs(*c, own=0, barriers=0),
    "Q has two barriers of its own": lambda *c: _pairs(*c, own=0),
    "each pair has four barriers": lambda *c: _pairs(*c, barriers=0),
    "each pair has four barriers of 8 bytes": lambda *c: _pairs(*c, barriers=16),
    "a pair is a tile of K and a tile of V": lambda *c: _pairs(*c, tiles=1),
    "a barrier has 8 bytes": lambda *c: _pairs(*c, own=2, barriers=4),
    "Q is one tile": lambda *c: _pairs(*c, q=2),
    "an element has element_bytes bytes": lambda D, M, N, size, budget: _pairs(D, M, N, 2, budget),
}


@checker("03b.2")
def kv_buffers(function: Callable[..., Any]) -> None:
    """Pairs of K and V tiles that fit beside Q: D, M, N, element_bytes, budget. Raises: ExerciseError.

    Source: chapter 03b.
    """
    rng = random.Random(SEED)
    hopper = 227 * 1024
    cases = [(D, 128, N, 2, hopper) for D, N in ((128, 128), (128, 176), (64, 128), (256, 80), (256, 128))]
    cases += [(128, 128, 128, 1, hopper), (256, 512, 128, 2, hopper), (256, 448, 8, 2, hopper)]
    for short in (0, 1, 16, 17, 48, 49, 96, 97, 112, 113):  # three pairs fit exactly, or not quite
        cases.append((64, 64, 32, 2, 64 * 64 * 2 + 16 + 3 * (2 * 32 * 64 * 2 + 32) - short))
    for _ in range(30):
        D, M, N = rng.choice([64, 96, 128, 256]), 64 * rng.randint(1, 4), 16 * rng.randint(1, 12)
        size = rng.choice([1, 2])
        exact = M * D * size + 16 + rng.randint(0, 6) * (2 * N * D * size + 32)
        cases.append((D, M, N, size, rng.choice([hopper, 99 * 1024, exact, exact - 1, exact - 16])))
    answers = []
    for D, M, N, size, budget in cases:
        what = f"kv_buffers(D={D}, M={M}, N={N}, element_bytes={size}, budget={budget})"
        answers.append(integer(function(D, M, N, size, budget), what))
        if answers[-1] < 0:
            raise ExerciseError(f"{what} is {answers[-1]}; where not even Q fits it must be 0")
    for (D, M, N, size, budget), value in zip(cases, answers, strict=True):
        expected = _pairs(D, M, N, size, budget)
        if value != expected:
            slips = (hint for hint, slip in _SLIPS.items() if answers == [max(0, slip(*case)) for case in cases])
            hint = next(slips, "too many" if value > expected else "another pair fits")
            what = f"kv_buffers(D={D}, M={M}, N={N}, element_bytes={size}, budget={budget})"
            needed = f"{M * D * size + 16 + value * (2 * N * D * size + 32):,} bytes"
            raise ExerciseError(f"{what} is {value}: Q and {value} pairs with their barriers take {needed}: {hint}")


# --- a persistent schedule -----------------------------------------------------------------------------------------


def _causal(heads: int, length: int, M: int, N: int) -> list[int]:
    """Key blocks of each tile of M queries, head after head."""
    return [-(-min(i + M, length) // N) for _ in range(heads) for i in range(0, length, M)]


def _snake(costs: Sequence[float], programs: int) -> float:
    """When the last program ends where the tiles are dealt, longest first, to and fro."""
    ends = [0.0] * programs
    for place, cost in enumerate(sorted(costs, reverse=True)):
        lap, at = divmod(place, programs)
        ends[at if lap % 2 == 0 else programs - 1 - at] += cost
    return max(ends)


@checker("03b.3")
def schedule(function: Callable[..., Any]) -> None:
    """Which tiles each program of a persistent kernel takes: costs, programs. Raises: ExerciseError.

    Source: chapter 03b.
    """
    rng = random.Random(SEED)
    cases: list[tuple[str, list[int], int]] = [
        ("no tile", [], 3), ("one tile", [5], 3), ("three equal tiles", [4, 4, 4], 3), ("one program", [3, 1, 2], 1),
        ("four tiles", [1, 2, 3, 4], 2),
    ]  # fmt: skip
    shapes = [(32, 4096, 132), (32, 8192, 132), (16, 16384, 132)]
    while len(cases) < 12:
        heads, length, programs = shapes.pop() if shapes else (
            rng.randint(16, 64), rng.randint(4000, 16_000), rng.choice([78, 108, 114, 132])
        )  # fmt: skip
        costs = _causal(heads, length, 128, 128)
        if len(costs) <= 4096 and _snake(costs, programs) <= 1.015 * sum(costs) / programs:
            kind = f"{heads} heads of {length} tokens"
            if rng.random() < 0.4:
                rng.shuffle(costs)
                kind += ", tiles in a random order"
            cases.append((kind, costs, programs))
    for kind, costs, programs in cases:
        what = f"schedule for {kind}, {len(costs)} tiles, {programs} programs,"
        given = list(costs)
        value = function(given, programs)
        if given != costs:
            raise ExerciseError(f"{what} changed costs; it only reads them")
        taken = _assignment(value, len(costs), programs, what)
        ends = [sum(costs[tile] for tile in tiles) for tiles in taken]
        least = max([sum(costs) / programs, *costs])
        last = max(range(programs), key=lambda p: ends[p])
        if ends[last] > 1.02 * least:
            tail = costs[taken[last][-1]]
            idle = 1 - sum(costs) / (programs * ends[last])
            raise ExerciseError(
                f"{what} ends at {ends[last]:,}, when program {last} is done, {ends[last] / least - 1:.1%} after the "
                f"ideal {least:,.1f}; its last tile costs {tail}, and {idle:.1%} of the machine's time is idle"
            )


def _assignment(value: Any, tiles: int, programs: int, what: str) -> list[list[int]]:
    if not isinstance(value, list | tuple):
        raise ExerciseError(f"{what} gave {type(value).__name__}; it must give a list of {programs} lists of tiles")
    if len(value) != programs:
        raise ExerciseError(f"{what} gave {len(value)} lists; it must give one for each of {programs} programs")
    taken: list[list[int]] = []
    owner: dict[int, int] = {}
    for program, mine in enumerate(value):
        if isinstance(mine, str | bytes | dict) or not isinstance(mine, Iterable):
            raise ExerciseError(f"{what} gave {mine!r} for program {program}; it must be a list of tiles")
        taken.append([integer(tile, f"{what} program {program}: a tile") for tile in mine])
        for tile in taken[-1]:
            if not 0 <= tile < tiles:
                raise ExerciseError(f"{what} gave tile {tile} to program {program}; there are tiles 0 to {tiles - 1}")
            if tile in owner:
                raise ExerciseError(f"{what} gave tile {tile} to program {owner[tile]} and to program {program}")
            owner[tile] = program
    if len(owner) < tiles:
        missing = next(tile for tile in range(tiles) if tile not in owner)
        raise ExerciseError(f"{what} gave tile {missing} to nobody; {tiles - len(owner)} tiles are missing")
    return taken


# --- barriers, simulated -------------------------------------------------------------------------------------------


def _parity(value: Any, what: str) -> int:
    """A whole number; a boolean will do for a parity."""
    return int(value) if isinstance(value, bool) else integer(value, what)


class _Barrier:
    """An mbarrier: a phase ends when ``count`` arrivals have come. Source: PTX, mbarrier."""

    def __init__(self, count: int) -> None:
        self.count, self.pending, self.phase = count, count, 0

    def arrive(self) -> None:
        self.pending -= 1
        if self.pending == 0:
            self.pending, self.phase = self.count, self.phase + 1

    def passes(self, parity: int) -> bool:
        """Whether a wait for the end of a phase of this parity returns: not while such a phase is running."""
        return self.phase % 2 != parity


class _Machine:
    """Buffers, their barriers, a producer that loads blocks and consumers that multiply with them, in any timing.

    A program is a generator of steps: ("wait_empty", buffer, parity) and ("load", buffer) for the producer;
    ("wait", buffer, parity), ("mma", buffer), ("mma_wait", pending) and ("arrive", buffer) for consumers. Loads and
    products go on after the step that starts them; when they end is up to the order in which things are tried.
    """

    def __init__(self, buffers: int, producer: Iterator[Any], consumers: Sequence[Iterator[Any]], what: str) -> None:
        self.what, self.buffers = what, buffers
        self.full = [_Barrier(1) for _ in range(buffers)]
        self.empty = [_Barrier(len(consumers)) for _ in range(buffers)]
        self.holds: list[int | None] = [None] * buffers  # the block in each buffer
        self.arriving: deque[int] = deque()  # buffers whose block is on its way
        self.loaded = 0
        self.programs: dict[str, Iterator[Any]] = {"the producer": producer}
        self.programs |= {f"consumer {i}": program for i, program in enumerate(consumers)}
        self.done = dict.fromkeys(self.programs, 0)  # products begun
        self.flying: dict[str, deque[int]] = {name: deque() for name in self.programs}  # buffers still being read
        self.next: dict[str, Any] = {}
        for name in self.programs:
            self.advance(name)

    def advance(self, name: str) -> None:
        self.next[name] = next(self.programs[name], None)
        if self.next[name] is not None:
            self.next[name] = self.checked(name, self.next[name])

    def checked(self, name: str, step: Any) -> tuple[Any, ...]:
        sizes = {"wait": 3, "mma": 2, "mma_wait": 2, "arrive": 2}
        if name == "the producer":
            sizes = {"wait_empty": 3, "load": 2}
        well_formed = isinstance(step, tuple | list) and step and isinstance(step[0], str)
        if not well_formed or sizes.get(step[0]) != len(step):
            wanted = ", ".join(f"({kind}, {'buffer, parity' if n == 3 else 'number'})" for kind, n in sizes.items())
            raise ExerciseError(f"{self.what}: {name} yields {step!r}; a step is one of {wanted}")
        kind, numbers = step[0], [_parity(n, f"{self.what}: {step!r}") for n in step[1:]]
        if kind != "mma_wait" and not 0 <= numbers[0] < self.buffers:
            raise ExerciseError(f"{self.what}: {name} yields {step!r}; there are buffers 0 to {self.buffers - 1}")
        if len(numbers) == 2 and numbers[1] not in (0, 1):
            raise ExerciseError(f"{self.what}: {name} yields {step!r}; a parity is 0 or 1")
        return (kind, *numbers)

    def can(self, event: str) -> bool:
        if event == "a load":
            return bool(self.arriving)
        if event.startswith("a product of "):
            return bool(self.flying[event.removeprefix("a product of ")])
        step = self.next[event]
        if step is None:
            return False
        kind, *at = step
        if kind == "wait_empty":
            return self.empty[at[0]].passes(at[1])
        if kind == "wait":
            return self.full[at[0]].passes(at[1])
        return kind != "mma_wait" or len(self.flying[event]) <= at[0]

    def do(self, event: str) -> None:
        if event == "a load":
            self.full[self.arriving.popleft()].arrive()
        elif event.startswith("a product of "):
            self.flying[event.removeprefix("a product of ")].popleft()
        else:
            kind, *at = self.next[event]
            if kind == "load":
                self.load(at[0])
            elif kind == "mma":
                self.multiply(event, at[0])
            elif kind == "arrive":
                self.give_back(event, at[0])
            self.advance(event)

    def load(self, buffer: int) -> None:
        block, start = self.holds[buffer], f"{self.what}: race: block {self.loaded} is loaded into buffer {buffer}"
        for name in self.programs:
            if buffer in self.flying[name]:
                raise ExerciseError(f"{start} while a product of {name} still reads block {block} there")
            if name != "the producer" and block is not None and self.done[name] <= block:
                raise ExerciseError(f"{start} before {name} has read block {block} there")
        self.holds[buffer] = self.loaded
        self.loaded += 1
        self.arriving.append(buffer)

    def give_back(self, name: str, buffer: int) -> None:
        if buffer in self.flying[name]:
            there = f"its product still reads block {self.holds[buffer]} there"
            raise ExerciseError(f"{self.what}: race: {name} gives buffer {buffer} back while {there}")
        self.empty[buffer].arrive()

    def multiply(self, name: str, buffer: int) -> None:
        block, wanted = self.holds[buffer], self.done[name]
        if block != wanted:
            there = "nothing" if block is None else f"block {block}"
            raise ExerciseError(f"{self.what}: race: {name} reads buffer {buffer} for block {wanted}; it holds {there}")
        if buffer in self.arriving:
            raise ExerciseError(f"{self.what}: race: {name} reads buffer {buffer} before block {block} has arrived")
        self.done[name] += 1
        self.flying[name].append(buffer)

    def run(self, order: Callable[[list[str]], list[str]], only: str = "") -> None:
        """Do what can be done until nothing can, each time the first in the order given.

        Raises: ExerciseError for a race, or where programs wait for ever.
        """
        events = [
            *self.programs,
            "a load",
            *(f"a product of {name}" for name in self.programs if name != "the producer"),
        ]
        if only:
            events = [only, "a load"]
        for _ in range(100_000):
            event = next((e for e in order(list(events)) if self.can(e)), None)
            if event is None:
                break
            self.do(event)
        else:
            raise ExerciseError(f"{self.what}: no end after 100000 steps")
        stuck = {name: step for name, step in self.next.items() if step is not None}
        if stuck and not only:
            waits = "; ".join(self.waiting(name, step) for name, step in stuck.items())
            raise ExerciseError(f"{self.what}: deadlock: {waits}")

    def waiting(self, name: str, step: tuple[Any, ...]) -> str:
        if step[0] not in ("wait", "wait_empty"):
            return f"{name} waits in {step}"
        kind, barriers = ("full", self.full) if step[0] == "wait" else ("empty", self.empty)
        phase = barriers[step[1]].phase
        return f"{name} waits for parity {step[2]} of {kind}[{step[1]}], which is in phase {phase}"


def _orders(rng: random.Random) -> list[tuple[str, Callable[[list[str]], list[str]]]]:
    """Timings: who is tried first."""

    def prefer(*first: str) -> Callable[[list[str]], list[str]]:
        def rank(event: str) -> int:
            return next((i for i, word in enumerate(first) if event.startswith(word)), len(first))

        return lambda events: sorted(events, key=rank)

    return [
        ("all in turn", prefer()),
        ("a fast producer", prefer("the producer", "a load", "consumer")),
        ("slow loads", prefer("the producer", "consumer", "a product")),
        ("slow products", prefer("the producer", "a load", "consumer", "a product")),
        ("fast products", prefer("a product", "consumer", "a load", "the producer")),
        ("consumer 1 ahead", prefer("consumer 1", "a product of consumer 1", "the producer", "a load")),
        *(("a random timing", lambda events: rng.sample(events, len(events))) for _ in range(4)),
    ]


def _producer(blocks: int, buffers: int) -> Iterator[Any]:
    """A right producer."""
    for i in range(blocks):
        yield "wait_empty", i % buffers, i // buffers % 2 ^ 1
        yield "load", i % buffers


@checker("03b.4")
def phases(function: Callable[..., Any]) -> None:
    """(buffer, empty parity, full parity) of block i: i, buffers. Raises: ExerciseError.  Source: chapter 03b."""
    rng = random.Random(SEED)
    for buffers in (1, 2, 3, 4, rng.randint(5, 7)):
        for blocks in sorted({1, buffers, buffers + 1, 2 * buffers + 1, 4 * buffers + rng.randint(0, 3)}):
            places = []
            for i in range(blocks):
                what = f"phases({i}, {buffers})"
                value = function(i, buffers)
                if not isinstance(value, tuple | list) or len(value) != 3:
                    raise ExerciseError(f"{what} gave {value!r}; it must give (buffer, empty_parity, full_parity)")
                places.append(tuple(_parity(n, what) for n in value))
            for kind, order in _orders(rng):
                _run_phases(places, buffers, order, f"{buffers} buffers, {blocks} blocks, {kind}")
            what = f"{buffers} buffers, {blocks} blocks, consumers asleep"
            machine = _Machine(buffers, _loads(places), [], what)
            machine.run(lambda events: events, only="the producer")
            whole(machine.loaded, min(buffers, blocks), f"{what}: the number of blocks that are loaded ahead")


def _loads(places: Sequence[tuple[int, ...]]) -> Iterator[Any]:
    for buffer, empty, _ in places:
        yield "wait_empty", buffer, empty
        yield "load", buffer


def _products(places: Sequence[tuple[int, ...]]) -> Iterator[Any]:
    for buffer, _, full in places:
        yield "wait", buffer, full
        yield "mma", buffer
        yield "mma_wait", 0
        yield "arrive", buffer


def _run_phases(
    places: Sequence[tuple[int, ...]], buffers: int, order: Callable[[list[str]], list[str]], what: str
) -> None:
    _Machine(buffers, _loads(places), [_products(places), _products(places)], what).run(order)


# --- find the planted bugs -----------------------------------------------------------------------------------------


@checker("03b.5")
def consumer(function: Callable[..., Any]) -> None:
    """A consumer's steps over the tiles of a persistent program: tiles, buffers. Raises: ExerciseError.

    Source: chapter 03b.
    """
    rng = random.Random(SEED)
    lists = [[1], [4], [2, 2], [3, 2], [1, 1, 1, 1, 1], [0, 3, 0, 1], []]
    lists += [[rng.randint(0, 7) for _ in range(rng.randint(1, 5))] for _ in range(4)]
    for buffers in (2, 3, 4):
        for tiles in lists:
            for kind, order in _orders(rng):
                _run_consumer(function, tiles, buffers, kind, order)


def _run_consumer(
    function: Callable[..., Any], tiles: list[int], buffers: int, kind: str, order: Callable[[list[str]], list[str]]
) -> None:
    blocks, what = sum(tiles), f"tiles of {tiles} blocks, {buffers} buffers, {kind}"
    programs = []
    for _ in range(2):
        steps = function(list(tiles), buffers)
        if not isinstance(steps, Iterable) or isinstance(steps, str | bytes | dict):
            raise ExerciseError(f"{what}: the consumer gave {type(steps).__name__}; it must yield its steps")
        programs.append(iter(steps))
    machine = _Machine(buffers, _producer(blocks, buffers), programs, what)
    machine.run(order)
    for name, done in machine.done.items():
        if name == "the producer":
            continue
        if done != blocks:
            raise ExerciseError(f"{what}: {name} ends after {done} products; there are {blocks} blocks")
    for buffer, barrier in enumerate(machine.empty):
        used = machine.full[buffer].phase
        if barrier.phase != used or barrier.pending != barrier.count:
            had = barrier.phase * barrier.count + barrier.count - barrier.pending
            raise ExerciseError(
                f"{what}: at the end empty[{buffer}] has had {had} arrivals; each of 2 consumers gives a buffer back "
                f"once for each of the {used} blocks it held"
            )
