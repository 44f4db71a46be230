"""Memories that serve a stream of requests without a model, and what each wastes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvlab.batch import Batch
from kvlab.cache import CacheFull, KVCache
from kvlab.paged import BlockManager, BlockPool, OutOfBlocks
from kvlab.workloads._lengths import Request


@dataclass
class Usage:
    """What a cache held while it served: one entry a step. ``used`` is in bytes. Source: chapter 01."""

    running: list[int] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    finished: int = 0


def fill(cache: KVCache, requests: Iterable[Request], steps: int, max_running: int | None = None) -> Usage:
    """Serve requests with the cache's real bookkeeping and no model, each running sequence growing by a token a step.

    A request that the cache refuses waits at the head of the queue. Where the running ones can no longer grow, the
    newest is put back, to start again from its prompt (an engine would keep its answer so far).

    Shapes and units: ``steps`` decode steps at the most, fewer where the requests run out; ``max_running`` sequences at
    a time, None for as many as fit. Gives the sequences and bytes in use after each step.

    Raises: ValueError for a request that even the empty cache cannot hold, or for steps below 0.

    Source: chapter 01.
    """
    if steps < 0:
        raise ValueError(f"steps is {steps}; it must be 0 or more")
    queue, usage = list(requests)[::-1], Usage()
    running: dict[int, tuple[Request, int]] = {}
    next_id = 0
    for _ in range(steps):
        for seq_id in [s for s, (_, left) in running.items() if left == 0]:
            cache.free(seq_id)
            del running[seq_id]
            usage.finished += 1
        while queue and (max_running is None or len(running) < max_running):
            try:
                cache.prepare(Batch.build([next_id], [[0] * queue[-1].prompt_len], [0]))
            except CacheFull as error:
                if not running:
                    raise ValueError(f"{queue[-1]} does not fit into the empty cache: {error}") from error
                break
            request = queue.pop()
            running[next_id] = (request, request.new_tokens)
            next_id += 1
        while running:
            try:
                cache.prepare(Batch.build(list(running), [[0]] * len(running), [cache.length(s) for s in running]))
                break
            except CacheFull as error:
                newest = max(running)
                cache.free(newest)
                queue.append(running.pop(newest)[0])
                if not running:
                    raise ValueError(f"{queue[-1]} does not fit into the empty cache: {error}") from error
        if not running and not queue:
            break
        running = {seq_id: (request, left - 1) for seq_id, (request, left) in running.items()}
        usage.running.append(len(running))
        usage.used.append(cache.used_nbytes)
    return usage


FREE, RESERVED, FILLED = 0, 1, 2


class Contiguous:
    """A memory in which a request's slots lie side by side, found by first fit and reserved when it starts.

    Shapes and units: ``slots`` is the size in tokens; ``reserve`` gives the slots to reserve for a request. Ideas for
    it: the longest text that may come; the next power of two of the length, if somebody knew it.

    Source: chapter 02; the three Orca variants in Kwon et al. 2023.
    """

    def __init__(self, slots: int, reserve: Callable[[Request], int]) -> None:
        self.slots, self.reserve = slots, reserve
        self.spans: dict[int, list[int]] = {}  # id: [start, reserved, filled]

    def start(self, seq_id: int, request: Request) -> bool:
        """Reserve the first hole that is large enough and fill in the prompt; False where there is none.

        Raises: ValueError for a known id, or where ``reserve`` gives less than the prompt.  Source: chapter 02.
        """
        wanted, at = self.reserve(request), 0
        if seq_id in self.spans or wanted < request.prompt_len:
            raise ValueError(
                f"sequence {seq_id} is known, or {wanted} slots are reserved for {request}: fewer than its prompt"
            )
        for start, reserved, _ in sorted(self.spans.values()):
            if start - at >= wanted:
                break
            at = start + reserved
        if self.slots - at < wanted:
            return False
        self.spans[seq_id] = [at, wanted, request.prompt_len]
        return True

    def grow(self, seq_id: int) -> bool:
        """One more token; False past what was reserved. Source: chapter 02."""
        span = self.spans[seq_id]
        if span[2] == span[1]:
            return False
        span[2] += 1
        return True

    def finish(self, seq_id: int) -> None:
        """Give the slots back. Source: chapter 02."""
        del self.spans[seq_id]

    def counts(self) -> tuple[int, int]:
        """Slots reserved, and slots of these that hold a token. Source: chapter 02."""
        return sum(span[1] for span in self.spans.values()), sum(span[2] for span in self.spans.values())

    def state(self) -> np.ndarray:
        """What each slot is, uint8 [slots]: FREE, RESERVED and empty, or FILLED. Source: chapter 02."""
        state = np.zeros(self.slots, np.uint8)
        for start, reserved, filled in self.spans.values():
            state[start : start + reserved] = RESERVED
            state[start : start + filled] = FILLED
        return state


class Pages:
    """The same memory in blocks, by the library's own ``paged.BlockManager``.

    Shapes and units: ``slots`` and ``block_size`` in tokens.

    Source: chapter 02.
    """

    def __init__(self, slots: int, block_size: int) -> None:
        self.manager = BlockManager(BlockPool(slots // block_size, block_size))
        self.slots = self.manager.pool.num_blocks * block_size

    def start(self, seq_id: int, request: Request) -> bool:
        """Take the prompt's blocks; False where they are not there. Source: chapter 02."""
        return self._to(seq_id, request.prompt_len)

    def grow(self, seq_id: int) -> bool:
        """One more token; False where it needs a block and none is free. Source: chapter 02."""
        length = self.manager.length(seq_id)
        if length % self.manager.block_size:  # the last block has room
            self.manager.advance(seq_id, length + 1)
            return True
        return self._to(seq_id, length + 1)

    def finish(self, seq_id: int) -> None:
        """Give the blocks back. Source: chapter 02."""
        self.manager.free(seq_id)

    def state(self) -> np.ndarray:
        """What each slot is, uint8 [slots]: FREE, RESERVED and empty, or FILLED. Source: chapter 02."""
        size = self.manager.block_size
        state = np.zeros((self.manager.pool.num_blocks, size), np.uint8)
        for seq_id in self.manager.seq_ids:
            table, length = self.manager.table(seq_id), self.manager.length(seq_id)
            state[table] = FILLED
            if length % size:
                state[table[-1], length % size :] = RESERVED
        return state.ravel()

    def counts(self) -> tuple[int, int]:
        """Slots taken, and slots of these that hold a token. Source: chapter 02."""
        pool = self.manager.pool
        filled = sum(map(self.manager.length, self.manager.seq_ids))
        return (pool.num_blocks - pool.num_free) * pool.block_size, filled

    def _to(self, seq_id: int, length: int) -> bool:
        try:
            self.manager.ensure(seq_id, length)
        except OutOfBlocks:
            return False
        self.manager.advance(seq_id, length)
        return True


@dataclass
class Run:
    """What a memory held while it served, one entry a step: sequences running, and the share of slots that were FREE,
    RESERVED and FILLED, [steps, 3]; ``states`` are its slots at each snapshot. Source: chapter 02."""

    running: list[int] = field(default_factory=list)
    shares: list[tuple[float, float, float]] = field(default_factory=list)
    states: list[np.ndarray] = field(default_factory=list)
    finished: int = 0
    preempted: int = 0

    def mean(self, what: int) -> float:
        """The mean share of slots that were FREE, RESERVED or FILLED, over the second half of the steps.

        Raises: ValueError where nothing ran.  Source: chapter 02."""
        if not self.shares:
            raise ValueError("no step was served; there is no mean")
        half = self.shares[len(self.shares) // 2 :]
        return sum(share[what] for share in half) / len(half)

    @property
    def at_once(self) -> float:
        """The mean number of requests running, over the second half of the steps.

        Raises: ValueError where nothing ran.  Source: chapter 02."""
        if not self.running:
            raise ValueError("no step was served; there is no mean")
        half = self.running[len(self.running) // 2 :]
        return sum(half) / len(half)

    def row(self) -> dict[str, float]:
        """The run as a row of ``figures.table``.

        Shapes and units: shares of slots in percent and requests at once, means over the second half of the steps;
        requests finished, and how often a running one was put back, over all steps.

        Raises: ValueError where nothing ran.  Source: chapter 02."""
        kinds = {"% with a token": FILLED, "% reserved, empty": RESERVED, "% not reserved": FREE}
        shares = {name: 100 * self.mean(what) for name, what in kinds.items()}
        return shares | {"at once": self.at_once, "finished": self.finished, "put back": self.preempted}


def serve(
    memory: Contiguous | Pages, requests: Sequence[Request], steps: int, max_running: int | None = None,
    snapshot_every: int = 0,
) -> Run:  # fmt: skip
    """Serve a queue in order, one token a running request and step; a request that does not fit waits at its head.

    A request that can no longer grow goes back to the head of the queue, the newest first.

    Shapes and units: ``steps`` at the most, fewer where the requests run out; ``max_running`` requests at a time.

    Raises: ValueError for a request that does not even fit alone, or steps or max_running that are too small.

    Source: chapter 02.
    """
    if steps < 0 or (max_running is not None and max_running < 1):
        raise ValueError(f"steps is {steps} and max_running {max_running}; they must be 0 and 1 or more")
    queue, run, running, seq_id = list(requests)[::-1], Run(), {}, 0  # type: ignore[var-annotated]
    for step in range(steps):
        for done in [s for s, (request, made) in running.items() if made == request.new_tokens]:
            memory.finish(done)
            del running[done]
            run.finished += 1
        while queue and (max_running is None or len(running) < max_running) and memory.start(seq_id, queue[-1]):
            running[seq_id] = (queue.pop(), 0)
            seq_id += 1
        if not running:
            if queue:
                raise ValueError(f"{queue[-1]} does not fit into an empty memory of {memory.slots} slots")
            break
        for s in list(running):
            while s in running and not memory.grow(s):
                newest = max(running)
                if len(running) == 1:
                    raise ValueError(f"{running[s][0]} does not fit into an empty memory of {memory.slots} slots")
                memory.finish(newest)
                queue.append(running.pop(newest)[0])
                run.preempted += 1
            if s in running:
                running[s] = (running[s][0], running[s][1] + 1)
        taken, filled = memory.counts()
        run.running.append(len(running))
        run.shares.append((1 - taken / memory.slots, (taken - filled) / memory.slots, filled / memory.slots))
        if snapshot_every and step % snapshot_every == 0:
            run.states.append(memory.state())
    return run


def random_history(seed: int, steps: int, num_blocks: int = 40, block_size: int = 3) -> Iterator[BlockManager]:
    """A ``paged.BlockManager`` after each step of a random history of append, fork, truncate and free.

    Shapes and units: ``steps`` counts operations; an append that finds no block is left out.

    Source: chapter 02.
    """
    rng, books, ids = random.Random(seed), BlockManager(BlockPool(num_blocks, block_size)), itertools.count()
    for _ in range(steps):
        known = books.seq_ids
        pick = rng.choice(known) if known else None
        action = rng.choice(("append", "fork", "truncate", "free"))
        if pick is None or action == "append":
            seq_id = next(ids) if pick is None or rng.random() < 0.3 else pick
            length = books.length(seq_id) + rng.randint(1, 7)
            if books.can_ensure(seq_id, length):
                books.ensure(seq_id, length)
                books.advance(seq_id, length)
        elif action == "fork":
            books.fork(pick, next(ids))
        elif action == "truncate":
            books.truncate(pick, rng.randint(0, books.length(pick)))
        else:
            books.free(pick)
        yield books
