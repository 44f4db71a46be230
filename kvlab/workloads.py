"""Streams of requests: how long prompts and answers are, and a cache that serves them without a model.

Chapters 01 and 02 fill their caches with the same stream, so that what they waste can be compared.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvlab.batch import Batch
from kvlab.cache import CacheFull, KVCache


@dataclass(frozen=True)
class Request:
    """One request: a prompt of ``prompt_len`` tokens that is answered with ``new_tokens``. Source: chapter 01."""

    prompt_len: int
    new_tokens: int


def lognormal(seed: int, count: int, typical: float, spread: float, limit: int = 1024) -> list[Request]:
    """Requests whose prompts and answers have log-normal lengths, the same for the same seed.

    Shapes and units: ``typical`` is the median length in tokens, ``spread`` the standard deviation of its logarithm;
    prompt and answer are each cut at ``limit // 2`` tokens and have at least one.

    Raises: ValueError for a count below 0, a typical length that is not positive, a negative spread, or a limit
    below 2.

    Source: chapter 01.
    """
    if count < 0 or not typical > 0 or spread < 0 or limit < 2:
        raise ValueError(
            f"count {count} and spread {spread} must be 0 or more, typical {typical} positive, limit {limit} 2 or more"
        )
    rng = random.Random(seed)
    drawn = [
        [min(limit // 2, max(1, int(rng.lognormvariate(math.log(typical), spread)))) for _ in "pn"]
        for _ in range(count)
    ]
    return [Request(prompt_len, new_tokens) for prompt_len, new_tokens in drawn]


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
