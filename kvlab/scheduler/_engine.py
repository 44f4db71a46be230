"""The loop around a model: schedule, one forward pass, sample, update."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

import torch

from kvlab.cache import KVCache
from kvlab.generate import check_prompt
from kvlab.model import Decoder
from kvlab.sampling import sample
from kvlab.scheduler._metrics import Metrics
from kvlab.scheduler._request import Request
from kvlab.scheduler._scheduler import Scheduler, Step


@torch.inference_mode()
def forward(model: Decoder, cache: KVCache, step: Step) -> list[int]:
    """Run a step through the model, one mixed batch, and choose a token for everyone who has caught up.

    Shapes and units: gives token ids in the order of ``step.sampled``.

    Raises: what the model, the cache and the sampler raise.  Source: chapter 06.
    """
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
    that fails is undone before its error goes on, so that nobody loses a token.

    Shapes and units: ``requests`` in order of arrival, in seconds from the call; ``clock`` gives seconds.

    Raises: ValueError for a scheduler that allows texts longer than the model's context; what the model, the cache and
    the sampler raise.

    Source: chapter 06.
    """
    longest = model.config.max_seq_len
    if scheduler.max_length > longest:
        raise ValueError(
            f"scheduler lets a text have {scheduler.max_length} tokens; the model's context is {longest}: give the "
            f"scheduler max_model_len={longest}"
        )
    return _serve(model, cache, scheduler, iter(requests), metrics, clock)


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
        for request in scheduler.take_finished():
            if metrics is not None:
                metrics.finish(request)
            yield request
    yield from scheduler.take_finished()


def _add(model: Decoder, scheduler: Scheduler, request: Request, now: float) -> None:
    if request.num_tokens < scheduler.max_length:  # else the scheduler says so itself
        try:
            check_prompt(model, request.prompt)
        except ValueError as error:
            return scheduler.reject(request, str(error), now)
    scheduler.add(request, now)
