"""The scheduler's own decisions, at a cost model's pace: hours of serving in seconds, on a laptop."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvlab.batch import as_count
from kvlab.scheduler import _checks as checks
from kvlab.scheduler._costs import CostModel, StepShape
from kvlab.scheduler._metrics import Metrics
from kvlab.scheduler._request import RUNNING, Request, in_order
from kvlab.scheduler._scheduler import Scheduler
from kvlab.scheduler._step import Step


class Places:
    """Who stands where in the batch, and when: a row for each place, to be handed to ``simulate`` as ``watch``.

    Shapes and units: ``lanes`` maps a place to its spans, [(start, end, "a prompt" or "decodes")] in seconds, as
    ``figures.timeline`` draws them; ``steps`` holds (start, end, StepShape) of each step.

    Raises: ValueError for a count of places that is no integer, 1 or more, or a step with more requests than places.

    Source: chapter 06.
    """

    def __init__(self, count: int) -> None:
        names = map(str, range(as_count(count, "count", 1)))
        self.lanes: dict[str, list[tuple[float, float, str]]] = {name: [] for name in names}
        self.steps: list[tuple[float, float, StepShape]] = []
        self._place: dict[Request, str] = {}

    def __call__(self, step: Step, start: float, end: float) -> None:
        place = {request: name for request, name in self._place.items() if request.state == RUNNING}
        free = [name for name in self.lanes if name not in place.values()]
        newcomers = [request for request in step.requests if request not in place]
        if len(newcomers) > len(free):
            raise ValueError(
                f"step has {len(newcomers)} newcomers; {len(free)} of the {len(self.lanes)} places are free"
            )
        self._place = place | dict(zip(newcomers, free, strict=False))
        self.steps.append((start, end, StepShape.of(step)))
        for request in step.requests:
            lane, kind = self.lanes[self._place[request]], "a prompt" if request in step.prefills else "decodes"
            goes_on = bool(lane) and lane[-1][1:] == (start, kind)
            lane.append((lane.pop()[0] if goes_on else start, end, kind))

    def at_work(self, until: float | None = None) -> float:
        """The share of all places' time in which something was computed for them, up to ``until`` in seconds (None: the
        end of the last step). 0 where nothing ran.

        Raises: ValueError for an ``until`` that is no time, 0 or more.  Source: chapter 06."""
        if until is None:
            until = self.steps[-1][1] if self.steps else 0.0
        until = checks.seconds(until, "until", least=0)
        spans = [span for lane in self.lanes.values() for span in lane]
        worked = sum(max(0.0, min(end, until) - start) for start, end, _ in spans)
        return worked / (len(self.lanes) * until) if until else 0.0


def simulate(
    scheduler: Scheduler, workload: Iterable[Request], cost_model: CostModel,
    watch: Callable[[Step, float, float], None] | None = None,
) -> Metrics:  # fmt: skip
    """Let a scheduler serve a workload on a machine that only the cost model knows.

    It is the same object that serves a model, with the same pool; nothing but the time of a step is made up.

    Shapes and units: ``workload`` in order of arrival, in seconds; answers end at their ``max_tokens``. ``watch`` is
    called with each step, its start and its end in seconds, before the scheduler's ``update``.

    Raises: ValueError, before anything is served, for what is no scheduler or no cost model, arrivals that are not in
    order, an id that stands twice, or requests that are not new or wait for stop tokens, of which a simulation knows
    nothing. And for a step time that is not finite and positive; that step is undone.

    Source: chapter 06; Agrawal et al. 2024 (Vidur).
    """
    checks.require(scheduler, Scheduler, "scheduler")
    if not callable(getattr(cost_model, "seconds", None)):
        raise ValueError(f"cost_model is {cost_model!r:.80}; it must give the seconds of a StepShape")
    if watch is not None and not callable(watch):
        raise ValueError(f"watch is {watch!r:.80}; it must be a function of a step, its start and its end")
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
                if watch is not None:
                    watch(step, now, now + took)
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
