"""Checkers of chapter 02: pools, tables and poisoned pages, drawn by one seed; no stored outputs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from kvlab import runtime
from kvlab.exercises import SEED, ExerciseError, _NotYet, checker, integer, launching
from kvlab.paged import BlockManager, BlockPool, OutOfBlocks

_PROMPT, _BLOCK_SIZE, _SEQUENCES, _WRITTEN = 37, 16, 4, 20


def _in_use(shared: bool, written: int = _WRITTEN) -> int:
    manager = BlockManager(BlockPool(64, _BLOCK_SIZE))
    for seq_id in range(_SEQUENCES):
        if seq_id and shared:
            manager.fork(0, seq_id)
        else:
            manager.ensure(seq_id, _PROMPT)
            manager.advance(seq_id, _PROMPT)
    for seq_id in range(_SEQUENCES):
        manager.ensure(seq_id, _PROMPT + written)
        manager.advance(seq_id, _PROMPT + written)
    return manager.pool.num_blocks - manager.pool.num_free


@checker("02.1")
def blocks_in_use(answer: Any) -> None:
    """(shared, unshared) blocks of a prompt of 37 tokens, forked three times, each then writing 20.

    Raises: ExerciseError.  Source: chapter 02.
    """
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise ExerciseError(f"answer is {answer!r}; it must be two integers: (shared, unshared)")
    shared, unshared = (integer(n, what) for n, what in zip(answer, ("shared", "unshared"), strict=True))
    expected, grown = _in_use(shared=True), -(-(_PROMPT + _WRITTEN) // _BLOCK_SIZE) - -(-_PROMPT // _BLOCK_SIZE)
    if shared == _in_use(shared=True, written=0):
        raise ExerciseError(f"shared: {shared} blocks are in use before the {_WRITTEN} tokens are written")
    if shared == _in_use(shared=True, written=0) + _SEQUENCES * grown:
        raise ExerciseError("shared: the prompt's last block has free slots; each writes there, in a block of its own")
    if shared == expected + 1:
        raise ExerciseError("shared: of a block's owners the last one writes in place; no copy is left over")
    if shared != expected:
        raise ExerciseError(f"shared: {shared} is not right; only full blocks of the prompt stay shared")
    if unshared == _in_use(shared=False, written=0):
        raise ExerciseError(f"unshared: {unshared} blocks are in use before the {_WRITTEN} tokens are written")
    if unshared != _in_use(shared=False):
        raise ExerciseError(f"unshared: {unshared} is not right; each sequence has a table of its own, rounded up")


@checker("02.2")
def slot_mapping(function: Callable[..., Any]) -> None:
    """Flat slots of new tokens: table, past, new, block_size. Raises: ExerciseError.  Source: chapter 02."""
    rng = random.Random(SEED)
    cases = [(0, 5, 4), (3, 2, 4), (4, 4, 4), (7, 1, 16), (15, 1, 16), (16, 1, 16), (10, 9, 5), (2, 3, 1), (6, 0, 3)]
    cases += [(rng.randint(0, 40), rng.randint(1, 30), rng.choice([1, 3, 5, 8, 16])) for _ in range(12)]
    for past, new, size in cases:
        used = -(-(past + new) // size)
        blocks = rng.sample(range(3 * used + 8), used)
        table = blocks + [-1] * rng.randint(0, 2)
        given = list(table)
        value = function(given, past, new, size)
        what = f"slot_mapping for table {table}, past {past}, new {new}, block_size {size}"
        if given != table:
            raise ExerciseError(f"{what} changed the table; it only reads it")
        if not isinstance(value, list):
            raise ExerciseError(f"{what} gave {type(value).__name__}; it must give a list of integers")
        got = [integer(slot, f"{what}: entry {i}") for i, slot in enumerate(value)]
        if len(got) != new:
            raise ExerciseError(f"{what} gave {len(got)} slots; there are {new} new tokens")
        expected = [blocks[i // size] * size + i % size for i in range(past, past + new)]
        if got == expected:
            continue
        at = next(i for i in range(new) if got[i] != expected[i])
        token, where = past + at, f"{what}: entry {at} is {got[at]}"
        if at and token % size == 0 and got[at] == got[at - 1] + 1:
            raise ExerciseError(f"{where}, the slot after the one before it; token {token} begins another block")
        if got[at] == blocks[at // size] * size + at % size:
            raise ExerciseError(f"{where}, the slot of token {at}; new token {at} is token {token} of the sequence")
        if got[at] == token:
            raise ExerciseError(f"{where}, the token's place in the sequence; the table says where its block is")
        raise ExerciseError(f"{where}; token {token} is token {token % size} in block {token // size} of the table")


class _Books:
    """A pool, the tables of several sequences over it, and what both were before an answer touched them."""

    def __init__(self, rng: random.Random, size: int, length: int, owners: int, free: int) -> None:
        held, others = -(-length // size), rng.randint(0, 3)
        self.pool = BlockPool(held + others + free + (held + others + free == 0), size)
        self.pool.allocate(self.pool.num_blocks)
        order = rng.sample(range(self.pool.num_blocks), self.pool.num_blocks)
        self.pool.free(order[held + others :])
        self.tables = [order[:held] for _ in range(owners)]
        for _ in range(owners - 1):
            self.pool.share(order[:held])
        self.tables.append(order[held : held + others])
        self.spare = self.pool.num_free
        self.remember()

    def remember(self) -> None:
        self.before, self.free_before = [list(t) for t in self.tables], self.pool.free_order()

    def unchanged(self, what: str) -> None:
        for b, (table, before) in enumerate(zip(self.tables, self.before, strict=True)):
            if table != before:
                raise ExerciseError(f"{what} changed table {b} from {before} to {table}")
        self.balanced(what)
        if self.pool.free_order() != self.free_before:
            raise ExerciseError(f"{what} changed the free blocks: {self.free_before} became {self.pool.free_order()}")

    def balanced(self, what: str) -> None:
        """Every block has as many owners as tables name it, and is free where none does."""
        free = self.pool.free_order()
        for block in range(self.pool.num_blocks):
            named, refs = sum(table.count(block) for table in self.tables), self.pool.ref_count(block)
            if named != refs:
                hint = "a block that was given up was not freed" if refs > named else "too many owners were taken away"
                raise ExerciseError(f"{what}: block {block} stands in {named} tables and has {refs} owners: {hint}")
            if free.count(block) != (named == 0):
                raise ExerciseError(f"{what}: block {block} stands in {named} tables and in the free list {free}")


def _table_of(table: Any, what: str) -> None:
    for block in table:
        if not isinstance(block, int) or isinstance(block, bool):
            raise ExerciseError(f"{what}: the table became {table}; its entries must be block numbers")


@checker("02.3")
def write_token(function: Callable[..., Any]) -> None:
    """Copy-on-write of one token: pool, table, length. Raises: ExerciseError.  Source: chapter 02."""
    rng = random.Random(SEED)
    cases = [(4, 0, 1), (4, 3, 1), (4, 3, 2), (4, 4, 2), (4, 6, 3), (16, 37, 4), (1, 2, 2)]
    cases += [(rng.choice([1, 3, 4]), rng.randint(0, 13), rng.randint(1, 4)) for _ in range(20)]
    for size, length, owners in cases:
        full = owners * (length % size == 0) or owners - 1  # the blocks that all owners together need
        for free in sorted({full + 2, full, max(0, full - 1), 0}, reverse=True):
            books = _Books(rng, size, length, owners, free)
            for writer in rng.sample(range(owners), owners):  # one after the other; the last owner writes in place
                _write_once(function, books, writer, length)


def _write_once(function: Callable[..., Any], books: _Books, writer: int, length: int) -> None:
    pool, table, place = books.pool, books.tables[writer], length // books.pool.block_size
    books.remember()
    before, room = list(table), pool.num_free
    owners = pool.ref_count(table[place]) if place < len(table) else 0
    need = int(owners != 1)
    state = f"a block of {owners} owners" if owners else "no block yet for the token"
    what = f"write_token for table {before}, length {length}, blocks of {pool.block_size}, {room} free, {state},"
    try:
        value = function(pool, table, length)
    except ExerciseError as error:
        if not isinstance(error.__cause__, OutOfBlocks):
            raise
        if need <= room:
            raise ExerciseError(f"{what} raised OutOfBlocks; it needs {need}") from None
        books.unchanged(f"{what} raised OutOfBlocks and")
        return
    if need > room:
        raise ExerciseError(f"{what} gave {value!r}; no block is free for it, so it must raise OutOfBlocks")
    _table_of(table, what.removesuffix(","))
    if len(table) != place + 1:
        raise ExerciseError(f"{what} left {len(table)} blocks in the table; {length + 1} tokens take {place + 1}")
    if table[:place] != before[:place]:
        raise ExerciseError(f"{what} changed blocks before the last one: the table became {table}")
    if need == 0 and table != before:
        raise ExerciseError(f"{what} changed the block; its one owner writes in place")
    if owners > 1 and table[place] == before[place]:
        raise ExerciseError(f"{what} left block {before[place]} in the table, which others read")
    books.balanced(what.removesuffix(","))
    if pool.num_free != room - need:
        raise ExerciseError(f"{what} took {room - pool.num_free} blocks; it needs {need}")
    expected = (before[place], table[place]) if owners > 1 else None
    if expected is None:
        if value is not None:
            raise ExerciseError(f"{what} gave {value!r}; there is nothing to copy, so it must give None")
    elif not isinstance(value, tuple | list) or len(value) != 2:
        raise ExerciseError(f"{what} gave {value!r}; it must give (source, target): its tokens have to be copied")
    elif tuple(integer(block, f"{what}: the pair") for block in value) != expected:
        swapped = tuple(value) == expected[::-1]
        hint = "the source comes first" if swapped else "the source is the shared block, the target the new one"
        raise ExerciseError(f"{what} gave {tuple(value)}: {hint}")


# --- the kernel ----------------------------------------------------------------------------------------------------

_MARGIN, _UNWRITTEN = 4, 1234.0  # blocks of poison before and behind the cache; what `out` holds before the launch


def _builder() -> Any:
    """Where the interpreter loads and stores, so that each access can be looked at; None where that cannot be had."""
    if not runtime.INTERPRET:
        return None
    try:
        from triton.runtime.interpreter import interpreter_builder
    except ImportError:
        return None
    names = ("create_masked_load", "create_masked_store")
    return interpreter_builder if all(hasattr(interpreter_builder, name) for name in names) else None


@contextmanager
def _watched(read: dict[str, Tensor], written: dict[str, Tensor], blocks: list[int], row: int) -> Iterator[None]:
    """In the interpreter: refuse an access outside the tensors, or to a table entry past a sequence's ``blocks``."""
    builder = _builder()
    if builder is None:
        yield
        return
    load, store = builder.create_masked_load, builder.create_masked_store

    def look(ptrs: Any, mask: Any, tensors: dict[str, Tensor], verb: str) -> None:
        at = np.unique(ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape).astype(bool)].astype(np.int64))
        x, y = (int(np.asarray(i).item()) for i in tuple(builder.grid_idx)[:2])
        program = f"the program of token {x}, sequence {y}"
        for name, tensor in tensors.items():
            base, width = tensor.data_ptr(), tensor.element_size()
            element = (at - base) // width
            inside = (element >= 0) & (element < tensor.numel())
            if name == "table":
                for seq, column in (divmod(int(i), row) for i in element[inside]):
                    if column >= blocks[seq]:
                        count = f"{blocks[seq]} blocks"
                        raise ExerciseError(f"{program} reads entry {column} of table {seq}, which has {count}")
            at = at[~inside]
        for name in read.keys() - tensors.keys():
            base = read[name].data_ptr()
            if ((at >= base) & (at < base + read[name].nbytes)).any():
                raise ExerciseError(f"{program} {verb} {name}; only out is its to write")
        if len(at):
            outside = {n: (int(at[0]) - t.data_ptr()) // t.element_size() for n, t in tensors.items()}
            name = min(outside, key=lambda n: abs(outside[n]))
            hint = "; an offset wrapped at 32 bits" if abs(outside[name]) >= 2**30 else ""
            raise ExerciseError(f"{program} {verb} element {outside[name]} of {name}, which is outside of it{hint}")

    def watched_load(ptrs: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        look(ptrs, mask, read, "reads")
        return load(ptrs, mask, *args, **kwargs)

    def watched_store(ptrs: Any, value: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        look(ptrs, mask, written, "writes to")
        return store(ptrs, value, mask, *args, **kwargs)

    with (
        mock.patch.object(builder, "create_masked_load", watched_load),
        mock.patch.object(builder, "create_masked_store", watched_store),
    ):
        yield


def _launch(
    kernel: Any, grid: tuple[int, int], cache: Tensor, table: Tensor, used: Tensor, out: Tensor, length: int, what: str
) -> None:
    size, width = cache.shape[1:]
    blocks = [-(-n // size) for n in used.tolist()]
    tensors = {"the cache": cache, "table": table, "used": used}
    kept = {name: t.clone() for name, t in tensors.items() if t.numel() < 2**20}
    with launching(what), _watched(tensors | {"out": out}, {"out": out}, blocks, table.stride(0)):
        kernel[grid](
            cache, table, used, out, table.stride(0), length,
            BLOCK_SIZE=size, WIDTH=width, COLUMNS=1 << (width - 1).bit_length(),
        )  # fmt: skip
        if out.is_cuda:
            torch.cuda.synchronize(out.device)
    for name, copy in kept.items():
        if not torch.equal(tensors[name].nan_to_num(1e4), copy.nan_to_num(1e4)):
            raise ExerciseError(f"{what}: the kernel changed {name}; it writes to out only")


def _judge(got: Tensor, cache: Tensor, table: Tensor, used: list[int], what: str) -> None:
    """Hold rows [B, tokens, WIDTH] that a kernel made to the pages they come from."""
    size = cache.shape[1]
    for seq, length in enumerate(used):
        for token in range(got.shape[1]):
            row, where = got[seq, token], f"{what}: out[{seq}, {token}]"
            place = f"block {token // size} of the sequence, slot {token % size}"
            expected = torch.zeros_like(row)
            if token < length:
                expected = cache[int(table[seq, token // size]), token % size].cpu()
            if torch.equal(row, expected):
                continue
            at = int((row != expected).nonzero()[0])
            if row[at] == _UNWRITTEN and cache.is_floating_point():
                raise ExerciseError(f"{where}[{at}] was not written; every row of out is, the ones past the end too")
            if row[at].isnan():
                raise ExerciseError(f"{where} is NaN: an unused slot was let through; the sequence has {length} tokens")
            if token >= length:
                raise ExerciseError(f"{where} is {row[at].item():g}; the sequence has {length} tokens, so it must be 0")
            raise ExerciseError(f"{where}[{at}] is {row[at].item():g}; it must be {expected[at].item():g}, {place}")


def _try_shape(kernel: Any, rng: random.Random, on: torch.device, used: list[int], size: int, width: int) -> None:
    """One launch over a cache whose unused slots and surroundings are NaN, and a table whose unused entries mislead."""
    dtype = rng.choice([torch.float32, torch.float16])
    counts = [-(-n // size) for n in used]
    blocks = sum(counts) + rng.randint(1, 4)
    behind = _MARGIN + 2**16 // (size * width)  # a wrong offset shall read poison, not memory of another
    arena = torch.full((_MARGIN + blocks + behind, size, width), float("nan"), dtype=dtype, device=on)
    cache = arena[_MARGIN : _MARGIN + blocks]
    row = max(*counts, 1) + rng.randint(0, 2)
    wrong = [-1, blocks, blocks + _MARGIN - 1, *range(blocks)]
    table = torch.tensor([[rng.choice(wrong) for _ in range(row)] for _ in range(len(used) + 8)], dtype=torch.int32)
    left = rng.sample(range(blocks), blocks)
    for seq, length in enumerate(used):
        for i in range(counts[seq]):
            table[seq, i] = left.pop()
            if i == 0 and seq and counts[seq - 1] and rng.random() < 0.3:
                table[seq, 0] = table[seq - 1, 0]  # a shared prefix
        for token in range(length):
            cache[int(table[seq, token // size]), token % size] = torch.randn(width).to(cache)
    length = max(1, max(used) + rng.choice([-1, 0, 1, 2, size, size + 1]))
    space = torch.full((length * (len(used) + length + 4), width), _UNWRITTEN, dtype=dtype, device=on)
    out = space[2 * length : (2 + len(used)) * length].view(len(used), length, width)
    what = f"used {used}, blocks of {size}, WIDTH {width}, L {length}"
    lengths = torch.tensor(used, dtype=torch.int32, device=on)
    _launch(kernel, (length, len(used)), cache, table.to(on)[: len(used)], lengths, out, length, what)
    around = torch.cat([space[: 2 * length], space[(2 + len(used)) * length :]])
    _judge(out.cpu(), cache, table, used, what)
    if not (around == _UNWRITTEN).all():
        raise ExerciseError(f"{what}: the kernel wrote outside of out [{len(used)}, {length}, {width}]")


def _try_far(kernel: Any, on: torch.device, far: str) -> None:
    """One launch in which a page, or a row of ``out``, begins 2**31 elements or more behind the first."""
    size, width, used, below = 4, 48, [2, 3], 0 if _builder() is not None else 2**31
    page = 1 if far == "out" else -(-(2**31) // (size * width))
    length = 4 if far == "the cache" else -(-(2**31) // width)
    try:
        arena = torch.empty(below + 2**31 + 4 * size * width, dtype=torch.int8, device=on)
    except (RuntimeError, MemoryError):
        print(f"02.4: no memory for {far} beyond 2**31 elements; offsets of 64 bits were not tried there")
        return
    near = torch.full((8 * size * width,), 101, dtype=torch.int8, device=on)
    arena[below : below + 2 * size * width], arena[-4 * size * width :] = 101, 101
    cache = (arena[below:] if far == "the cache" else near)[: (page + 1) * size * width].view(page + 1, size, width)
    rows = near[: 2 * length * width] if far == "the cache" else arena[below : below + (length + 4) * width]
    for number in (page, 0):
        cache[number] = torch.randint(1, 100, (size, width), dtype=torch.int8).to(on)
    table = torch.tensor([[page], [0]], dtype=torch.int32)
    lengths = torch.tensor(used, dtype=torch.int32, device=on)
    what = f"with {far} of more than 2**31 elements"
    _launch(kernel, (4, 2), cache, table.to(on), lengths, rows, length, what)
    got = torch.stack([rows[b * length * width :][: 4 * width].view(4, width) for b in (0, 1)]).cpu()
    try:
        _judge(got, cache, table, used, what)
    except ExerciseError as error:
        raise ExerciseError(f"{error}; offsets need 64 bits there") from None


@checker("02.4")
def gather_kernel(kernel: Any) -> None:
    """A Triton kernel that copies pages together. Not judged where no kernel can be launched.

    Raises: ExerciseError.  Source: chapter 02.
    """
    on = torch.device("cpu") if runtime.INTERPRET else runtime.device()
    if not runtime.can_launch(on):
        print("02.4: skipped, no kernel can be launched on this machine (`make doctor` says why)")
        raise _NotYet
    inner = kernel
    while not isinstance(inner, type) and getattr(inner, "fn", None) is not None:
        inner = inner.fn
    if inner is kernel or not callable(inner):
        shown = getattr(kernel, "__wrapped__", kernel)
        raise ExerciseError(f"the answer is of type {type(shown).__name__}; it must be a kernel under @triton.jit")
    rng = random.Random(SEED)
    shapes = [([5, 0, 1], 4, 8), ([4, 8], 4, 5), ([3, 7, 2], 3, 24), ([2, 3], 1, 1), ([9], 16, 33)]
    for _ in range(3):
        used = [rng.randint(0, 9) for _ in range(rng.randint(1, 3))]
        shapes.append((used, rng.choice([1, 2, 3, 5, 8]), rng.randint(1, 40)))
    for used, size, width in shapes:
        _try_shape(kernel, rng, on, used, size, width)
    for far in ("the cache", "out"):
        _try_far(kernel, on, far)


# --- find the planted bugs -----------------------------------------------------------------------------------------


@checker("02.5")
def truncate(function: Callable[..., Any]) -> None:
    """Drop tail tokens: table, length, new_length, block_size, pool. Raises: ExerciseError.  Source: chapter 02."""
    rng = random.Random(SEED)
    cases = [
        (4, 8, 4, 1),
        (4, 8, 0, 1),
        (4, 8, 7, 1),
        (4, 8, 5, 1),
        (4, 12, 4, 3),
        (4, 7, 3, 2),
        (4, 6, 6, 2),
        (1, 3, 1, 1),
    ]
    for _ in range(24):
        length = rng.randint(0, 20)
        cases.append((rng.choice([1, 2, 3, 5, 16]), length, rng.randint(0, length), rng.randint(1, 3)))
    for size, length, shorter, owners in cases:
        books = _Books(rng, size, length, owners, rng.randint(0, 3))
        for who in range(owners):
            _truncate_once(function, books, who, length, shorter, owners - who)
    for shorter in (-1, 8, 12):
        books = _Books(rng, 4, 7, 1, 2)
        what = f"truncate from 7 tokens to {shorter}"
        try:
            function(books.tables[0], 7, shorter, 4, books.pool)
        except ExerciseError as error:
            if not isinstance(error.__cause__, ValueError):
                raise
            books.unchanged(f"{what} raised ValueError and")
        else:
            raise ExerciseError(f"{what} raised nothing; as before it must raise ValueError")


def _truncate_once(
    function: Callable[..., Any], books: _Books, who: int, length: int, shorter: int, owners: int
) -> None:
    pool, table, size = books.pool, books.tables[who], books.pool.block_size
    books.remember()
    before, kept = list(table), -(-shorter // size)
    state = "which it owns alone" if owners == 1 else f"which have {owners} owners"
    what = f"truncate from {length} tokens to {shorter}, table {before} of blocks of {size}, {state},"
    function(table, length, shorter, size, pool)
    _table_of(table, what.removesuffix(","))
    if table != before[:kept]:
        hint = f"{shorter} tokens take {kept}" if len(table) != kept else "what is kept stays where it was"
        raise ExerciseError(f"{what} left the blocks {table}: {hint}")
    books.balanced(what.removesuffix(","))
    freed = [block for block in reversed(before[kept:]) if pool.ref_count(block) == 0]
    if pool.free_order() != books.free_before + freed:
        came = pool.free_order()[len(books.free_before) :]
        raise ExerciseError(f"{what} freed {came}; {freed} is the tail first")
