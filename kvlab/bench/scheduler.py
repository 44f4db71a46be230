"""Chapter 06's parts: what scheduler and simulation take on the host, steps of mixed batches, serving by each policy.

Weights are random, and so are the keys and values of contexts that were never computed: speed does not depend on them.
Greedy tokens are chosen and thrown away. Passes of up to some 2000 tokens are replayed from CUDA graphs: launched from
Python, a step of a large model would take as long as its launches.
"""

from __future__ import annotations

import functools
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from kvlab import config as configs
from kvlab import figures, flash_decoding, fused, workloads
from kvlab.bench import Record, Session, Timing, measure
from kvlab.bench._captured import CapturedDecoder
from kvlab.bench._session import device_name
from kvlab.cache import take_back
from kvlab.costs import HARDWARE, Hardware
from kvlab.model import Decoder
from kvlab.paged import BlockManager, BlockPool, PagedCache
from kvlab.runtime import next_power_of_2
from kvlab.sampling import SamplingParams
from kvlab.scheduler import Metrics, Request, RooflineCost, Scheduler, Step, StepShape, forward, serve, simulate

TRACE = Path(__file__).parent / "traces" / "decodes_and_prompts.jsonl"
BLOCK_SIZE = 16
Shape = dict[str, int | float | str]
SIZES: dict[str, Any] = {  # of the passes that are captured
    "decodes": [*range(8, 64, 8), *range(64, 129, 16)],
    "tokens": [*range(16, 128, 16), *range(128, 1120, 32), *range(1120, 2145, 64)],
    "rows": 128,
}
QUICK_SIZES: dict[str, Any] = {"decodes": [4, 8], "tokens": [16, 128], "rows": 8}

Lens = list[tuple[int, int]]  # of each sequence of a step: new tokens, and its length once they are computed
LAUNCHED: list[Lens] = [  # steps that are also launched from Python
    [(1, 2000)] * 32, *([*[(1, 2000)] * 32, (n, 4096 + n)] for n in (256, 512, 1024, 2048)),
]  # fmt: skip
Way = tuple[str, int, int, int | None]  # policy, budget, places, longest chunk
WAYS: dict[str, Way] = {  # what serves the fixed workload, here and in the simulation
    "static": ("static", 32768, 64, None),
    "continuous": ("continuous", 32768, 64, None),
    **{f"chunked {n}": ("chunked", n + 32, 64, n) for n in (256, 512, 1024, 2048)},  # beside 32 texts that decode
    "chunked 512 of 576": ("chunked", 576, 64, 512),  # what is left goes to the next prompt: 32 tokens of it
}
HELD_OUT_WAY: Way = ("chunked", 1024, 128, 512)


def run(session: Session) -> Iterator[Record]:
    """The host's share and simulations, then steps, then whole workloads.

    Shapes and units:
        scheduler.host       ms of ``schedule`` and ``update`` with ``running`` requests that decode, ``waiting`` more
        scheduler.simulated  seconds in which a busy chat of so many ``requests`` is simulated
        scheduler.step       ms of one forward pass by the wall's clock, batch and sampling included; the shape is that
                             of ``scheduler.StepShape``
        scheduler.launched   the same of a few steps, "replayed" from graphs and "launched" from Python
        scheduler.serving    figures of the fixed workload of long prompts among decodes, by policy: ms of ITL and TTFT,
                             tokens/s, seconds
        scheduler.held_out   ms of ITL and TTFT of three workloads that no model of step times was fitted to

    Source: chapter 06.
    """
    for part in PARTS.values():
        yield from part(session)


# --- the host --------------------------------------------------------------------------------------------------------


def host(session: Session) -> Iterator[Record]:
    """ms of ``schedule`` and ``update`` by the number waiting, on one core. Source: chapter 06."""
    running, counts, steps = (8, [0, 100], 20) if session.quick else (256, [0, 1000, 10_000, 100_000], 600)
    for policy, waiting in itertools.product(("continuous", "chunked", "fair"), counts):
        spent = host_times(policy, running, waiting, steps)
        low, median, high = statistics.quantiles(spent, n=4)
        shape: Shape = {"running": running, "waiting": waiting, "policy": policy}
        record = session.record(
            "scheduler.host", "kvlab", median, "ms", shape=shape, dtype="none",
            timing=Timing(median, high - low, len(spent)),
        )  # fmt: skip
        yield replace(record, device=device_name(torch.device("cpu")), driver=None)


def host_times(policy: str, running: int, waiting: int, steps: int) -> list[float]:
    """ms of ``schedule`` plus ``update`` in each of so many decode steps of ``running`` requests, ``waiting`` more.

    Source: chapter 06.
    """
    pool = BlockPool(running * (steps + 400) // BLOCK_SIZE * 2, BLOCK_SIZE)
    scheduler = Scheduler(BlockManager(pool), policy, 2048, running, max_wait=1e9)
    params, spent = SamplingParams(max_tokens=10 * (steps + 400)), []
    for i in range(running + waiting):
        scheduler.add(Request(i, range(200 + i % 16), params, client=f"client {i % 50}"))
    while len(scheduler.decoding) < running:
        scheduler.update(scheduler.schedule())
    for _ in range(steps):
        begin = time.perf_counter()
        scheduler.update(scheduler.schedule())
        spent.append(1e3 * (time.perf_counter() - begin))
    return spent


def simulated(session: Session) -> Iterator[Record]:
    """Seconds to simulate a Llama-3-8B that serves a busy chat on an H200, on one core. Source: chapter 06."""
    count, rate = (50 if session.quick else 100_000), 60.0
    for policy in ("continuous", "chunked", "fair"):
        requests = workloads.arriving(
            workloads.mix("chat", count)[0], workloads.poisson(rate, count), clients=[f"client {i}" for i in range(50)]
        )
        scheduler = Scheduler(BlockManager(BlockPool(30_000, BLOCK_SIZE)), policy, 2048, 256)
        begin = time.perf_counter()
        run = simulate(scheduler, requests, RooflineCost(configs.get("llama-3-8b"), HARDWARE["h200"]))
        spent = time.perf_counter() - begin
        shape: Shape = {"requests": count, "rate": rate, "policy": policy, "steps": len(run.steps["end"])}
        record = session.record("scheduler.simulated", "kvlab", spent, "s", shape=shape, dtype="none")
        yield replace(record, device=device_name(torch.device("cpu")), driver=None)


# --- a model to serve ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Server:
    """A model with random weights, the pool for its requests, and the model's captured passes. Source: chapter 06."""

    model: Decoder
    cache: PagedCache
    captured: CapturedDecoder

    @classmethod
    @functools.lru_cache(maxsize=1)  # all parts of a run share one: it fills most of a GPU
    def build(cls, session: Session) -> Server:
        """A Llama-3-8B shape and a pool of 480K tokens on a GPU; the smallest model elsewhere, or in a quick run.

        Source: chapter 06."""
        name = "llama-3-8b" if _in_full(session) else "stdlib-1m"
        config = replace(configs.get(name), max_seq_len=20_480 if _in_full(session) else 4096)
        dtype = torch.bfloat16 if session.on_gpu else torch.float32
        torch.manual_seed(0)
        model = Decoder(config, fused.OPS, dtype=dtype, device=session.device).merge_projections()
        cache = PagedCache(
            config, _num_blocks(session), BLOCK_SIZE, attention=flash_decoding.attention, dtype=dtype,
            device=session.device, max_model_len=config.max_seq_len,
        )  # fmt: skip
        for memory in (cache.k, cache.v):
            memory.normal_()
        captured = CapturedDecoder(model, cache, **(SIZES if _in_full(session) else QUICK_SIZES))
        captured.capture(most_tokens=32_768 if _in_full(session) else 4096)
        return cls(model, cache, captured)

    @property
    def runner(self) -> Decoder:
        """What runs the steps: it is called as the decoder is. Source: chapter 06."""
        return cast(Decoder, self.captured)

    def fill(self, lens: Lens) -> Step:
        """A step over sequences of (new tokens, length once they are computed), whose pasts are random keys and values.

        A sequence with one new token and a past decodes. Source: chapter 06."""
        step, manager = Step(sum(q for q, _ in lens)), self.cache.manager
        for i, (q_len, length) in enumerate(lens):
            request = Request(i, range(length), SamplingParams(max_tokens=2))
            request.prompt = [j % 1000 for j in range(length)]
            request.num_computed_tokens = past = length - q_len
            manager.ensure(i, length)
            manager.advance(i, past)
            if q_len == 1 and past:
                step.decodes.append(request)
            else:
                step.prefills[request] = q_len
        return step

    def run(self, step: Step, *, launched: bool = False) -> list[int]:
        """One pass over a step of ``fill``, undone afterwards; gives the tokens. Where its size is captured, it is
        replayed, if it is not to be ``launched`` from Python. Source: chapter 06."""
        tokens = forward(self.model if launched else self.runner, self.cache, step)
        requests = step.requests
        take_back(self.cache, [r.request_id for r in requests], [r.num_computed_tokens for r in requests])
        return tokens


def _in_full(session: Session) -> bool:
    return session.on_gpu and not session.quick


def _num_blocks(session: Session) -> int:
    return (480_000 if _in_full(session) else 4096) // BLOCK_SIZE


def grid(session: Session) -> list[Lens]:
    """The steps that are timed: decodes of one context, chunks of one past, and both mixed.

    Shapes and units: a step is [(new tokens, length once they are computed)]. Source: chapter 06.
    """
    if not _in_full(session):
        decodes, contexts, chunks, pasts = [0, 4], [60], [16, 64], [0, 100]
    else:
        decodes, contexts = [0, 1, 8, 32, 64, 120], [500, 2000, 6000]
        chunks, pasts = [64, 128, 256, 512, 1024, 2048, 4096, 16384], [0, 4096, 15000]
    found = [[(1, n)] * b for b in decodes for n in contexts if b]
    for b, n, chunk, past in itertools.product(decodes, contexts, chunks, pasts):
        if (b or n == contexts[0]) and (chunk <= 4096 or (b in (0, 32) and not past)):
            found.append([*[(1, n)] * b, (chunk, past + chunk)])
    if _in_full(session):  # several prompts in one step, as chat has them
        found += [[(p, p)] * count for p in (100, 300) for count in (1, 3, 8)]
        found += [[*[(1, 1500)] * b, *[(200, 200)] * 3] for b in (16, 64, 120)]
    return [lens for lens in found if sum(-(-n // BLOCK_SIZE) for _, n in lens) <= _num_blocks(session)]


def steps(session: Session) -> Iterator[Record]:
    """ms of one pass, over a grid of mixed batches; a part of the grid, drawn at random, where it is long.

    Source: chapter 06."""
    server, shapes = Server.build(session), grid(session)
    random.Random(0).shuffle(shapes)
    for lens in shapes[: 4 if session.quick else 240]:
        yield _timed(session, server, lens)


def launched(session: Session) -> Iterator[Record]:
    """A few steps launched from Python beside the same steps replayed. Source: chapter 06."""
    server = Server.build(session)
    for lens in LAUNCHED if _in_full(session) else [[(1, 60)] * 4]:
        for how in ("replayed", "launched"):
            yield _timed(session, server, lens, "scheduler.launched", how)


def _timed(
    session: Session, server: Server, lens: Lens, bench: str = "scheduler.step", impl: str = "kvlab"
) -> Record:  # fmt: skip
    step = server.fill(lens)
    shape = asdict(StepShape.of(step))

    def once(_: int) -> list[int]:
        return server.run(step, launched=impl == "launched")

    timing = measure(once, device=session.device, seconds=session.seconds(0.15), min_count=3, max_count=12, host=True)
    for request in step.requests:
        server.cache.free(request.request_id)
    return session.record(
        bench, impl, timing.ms, "ms", shape={"model": server.model.config.name, **shape}, dtype=server.model.dtype,
        timing=timing,
    )  # fmt: skip


# --- whole workloads -------------------------------------------------------------------------------------------------


def fixed(session: Session) -> list[Request]:
    """The workload of ``serving``: on a GPU the one in the file, elsewhere a small likeness. Source: chapter 06."""
    if session.quick:
        return workloads.decodes_and_prompts(4, 10, 2, 128, gap=0.2)
    return workloads.load_trace(TRACE) if session.on_gpu else workloads.decodes_and_prompts(8, 100, 6, 1024, gap=0.5)


def held_out_workloads(quick: bool = False) -> dict[str, list[Request]]:
    """Three workloads to judge a simulation by: chat that comes at random, in bursts, and documents among chat.

    Source: chapter 06.
    """
    count = 4 if quick else 240
    chat, documents = workloads.mix("chat", count, 11)[0], workloads.mix("documents", max(2, count // 12), 12)[0]
    if quick:
        chat = [workloads.Request(min(r.prompt_len, 40), 5) for r in chat]
        documents = [workloads.Request(100, 3)] * len(documents)
    rate = 20.0 if quick else 12.0
    slow = workloads.poisson(rate / 12, len(documents), 15)
    return {
        "chat, Poisson": workloads.arriving(chat, workloads.poisson(rate, count, 13)),
        "chat, bursts": workloads.arriving(chat, workloads.bursty(rate, count, 14)),
        "documents among chat": workloads.together(
            workloads.arriving(chat[: count // 2], workloads.poisson(rate / 2, count // 2, 16)),
            workloads.arriving(documents, slow, first_id=count),
        ),
    }


class Watched(Metrics):
    """Metrics that also keep the least time of every gap between two tokens: the sum of what the rooflines allow the
    steps between them, by what the hardware was measured to do.

    Shapes and units: ``gaps`` in seconds, one for every token but a request's first.

    Source: chapter 06.
    """

    def __init__(self, cost: RooflineCost) -> None:
        super().__init__()
        self.cost = cost
        self.gaps: list[float] = []
        self._clock = 0.0
        self._last: dict[Request, float] = {}  # when its last token came, were every step as fast as can be

    def observe(self, scheduler: Scheduler, step: Step, start: float, end: float) -> None:
        """Note a step, after the scheduler's ``update``: what is computed by then is what it had to read.

        Source: chapter 06."""
        super().observe(scheduler, step, start, end)
        chunks = [(q, r.num_computed_tokens) for r, q in step.prefills.items()]
        self._clock += self.cost.floor(StepShape.build([r.num_computed_tokens for r in step.decodes], chunks))
        for request in step.requests:
            if request.num_computed_tokens == request.num_tokens - 1:  # it has a new token
                if request in self._last:
                    self.gaps.append(self._clock - self._last[request])
                self._last[request] = self._clock

    def allowed(self, q: float) -> float:
        """The q-th percentile (0 to 100) of the gaps that the steps' rooflines allow, in seconds; NaN without decodes.

        Source: chapter 06."""
        return float(np.percentile(self.gaps, q)) if self.gaps else float("nan")


def figures_of(run: Metrics) -> dict[str, tuple[float, str]]:
    """What is recorded of a run: {name: (value, unit)}. Source: chapter 06."""
    found = {f"{name} p{q:g}": (1e3 * run.percentile(name, q), "ms") for name in ("itl", "ttft") for q in (50, 99, 100)}
    found |= {"all tokens": (run.total_throughput(), "tokens/s"), "new tokens": (run.throughput(), "tokens/s")}
    return found | {"whole run": (run.seconds, "s"), "steps": (float(len(run.steps["end"])), "steps")}


def _served(
    session: Session, server: Server, bench: str, requests: list[Request], name: str, way: Way
) -> Iterator[Record]:
    policy, budget, places, chunk = way
    scheduler = _scheduler(server, server.cache.manager, way)
    replayed = server.captured.replayed
    run = Watched(RooflineCost(server.model.config, _hardware(session)))
    for _ in serve(server.runner, server.cache, scheduler, requests, metrics=run):
        pass
    found = figures_of(run)
    found["steps replayed from graphs"] = (float(server.captured.replayed - replayed), "steps")
    if session.on_gpu:  # nothing is measured of other machines
        found["itl p99 by the roofline of its steps"] = (1e3 * run.allowed(99), "ms")
    for figure, (value, unit) in found.items():
        shape: Shape = {"model": server.model.config.name, "workload": name, "figure": figure, "policy": policy,
                        "budget": budget, "places": places, "chunk": chunk or 0, "requests": len(requests)}  # fmt: skip
        yield session.record(bench, "kvlab", value, unit, shape=shape, dtype=server.model.dtype)


def _hardware(session: Session) -> Hardware:
    """The machine of ``costs.HARDWARE`` that the session runs on, measured rates if there are any; else an H200."""
    name = next((name for name in HARDWARE if name.split("-")[0].upper() in device_name(session.device)), "h200")
    try:
        return figures.measured_hardware(name)
    except LookupError:
        return HARDWARE[name]


def _scheduler(server: Server, manager: BlockManager, way: Way) -> Scheduler:
    policy, budget, places, chunk = way
    return Scheduler(manager, policy, budget, places, chunk, max_model_len=server.model.config.max_seq_len)


def kinds_of_steps(session: Session, server: Server, requests: list[Request], way: Way) -> dict[tuple[int, ...], Lens]:
    """One step of each kind that a workload has when it is simulated; steps of one kind run the same kernels.

    Shapes and units: a kind is the numbers of sequences, of new tokens and of keys, in powers of two, as far as they
    matter to a kernel. Source: chapter 06.
    """
    kinds: dict[tuple[int, ...], tuple[int, Lens]] = {}

    def watch(step: Step, start: float, end: float) -> None:
        lens = [(q, r.num_computed_tokens + q) for r, q in zip(step.requests, step.q_lens, strict=True)]
        count, most, keys = len(lens), max(q for q, _ in lens), len(lens) * max(n for _, n in lens)
        many, new, wide = (next_power_of_2(x) for x in (count, most, keys))
        kind = (min(count, 2), max(32, many), min(new, 32), min(max(wide, 2**12), 2**16))
        if kind not in kinds or kinds[kind][0] < keys:
            kinds[kind] = keys, lens

    cost = RooflineCost(server.model.config, _hardware(session), overhead=0.01)  # about what launches take
    simulate(_scheduler(server, BlockManager(BlockPool(_num_blocks(session), BLOCK_SIZE)), way), requests, cost, watch)
    return {kind: lens for kind, (_, lens) in kinds.items()}


def _warm(session: Session, server: Server, requests: list[Request], way: Way, warm: set[tuple[int, ...]]) -> None:
    """Compile and tune whatever the steps of a workload need, but for kinds that are ``warm``, before a clock runs."""
    for kind, lens in kinds_of_steps(session, server, requests, way).items():
        if kind in warm:
            continue
        warm.add(kind)
        step = server.fill(lens)
        server.run(step)
        for request in step.requests:
            server.cache.free(request.request_id)


def serving(session: Session) -> Iterator[Record]:
    """The fixed workload by each policy. Source: chapter 06."""
    server, warm = Server.build(session), set[tuple[int, ...]]()
    for name in WAYS if _in_full(session) else ["continuous", "chunked 512"]:
        _warm(session, server, fixed(session), WAYS[name], warm)
        yield from _served(session, server, "scheduler.serving", fixed(session), name, WAYS[name])


def held_out(session: Session) -> Iterator[Record]:
    """Three workloads that the fit has not seen. Source: chapter 06."""
    server, warm, quick = Server.build(session), set[tuple[int, ...]](), not _in_full(session)
    for name, requests in held_out_workloads(quick).items():
        _warm(session, server, held_out_workloads(quick)[name], HELD_OUT_WAY, warm)
        yield from _served(session, server, "scheduler.held_out", requests, name, HELD_OUT_WAY)


PARTS: dict[str, Callable[[Session], Iterator[Record]]] = {
    "host": host,
    "simulated": simulated,
    "steps": steps,
    "launched": launched,
    "serving": serving,
    "held_out": held_out,
}
