"""Time measured the way the book reports it: warm, many times, the median, and never out of a warm L2 by accident."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from kvlab.config import is_number


@dataclass(frozen=True)
class Timing:
    """Median and interquartile range, in milliseconds, of ``count`` repetitions. Source: chapter 00."""

    ms: float
    spread: float
    count: int

    @property
    def seconds(self) -> float:
        """The median in seconds. Source: chapter 00."""
        return self.ms / 1e3


def l2_bytes(device: torch.device | str) -> int:
    """Bytes of the last cache before memory: the GPU's L2; on a CPU 32 MiB is assumed. Source: chapter 00."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    return 32 << 20


def rotations(nbytes: int, device: torch.device | str) -> int:
    """How many copies of buffers of ``nbytes`` bytes make up five times the L2, so that none is found there.

    Raises: ValueError where nbytes is no integer or under 1.  Source: chapter 00.
    """
    if type(nbytes) is not int or nbytes < 1:
        raise ValueError(f"nbytes is {nbytes!r}; it must be an integer, 1 or more")
    return max(2, -(-5 * l2_bytes(device) // nbytes))


def measure(
    fn: Callable[[int], object],
    *,
    device: torch.device | str,
    seconds: float = 0.3,
    min_count: int = 5,
    max_count: int = 200,
    flush: bool = False,
    graph: int = 0,
    host: bool = False,
    reset: Callable[[], object] | None = None,
) -> Timing:
    """Time ``fn(i)``, where i counts the calls so that ``fn`` can rotate its buffers.

    Shapes and units: about ``seconds`` of repetitions, at least ``min_count`` and at most ``max_count``, after a warm
    run. On a GPU the clock is a pair of CUDA events. ``flush`` overwrites five times the L2 before each repetition.
    ``graph`` = n captures n calls (i = 0 .. n-1) in a CUDA graph and times its replays: for kernels shorter than their
    launch. ``host`` takes the wall clock around a synchronised call instead: for steps in which Python is a part of
    the cost. On a CPU the wall clock is always used and ``graph`` is ignored. By the wall's clock ``reset`` is called
    before every call, off the clock, to take back what the one before has done. Gives the time of one call.

    Raises: ValueError where counts are no integers or under 1, ``seconds`` is not finite or negative, ``graph`` is
    asked for together with ``flush``, or ``reset`` on a GPU without ``host``.

    Source: chapter 00; Triton's ``do_bench``.
    """
    _require(seconds, min_count=(min_count, 1), max_count=(max_count, min_count), graph=(graph, 0))
    if graph and flush:
        raise ValueError("graph and flush exclude each other: let the captured calls rotate their buffers")
    device = torch.device(device)
    if device.type != "cuda":
        return _wall(fn, seconds, min_count, max_count, lambda: None, reset)
    if host:
        return _wall(fn, seconds, min_count, max_count, lambda: torch.cuda.synchronize(device), reset)
    if reset is not None:
        raise ValueError("reset is given; on a GPU it needs host=True, for calls that are queued cannot be taken back")
    with torch.cuda.device(device):
        return _events(fn, seconds, min_count, max_count, flush, graph)


def race(
    functions: Mapping[str, Callable[[int], object]],
    *,
    device: torch.device | str,
    seconds: float = 0.3,
    rounds: int = 15,
    graph: int = 0,
    seed: int = 0,
) -> dict[str, Timing]:
    """Time several functions that do the same work against each other; gives the Timing of one call of each.

    A GPU under load lowers its clock, so whoever is measured later, or after a heavier one, would seem slower. Here all
    are warmed up first and then take turns: in each of ``rounds`` rounds every function runs one short burst of calls,
    in an order shuffled anew. The result is the median over the rounds; the spread says how far they lie apart.

    Shapes and units: about ``seconds`` of calls for each function in all, at least one call a round. ``fn(i)`` is
    called with i = 0, 1, ... so that it can rotate its buffers; the L2 is overwritten before each burst, so buffers
    larger than the L2 need no rotation. ``graph`` = n captures n calls of each function in a CUDA graph, as in
    ``measure``. A round is queued as a whole, behind a call that does not count, so that launches are hidden as they
    are in a model.

    Raises: ValueError where there is no function, ``rounds`` or ``graph`` is no integer or too small, or ``seconds`` is
    not finite or negative.

    Source: chapter 03.
    """
    if not functions:
        raise ValueError("functions is empty; a race needs at least one")
    _require(seconds, rounds=(rounds, 1), graph=(graph, 0))
    device = torch.device(device)
    if device.type != "cuda":
        return _race(functions, lambda fn: _WallRunner(fn), lambda: None, seconds, rounds, seed)
    with torch.cuda.device(device):
        trash = torch.empty(5 * l2_bytes(device), dtype=torch.int8, device=device)
        return _race(
            functions, lambda fn: _EventRunner(fn, graph, trash), torch.cuda.synchronize, seconds, rounds, seed
        )


class _WallRunner:
    """Runs bursts of one function by the wall clock."""

    calls = 1  # of the function, in one unit of a burst

    def __init__(self, fn: Callable[[int], object]) -> None:
        self.fn, self.count, self.bursts = fn, 0, list[float]()

    def lead(self) -> None:
        """A call that does not count."""
        self.fn(self.count)
        self.count += 1

    def burst(self, units: int) -> None:
        start = time.perf_counter()
        for _ in range(units):
            self.lead()
        self.bursts.append(1e3 * (time.perf_counter() - start) / units)

    def times(self) -> list[float]:
        """Milliseconds of one unit, burst by burst."""
        return self.bursts


class _EventRunner:
    """Runs bursts of one function, or of the replays of its graph, between CUDA events."""

    def __init__(self, fn: Callable[[int], object], graph: int, trash: torch.Tensor) -> None:
        self.fn, self.count, self.calls, self.trash = fn, 0, max(graph, 1), trash
        self.pairs: list[tuple[torch.cuda.Event, torch.cuda.Event, int]] = []
        self.captured: torch.cuda.CUDAGraph | None = None
        for _ in range(3):
            self.lead()
        torch.cuda.synchronize()
        if graph:
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                for i in range(graph):
                    fn(i)
            self.captured = captured

    def lead(self) -> None:
        """A call that does not count."""
        if self.captured is not None:
            self.captured.replay()
        else:
            self.fn(self.count)
            self.count += 1

    def burst(self, units: int) -> None:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.trash.zero_()
        start.record()
        for _ in range(units):
            self.lead()
        end.record()
        self.pairs.append((start, end, units))

    def times(self) -> list[float]:
        """Milliseconds of one unit, burst by burst; the device must be idle."""
        return [start.elapsed_time(end) / units for start, end, units in self.pairs]


def _race(
    functions: Mapping[str, Callable[[int], object]],
    start: Callable[[Callable[[int], object]], _WallRunner | _EventRunner],
    wait: Callable[[], object],
    seconds: float,
    rounds: int,
    seed: int,
) -> dict[str, Timing]:
    runners = {name: start(fn) for name, fn in functions.items()}
    units = {}
    for name, runner in runners.items():  # how long is one? the warm burst that tells does not count
        runner.lead()
        runner.burst(1)
        wait()
        once = max(runner.times()[0], 1e-3)
        units[name] = max(1, min(1000, int(1e3 * seconds / rounds / once)))
    rng, order = random.Random(seed), list(runners)
    for _ in range(rounds):
        rng.shuffle(order)
        runners[order[-1]].lead()
        for name in order:
            runners[name].burst(units[name])
        wait()
    return {name: _summary(runner.times()[1:], runner.calls) for name, runner in runners.items()}


def _require(seconds: float, **counts: tuple[int, int]) -> None:
    """Refuse counts, given with their least value, and seconds that are none."""
    for name, (value, least) in counts.items():
        if type(value) is not int or value < least:
            raise ValueError(f"{name} is {value!r}; it must be an integer, {least} or more")
    if not is_number(seconds) or seconds < 0:
        raise ValueError(f"seconds is {seconds!r}; it must be a finite number, 0 or more")


def _summary(samples: list[float], calls: int = 1) -> Timing:
    samples = sorted(s / calls for s in samples)
    quartiles = statistics.quantiles(samples, n=4) if len(samples) > 1 else [samples[0]] * 3
    return Timing(statistics.median(samples), quartiles[2] - quartiles[0], len(samples))


def _wall(
    fn: Callable[[int], object], seconds: float, min_count: int, max_count: int, wait: Callable[[], object],
    reset: Callable[[], object] | None,
) -> Timing:  # fmt: skip
    def once(i: int) -> float:
        if reset is not None:
            reset()
            wait()
        start = time.perf_counter()
        fn(i)
        wait()
        return 1e3 * (time.perf_counter() - start)

    once(0)
    samples: list[float] = []
    begin = time.perf_counter()
    while len(samples) < min_count or (len(samples) < max_count and time.perf_counter() - begin < seconds):
        samples.append(once(len(samples) + 1))
    return _summary(samples)


def _events(
    fn: Callable[[int], object], seconds: float, min_count: int, max_count: int, flush: bool, graph: int
) -> Timing:
    calls, captured = 1, None
    for i in range(3):
        fn(i)
    torch.cuda.synchronize()
    if graph:
        calls, captured = graph, torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            for i in range(graph):
                fn(i)
        captured.replay()
    trash = torch.empty(5 * l2_bytes("cuda"), dtype=torch.int8, device="cuda") if flush else None

    def repetition(i: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        if trash is not None:
            trash.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        if captured is None:
            fn(i)
        else:
            captured.replay()
        end.record()
        return start, end

    start, end = repetition(0)
    torch.cuda.synchronize()
    once = max(start.elapsed_time(end), 1e-3)
    count = min(max_count, max(min_count, int(1e3 * seconds / once)))
    pairs = [repetition(i) for i in range(count)]
    torch.cuda.synchronize()
    return _summary([start.elapsed_time(end) for start, end in pairs], calls)
