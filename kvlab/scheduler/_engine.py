"""The loop around a model: schedule, one forward pass, sample, update."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from kvlab.cache import KVCache
from kvlab.generate import check_prompt
from kvlab.model import Decoder
from kvlab.sampling import sample
from kvlab.scheduler import _checks as checks
from kvlab.scheduler._metrics import Metrics
from kvlab.scheduler._request import Request, in_order
from kvlab.scheduler._scheduler import Scheduler
from kvlab.scheduler._step import Step


@torch.inference_mode()
def forward(model: Decoder, cache: KVCache, step: Step) -> list[int]:
    """Run a step through the model, one mixed batch, and choose a token for everyone who has caught up.

    Shapes and units: gives token ids in the order of ``step.sampled``.

    Raises: ValueError for a step with nothing to compute; what the model, the cache and the sampler raise.

    Source: chapter 06.
    """
    checks.require(step, Step, "step")
    if not step:
        raise ValueError("step is empty; it must have something to compute")
    sampled = step.sampled
    logits = model(step.batch(model.device), cache)
    labels = [f"request {r.request_id}, position {r.num_tokens}" for r in sampled]
    return sample(logits, [r.params for r in sampled], [r.num_tokens for r in sampled], labels=labels)


def serve(
    model: Decoder,
    cache: KVCache,
    scheduler: Scheduler,
    requests: Iterable[Request] = (),
    *,
    metrics: Metrics | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Request]:
    """Serve requests as they arrive, and yield each when it has ended, for whatever reason.

    Between two of them the caller may add and cancel others. A prompt that the model cannot read is rejected. A step
    that fails is undone before its error goes on, so that nobody loses a token; who had not come by then is still "new"
    (of an iterator, one request may have been read ahead).

    Shapes and units: ``requests`` in order of arrival, in seconds from the call; ``clock`` gives seconds.

    Raises: ValueError for a scheduler that keeps other books than the cache, or allows texts longer than the model's
    context, for requests that are not new or not in order (those of a list before anything is served), or an argument
    of a wrong type; what the model, the cache and the sampler raise.

    Source: chapter 06.
    """
    checks.require(scheduler, Scheduler, "scheduler")
    if getattr(cache, "manager", None) is not scheduler.manager:
        raise ValueError(
            f"cache is a {type(cache).__name__}, whose blocks are not the scheduler's; build it as "
            "Scheduler(cache.manager, ...)"
        )
    if metrics is not None:
        checks.require(metrics, Metrics, "metrics")
    if not callable(clock):
        raise ValueError(f"clock is {clock!r:.80}; it must be a function that gives seconds")
    longest = model.config.max_seq_len
    if scheduler.max_length > longest:
        raise ValueError(
            f"scheduler lets a text have {scheduler.max_length} tokens; the model's context is {longest}: give the "
            f"scheduler max_model_len={longest}"
        )
    if isinstance(requests, Sequence) or not isinstance(requests, Iterable):
        requests = list(in_order(checks.entries(requests, "requests"), "requests"))
    return _serve(model, cache, scheduler, in_order(requests, "requests"), metrics, clock)


def _serve(
    model: Decoder, cache: KVCache, scheduler: Scheduler, coming: Iterator[Request], metrics: Metrics | None,
    clock: Callable[[], float],
) -> Iterator[Request]:  # fmt: skip
    begin, following = clock(), next(coming, None)
    while following is not None or scheduler.has_work:
        now = clock() - begin
        if following is not None and not scheduler.has_work and following.arrival > now:
            time.sleep(following.arrival - now)
            continue
        while following is not None and following.arrival <= now:
            _add(model, scheduler, following, now)
            following = next(coming, None)
        step = scheduler.schedule(now)
        if step:
            try:
                tokens = forward(model, cache, step)
            except BaseException:
                scheduler.undo(step, clock() - begin)
                raise
            end = clock() - begin
            scheduler.update(step, tokens, end)
            if metrics is not None:
                metrics.observe(scheduler, step, now, end)
        yield from _ended(scheduler, metrics)
    yield from _ended(scheduler, metrics)


def _ended(scheduler: Scheduler, metrics: Metrics | None) -> Iterator[Request]:
    """Whoever has ended, taken one by one: a caller that stops listening leaves the others to be taken."""
    while done := scheduler.take_finished(1):
        if metrics is not None:
            metrics.finish(done[0])
        yield done[0]


def _add(model: Decoder, scheduler: Scheduler, request: Request, now: float) -> None:
    if request.num_tokens < scheduler.max_length:  # else the scheduler says so itself
        try:
            check_prompt(model, request.prompt)
        except ValueError as error:
            return scheduler.reject(request, str(error), now)
    scheduler.add(request, now)
