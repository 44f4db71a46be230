"""Requests that arrive over time, for a scheduler; and their files."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvlab import scheduler
from kvlab.batch import as_count, as_int
from kvlab.sampling import SamplingParams
from kvlab.scheduler import _checks as checks
from kvlab.workloads._lengths import Request


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
    return float(rate), as_count(count, "count"), random.Random(as_int(seed, "seed"))


def _finite(times: list[float], rate: float) -> list[float]:
    if times and times[-1] == math.inf:
        raise ValueError(f"rate is {rate!r}; at such a rate the last of {len(times)} does not come in finite time")
    return times


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
    limit = None if limit is None else as_count(limit, "limit")
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
    decodes, prompts = as_count(decodes, "decodes"), as_count(prompts, "prompts")
    short, rng = arriving([Request(512, answer)] * decodes, [0.0] * decodes), random.Random(as_int(seed, "seed"))
    times = [max(0.0, 1.0 + gap * (i + rng.uniform(-0.2, 0.2))) for i in range(prompts)]
    return together(short, arriving([Request(prompt_len, 64)] * prompts, times, first_id=decodes))
