"""Which tile a launch uses: a short list for each kind of work, timed once per class of shapes, the best one kept.

A search over every tile takes minutes and is over-fitted to one shape. Here a list has at most four entries, its first
is good by itself, and it is the one used wherever nothing may be timed: in the interpreter, while a CUDA graph is being
captured, and with KVLAB_TUNE=0. What was found is kept on disk, in $KVLAB_CACHE or ~/.cache/kvlab.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch

from kvlab import runtime
from kvlab.runtime import next_power_of_2, triton

MAX_CONFIGS = 4
_TABLES: dict[Path, dict[str, Config]] = {}  # what each file held when it was first read, and what was found since


@dataclass(frozen=True)
class Config:
    """A tile: M rows of queries against N keys at a time, by so many warps, with loads so many blocks ahead.

    Shapes and units: M and N in rows, powers of two, 16 or more.

    Source: chapter 03.
    """

    M: int
    N: int
    num_warps: int
    num_stages: int


_INTERPRETED = Config(64, 64, 4, 1)  # small, so that a short text has several tiles

# Long prompts, 16-bit numbers; by the head size, rounded up. The first was chosen among what compiles without a spilled
# register, near FlashAttention's and FlexAttention's own tables; the others are what may beat it.
_LONG: dict[bool, dict[int, list[Config]]] = {
    True: {  # Hopper: 64 rows a warpgroup
        64: [Config(128, 128, 8, 3), Config(128, 64, 4, 3), Config(64, 128, 4, 3)],
        128: [Config(128, 64, 8, 3), Config(128, 128, 8, 2), Config(64, 64, 4, 3)],
        256: [Config(128, 32, 8, 3), Config(64, 64, 8, 2), Config(128, 32, 8, 2)],
    },
    False: {  # Ampere, Ada: 99 KB of shared memory on most of them
        64: [Config(128, 64, 8, 3), Config(64, 64, 4, 3), Config(128, 32, 4, 3)],
        128: [Config(128, 32, 8, 2), Config(64, 64, 4, 2), Config(64, 32, 4, 3)],
        256: [Config(64, 32, 8, 2), Config(64, 32, 8, 1), Config(64, 64, 8, 1)],
    },
}
_MIDDLE = {  # up to 64 rows in all
    True: {64: [Config(64, 128, 4, 3), Config(64, 64, 4, 3)], 128: [Config(64, 64, 4, 3)], 256: [Config(64, 64, 8, 2)]},
    False: {64: [Config(64, 64, 4, 3)], 128: [Config(64, 32, 4, 3)], 256: [Config(64, 32, 8, 2)]},
}
_SINGLE = {64: Config(64, 32, 8, 2), 128: Config(32, 16, 8, 2), 256: Config(16, 32, 8, 2)}  # float32: no tensor cores


def once_a_kind(find: Callable[..., list[Config]]) -> Callable[..., list[Config]]:
    """Decorate what lists the candidates: a launch on a GPU asks for the same list every time, and must not change it.

    Source: chapter 04.
    """
    remembered = functools.lru_cache(1 << 10)(find)

    @functools.wraps(find)
    def found(**kind: Any) -> list[Config]:
        return (find if kind["capability"] is None else remembered)(**kind)  # the interpreter's is made at once

    return found


@once_a_kind
def candidates(
    *, capability: tuple[int, int] | None, shared: int, width: int, v_width: int, itemsize: int, rows: int,
    indirect: bool,
) -> list[Config]:  # fmt: skip
    """The configurations worth timing for a kind of work, the best guess first.

    Shapes and units: ``capability`` of the GPU, None in the interpreter; ``shared`` bytes of shared memory that a
    program may have; ``width`` and ``v_width`` head sizes rounded up to powers of two; ``itemsize`` bytes a number;
    ``rows`` bounds new tokens times the group of one sequence; ``indirect``: pages are looked up before keys can be
    loaded, which halves how far ahead the loads run.

    Raises: ValueError where not even the smallest tile fits the shared memory.

    Source: chapter 03; the tables of FlashAttention-2 and of PyTorch's FlexAttention.
    """
    least = max(16, 1 << max(rows - 1, 0).bit_length())
    if capability is None:
        return [Config(min(least, _INTERPRETED.M), *astuple(_INTERPRETED)[1:])]
    wide = max(64, width, v_width)
    hopper = capability[0] in (9, 10)
    if itemsize >= 4:
        found = [_SINGLE[wide]]
    elif least > 64:
        found = list(_LONG[hopper][wide])
        if indirect:
            found.insert(1, _deeper(found[0]))
    elif least == 64:
        found = list(_MIDDLE[hopper][wide])
    else:  # few rows: nearly all the time goes into reading keys and values
        n = 8192 // wide
        found = [Config(least, n, 4, 3), Config(least, max(16, n // 2), 4, 4), Config(least, n, 8, 3)]
        if indirect:
            found = [_deeper(c) for c in found]

    def fits(config: Config) -> bool:
        return shared_bytes(config, width, v_width, itemsize, hopper=hopper, indirect=indirect) <= shared

    found = [c for c in found if fits(c)] or [c for c in (Config(16, 16, 4, 1),) if fits(c)]
    if not found:
        raise ValueError(f"head sizes are {width} and {v_width}; not one tile fits {shared} bytes of shared memory")
    return found[:MAX_CONFIGS]


def _deeper(config: Config) -> Config:
    """As many blocks ahead as before, where a look-up goes before each load."""
    return Config(config.M, config.N, config.num_warps, 2 * config.num_stages - 1)


def shared_bytes(
    config: Config, width: int, v_width: int, itemsize: int, *, hopper: bool, indirect: bool = False
) -> int:
    """The shared memory that a program takes: queries, the keys and values of blocks on their way, weights.

    Shapes and units: bytes, an upper bound; as ``candidates``. Hopper's asynchronous products (of 16-bit numbers, 64
    rows or more) keep one block more, and take their weights from registers.

    Source: chapter 03; ``triton.compile``'s own figures, to which tests hold it.
    """
    asynchronous = hopper and itemsize == 2 and config.M >= 64
    blocks = config.num_stages if asynchronous else max(1, config.num_stages - 1)
    if indirect:
        blocks = (blocks + 1) // 2
    numbers = config.M * width + blocks * config.N * (width + v_width) + (0 if asynchronous else config.M * config.N)
    return max(numbers, config.M * v_width) * itemsize + (8 * config.N * config.num_stages if indirect else 0) + 2048


def padded(size: int) -> int:
    """A head size as a tile has it: a power of two, 16 or more. Source: chapter 03."""
    return max(16, next_power_of_2(size))


@functools.cache
def chip(device: torch.device) -> tuple[str, tuple[int, int] | None, int]:
    """A GPU's name, capability and bytes of shared memory for one program; the interpreter has no bounds.

    Source: chapter 03.
    """
    return ("interpreter", None, 2**40) if device.type != "cuda" or runtime.INTERPRET else _gpu(device)


@functools.cache
def _gpu(device: torch.device) -> tuple[str, tuple[int, int], int]:
    shared = triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"]
    return torch.cuda.get_device_name(device), runtime.capability(device), shared


@functools.cache
def code(*files: str) -> str:
    """What a timing is true of: this version of Triton, and the text of a kernel and of what it calls.

    Source: chapter 03.
    """
    text = b"".join(Path(file).read_bytes() for file in files)
    return f"{getattr(triton, '__version__', 'none')}-{hashlib.sha256(text).hexdigest()[:12]}"


@functools.lru_cache(1 << 12)
def shape_class(**parts: Any) -> str:
    """The name of a class of shapes that share a configuration: its parts in order, lengths rounded up.

    Shapes and units: an int whose name begins with ``max_`` counts tokens and is rounded up to a power of two.

    Source: chapter 03.
    """

    def bucket(name: str, value: Any) -> Any:
        return 1 << max(value - 1, 0).bit_length() if name.startswith("max_") else value

    return "|".join(f"{name}={bucket(name, value)}" for name, value in parts.items())


def may_tune(device: torch.device) -> bool:
    """Whether configurations may be timed now: on a GPU, outside a graph's capture, and unless KVLAB_TUNE is 0.

    Source: chapter 03.
    """
    if device.type != "cuda" or runtime.INTERPRET or os.environ.get("KVLAB_TUNE", "1") == "0":
        return False
    return not torch.cuda.is_current_stream_capturing()


def path() -> Path:
    """The file that keeps what was found: tune.json in $KVLAB_CACHE, or in ~/.cache/kvlab. Source: chapter 03."""
    return _path(os.environ.get("KVLAB_CACHE"), os.environ.get("HOME"))


@functools.lru_cache(16)
def _path(given: str | None, home: str | None) -> Path:
    """The same, worked out once: this is asked at every launch."""
    try:
        return Path(given or Path.home() / ".cache" / "kvlab") / "tune.json"
    except RuntimeError:  # a user without a home
        return Path(tempfile.gettempdir()) / "kvlab" / "tune.json"


def known(key: str, found: Sequence[Config]) -> Config | None:
    """What was found for a class before, in this process or another, if it is still in the list.

    Source: chapter 03.
    """
    config = _table(path()).get(key)
    return config if config in found else None


def choose(key: str, found: Sequence[Config], measure: Callable[[Config], float | None] | None = None) -> Config:
    """The configuration of a class: the one known, else the fastest by ``measure``, which is then kept.

    Shapes and units: ``found`` from ``candidates``; ``measure`` gives the milliseconds of one, or None where it cannot
    run here; without it nothing is timed and the first is taken, this once.

    Raises: ValueError where ``found`` is empty; RuntimeError where not one of several can run.

    Source: chapter 03; Triton's autotuner.
    """
    if not found:
        raise ValueError("found is empty; it must hold one configuration or more")
    if len(found) == 1:
        return found[0]
    config = known(key, found)
    if config is None and measure is not None:
        times = {c: ms for c in found if (ms := measure(c)) is not None}
        if not times:
            raise RuntimeError(f"no configuration of {list(found)} can run on this GPU")
        config = min(times, key=lambda c: times[c])
        _keep(path(), key, config)
    return config or found[0]


def time_launch(launch: Callable[[], object], seconds: float = 0.02) -> float | None:
    """Milliseconds of one launch on the current GPU, by CUDA events; None where the GPU has not the resources.

    The first launch compiles, the second says how many more about ``seconds`` allow: 10 at most. The GPU is kept busy
    while they are put in its queue, so that what they cost the host does not show.

    Source: chapter 03; Triton's ``do_bench``.
    """
    from triton.runtime.errors import OutOfResources

    def timed(count: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(count * 300_000)  # cycles
        begin.record()
        for _ in range(count):
            launch()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / count

    try:
        launch()
    except OutOfResources:
        return None
    once = timed(1)
    count = int(min(10, seconds * 1e3 / max(once, 1e-3)))
    return min(once, timed(count)) if count > 1 else once


def _table(file: Path) -> dict[str, Config]:
    if file not in _TABLES:
        _TABLES[file] = _read(file)
    return _TABLES[file]


def _read(file: Path) -> dict[str, Config]:
    """The rows of a file; what is missing or spoilt counts as not found."""
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
        return {key: Config(*row) for key, row in rows.items() if len(row) == 4 and all(type(n) is int for n in row)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _keep(file: Path, key: str, config: Config) -> None:
    """Remember a choice, here and on disk beside what other processes have written; a disk that is full, or may not be
    written to, costs the next process a search and nothing else."""
    _table(file)[key] = config
    rows = {name: list(astuple(row)) for name, row in {**_read(file), key: config}.items()}
    partial = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".partial", delete=False) as partial:
            json.dump({"rows": rows}, partial, indent=0, sort_keys=True)
        os.replace(partial.name, file)
    except OSError:
        if partial is not None:
            with contextlib.suppress(OSError):
                os.unlink(partial.name)
