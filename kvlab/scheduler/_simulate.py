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

    Raises: ValueError for a count of places that is no integer, 1 or more, a step with more requests than places, or
    one that begins before the last has ended (of another run, say).

    Source: chapter 06.
    """

    def __init__(self, count: int) -> None:
        names = map(str, range(as_count(count, "count", 1)))
        self.lanes: dict[str, list[tuple[float, float, str]]] = {name: [] for name in names}
        self.steps: list[tuple[float, float, StepShape]] = []
        self._place: dict[Request, str] = {}

    def __call__(self, step: Step, start: float, end: float) -> None:
        checks.require(step, Step, "step")
        if self.steps and start < self.steps[-1][1]:
            raise ValueError(
                f"start is {start}; the last step ended at {self.steps[-1][1]}: give each run its own Places"
            )
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

    Shapes and units: ``workload`` in order of arrival, in seconds on the scheduler's clock, which begins at 0 and goes
    on where the last call left it; answers end at their ``max_tokens``. ``watch`` is called with each step, its start
    and its end in seconds, before the scheduler's ``update``.

    Raises: ValueError, before anything is served, for what is no scheduler or no cost model, a step in flight, arrivals
    that are not in order, an id that stands twice or is in use, requests that are not new, and any that wait for stop
    tokens or have token ids, of which a simulation knows nothing. And for a step time that is not finite and positive;
    that step is undone.

    Source: chapter 06; Agrawal et al. 2024 (Vidur).
    """
    checks.require(scheduler, Scheduler, "scheduler")
    if not callable(getattr(cost_model, "seconds", None)):
        raise ValueError(f"cost_model is {cost_model!r:.80}; it must give the seconds of a StepShape")
    if watch is not None and not callable(watch):
        raise ValueError(f"watch is {watch!r:.80}; it must be a function of a step, its start and its end")
    scheduler.require_idle()
    metrics, now, coming = Metrics(simulated=True), scheduler.time, iter(_checked(workload, scheduler))
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
                start, end = now, checks.seconds(now + _seconds(cost_model, step), "cost_model's end of a step")
                if watch is not None:
                    watch(step, start, end)
                scheduler.update(step, None, end)
            except BaseException:
                if scheduler.in_flight is step:
                    scheduler.undo(step, now)
                raise
            now = end
            metrics.observe(scheduler, step, start, now)
        for request in scheduler.take_finished():
            metrics.finish(request)
    return metrics


def _checked(workload: Iterable[Request], scheduler: Scheduler) -> list[Request]:
    """The requests in order, each once, if none of them, and none that is there already, knows of tokens."""
    requests = list(in_order(checks.entries(workload, "workload"), "workload"))
    scheduler.require_unused(requests, "workload")
    for request in [*requests, *scheduler.requests.values()]:
        if request.stops or request.tokens:
            what = "stop tokens" if request.stops else "new tokens with ids"
            raise ValueError(f"request {request.request_id} has {what}; a simulation makes no tokens")
    return requests


def _seconds(cost_model: CostModel, step: Step) -> float:
    took = checks.seconds(cost_model.seconds(StepShape.of(step)), "cost_model's time of a step", least=0)
    if took == 0:
        raise ValueError(f"cost_model gives {took!r} for a step; a step takes a positive number of seconds")
    return took
