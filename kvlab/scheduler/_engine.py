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

    Raises: ValueError for a step with nothing to compute, or what is no model; what the model, the cache and the
    sampler raise.

    Source: chapter 06.
    """
    checks.require(step, Step, "step")
    if not step:
        raise ValueError("step is empty; it must have something to compute")
    _require_model(model)
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

    Shapes and units: ``requests`` in order of arrival, in seconds on the scheduler's clock, which begins at 0 and goes
    on where the last call left it; ``clock`` gives seconds.

    Raises: ValueError for a scheduler that keeps other books than the cache, has a step in flight, or allows texts
    longer than the model's context or the cache's ``max_model_len``, for metrics of another run, requests that are not
    new, not in order or of one id (those of a list before anything is served), a clock that stands still, or an
    argument of a wrong type; what the model, the cache and the sampler raise.

    Source: chapter 06.
    """
    checks.require(scheduler, Scheduler, "scheduler")
    _require_model(model)
    if getattr(cache, "manager", None) is not scheduler.manager:
        raise ValueError(
            f"cache is a {type(cache).__name__}, whose blocks are not the scheduler's; build it as "
            "Scheduler(cache.manager, ...)"
        )
    if metrics is not None:
        checks.require(metrics, Metrics, "metrics")
        ends = metrics.steps["end"]
        if len(ends) and ends[-1] > scheduler.time:
            raise ValueError(
                f"metrics holds a step that ended at {ends[-1]}, the scheduler is at {scheduler.time}; both must be "
                "of one run"
            )
    scheduler.require_idle()
    if not callable(clock):
        raise ValueError(f"clock is {clock!r:.80}; it must be a function that gives seconds")
    bounds = {"the model's context": model.config.max_seq_len}
    if (room := getattr(cache, "max_model_len", None)) is not None:
        bounds["the cache's max_model_len"] = room
    for name, longest in bounds.items():
        if scheduler.max_length > longest:
            raise ValueError(
                f"scheduler lets a text have {scheduler.max_length} tokens; {name} is {longest}: give the scheduler "
                f"max_model_len={longest}"
            )
    if isinstance(requests, Sequence) or not isinstance(requests, Iterable):
        requests = list(in_order(checks.entries(requests, "requests"), "requests"))
        scheduler.require_unused(requests, "requests")
    return _serve(model, cache, scheduler, in_order(requests, "requests"), metrics, clock)


def _serve(
    model: Decoder, cache: KVCache, scheduler: Scheduler, coming: Iterator[Request], metrics: Metrics | None,
    clock: Callable[[], float],
) -> Iterator[Request]:  # fmt: skip
    begin, following = clock() - scheduler.time, next(coming, None)
    while following is not None or scheduler.has_work:
        now = clock() - begin
        if following is not None and not scheduler.has_work and following.arrival > now:
            time.sleep(min(following.arrival - now, 60.0))
            if clock() - begin <= now:
                raise ValueError(f"clock stands still at {now}; it must give seconds that pass")
            continue
        while following is not None and following.arrival <= now:
            _add(model, scheduler, following, now)
            following = next(coming, None)
        step = scheduler.schedule(now)
        if step and _readable(model, scheduler, step, now):
            try:
                tokens = forward(model, cache, step)
                end = clock() - begin
                scheduler.update(step, tokens, end)
            except BaseException:
                if scheduler.in_flight is step:
                    scheduler.undo(step, now)
                raise
            if metrics is not None:
                metrics.observe(scheduler, step, now, end)
        yield from _ended(scheduler, metrics)
    yield from _ended(scheduler, metrics)


def _require_model(model: object) -> None:
    if not (callable(model) and hasattr(model, "config") and hasattr(model, "device")):
        raise ValueError(f"model is {model!r:.80}; it must be a Decoder, or be called as one")


def _readable(model: Decoder, scheduler: Scheduler, step: Step, now: float) -> bool:
    """Whether the model can read all prompts that begin in a step; else it is undone, and those it cannot are rejected.

    Callers may have added them to the scheduler themselves."""
    wrong = {request: why for request in step.prefills if (why := _unreadable(model, request)) is not None}
    if wrong:
        scheduler.undo(step, now)
        for request, why in wrong.items():
            scheduler.reject(request, why, now)
    return not wrong


def _unreadable(model: Decoder, request: Request) -> str | None:
    """Why the model cannot read a prompt; None where it can, which is looked at once."""
    if not request.readable:
        try:
            check_prompt(model, request.prompt)
        except ValueError as error:
            return str(error)
        request.readable = True
    return None


def _ended(scheduler: Scheduler, metrics: Metrics | None) -> Iterator[Request]:
    """Whoever has ended, taken one by one: a caller that stops listening leaves the others to be taken."""
    while done := scheduler.take_finished(1):
        if metrics is not None:
            metrics.finish(done[0])
        yield done[0]


def _add(model: Decoder, scheduler: Scheduler, request: Request, now: float) -> None:
    if request.num_tokens < scheduler.max_length:  # else the scheduler says so itself
        why = _unreadable(model, request)
        if why is not None:
            return scheduler.reject(request, why, now)
    scheduler.add(request, now)
