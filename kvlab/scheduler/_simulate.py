"""The scheduler's own decisions, at a cost model's pace: hours of serving in seconds, on a laptop."""

from __future__ import annotations

from collections.abc import Iterable

from kvlab.scheduler._costs import CostModel, StepShape
from kvlab.scheduler._metrics import Metrics
from kvlab.scheduler._request import Request
from kvlab.scheduler._scheduler import Scheduler


def simulate(scheduler: Scheduler, workload: Iterable[Request], cost_model: CostModel) -> Metrics:
    """Let a scheduler serve a workload on a machine that only the cost model knows.

    It is the same object that serves a model, with the same pool; nothing but the time of a step is made up.

    Shapes and units: ``workload`` in order of arrival, in seconds; answers end at their ``max_tokens``.

    Raises: ValueError for arrivals that are not in order, a step time that is not positive, or requests that wait for
    stop tokens, of which a simulation knows nothing.

    Source: chapter 06; Agrawal et al. 2024 (Vidur).
    """
    metrics, now, latest, coming = Metrics(simulated=True), 0.0, 0.0, iter(workload)
    following = next(coming, None)
    while following is not None or scheduler.has_work:
        if following is not None and not scheduler.has_work:
            now = max(now, following.arrival)
        while following is not None and following.arrival <= now:
            if following.stops:
                raise ValueError(f"request {following.request_id} has stop tokens; a simulation makes no tokens")
            if following.arrival < latest:
                raise ValueError(
                    f"workload has an arrival at {following.arrival} after {latest}; they must be in order"
                )
            latest = following.arrival
            scheduler.add(following)
            following = next(coming, None)
        step = scheduler.schedule(now)
        if step:
            took = cost_model.seconds(StepShape.of(step))
            if not took > 0:
                raise ValueError(f"cost_model gives {took!r} for a step; a step takes a positive number of seconds")
            start, now = now, now + took
            scheduler.update(step, None, now)
            metrics.observe(scheduler, step, start, now)
        for request in scheduler.take_finished():
            metrics.finish(request)
    return metrics
