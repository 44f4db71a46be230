"""The scheduler's own decisions, at a cost model's pace: hours of serving in seconds, on a laptop."""

from __future__ import annotations

from collections.abc import Iterable

from kvlab.scheduler import _checks as checks
from kvlab.scheduler._costs import CostModel, StepShape
from kvlab.scheduler._metrics import Metrics
from kvlab.scheduler._request import Request, in_order
from kvlab.scheduler._scheduler import Scheduler, Step


def simulate(scheduler: Scheduler, workload: Iterable[Request], cost_model: CostModel) -> Metrics:
    """Let a scheduler serve a workload on a machine that only the cost model knows.

    It is the same object that serves a model, with the same pool; nothing but the time of a step is made up.

    Shapes and units: ``workload`` in order of arrival, in seconds; answers end at their ``max_tokens``.

    Raises: ValueError, before anything is served, for what is no scheduler or no cost model, arrivals that are not in
    order, an id that stands twice, or requests that are not new or wait for stop tokens, of which a simulation knows
    nothing. And for a step time that is not finite and positive; that step is undone.

    Source: chapter 06; Agrawal et al. 2024 (Vidur).
    """
    checks.require(scheduler, Scheduler, "scheduler")
    if not callable(getattr(cost_model, "seconds", None)):
        raise ValueError(f"cost_model is {cost_model!r:.80}; it must give the seconds of a StepShape")
    metrics, now, coming = Metrics(simulated=True), 0.0, iter(_checked(workload))
    following = next(coming, None)
    while following is not None or scheduler.has_work:
        if following is not None and not scheduler.has_work:
            now = max(now, following.arrival)
        while following is not None and following.arrival <= now:
            scheduler.add(following)
            following = next(coming, None)
        step = scheduler.schedule(now)
        if step:
            try:
                took = _seconds(cost_model, step)
            except BaseException:
                scheduler.undo(step, now)
                raise
            start, now = now, now + took
            scheduler.update(step, None, now)
            metrics.observe(scheduler, step, start, now)
        for request in scheduler.take_finished():
            metrics.finish(request)
    return metrics


def _checked(workload: Iterable[Request]) -> list[Request]:
    """The requests in order, each once, none of which waits for a token."""
    requests, ids = list(in_order(checks.entries(workload, "workload"), "workload")), set()
    for request in requests:
        if request.stops:
            raise ValueError(f"request {request.request_id} has stop tokens; a simulation makes no tokens")
        if request.request_id in ids:
            raise ValueError(f"workload holds request_id {request.request_id} twice; each must stand there once")
        ids.add(request.request_id)
    return requests


def _seconds(cost_model: CostModel, step: Step) -> float:
    took = checks.seconds(cost_model.seconds(StepShape.of(step)), "cost_model's time of a step", least=0)
    if took == 0:
        raise ValueError(f"cost_model gives {took!r} for a step; a step takes a positive number of seconds")
    return took
