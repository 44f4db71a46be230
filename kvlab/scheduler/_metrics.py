"""What users and operators watch: how long each token took, and what the machine did meanwhile."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.scheduler import _checks as checks
from kvlab.scheduler._request import Request
from kvlab.scheduler._scheduler import Scheduler
from kvlab.scheduler._step import Step

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
KINDS = ("prefill", "decode", "mixed")
_COLUMNS = "start end decodes chunks chunk_tokens running waiting kv_use preempted".split()  # noqa: SIM905


@dataclass(frozen=True, slots=True)
class Served:
    """One request that has ended, in the field's terms.

    Shapes and units: times in seconds. ``ttft`` from arrival to the first token; ``itl`` the gaps between tokens,
    float32 [n - 1]; ``tpot`` their mean, (e2e - TTFT) / (n - 1), None with fewer than two tokens; ``queue_time`` from
    arrival until it was admitted; ``e2e`` from arrival to its end. ``ttft`` and ``queue_time`` are None where it never
    came so far.

    Source: chapter 06; the definitions of vLLM's benchmarks.
    """

    request_id: int
    client: str
    reason: str
    prompt_tokens: int
    new_tokens: int
    arrival: float
    ttft: float | None
    itl: np.ndarray
    tpot: float | None
    queue_time: float | None
    e2e: float
    preemptions: int

    @classmethod
    def of(cls, request: Request) -> Served:
        """The figures of a finished request. Raises: ValueError for one that is not.  Source: chapter 06."""
        checks.require(request, Request, "request")
        if request.finished is None or request.finish_reason is None:
            raise ValueError(f"request {request.request_id} is {request.state}; only a finished one has its figures")
        times = np.array(request.token_times)
        admitted, start = request.admitted, request.arrival
        return cls(
            request.request_id, request.client, request.finish_reason, request.num_prompt_tokens, len(times), start,
            ttft=float(times[0] - start) if len(times) else None,
            itl=np.diff(times).astype(np.float32),
            tpot=float(times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None,
            queue_time=None if admitted is None else admitted - start,
            e2e=request.finished - start, preemptions=request.preemptions,
        )  # fmt: skip


class Metrics:
    """Everything that a run of a scheduler shows: steps as they were, requests as they ended.

    Shapes and units: times in seconds; ``simulated`` says that a cost model gave them, and is said wherever they are
    shown.

    Raises: ValueError for a ``simulated`` that is neither True nor False.

    Source: chapter 06; vLLM's metrics have the same names.
    """

    def __init__(self, *, simulated: bool = False) -> None:
        if not isinstance(simulated, bool):
            raise ValueError(f"simulated is {simulated!r:.80}; it must be True or False")
        self.simulated = simulated
        self.served: list[Served] = []
        self._rows: list[tuple[float, ...]] = []

    def observe(self, scheduler: Scheduler, step: Step, start: float, end: float) -> None:
        """Note a step that ran from ``start`` to ``end`` (seconds), after the scheduler's ``update``.

        Raises: ValueError for what is no scheduler or no step, or times that are none or not in order.

        Source: chapter 06."""
        checks.require(scheduler, Scheduler, "scheduler")
        checks.require(step, Step, "step")
        start = checks.seconds(start, "start")
        end = checks.seconds(end, "end", least=start)
        pool = scheduler.manager.pool
        self._rows.append(
            (start, end, len(step.decodes), len(step.prefills), sum(step.prefills.values()), scheduler.num_running,
             scheduler.num_waiting, 1 - pool.num_free / pool.num_blocks, len(step.preempted))
        )  # fmt: skip

    def finish(self, request: Request) -> None:
        """Note a request that has ended. Raises: ValueError for one that has not.  Source: chapter 06."""
        self.served.append(Served.of(request))

    @property
    def steps(self) -> dict[str, np.ndarray]:
        """The steps, column by column: start and end in seconds, decodes, chunks and chunk_tokens computed; once it was
        over running, waiting and kv_use (the share of blocks held); preempted for it. Each [steps]. Source: chapter 06.
        """
        rows = np.array(self._rows, dtype=np.float64).reshape(-1, len(_COLUMNS))
        return dict(zip(_COLUMNS, rows.T, strict=True))

    # --- figures ---

    def values(self, name: str) -> np.ndarray:
        """All values of a quantity, in seconds: "ttft", "tpot", "queue_time" or "e2e" by request, "itl" by token.

        Shapes and units: float [n], of requests that have one.

        Raises: ValueError for another name.  Source: chapter 06.
        """
        if name == "itl":
            return np.concatenate([s.itl for s in self.served]) if self.served else np.empty(0, np.float32)
        if name not in ("ttft", "tpot", "queue_time", "e2e"):
            raise ValueError(f'name is {name!r}; it must be "ttft", "itl", "tpot", "queue_time" or "e2e"')
        found = [getattr(s, name) for s in self.served]
        return np.array([x for x in found if x is not None], dtype=np.float64)

    def percentile(self, name: str, q: float) -> float:
        """The q-th percentile (0 to 100) of a quantity, in seconds; NaN where there are no values.

        Raises: ValueError as ``values``, or for a q out of range.  Source: chapter 06."""
        q, found = checks.number(q, "q", 0, 100), self.values(name)
        return float(np.percentile(found, q)) if len(found) else float("nan")

    @property
    def seconds(self) -> float:
        """From the start of the first step to the end of the last. Source: chapter 06."""
        return self._rows[-1][1] - self._rows[0][0] if self._rows else 0.0

    def throughput(self) -> float:
        """New tokens a second, of everyone that has ended, over the whole run. Source: chapter 06."""
        return sum(s.new_tokens for s in self.served) / self.seconds if self.seconds else 0.0

    def total_throughput(self) -> float:
        """Tokens of prompts and answers a second. A prompt counts once, however often it was computed.

        Source: chapter 06."""
        answered = [s for s in self.served if s.new_tokens]
        return sum(s.prompt_tokens + s.new_tokens for s in answered) / self.seconds if self.seconds else 0.0

    def goodput(self, *, ttft: float | None = None, tpot: float | None = None, itl: float | None = None) -> float:
        """Requests a second that were answered, to their end and within every limit given.

        Shapes and units: limits in seconds; ``itl`` is a limit to a request's longest gap.

        Raises: ValueError for a limit that is no positive number.  Source: chapter 06; Zhong et al. 2024 (DistServe).
        """
        for name, limit in (("ttft", ttft), ("tpot", tpot), ("itl", itl)):
            if limit is not None and checks.seconds(limit, name, least=0) == 0:
                raise ValueError(f"{name} is {limit!r}; it must be a positive number of seconds, or None")

        def good(s: Served) -> bool:
            longest = float(s.itl.max()) if len(s.itl) else None
            pairs = ((s.ttft, ttft), (s.tpot, tpot), (longest, itl))
            return all(value is None or limit is None or value <= limit for value, limit in pairs)

        count = sum(good(s) for s in self.served if s.new_tokens and s.reason in ("stop", "length"))
        return count / self.seconds if self.seconds else 0.0

    def time_by_kind(self) -> dict[str, float]:
        """Seconds of the steps that computed chunks only, decodes only, and both. Source: chapter 06."""
        steps = self.steps
        took, decodes, chunks = steps["end"] - steps["start"], steps["decodes"] > 0, steps["chunks"] > 0
        masks = (chunks & ~decodes, decodes & ~chunks, chunks & decodes)
        return {kind: float(took[mask].sum()) for kind, mask in zip(KINDS, masks, strict=True)}

    def summary(self) -> dict[str, float]:
        """The run in one dict: counts, seconds, tokens a second, shares. Times are p50 and p99. Source: chapter 06."""
        steps = self.steps
        took = steps["end"] - steps["start"]
        out = {"requests": float(len(self.served)), "steps": float(len(took)), "seconds": self.seconds}
        for name in ("ttft", "itl", "tpot", "queue_time"):
            out |= {f"{name} p{q}": self.percentile(name, q) for q in (50, 99)}
        out |= {"new tokens/s": self.throughput(), "all tokens/s": self.total_throughput()}
        out["kv use, mean"] = float(np.average(steps["kv_use"], weights=took)) if took.sum() else 0.0
        out["kv use, most"] = float(steps["kv_use"].max(initial=0.0))
        out |= {f"seconds of {kind} steps": s for kind, s in self.time_by_kind().items()}
        out["preemptions"] = float(steps["preempted"].sum())
        return out

    # --- forms ---

    def table(self) -> str:
        """The summary as Markdown. Source: chapter 06."""
        return table({"": self})

    def prometheus(self, prefix: str = "kvlab") -> str:
        """The figures in Prometheus' text format, so that a server of metrics can scrape them.

        Raises: ValueError for a prefix that cannot begin a metric's name.

        Source: chapter 06; the exposition format 0.0.4.
        """
        if not isinstance(prefix, str) or not re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", prefix):
            raise ValueError(f"prefix is {prefix!r:.80}; it must be letters, digits and underscores, no digit first")
        lines: list[str] = []

        def metric(name: str, kind: str, about: str, samples: Sequence[tuple[str, float]]) -> None:
            label = " (simulated)" if self.simulated else ""
            lines.extend((f"# HELP {prefix}_{name} {about}{label}", f"# TYPE {prefix}_{name} {kind}"))
            lines.extend(f"{prefix}_{name}{suffix} {value:.10g}" for suffix, value in samples)

        last = self._rows[-1] if self._rows else (0.0,) * len(_COLUMNS)
        now = dict(zip(_COLUMNS, last, strict=True))
        metric("num_requests_running", "gauge", "Requests that hold blocks.", [("", now["running"])])
        metric("num_requests_waiting", "gauge", "Requests in the queue.", [("", now["waiting"])])
        metric("kv_cache_usage_ratio", "gauge", "Share of the blocks that are held.", [("", now["kv_use"])])
        reasons = sorted(Counter(s.reason for s in self.served).items())
        metric("requests_total", "counter", "Requests that have ended, by reason.",
               [(f'{{finished_reason="{reason}"}}', count) for reason, count in reasons])  # fmt: skip
        metric("preemptions_total", "counter", "Requests that had to give their blocks back.",
               [("", float(self.steps["preempted"].sum()))])  # fmt: skip
        metric("prompt_tokens_total", "counter", "Tokens of prompts computed, again where again.",
               [("", float(self.steps["chunk_tokens"].sum()))])  # fmt: skip
        metric("generation_tokens_total", "counter", "New tokens of requests that have ended.",
               [("", float(sum(s.new_tokens for s in self.served)))])  # fmt: skip
        metric("step_seconds_total", "counter", "Time of steps, by what they computed.",
               [(f'{{kind="{kind}"}}', seconds) for kind, seconds in self.time_by_kind().items()])  # fmt: skip
        for name, long, about in (
            ("ttft", "time_to_first_token_seconds", "From arrival to the first token."),
            ("itl", "inter_token_latency_seconds", "Between two tokens of a request."),
            ("tpot", "time_per_output_token_seconds", "Mean gap of a request."),
            ("queue_time", "request_queue_time_seconds", "From arrival until admitted."),
            ("e2e", "e2e_request_latency_seconds", "From arrival to the end."),
        ):
            metric(long, "histogram", about, _histogram(self.values(name)))
        return "\n".join(lines) + "\n"

    def chrome_trace(self) -> str:
        """The steps and the requests' lives as JSON for chrome://tracing or Perfetto; times in microseconds.

        Source: chapter 06; the Trace Event Format.
        """
        about = " (simulated)" if self.simulated else ""
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name + about}}
            for pid, name in ((0, "steps"), (1, "requests"))
        ]
        for row in self._rows:
            step = dict(zip(_COLUMNS, row, strict=True))
            kind = "mixed" if step["decodes"] and step["chunks"] else "prefill" if step["chunks"] else "decode"
            start, end = 1e6 * step.pop("start"), 1e6 * step.pop("end")
            events.append({"ph": "X", "pid": 0, "tid": 0, "name": kind, "ts": start, "dur": end - start, "args": step})
            used = {"kv_use": step["kv_use"]}
            events.append({"ph": "C", "pid": 0, "name": "KV use", "ts": end, "args": used})
        for s in self.served:
            marks: list[tuple[str, float | None]] = [("queued", s.queue_time), ("prefill", s.ttft), ("decode", s.e2e)]
            begin = 0.0
            for name, until in marks:
                if until is not None and until > begin:
                    events.append({
                        "ph": "X", "pid": 1, "tid": s.request_id, "name": name, "ts": 1e6 * (s.arrival + begin),
                        "dur": 1e6 * (until - begin), "args": {"client": s.client, "reason": s.reason},
                    })  # fmt: skip
                    begin = until
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def table(runs: Mapping[str, Metrics]) -> str:
    """The summaries of several runs side by side, as a Markdown table; simulated ones are labelled.

    Raises: ValueError for what is no mapping from names to Metrics.  Source: chapter 06.
    """
    if not isinstance(runs, Mapping):
        raise ValueError(f"runs is {runs!r:.80}; it must map names to Metrics")
    for name, run in runs.items():
        checks.require(run, Metrics, f"runs[{name!r}]")
    names = [
        f"{name}{' (simulated)' if run.simulated else ''}".strip().replace("|", "\\|") for name, run in runs.items()
    ]
    summaries = [run.summary() for run in runs.values()]
    lines = [f"| | {' | '.join(names)} |", "|---" + "|---:" * len(names) + "|"]
    for key in summaries[0] if summaries else ():
        lines.append(f"| {key} | {' | '.join(_shown(key, s[key]) for s in summaries)} |")
    return "\n".join(lines)


def _shown(key: str, value: float) -> str:
    if value != value:
        return "–"
    if key.endswith((" p50", " p99")):
        return f"{1e3 * value:,.1f} ms"
    if key.startswith("kv use"):
        return f"{value:.1%}"
    return f"{value:,.0f}" if value == int(value) or value >= 1000 else f"{value:.3g}"


def _histogram(values: np.ndarray) -> list[tuple[str, float]]:
    ordered = np.sort(values)
    below = np.searchsorted(ordered, BUCKETS, side="right")
    samples = [(f'_bucket{{le="{edge:g}"}}', float(n)) for edge, n in zip(BUCKETS, below, strict=True)]
    count = float(len(values))
    return [*samples, ('_bucket{le="+Inf"}', count), ("_sum", float(values.sum(dtype=np.float64))), ("_count", count)]
