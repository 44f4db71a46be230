"""The Hopper decode kernel's deal of blocks, run on the host: its own device functions, with NumPy in Gluon's place."""

from __future__ import annotations

import itertools
import types
from collections import Counter
from typing import Any

import numpy as np

FUNCTIONS = ("lengths_of", "add", "left_over", "parts_of", "share_of", "find_chunk", "next_sequence", "cuts")


class Vector(np.ndarray):
    """What Gluon has as a tensor of integers."""

    def to(self, dtype: Any) -> Vector:
        return self.astype(np.int64)


def _tensor(x: Any) -> Any:
    return np.asarray(x).view(Vector) if np.ndim(x) else int(x)


class Pointer:
    def __init__(self, data: np.ndarray, at: Any = 0) -> None:
        self.data, self.at = data, at

    def __add__(self, n: Any) -> Pointer:
        return Pointer(self.data, self.at + n)


def _load(pointer: Pointer, mask: Any = True, other: int = 0, **_: Any) -> Any:
    at, mask = np.broadcast_arrays(pointer.at, mask)
    return _tensor(np.where(mask, pointer.data[np.where(mask, at, 0)], other))


def of_program(kernel: Any, program: int, programs: int) -> Any:
    """The functions as one program of so many sees them."""
    gl = types.SimpleNamespace(
        load=_load, program_id=lambda axis: program, num_programs=lambda axis: programs, int32=None,
        arange=lambda low, high, layout: _tensor(range(low, high)), BlockedLayout=lambda *layout: None,
        sum=lambda x, axis: int(np.sum(x)), associative_scan=lambda x, axis, fn: _tensor(np.cumsum(x)),
        where=lambda c, a, b: _tensor(np.where(c, a, b)), cdiv=lambda a, b: -(-a // b),
        maximum=lambda a, b: _tensor(np.maximum(a, b)), minimum=lambda a, b: _tensor(np.minimum(a, b)),
    )  # fmt: skip
    names: dict[str, Any] = {"gl": gl}
    names |= {name: getattr(kernel, name).value for name in ("ENOUGH", "LONG", "CHUNKS", "LEAST_CHUNK")}
    names |= {name: types.FunctionType(getattr(kernel, name).fn.__code__, names, name) for name in FUNCTIONS}
    return types.SimpleNamespace(**names)


def deal(kernel: Any, plan: Any, q_lens: list[int], kv_lens: list[int], kv_heads: int, programs: int) -> bool:
    """Let every program take its share, and then deal out all chunks; gives whether there were any.

    Asserted: each block of keys is read once; all pieces of an item are counted alike, as many as there are; and each
    piece has a place of its own, where the merge looks for it.
    """
    batch, starts = len(q_lens), np.cumsum([0, *q_lens])
    work = (Pointer(starts), Pointer(np.array(kv_lens)), batch, kv_heads)
    first = of_program(kernel, 0, programs)
    read: Counter[tuple[int, int, int]] = Counter()
    counts: dict[tuple[int, int], list[int]] = {}
    places: set[tuple[int, int]] = set()

    def walk(run: Any, portion: Any) -> None:
        seq, head, block, left, line, begin, late, share, chunk = (int(x) for x in portion)
        while left > 0:
            _, _, _, low, blocks = run.lengths_of(seq, True, work, plan)
            own, over = run.parts_of(seq, blocks, chunk, plan)
            todo = min(left, (over if line else own) - block)
            assert todo > 0, "a portion begins or goes on where an item has no block in its line"
            begins = low + (own if line else 0) + block
            read.update((seq, head, i) for i in range(begins, begins + todo))
            cut, pieces = run.cuts(begin, own, share)
            late_cut, late_pieces = run.cuts(late, over, chunk)
            late_seq = programs // kv_heads + batch + seq
            mine = late_seq + (late + block) // max(chunk, 1) if line else seq + (begin + block) // share
            counts.setdefault((seq, head), []).append(pieces + late_pieces)
            if pieces + late_pieces > 1:
                assert (mine, head) not in places, "two pieces in one place"
                assert mine - seq - cut in range(pieces) or mine - late_seq - late_cut in range(late_pieces)
                places.add((mine, head))
            left, block = left - todo, 0
            if left > 0:
                seq, begin, late = run.next_sequence(seq, own, over, begin, late, line, chunk, work, plan)

    for program in range(programs):
        run = of_program(kernel, program, programs)
        portion, over = run.share_of(work, plan)
        share, chunk = portion[7:]
        walk(run, portion)
    for head, at in itertools.product(range(kv_heads), range(0, over, max(chunk, 1))):
        walk(first, first.find_chunk(head, at, min(chunk, over - at), share, chunk, work, plan))
    expected: Counter[tuple[int, int, int]] = Counter()
    for seq in range(batch):
        _, _, _, low, blocks = first.lengths_of(seq, True, work, plan)
        expected.update((seq, head, low + i) for head in range(kv_heads) for i in range(blocks))
    assert read == expected
    assert all(set(of_item) == {len(of_item)} for of_item in counts.values())
    return over > 0
