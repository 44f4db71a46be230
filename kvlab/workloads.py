"""Streams of requests, and memories that serve them without a model, so that what each wastes can be compared.

And requests that arrive over time, and real rows of scores, from a model that reads a text.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kvlab import scheduler
from kvlab.batch import Batch, as_int
from kvlab.cache import CacheFull, KVCache, NoCache
from kvlab.model import Decoder
from kvlab.paged import BlockManager, BlockPool, OutOfBlocks
from kvlab.sampling import SamplingParams
from kvlab.scheduler import _checks as checks


@dataclass(frozen=True)
class Request:
    """One request: a prompt of ``prompt_len`` tokens that is answered with ``new_tokens``.

    Raises: ValueError where one of them is under 1 or no integer.  Source: chapter 01.
    """

    prompt_len: int
    new_tokens: int

    def __post_init__(self) -> None:
        if as_int(self.prompt_len, "prompt_len") < 1 or as_int(self.new_tokens, "new_tokens") < 1:
            raise ValueError(
                f"prompt_len is {self.prompt_len} and new_tokens {self.new_tokens}; both must be 1 or more"
            )


def lognormal(
    seed: int, count: int, typical: float, spread: float, limit: int = 1024, answer: tuple[float, float] | None = None
) -> list[Request]:
    """Requests whose prompts and answers have log-normal lengths, the same for the same seed.

    Shapes and units: ``typical`` is the median length in tokens, ``spread`` the standard deviation of its logarithm,
    for prompts and, unless ``answer`` gives another pair, for answers; each is cut at ``limit // 2`` tokens and has at
    least one.

    Raises: ValueError for a count below 0, a typical length that is not positive, a negative spread, or a limit
    below 2.

    Source: chapter 01.
    """
    for median, sigma in ((typical, spread), answer or (typical, spread)):
        if as_int(count, "count") < 0 or not 0 < median < math.inf or not 0 <= sigma < 10 or as_int(limit, "limit") < 2:
            raise ValueError(
                f"count {count} must be 0 or more, median {median} positive and finite, spread {sigma} 0 to 10 and "
                f"limit {limit} 2 or more"
            )
    rng, kinds = random.Random(seed), ((typical, spread), answer or (typical, spread))
    drawn = [
        [min(limit // 2, max(1, int(rng.lognormvariate(math.log(median), sigma)))) for median, sigma in kinds]
        for _ in range(count)
    ]
    return [Request(prompt_len, new_tokens) for prompt_len, new_tokens in drawn]


def mix(name: str, count: int, seed: int = 0) -> tuple[list[Request], int]:
    """A named mix of requests and the longest text it may hold (tokens): "chat", "documents" or "mixed" (half of each).

    "chat" has the mean lengths of ShareGPT as Kwon et al. report them, prompts of 161 tokens and answers of 338;
    "documents" has long prompts, median 6000, and short answers, as in LongBench's summaries.

    Raises: ValueError for another name.  Source: chapter 02; Kwon et al. 2023, Bai et al. 2024.
    """
    if name == "chat":
        return lognormal(seed, count, 161 / math.exp(1.1**2 / 2), 1.1, 2048, (338 / math.exp(0.9**2 / 2), 0.9)), 2048
    if name == "documents":
        return lognormal(seed, count, 6000, 0.5, 32768, (200, 0.7)), 32768
    if name == "mixed":
        short, long = mix("chat", count, seed)[0], mix("documents", count, seed + 1)[0]
        return [pair[i % 2] for i, pair in enumerate(zip(short, long, strict=True))], 32768
    raise ValueError(f'name is {name!r}; it must be "chat", "documents" or "mixed"')


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


# --- memories, as slots without tensors -----------------------------------------------------------------------------

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


# --- requests that arrive -------------------------------------------------------------------------------------------


def poisson(rate: float, count: int, seed: int = 0) -> list[float]:
    """Arrival times of people who do not know of one another: gaps are exponential.

    Shapes and units: ``rate`` in arrivals a second; gives ``count`` times in seconds, rising.

    Raises: ValueError for a rate that is not positive or so low that times are not finite, a count below 0, or a seed
    that is no integer.

    Source: chapter 06.
    """
    rate, count, rng = _checked_arrivals(rate, count, seed)
    return _finite(list(itertools.accumulate(rng.expovariate(rate) for _ in range(count))), rate)


def bursty(rate: float, count: int, seed: int = 0, burst: float = 8.0) -> list[float]:
    """Arrival times that come in bursts: the starts of bursts are Poisson, their sizes geometric.

    Shapes and units: ``rate`` in arrivals a second over all, ``burst`` the mean size of a burst, whose members come
    within 50 ms; gives ``count`` times in seconds, rising.

    Raises: ValueError for a rate that is not positive or so low that times are not finite, a count below 0, a seed that
    is no integer, or a burst below 1.

    Source: chapter 06.
    """
    rate, count, rng = _checked_arrivals(rate, count, seed)
    burst, start = checks.number(burst, "burst", 1), 0.0
    times: list[float] = []
    while len(times) < count:
        start += rng.expovariate(rate / burst)
        size = 1
        while size < count and rng.random() > 1 / burst:
            size += 1
        times += [start + rng.uniform(0, 0.05) for _ in range(size)]
    return _finite(sorted(times[:count]), rate)


def _checked_arrivals(rate: float, count: int, seed: int) -> tuple[float, int, random.Random]:
    if checks.number(rate, "rate", 0, unit=" of arrivals a second") == 0:
        raise ValueError(f"rate is {rate!r}; it must be a positive number of arrivals a second")
    return float(rate), _count("count", count), random.Random(as_int(seed, "seed"))


def _finite(times: list[float], rate: float) -> list[float]:
    if times and times[-1] == math.inf:
        raise ValueError(f"rate is {rate!r}; at such a rate the last of {len(times)} does not come in finite time")
    return times


def _count(name: str, value: object) -> int:
    count = as_int(value, name)
    if count < 0:
        raise ValueError(f"{name} is {count}; it must be 0 or more")
    return count


def arriving(
    requests: Sequence[Request], times: Sequence[float], *, clients: Sequence[str] = ("",), first_id: int = 0
) -> list[scheduler.Request]:
    """Requests for a scheduler, of lengths and arrival times; the tokens of their prompts count up from 0.

    Shapes and units: a time in seconds for each request; they are taken from ``clients`` in turn, and numbered from
    ``first_id``. Answers have exactly ``new_tokens`` tokens.

    Raises: ValueError where there is not one time a request, or no client, or an entry is none.  Source: chapter 06.
    """
    requests, times = checks.entries(requests, "requests"), checks.entries(times, "times")
    clients, first_id = checks.entries(clients, "clients"), as_int(first_id, "first_id")
    if len(requests) != len(times):
        raise ValueError(f"times has {len(times)} entries; there are {len(requests)} requests, each with one")
    if not clients:
        raise ValueError("clients is empty; it must name one or more")
    for i, request in enumerate(requests):
        checks.require(request, Request, f"requests[{i}]")
    return [
        scheduler.Request(
            first_id + i, range(r.prompt_len), SamplingParams(max_tokens=r.new_tokens), t, clients[i % len(clients)]
        )
        for i, (r, t) in enumerate(zip(requests, times, strict=True))
    ]


def together(*streams: Sequence[scheduler.Request]) -> list[scheduler.Request]:
    """Several streams of requests as one, in order of arrival.

    Raises: ValueError where two requests have one id, or an entry is no request.  Source: chapter 06.
    """
    requests = itertools.chain.from_iterable(_for_a_scheduler(stream, "streams") for stream in streams)
    every = sorted(requests, key=lambda r: r.arrival)
    if len({r.request_id for r in every}) < len(every):
        raise ValueError("streams hold a request_id twice; number them with first_id")
    return every


def _for_a_scheduler(requests: Iterable[scheduler.Request], name: str) -> list[scheduler.Request]:
    found = checks.entries(requests, name)
    for request in found:
        if not isinstance(request, scheduler.Request):
            raise ValueError(f"{name} holds {request!r:.80}; it must hold requests for a scheduler, as of arriving()")
    return found


def save_trace(requests: Iterable[scheduler.Request], path: str | Path) -> None:
    """Write when requests came and how long they were, one JSON object a line, as Mooncake's traces have it.

    Shapes and units: ``timestamp`` in milliseconds, ``input_length`` and ``output_length`` in tokens.

    Raises: ValueError for an entry that is no request, or one that wants no tokens; then nothing is written.

    Source: chapter 06; Qin et al. 2024 (Mooncake).
    """
    requests = _for_a_scheduler(requests, "requests")
    for r in requests:
        if not r.params.max_tokens:
            raise ValueError(f"requests: request {r.request_id} has max_tokens 0; an answer in a trace has 1 or more")
    rows = (
        {
            "timestamp": round(1e3 * r.arrival, 3),
            "input_length": r.num_prompt_tokens,
            "output_length": r.params.max_tokens,
        }
        for r in requests
    )
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def load_trace(path: str | Path, *, limit: int | None = None, speed: float = 1.0) -> list[scheduler.Request]:
    """Requests of a trace, in order of arrival: what ``save_trace`` writes, and Mooncake's published traces.

    Shapes and units: the first ``limit`` lines (None: all); arrival times are divided by ``speed``.

    Raises: ValueError naming the line that is no request, or for a speed that is not positive or a limit below 0.

    Source: chapter 06; Qin et al. 2024 (Mooncake).
    """
    if checks.number(speed, "speed", 0) == 0:
        raise ValueError(f"speed is {speed!r}; it must be a positive number")
    limit = None if limit is None else _count("limit", limit)
    with Path(path).open(encoding="utf-8") as lines:
        texts = list(itertools.islice(lines, limit))
    found, times = [], []
    for i, text in enumerate(texts):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
            time = checks.seconds(checks.number(row["timestamp"], "timestamp", 0) / 1e3 / speed, "timestamp")
            request = Request(row["input_length"], row["output_length"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: line {i + 1} is no request: {error}") from None
        found.append(request)
        times.append(time)
    return sorted(arriving(found, times), key=lambda r: r.arrival)


def decodes_and_prompts(
    decodes: int = 32, answer: int = 1000, prompts: int = 30, prompt_len: int = 16384, gap: float = 0.65, seed: int = 0
) -> list[scheduler.Request]:
    """Texts under way, and long prompts that come between: the load that chunked prefill is for.

    Shapes and units: ``decodes`` requests of 512 tokens that are answered with ``answer`` come at once; from the first
    second on, ``prompts`` of ``prompt_len`` tokens, answered with 64, come every ``gap`` seconds, a fifth of that
    early or late.

    Raises: ValueError as ``Request``, for a number of requests below 0, a gap that is not positive, or a seed that is
    no integer.

    Source: chapter 06.
    """
    if checks.seconds(gap, "gap", least=0) == 0:
        raise ValueError(f"gap is {gap!r}; it must be a positive number of seconds")
    decodes, prompts = _count("decodes", decodes), _count("prompts", prompts)
    short, rng = arriving([Request(512, answer)] * decodes, [0.0] * decodes), random.Random(as_int(seed, "seed"))
    times = [max(0.0, 1.0 + gap * (i + rng.uniform(-0.2, 0.2))) for i in range(prompts)]
    return together(short, arriving([Request(prompt_len, 64)] * prompts, times, first_id=decodes))


# --- real rows -------------------------------------------------------------------------------------------------------


class _Watching(NoCache):
    """A cache that keeps nothing and notes the last query's scores against all keys."""

    def __init__(self, model: Decoder) -> None:
        super().__init__(model.config)
        self.rows: list[Tensor] = []

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        assert k is not None
        last = q[-1].unflatten(0, (k.shape[1], -1)) * q.shape[2] ** -0.5  # [H_kv, G, D]
        self.rows.append(torch.einsum("hgd,thd->hgt", last.float(), k.float()).flatten(0, 1))
        return super().attend(layer, q, k, v)


@torch.inference_mode()
def last_scores(model: Decoder, token_ids: Sequence[int]) -> np.ndarray:
    """The scaled scores of a text's last query against all of its keys, in every layer and head.

    Shapes and units: token_ids of one text, L of them; gives float32 [layers · H, L], the input of a softmax.

    Raises: ValueError where there are no tokens.

    Source: chapter 03.
    """
    if len(token_ids) == 0:
        raise ValueError("token_ids is empty; a text has one token or more")
    watching = _Watching(model)
    model(Batch.build([0], [list(token_ids)], [0], device=model.device), watching)
    return torch.cat(watching.rows).cpu().numpy()
