"""Time measured the way the book reports it: warm, many times, the median, and never out of a warm L2 by accident."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
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
) -> Timing:
    """Time ``fn(i)``, where i counts the calls so that ``fn`` can rotate its buffers.

    Shapes and units: about ``seconds`` of repetitions, at least ``min_count`` and at most ``max_count``, after a warm
    run. On a GPU the clock is a pair of CUDA events. ``flush`` overwrites five times the L2 before each repetition.
    ``graph`` = n captures n calls (i = 0 .. n-1) in a CUDA graph and times its replays: for kernels shorter than their
    launch. ``host`` takes the wall clock around a synchronised call instead: for steps in which Python is a part of
    the cost. On a CPU the wall clock is always used and ``graph`` is ignored. Gives the time of one call.

    Raises: ValueError where counts are no integers or under 1, ``seconds`` is not finite or negative, or ``graph`` is
    asked for together with ``flush``.

    Source: chapter 00; Triton's ``do_bench``.
    """
    for name, value, least in (("min_count", min_count, 1), ("max_count", max_count, min_count), ("graph", graph, 0)):
        if type(value) is not int or value < least:
            raise ValueError(f"{name} is {value!r}; it must be an integer, {least} or more")
    if not is_number(seconds) or seconds < 0:
        raise ValueError(f"seconds is {seconds!r}; it must be a finite number, 0 or more")
    if graph and flush:
        raise ValueError("graph and flush exclude each other: let the captured calls rotate their buffers")
    device = torch.device(device)
    if device.type != "cuda":
        return _wall(fn, seconds, min_count, max_count, lambda: None)
    if host:
        return _wall(fn, seconds, min_count, max_count, lambda: torch.cuda.synchronize(device))
    with torch.cuda.device(device):
        return _events(fn, seconds, min_count, max_count, flush, graph)


def _summary(samples: list[float], calls: int = 1) -> Timing:
    samples = sorted(s / calls for s in samples)
    quartiles = statistics.quantiles(samples, n=4) if len(samples) > 1 else [samples[0]] * 3
    return Timing(statistics.median(samples), quartiles[2] - quartiles[0], len(samples))


def _wall(
    fn: Callable[[int], object], seconds: float, min_count: int, max_count: int, wait: Callable[[], object]
) -> Timing:
    fn(0)
    wait()
    samples: list[float] = []
    begin = time.perf_counter()
    while len(samples) < min_count or (len(samples) < max_count and time.perf_counter() - begin < seconds):
        start = time.perf_counter()
        fn(len(samples) + 1)
        wait()
        samples.append(1e3 * (time.perf_counter() - start))
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
