"""How many splits, and which tile: decided on the host from bounds alone, for the lengths are on the device."""

from __future__ import annotations

from typing import NamedTuple

from kvlab.flash import _tune
from kvlab.flash._tune import Config
from kvlab.runtime import next_power_of_2

MAX_ROWS = 64  # new tokens times group: up to here a sequence's rows fit one tile, and reading its keys is the work
MAX_BATCH = 4096  # sequences whose lengths each program reads to find its own
PER_MULTIPROCESSOR = 2  # programs that keep one multiprocessor's share of the memory busy
LONGEST_CHUNK = 4096  # keys; what comes last should be short beside the whole
MOST_CHUNKS = 16  # for each multiprocessor


class Splits(NamedTuple):
    """How the keys are cut: by "balanced", "count" or "size"; ``limit`` bounds what the rule may give.

    Shapes and units: balanced: chunks a KV head over all sequences, ``wave`` of them if that makes none longer than
    ``longest`` tiles; count: splits of each sequence; size: chunks of ``chunk`` keys of each sequence. ``programs`` of
    a KV head are launched.

    Source: chapter 04.
    """

    rule: str
    limit: int
    wave: int
    longest: int
    chunk: int
    programs: int

    def __str__(self) -> str:
        if self.rule == "count":
            return f"{self.limit} splits a sequence" if self.limit > 1 else "one split a sequence"
        if self.rule == "size":
            return f"chunks of {self.chunk} keys"
        return f"balanced, {self.wave} to {self.limit} chunks a KV head"


def max_rows(itemsize: int, head_dim: int) -> int:
    """Rows of a sequence, new tokens times group, that one tile holds: 64, and 32 of large heads in float32.

    Source: chapter 04.
    """
    return MAX_ROWS if itemsize < 4 or head_dim <= 128 else MAX_ROWS // 2


def choose_splits(
    batch: int, kv_heads: int, rows: int, max_seqlen_k: int, multiprocessors: int, tile: int = 64
) -> tuple[int, int]:
    """How many chunks the keys of all sequences are dealt into, for each KV head: (wave, limit).

    ``wave`` chunks give every multiprocessor two programs, which is what it takes to keep its share of the memory busy,
    unless there are too few keys: a chunk has a tile at least, and eight keys for each row, so that writing partial
    results and reading them again stays a small part of the traffic. Where ``wave`` chunks would be longer than 4096
    keys, as many as it takes are cut, up to ``limit``: with few long chunks, half of the multiprocessors wait for the
    last.

    Shapes and units: ``rows`` new tokens times group of a sequence at most, ``max_seqlen_k`` keys of a sequence at
    most, ``tile`` keys; bounds, never what the device holds.

    Raises: ValueError for a number under 1 (``max_seqlen_k``: under 0).

    Source: chapter 04; Dao et al. 2023 (Flash-Decoding), and FlashInfer's scheduler.
    """
    given = {"batch": batch, "kv_heads": kv_heads, "rows": rows, "multiprocessors": multiprocessors, "tile": tile}
    for name, value in (*given.items(), ("max_seqlen_k", max_seqlen_k + 1)):
        if value < 1:
            least = int(name != "max_seqlen_k")
            raise ValueError(f"{name} is {value - 1 + least}; it must be {least} or more")
    shortest = max(tile, 8 * rows)
    full = -(-PER_MULTIPROCESSOR * multiprocessors // kv_heads)
    wave = max(1, min(full, batch * -(-max_seqlen_k // shortest)))
    most = -(-MOST_CHUNKS * multiprocessors // kv_heads)
    return wave, max(wave, min(most, batch * -(-max_seqlen_k // LONGEST_CHUNK)))


def plan(
    num_splits: int, split_size: int | None, *, batch: int, kv_heads: int, rows: int, max_seqlen_k: int,
    multiprocessors: int, tile: int,
) -> Splits:  # fmt: skip
    """The rule of one call, and the grid that it needs. Shapes and units: as ``choose_splits``.

    Source: chapter 04.
    """
    if split_size is not None:
        limit = max(1, -(-max_seqlen_k // split_size))
        return Splits("size", limit, 1, 1, min(split_size, 2**30), batch * limit)
    if num_splits > 0 or batch > MAX_BATCH:
        limit = max(1, min(num_splits, -(-max_seqlen_k // tile)))  # more splits than tiles would have no work
        return Splits("count", limit, 1, 1, 1, batch * limit)
    wave, limit = choose_splits(batch, kv_heads, rows, max_seqlen_k, multiprocessors, tile)
    return Splits("balanced", limit, wave, max(1, LONGEST_CHUNK // tile), 1, limit + batch)


# --- tiles -----------------------------------------------------------------------------------------------------------

_INTERPRETED = 64  # keys of a tile there


@_tune.once_a_kind
def candidates(
    *, capability: tuple[int, int] | None, shared: int, width: int, v_width: int, itemsize: int, rows: int,
    fixed: bool = False,
) -> list[Config]:  # fmt: skip
    """The tiles worth timing, the best guess first: M rows, all that a sequence has, by N keys.

    Shapes and units: as ``flash._tune.candidates``; ``fixed``: the same single tile whatever ``rows`` is, for
    results that may not depend on the company.

    Raises: ValueError where not even the smallest tile fits the shared memory.

    Source: chapter 04.
    """
    most = max_rows(itemsize, max(width, v_width))
    m = most if fixed else max(16, 1 << max(min(rows, most) - 1, 0).bit_length())
    if capability is None:
        return [Config(m, _INTERPRETED, 4, 1)]
    wide = max(64, width, v_width)
    n = 8192 // wide
    hopper = capability[0] in (9, 10)
    if itemsize >= 4:  # no tensor cores
        warps = 16 if m > 16 and wide > 64 else 4 if m == 16 and wide == 64 else 8
        found = [Config(m, max(16, n // 4), warps, 3), Config(m, 16, warps, 1)]
    else:  # warps: as few as need not save registers
        many = (m == 64 and wide != 128) or (m == 32 and wide == 256 and hopper)
        warps = 8 if many else 4
        found = [  # few rows: the fewer warps, the less they wait for each other
            Config(m, 2 * n, 4, 3), Config(m, n, 2, 3), Config(m, n, 4, 3)
        ] if m == 16 and not fixed else [
            Config(m, n, warps, 5), Config(m, n, 2 * warps, 5), Config(m, n, warps, 7), Config(m, n, warps, 3),
            Config(m, max(16, n // 2), warps, 7), Config(m, 16, warps, 3),
        ]  # fmt: skip

    def fits(config: Config) -> bool:
        return shared_bytes(config, width, v_width, itemsize, hopper=hopper) <= shared

    found = list(dict.fromkeys(c for c in found if fits(c)))
    if not found:
        raise ValueError(f"head sizes are {width} and {v_width}; not one tile fits {shared} bytes of shared memory")
    return found[: 1 if fixed else _tune.MAX_CONFIGS]


def shared_bytes(config: Config, width: int, v_width: int, itemsize: int, *, hopper: bool) -> int:
    """The shared memory of a program, an upper bound: what attention takes or, after it, what the merge does.

    Shapes and units: bytes; as ``candidates``.

    Source: chapter 04; ``triton.compile``'s own figures, to which tests hold it.
    """
    s, r = merge_tile(v_width)
    merging = 3 * s * r * (4 * v_width + 8) + 4096
    return max(_tune.shared_bytes(config, width, v_width, itemsize, hopper=hopper, indirect=True), merging)


def merge_tile(v_width: int) -> tuple[int, int]:
    """How many splits and rows are merged at a time: 4096 numbers at most, so that they fit the registers.

    Source: chapter 04.
    """
    return max(2, min(8, 1024 // next_power_of_2(v_width))), 4
