"""Who owns which block: a pool with reference counts, and a block table for each sequence. Plain Python, no tensors."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence

from kvlab.batch import as_count, as_int, as_ints
from kvlab.cache import CacheFull, check_truncate


class OutOfBlocks(CacheFull):
    """The pool has fewer free blocks than a call needs; nothing has changed.

    Shapes and units: ``needed`` and ``free`` in blocks.

    Source: chapter 02.
    """

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(needed, free, "blocks", "free or preempt a sequence, or make the pool larger")


class BlockPool:
    """Blocks 0 .. num_blocks - 1, each free or held by one owner or more.

    Every call takes time in proportion to the blocks it names, whatever the size of the pool. Free blocks are handed
    out in the order in which they became free, the longest ago first, so that what was in use last is overwritten last.

    Shapes and units: ``num_blocks`` counts blocks, ``block_size`` the tokens that fit into one.

    Raises: ValueError for sizes under 1.

    Source: chapter 02; Kwon et al. 2023 (PagedAttention).
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        num_blocks, block_size = as_int(num_blocks, "num_blocks"), as_int(block_size, "block_size")
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks is {num_blocks} and block_size {block_size}; both must be 1 or more")
        self.num_blocks, self.block_size = num_blocks, block_size
        self._refs = [0] * (2 * self.num_blocks)  # the second half stays 0: a negative number finds no owner there
        self._free, self._head = list(range(self.num_blocks)), 0  # free blocks are those from _head on

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds. Source: chapter 02."""
        return len(self._free) - self._head

    def ref_count(self, block: int) -> int:
        """How many owners a block has; 0 is free. Raises: ValueError for no block.  Source: chapter 02."""
        self._require([block])
        return self._refs[block]

    def free_order(self) -> list[int]:
        """The free blocks, the next to be handed out first. For looking; it copies. Source: chapter 02."""
        return self._free[self._head :]

    def allocate(self, count: int = 1) -> list[int]:
        """Take ``count`` free blocks, each with one owner. Raises: OutOfBlocks; ValueError for a negative count.

        Source: chapter 02.
        """
        count = count if type(count) is int else as_count(count, "count")
        start, refs, free = self._head, self._refs, self._free
        if not 0 <= count <= len(free) - start:
            raise OutOfBlocks(as_count(count, "count"), self.num_free)
        end = self._head = start + count
        blocks = free[start:end]  # slices and list.extend run in C: this is called for every block of every request
        for block in blocks:
            refs[block] = 1
        if end > self.num_blocks:  # what was handed out is cut off once in a while
            del free[:end]
            self._head = 0
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Add an owner to each block; a block named twice gains two.

        Raises: ValueError for a block that is free or none; then nothing has changed.  Source: chapter 02.
        """
        blocks = as_ints(blocks, "blocks")
        self._require(blocks)
        refs = self._refs
        for block in blocks:
            if not refs[block]:
                raise ValueError(f"blocks {list(blocks)} hold {block}, which is free; only a held block can be shared")
        for block in blocks:
            refs[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Take one owner from each block; those without any become free, the last of ``blocks`` first.

        A sequence names its blocks in order, so its tail is reused before its head, which others are likelier to share.

        Raises: ValueError for a block that has not so many owners, or is none; then nothing has changed.

        Source: chapter 02; vLLM frees in the same order.
        """
        if not isinstance(blocks, list | array):
            blocks = as_ints(blocks, "blocks")
        refs = self._refs
        if len(blocks) == 1:  # the commonest call, without the loop
            block = blocks[0]
            if type(block) is int and 0 <= block < self.num_blocks and refs[block] == 1:
                refs[block] = 0
                self._free.append(block)
                return
        freed = blocks[::-1]
        to_do = iter(freed)
        try:
            for block in to_do:
                if refs[block] != 1:
                    break
                refs[block] = 0
            else:  # nobody shares any of them
                self._free.extend(freed)
                return
        except (IndexError, TypeError):
            pass
        rest = list(to_do)
        done = len(freed) - len(rest) - 1
        self._free_shared(list(freed), done)

    def _free_shared(self, freed: list[int], done: int) -> None:
        """The rest of ``free``, one owner at a time: the first ``done`` have none left, the next is shared or wrong."""
        refs, free = self._refs, freed[:done]
        for place in range(done, len(freed)):
            block = freed[place]
            if type(block) is not int or not 0 <= block < self.num_blocks or refs[block] < 1:
                for undo in freed[:place]:
                    refs[undo] += 1
                self._require(freed)
                raise ValueError(f"blocks {freed[::-1]} hold {block}, which is freed more often than it was taken")
            refs[block] -= 1
            if not refs[block]:
                free.append(block)
        self._free.extend(free)

    def _require(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if not isinstance(block, int) or isinstance(block, bool) or not 0 <= block < self.num_blocks:
                raise ValueError(f"block {block!r} is none of this pool's; it must be 0 to {self.num_blocks - 1}")


class BlockManager:
    """A block table and a length for each sequence, over one pool. Cache, scheduler and simulator share one of these.

    ``ensure`` gives a sequence room, ``advance`` says that the room holds tokens; a table has at least the
    ceil(n / block_size) blocks of its n tokens. Blocks may stand in several tables; before a shared one is written to,
    the writer gets a block of its own (copy-on-write), and the pair to copy is left in ``take_copies`` for whoever
    holds the tensors. The last owner of a block writes in place.

    Shapes and units: lengths in tokens; tables are ``array('i')`` of block numbers.

    Source: chapter 02; Kwon et al. 2023 (PagedAttention), vLLM's block manager.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool, self.block_size = pool, pool.block_size
        self._tables: dict[int, array[int]] = {}
        self._lengths: dict[int, int] = {}
        self._copies: dict[int, int] = {}  # written block -> the block it is a copy of, not yet copied

    # --- looking ---

    def __contains__(self, seq_id: int) -> bool:
        """Whether a sequence is known, be it empty. Source: chapter 02."""
        return seq_id in self._tables

    @property
    def seq_ids(self) -> list[int]:
        """The known sequences. Source: chapter 02."""
        return list(self._tables)

    def length(self, seq_id: int) -> int:
        """Tokens of a sequence; 0 for an id never seen. Source: chapter 02."""
        return self._lengths.get(seq_id, 0)

    def table(self, seq_id: int) -> array[int]:
        """The blocks of a sequence in order, not to be changed; empty for an id never seen. Source: chapter 02."""
        return self._tables.get(seq_id, array("i"))

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens: ceil(num_tokens / block_size). Source: chapter 02."""
        return -(-num_tokens // self.block_size)

    def blocks_needed(self, lengths: Mapping[int, int]) -> int:
        """Free blocks that ``ensure_all`` would take for these sequences ({id: length in tokens}), copies included.

        Source: chapter 02.
        """
        needed, size = 0, self.block_size
        writers: dict[int, int] = {}  # blocks that will be written to, and by how many of the sequences
        for seq_id, length in lengths.items():
            table = self._tables.get(seq_id, ())
            missing = -(-length // size) - len(table)
            if missing > 0:
                needed += missing
            for place in self._written(seq_id, length):
                writers[table[place]] = writers.get(table[place], 0) + 1
        for block, count in writers.items():
            needed += min(count, self.pool._refs[block] - 1)  # the last owner writes in place
        return needed

    def can_ensure(self, seq_id: int, length: int) -> bool:
        """Whether ``ensure(seq_id, length)`` (in tokens) would find its blocks. Source: chapter 02."""
        return self.blocks_needed({seq_id: length}) <= self.pool.num_free

    # --- changing ---

    def ensure(self, seq_id: int, length: int) -> None:
        """Give a sequence, known or new, room for ``length`` tokens; new ones go to blocks of its own. Idempotent.

        Raises: OutOfBlocks, or ValueError for an id or length that is no integer; then nothing has changed.

        Source: chapter 02.
        """
        self.ensure_all({seq_id: length})

    def ensure_all(self, lengths: Mapping[int, int]) -> None:
        """``ensure`` for several sequences ({id: length in tokens}): all of them, or none.

        Raises: OutOfBlocks, or ValueError for an id or length that is no integer; then nothing has changed.

        Source: chapter 02.
        """
        lengths = {as_int(s, "seq_id"): as_count(length, "length") for s, length in lengths.items()}
        needed = self.blocks_needed(lengths)
        if needed > self.pool.num_free:
            raise OutOfBlocks(needed, self.pool.num_free)
        for seq_id, length in lengths.items():
            if seq_id not in self._tables:
                self._tables[seq_id], self._lengths[seq_id] = array("i"), 0
            table = self._tables[seq_id]
            for place in self._written(seq_id, length):
                self._own(table, place)
            missing = self.num_blocks(length) - len(table)
            if missing > 0:
                table.extend(self.pool.allocate(missing))

    def advance(self, seq_id: int, length: int) -> None:
        """Say that a sequence now has ``length`` tokens, for which ``ensure`` has made room.

        Raises: ValueError for an unknown id, a length below the current one, or one there is no room for.

        Source: chapter 02.
        """
        self.require(seq_id)
        length = as_int(length, "advance: length")
        current, room = self._lengths[seq_id], len(self._tables[seq_id]) * self.block_size
        if not current <= length <= room:
            raise ValueError(f"advance: length is {length}; sequence {seq_id} has {current} tokens and room for {room}")
        self._lengths[seq_id] = length

    def adopt(self, seq_id: int, blocks: Sequence[int], length: int | None = None) -> None:
        """Start a sequence on blocks that others hold: a prefix found in the cache.

        Shapes and units: ``length`` in tokens must lie in the last of the blocks; by default they are full.

        Raises: ValueError for a known id, a free block, or a length that does not fit the blocks.

        Source: chapter 02; chapter 08 finds the blocks.
        """
        seq_id = as_int(seq_id, "seq_id")
        length = as_count(len(blocks) * self.block_size if length is None else length, "length")
        if seq_id in self._tables:
            raise ValueError(f"sequence {seq_id} is already known; free it before it adopts blocks")
        if self.num_blocks(length) != len(blocks):
            raise ValueError(f"length is {length}, which {len(blocks)} blocks of {self.block_size} do not hold exactly")
        self.pool.share(blocks)
        self._tables[seq_id], self._lengths[seq_id] = array("i", blocks), length

    def fork(self, parent: int, child: int) -> None:
        """Make ``child`` a sequence with all of ``parent``'s blocks, shared. Nothing is copied until one writes.

        Raises: ValueError for an unknown parent, or a child that is known or no integer.  Source: chapter 02.
        """
        self.require(parent)
        child = as_int(child, "child")
        if child in self._tables:
            raise ValueError(f"fork: child {child} is already in the cache")
        self.pool.share(self._tables[parent])
        self._tables[child], self._lengths[child] = self._tables[parent][:], self._lengths[parent]

    def writable(self, seq_id: int, start: int, stop: int) -> None:
        """Make the blocks of tokens start .. stop of a sequence its own, so that tokens kept can be moved there.

        Raises: ValueError for an unknown id or a range outside its tokens; OutOfBlocks; then nothing has changed.

        Source: chapter 05.
        """
        self.require(seq_id)
        if not 0 <= start <= stop <= self._lengths[seq_id]:
            raise ValueError(f"tokens {start} to {stop} are not within the {self._lengths[seq_id]} kept")
        table = self._tables[seq_id]
        places = range(start // self.block_size, self.num_blocks(stop) if stop > start else start // self.block_size)
        shared = sum(self.pool.ref_count(table[i]) > 1 for i in places)
        if shared > self.pool.num_free:
            raise OutOfBlocks(shared, self.pool.num_free)
        for i in places:
            self._own(table, i)

    def truncate(self, seq_id: int, length: int) -> None:
        """Forget all but the first ``length`` tokens and free the blocks that hold none of them.

        Raises: ValueError for an unknown id, a negative length or one past the end.  Source: chapter 02.
        """
        self.require(seq_id)
        length = check_truncate(length, self._lengths[seq_id])
        table, kept = self._tables[seq_id], self.num_blocks(length)
        self._release(table[kept:])
        del table[kept:]
        self._lengths[seq_id] = length

    def free(self, seq_id: int) -> None:
        """Forget a sequence and free its blocks, the last first; an unknown id is no error. Source: chapter 02."""
        if seq_id in self._tables:
            self._release(self._tables.pop(seq_id))
            del self._lengths[seq_id]

    def take_copies(self) -> dict[int, int]:
        """The block copies that are due, {written block: source}, and forget them. Whoever holds the tensors reads all
        sources before it writes, and does so before any token is written. Source: chapter 02."""
        copies, self._copies = self._copies, {}
        return copies

    def slots(self, seq_id: int, start: int, stop: int) -> list[int]:
        """The flat slot (block · block_size + offset) of each of the tokens start .. stop of a sequence.

        Raises: ValueError for an unknown id or tokens it has no room for.  Source: chapter 02.
        """
        self.require(seq_id)
        table, size = self._tables[seq_id], self.block_size
        if not 0 <= start <= stop <= len(table) * size:
            raise ValueError(
                f"tokens {start} to {stop} have no slots; the table's {len(table)} blocks hold {size} each"
            )
        return [table[i // size] * size + i % size for i in range(start, stop)]

    def audit(self) -> None:
        """Check the books in full: every block is free or referenced and not both, the free list names none twice, the
        reference counts add up to the table entries, and every table holds its sequence's tokens.

        Raises: AssertionError that says what is wrong.  Source: chapter 02.
        """
        pool, counted = self.pool, [0] * self.pool.num_blocks
        for seq_id, table in self._tables.items():
            assert len(table) >= self.num_blocks(self._lengths[seq_id]), (
                f"sequence {seq_id} has {len(table)} blocks for {self._lengths[seq_id]} tokens"
            )
            for block in table:
                counted[block] += 1
        for block, (count, refs) in enumerate(zip(counted, pool._refs, strict=False)):
            assert count == refs, f"block {block} stands in {count} tables and has {refs} owners"
        free = pool.free_order()
        assert len(set(free)) == len(free), f"the free list names a block twice: {free}"
        assert set(free) == {b for b, count in enumerate(counted) if count == 0}, (
            f"the free list {free} is not what no table names: {[b for b, c in enumerate(counted) if c == 0]}"
        )
        assert set(self._lengths) == set(self._tables), "a sequence has a length and no table, or a table and no length"

    def require(self, seq_id: int) -> None:
        """Refuse an unknown sequence. Raises: ValueError.  Source: chapter 02."""
        if seq_id not in self._tables:
            raise ValueError(f"sequence {seq_id} is not in the cache; it holds {sorted(self._tables)}")

    def _written(self, seq_id: int, length: int) -> range:
        """Places in the table whose blocks are there and will be written to on the way to ``length`` tokens."""
        current, held = self._lengths.get(seq_id, 0), len(self._tables.get(seq_id, ()))
        first = current // self.block_size
        if length <= current or first >= held:
            return range(0)
        return range(first, min(held, self.num_blocks(length)))

    def _own(self, table: array[int], place: int) -> None:
        """Copy-on-write: a block of one's own at this place of the table."""
        old = table[place]
        if self.pool.ref_count(old) > 1:
            [new] = self.pool.allocate()
            self.pool.free([old])
            self._copies[new] = self._copies.get(old, old)  # a copy that is itself still due is read at its source
            table[place] = new

    def _release(self, blocks: array[int]) -> None:
        self.pool.free(blocks)
        if self._copies:
            for block in blocks:
                if not self.pool.ref_count(block):
                    self._copies.pop(block, None)
