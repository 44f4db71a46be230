"""Who takes part in a race: implementations that were found right, and the race itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvlab.bench import Session, Timing, race
from kvlab.bench._peers import Call, Peer, first_line


class Expectation(Protocol):
    """What an output is held against. Source: chapter 03."""

    def error(self, out: Tensor) -> float:
        """The relative error of out [..., H, D]. Source: chapter 03."""
        ...


class Entrant(NamedTuple):
    """An implementation that was found right: what a race runs. Source: chapter 03."""

    name: str
    version: str | None
    fn: Callable[[int], Tensor]
    error: float


def admit(
    session: Session, peer: Peer, prepare: Callable[[], Call], expected: Expectation, like: Tensor, suffix: str = ""
) -> list[Entrant]:
    """The implementation, ready to run, or nothing where it raises or is wrong.

    Shapes and units: ``like`` [..., H, D] is what the output looks like.

    Source: chapter 03.
    """
    name, limit = peer.name + suffix, 1e-2 if like.dtype != torch.float32 else 1e-4
    try:
        call = prepare()
        torch.full_like(like, float("nan"))  # freed at once: an output that is not written shows as NaN
        error = expected.error(call.run())
    except Exception as problem:  # another library's errors are of any kind
        if session.on_gpu:
            torch.cuda.synchronize()  # raises where the device is lost: then nothing more can be measured
        session.note(f"  {name}: skipped, {first_line(problem)}")
        return []
    if not error <= limit:
        session.note(f"  {name}: skipped, its output is off by {error:.2g} (allowed {limit:g})")
        return []
    version = f"{peer.version} ({call.how})" if peer.version and call.how else peer.version
    return [Entrant(name, version, lambda i: call.run(), error)]


def compete(
    session: Session, entrants: Sequence[Entrant], seconds: float = 0.4, graph: int = 0
) -> dict[str, tuple[Entrant, Timing]]:
    """Race them, about so many seconds each; ``graph`` as in ``bench.race``, and without where nothing can be captured.

    Source: chapter 03.
    """
    if not entrants:
        return {}
    functions: dict[str, Callable[[int], object]] = {e.name: e.fn for e in entrants}
    seconds, rounds = session.seconds(seconds), 2 if session.quick else 15
    try:
        timings = race(functions, device=session.device, seconds=seconds, rounds=rounds, graph=graph)
    except RuntimeError as problem:
        if not graph:
            raise
        session.note(f"  not in a CUDA graph: {first_line(problem)}")
        timings = race(functions, device=session.device, seconds=seconds, rounds=rounds)
    return {e.name: (e, timings[e.name]) for e in entrants}
