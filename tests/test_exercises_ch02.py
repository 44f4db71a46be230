"""Chapter 02's checkers pass what is right, however it was written, and refuse what is wrong."""

from __future__ import annotations

import functools
import random
from array import array

import exercising
import numpy as np
import pytest
import torch
from faulty import Faulty

from kvlab import exercises, runtime
from kvlab.exercises import ExerciseError, ch02
from kvlab.paged import BlockManager, OutOfBlocks
from kvlab.runtime import counted, tl, triton

IDS = ["02.1", "02.2", "02.3", "02.4", "02.5"]
needs_triton = pytest.mark.skipif(not runtime.can_launch(), reason="no kernel can be launched here")


# --- 02.2 ---


def slot_mapping(table, past, new, block_size):
    return [table[i // block_size] * block_size + i % block_size for i in range(past, past + new)]


def slots_by_numpy(table, past, new, block_size):
    at = np.arange(past, past + new)
    return list(np.array(table, dtype=np.int64)[at // block_size] * block_size + at % block_size) if new else []


def slots_from_zero(table, past, new, block_size):
    return slot_mapping(table, 0, new, block_size)


def slots_without_a_table(table, past, new, block_size):
    return list(range(past, past + new))


def slots_in_a_row(table, past, new, block_size):
    first = table[past // block_size] * block_size + past % block_size
    return list(range(first, first + new))


def slots_of_sixteen(table, past, new, block_size):
    return [table[i // block_size] * 16 + i % block_size for i in range(past, past + new)]


def slots_one_late(table, past, new, block_size):
    return slot_mapping([*table, 0], past + 1, new, block_size)


def slots_of_all(table, past, new, block_size):
    return slot_mapping(table, 0, past + new, block_size)


def slots_as_floats(table, past, new, block_size):
    return [float(slot) for slot in slot_mapping(table, past, new, block_size)]


def slots_that_eat_the_table(table, past, new, block_size):
    slots = slot_mapping(table, past, new, block_size)
    table.clear()
    return slots


# --- 02.3 ---


def write_token(pool, table, length):
    place = length // pool.block_size
    if place == len(table):
        table.extend(pool.allocate())
        return None
    source = table[place]
    if pool.ref_count(source) == 1:
        return None
    [target] = pool.allocate()
    pool.free([source])
    table[place] = target
    return source, target


def write_by_manager(pool, table, length):
    """The library's own copy-on-write, lent the table."""
    manager = BlockManager(pool)
    manager.pool.share(table)
    manager._tables[0], manager._lengths[0] = array("i", table), length
    pool.free(table)  # the table is the manager's now
    manager.ensure(0, length + 1)
    table[:] = list(manager.table(0))
    [pair] = [(source, target) for target, source in manager.take_copies().items()] or [None]
    return pair


def write_never_copies(pool, table, length):
    if length // pool.block_size == len(table):
        table.extend(pool.allocate())


def write_always_copies(pool, table, length):
    place = length // pool.block_size
    if place == len(table):
        table.extend(pool.allocate())
        return None
    source, [table[place]] = table[place], pool.allocate()
    pool.free([source])
    return source, table[place]


def write_frees_first(pool, table, length):
    place = length // pool.block_size
    if place < len(table) and pool.ref_count(table[place]) > 1:
        pool.free([table[place]])
        source, [table[place]] = table[place], pool.allocate()
        return source, table[place]
    return write_token(pool, table, length)


def write_pops_first(pool, table, length):
    place = length // pool.block_size
    if place < len(table) and pool.ref_count(table[place]) > 1:
        source = table.pop()
        table.extend(pool.allocate())
        pool.free([source])
        return source, table[place]
    return write_token(pool, table, length)


def write_forgets_to_free(pool, table, length):
    place = length // pool.block_size
    if place < len(table) and pool.ref_count(table[place]) > 1:
        source, [table[place]] = table[place], pool.allocate()
        return source, table[place]
    return write_token(pool, table, length)


def write_swaps_the_pair(pool, table, length):
    pair = write_token(pool, table, length)
    return pair and pair[::-1]


def write_says_nothing(pool, table, length):
    write_token(pool, table, length)


def write_copies_the_new_block(pool, table, length):
    pair = write_token(pool, table, length)
    return pair or (table[-1], table[-1])


def write_swallows_the_error(pool, table, length):
    try:
        return write_token(pool, table, length)
    except OutOfBlocks:
        return None


def write_appends_a_list(pool, table, length):
    if length // pool.block_size == len(table):
        table.append(pool.allocate())
        return None
    return write_token(pool, table, length)


def write_one_block_early(pool, table, length):
    if length % pool.block_size == pool.block_size - 1:
        table.extend(pool.allocate())
        return None
    return write_token(pool, table, length)


# --- 02.4 ---


@triton.jit
def gather_kernel(
    cache_ptr, table_ptr, used_ptr, out_ptr, table_row, L,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token, seq = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    there = token < tl.load(used_ptr + seq)
    page = tl.load(table_ptr + seq * table_row + token // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
    source = (page * BLOCK_SIZE + token % BLOCK_SIZE) * WIDTH
    row = tl.load(cache_ptr + source + column, mask=there & (column < WIDTH), other=0)
    tl.store(out_ptr + (seq * L + token) * WIDTH + column, row, mask=column < WIDTH)


@counted
@triton.jit
def branching_kernel(
    cache_ptr, table_ptr, used_ptr, out_ptr, table_row, L,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Another way to write it: a branch, pointers moved on, zeros of their own."""
    token, seq = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    out_ptr += seq.to(tl.int64) * L * WIDTH + token.to(tl.int64) * WIDTH
    if token < tl.load(used_ptr + seq):
        page = tl.load(table_ptr + seq * table_row + token // BLOCK_SIZE)
        cache_ptr += page.to(tl.int64) * (BLOCK_SIZE * WIDTH)
        row = tl.load(cache_ptr + (token % BLOCK_SIZE) * WIDTH + column, mask=column < WIDTH)
        tl.store(out_ptr + column, row, mask=column < WIDTH)
    else:
        tl.store(out_ptr + column, tl.zeros([COLUMNS], tl.float32), mask=column < WIDTH)


@triton.jit
def faulty_kernel(
    cache_ptr, table_ptr, used_ptr, out_ptr, table_row, L,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, FAULT: tl.constexpr,
):  # fmt: skip
    token, seq = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    used = tl.load(used_ptr + seq)
    there = token < used
    if FAULT == "one token more":
        there = token <= used
    if FAULT == "one token less":
        there = token + 1 < used
    entry = seq * table_row + token // BLOCK_SIZE
    if FAULT == "first table for all":
        entry = token // BLOCK_SIZE
    page = tl.load(table_ptr + entry, mask=there, other=0)
    if FAULT == "reads the table past the end":
        page = tl.load(table_ptr + entry)
    if FAULT != "cache offsets of 32 bits":
        page = page.to(tl.int64)
    slot = token % BLOCK_SIZE
    if FAULT == "cache offsets of 32 bits":
        slot = slot.to(tl.int32)
    if FAULT == "slot 0 always":
        slot = slot * 0
    source = (page * BLOCK_SIZE + slot) * WIDTH
    if FAULT == "width for block size":
        source = page * WIDTH * WIDTH + slot * WIDTH
    narrow = column < WIDTH
    if FAULT == "padded columns":
        narrow = column < COLUMNS
    row = tl.load(cache_ptr + source + column, mask=there & (column < WIDTH), other=0)
    if FAULT == "multiplies NaN by 0":
        page = tl.load(table_ptr + seq * table_row + tl.minimum(token, used - 1) // BLOCK_SIZE, mask=used > 0, other=0)
        source = (page.to(tl.int64) * BLOCK_SIZE + slot) * WIDTH
        row = tl.load(cache_ptr + source + column, mask=column < WIDTH, other=0)
        row = (row * there).to(row.dtype)
    target = (seq * L + token) * WIDTH
    if FAULT == "out offsets of 32 bits":
        target = (tl.program_id(1) * L + tl.program_id(0)) * WIDTH
    if FAULT == "out as wide as COLUMNS":
        target = (seq * L + token) * COLUMNS
    if FAULT == "writes no zeros":
        narrow = narrow & there
    if FAULT == "writes into the cache":
        tl.store(cache_ptr + column, row, mask=narrow)
    if FAULT == "swaps the ids":
        target = (token * L + seq) * WIDTH
    tl.store(out_ptr + target + column, row, mask=narrow)


@triton.jit
def stub_kernel(
    cache_ptr, table_ptr, used_ptr, out_ptr, table_row, L,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    return


@triton.jit
def kernel_of_other_arguments(cache_ptr, out_ptr, WIDTH: tl.constexpr):
    tl.store(out_ptr, tl.load(cache_ptr))


faulty = functools.partial(Faulty, faulty_kernel)

FAULTS = [
    "one token more",
    "one token less",
    "first table for all",
    "reads the table past the end",
    "cache offsets of 32 bits",
    "out offsets of 32 bits",
    "slot 0 always",
    "width for block size",
    "padded columns",
    "multiplies NaN by 0",
    "out as wide as COLUMNS",
    "writes no zeros",
    "writes into the cache",
    "swaps the ids",
]


# --- 02.5 ---


def truncate(table, length, new_length, block_size, pool):
    if not 0 <= new_length <= length:
        raise ValueError(f"new_length is {new_length}; it must be 0 to {length}")
    kept = -(-new_length // block_size)
    while len(table) > kept:
        pool.free([table.pop()])


def truncate_at_once(table, length, new_length, block_size, pool):
    if new_length not in range(length + 1):
        raise ValueError(new_length)
    kept = (new_length + block_size - 1) // block_size
    pool.free(table[kept:])  # the last of them first
    del table[kept:]


def planted(floor=True, keeps_shared=True):
    """The exercise's function, with both faults or one."""

    def truncate(table, length, new_length, block_size, pool):
        if not 0 <= new_length <= length:
            raise ValueError(f"new_length is {new_length}; it must be 0 to {length}")
        kept = new_length // block_size if floor else -(-new_length // block_size)
        while len(table) > kept:
            block = table.pop()
            if not keeps_shared or pool.ref_count(block) == 1:
                pool.free([block])

    return truncate


def truncate_frees_for_all(table, length, new_length, block_size, pool):
    if not 0 <= new_length <= length:
        raise ValueError(new_length)
    while len(table) > -(-new_length // block_size):
        block = table.pop()
        while pool.ref_count(block):
            pool.free([block])


def truncate_head_first(table, length, new_length, block_size, pool):
    if not 0 <= new_length <= length:
        raise ValueError(new_length)
    kept = -(-new_length // block_size)
    for block in table[kept:]:
        pool.free([block])
    del table[kept:]


def truncate_keeps_one_more(table, length, new_length, block_size, pool):
    if not 0 <= new_length <= length:
        raise ValueError(new_length)
    while len(table) > new_length // block_size + 1:
        pool.free([table.pop()])


def truncate_forgets_the_table(table, length, new_length, block_size, pool):
    if not 0 <= new_length <= length:
        raise ValueError(new_length)
    pool.free(table[-(-new_length // block_size) :])


def truncate_takes_any_length(table, length, new_length, block_size, pool):
    while len(table) > max(0, -(-new_length // block_size)):
        pool.free([table.pop()])


RIGHT = {
    "02.1": [(10, 16), [10, 16], (np.int64(10), torch.tensor(16))],
    "02.2": [slot_mapping, slots_by_numpy],
    "02.3": [write_token, write_by_manager],
    "02.4": [gather_kernel, branching_kernel],
    "02.5": [truncate, truncate_at_once],
}
WRONG = {
    "02.1": [
        (11, 16), (7, 16), (3, 16), (13, 16), (10, 12), (10, 15), (16, 10), (10,), 10, (10.0, 16), ("10", "16"),
        (True, 16), (10, None),
    ],
    "02.2": [
        slots_from_zero, slots_without_a_table, slots_in_a_row, slots_of_sixteen, slots_one_late, slots_of_all,
        slots_as_floats, slots_that_eat_the_table, lambda *_: None, lambda *_: 1 / 0,
        lambda *a: torch.tensor(slot_mapping(*a)),
    ],
    "02.3": [
        write_never_copies, write_always_copies, write_frees_first, write_pops_first, write_forgets_to_free,
        write_swaps_the_pair, write_says_nothing, write_copies_the_new_block, write_swallows_the_error,
        write_appends_a_list, write_one_block_early, lambda *_: None, lambda *_: 1 / 0,
    ],
    "02.4": [*map(faulty, FAULTS), stub_kernel, kernel_of_other_arguments, stub_kernel.fn, slot_mapping],
    "02.5": [
        planted(), planted(floor=False), planted(keeps_shared=False), truncate_frees_for_all, truncate_head_first,
        truncate_keeps_one_more, truncate_forgets_the_table, truncate_takes_any_length, lambda *_: None,
        lambda *_: 1 / 0,
    ],
}  # fmt: skip


class TestAnswers(exercising.Answers):
    RIGHT, WRONG = RIGHT, WRONG
    KERNEL, UNTRACED = "02.4", 3


@pytest.mark.parametrize("name", ["02.2", "02.3", "02.5"])
def test_a_function_that_is_a_stub_is_no_error(name: str) -> None:
    assert exercises.outcome(name, lambda *_: ...) == "not yet"


def test_where_nothing_can_be_launched_no_kernel_is_right(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runtime, "can_launch", lambda on=None: False)
    assert exercises.outcome("02.4", gather_kernel) != "right"
    assert "02.4: skipped" in capsys.readouterr().out


def test_the_faulty_function_is_right_where_the_chapter_says_so() -> None:
    for length, shorter in ((8, 4), (12, 0), (4, 4)):
        books = ch02._Books(random.Random(0), 4, length, 1, 2)
        ch02._truncate_once(planted(), books, 0, length, shorter, 1)


@needs_triton
def test_a_wrong_kernel_is_caught_where_accesses_cannot_be_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU. The tensors stand within larger ones, so that what is read beside them is wrong and harmless."""
    monkeypatch.setattr(ch02, "_builder", lambda: None)
    assert exercises.outcome("02.4", gather_kernel) == "right"
    for fault in FAULTS:
        if fault != "reads the table past the end":  # what was read is not used, so nothing shows
            with pytest.raises(ExerciseError):
                exercises.check("02.4", faulty(fault))


@needs_triton
@pytest.mark.skipif(not runtime.INTERPRET, reason="accesses are watched in the interpreter")
def test_a_wrong_kernel_is_told_what_is_wrong() -> None:
    for fault, match in {
        "reads the table past the end": "reads entry .* of table .*, which has . blocks",
        "cache offsets of 32 bits": "wrapped at 32 bits",
        "out offsets of 32 bits": "wrapped at 32 bits",
        "multiplies NaN by 0": "NaN",
        "writes no zeros": "not written",
        "writes into the cache": "writes to the cache",
        "padded columns": "out",
        "one token less": "must be",
    }.items():
        with pytest.raises(ExerciseError, match=match):
            exercises.check("02.4", faulty(fault))
    with pytest.raises(ExerciseError, match="not written"):
        exercises.check("02.4", stub_kernel)
    with pytest.raises(ExerciseError, match=r"@triton\.jit"):
        exercises.check("02.4", slot_mapping)


def test_a_wrong_answer_is_told_what_is_wrong() -> None:
    for name, wrong, match in [
        ("02.1", (11, 16), "writes in place"),
        ("02.1", (7, 16), "free slots"),
        ("02.1", (10, 12), "before the 20 tokens"),
        ("02.2", slots_from_zero, "new token 0 is token 3"),
        ("02.2", slots_in_a_row, "another block"),
        ("02.3", write_frees_first, "OutOfBlocks and"),
        ("02.3", write_never_copies, "which others read"),
        ("02.3", write_always_copies, "writes in place"),
        ("02.3", write_swaps_the_pair, "source comes first"),
        ("02.5", planted(), "tokens take"),
        ("02.5", planted(floor=False), "not freed"),
        ("02.5", truncate_head_first, "tail first"),
    ]:
        with pytest.raises(ExerciseError, match=match):
            exercises.check(name, wrong)
