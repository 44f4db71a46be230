"""PagedCache: the books of ``BlockManager`` and the tensors they are about, behind ``KVCache``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvlab import runtime
from kvlab.batch import Batch, as_count
from kvlab.cache import check_attend, check_keep
from kvlab.config import ModelConfig
from kvlab.paged._blocks import BlockManager, BlockPool
from kvlab.paged._kernels import attention as paged_attention
from kvlab.paged._kernels import reshape_and_cache


class PagedCache:
    """Keys and values in pages of ``block_size`` tokens, taken from one pool as sequences grow.

    ``attention`` is any function of the one attention signature: storage and computation are separate. ``prepare`` does
    all work of the host and fills buffers of fixed address; ``attend`` only launches, so a captured step replays.

    Shapes and units: k and v are [num_layers, num_blocks, block_size, H_kv, D]; ``num_blocks`` counts blocks for all
    layers together (a block holds its tokens in every layer), ``block_size`` in tokens. ``manager`` may be shared with
    a scheduler; by default it is new. ``impl`` is passed to the kernels ("torch", "triton", None: by device).
    ``max_model_len`` bounds the tokens of any sequence and gives all block tables one width, so that a captured pass
    can be replayed over other sequences; None: each batch's table is as wide as its longest sequence needs.

    Raises: ValueError for sizes under 1 or a manager of another pool; MemoryError with the size that would fit where a
    GPU is too full.

    Source: chapter 02; Kwon et al. 2023 (PagedAttention).
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int = 16,
        *,
        attention: Callable[..., Any] = paged_attention,
        manager: BlockManager | None = None,
        impl: str | None = None,
        max_model_len: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.manager = BlockManager(BlockPool(num_blocks, block_size)) if manager is None else manager
        pool = self.manager.pool
        if (pool.num_blocks, pool.block_size) != (num_blocks, block_size):
            raise ValueError(
                f"manager has {pool.num_blocks} blocks of {pool.block_size}; the cache was asked for {num_blocks} of "
                f"{block_size}"
            )
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(f"dtype is {dtype}; keys and values need a floating-point type")
        self.config, self.num_blocks, self.block_size, self.attention = config, num_blocks, block_size, attention
        if not callable(attention):
            raise ValueError(f"attention is {attention!r}; it must be a function of the one attention signature")
        runtime.choose(impl, torch.device(device), "PagedCache")
        self.max_model_len = None if max_model_len is None else as_count(max_model_len, "max_model_len", 1)
        if self.max_model_len is not None and self.max_model_len >= 2**31:
            raise ValueError(f"max_model_len is {max_model_len}; it must be under 2**31")
        self._impl = {} if impl is None else {"impl": impl}
        shape = (config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        per_block = 2 * config.num_layers * block_size * config.num_kv_heads * config.head_dim * dtype.itemsize
        runtime.require_memory(per_block * num_blocks, device, "the KV cache", per_block, "blocks")
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)
        self._buffers = {
            name: Buffer(kind, self.k.device)
            for name, kind in (("table", np.int32), ("slots", np.int64), ("starts", np.int32), ("used", np.int32))
        }
        self._batch: Batch | None = None
        self._least_columns = min(num_blocks, runtime.cdiv(self.max_model_len or 1, block_size))
        self._columns = self._least_columns

    def __contains__(self, seq_id: int) -> bool:
        """Whether a sequence is known, be it empty. Source: chapter 02."""
        return seq_id in self.manager

    @property
    def nbytes(self) -> int:
        """Bytes reserved for keys and values, used or not. Source: chapter 02."""
        return self.k.nbytes + self.v.nbytes

    @property
    def used_nbytes(self) -> int:
        """Bytes of the slots that hold a token; a shared one counts once. Source: chapter 02."""
        filled: dict[int, int] = {}
        size = self.block_size
        for seq_id in self.manager.seq_ids:
            left = self.manager.length(seq_id)
            for block in self.manager.table(seq_id):
                filled[block] = max(filled.get(block, 0), min(left, size))
                left -= size
        return sum(filled.values()) * self.nbytes // (self.num_blocks * size)

    def prepare(self, batch: Batch) -> None:
        """Give every sequence of the batch room for its new tokens, in blocks that it may write to; create unseen ids.

        Raises: ValueError for a duplicate id, a length that does not continue or one over ``max_model_len``, or a
        ``max_seqlen_q`` that does not bound the new tokens; OutOfBlocks. Nothing has changed then.

        Source: chapter 02.
        """
        most = max(batch.q_lens, default=0)
        if batch.max_seqlen_q is not None and not most <= batch.max_seqlen_q < 2**31:
            raise ValueError(f"max_seqlen_q is {batch.max_seqlen_q}; a sequence has {most} new tokens")
        lengths: dict[int, int] = {}
        for seq_id, q_len, past in zip(batch.seq_ids, batch.q_lens, batch.past_lens, strict=True):
            if seq_id is None:
                continue
            if seq_id in lengths:
                raise ValueError(f"seq_ids {batch.seq_ids} hold {seq_id} twice; a sequence may stand there only once")
            known = self.manager.length(seq_id)
            if past != known:
                raise ValueError(f"sequence {seq_id} continues at {past}, but the cache holds {known} of its tokens")
            lengths[seq_id] = past + q_len
        if self.max_model_len is not None and max(lengths.values(), default=0) > self.max_model_len:
            long = max(lengths, key=lengths.__getitem__)
            raise ValueError(
                f"sequence {long} would have {lengths[long]} tokens; the cache's max_model_len is {self.max_model_len}"
            )
        self.manager.ensure_all(lengths)
        for seq_id, length in lengths.items():
            self.manager.advance(seq_id, length)
        self._copy_blocks()
        self._fill(batch)
        self._batch = batch

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        """Store k, v [T, H_kv, D] (both None: read only) in their slots and give the attention of q, [T, H, D].

        Raises: ValueError before ``prepare``, or for tensors that do not fit the batch or the model.

        Source: chapter 02.
        """
        batch = self._batch
        if batch is None:
            raise ValueError(
                "attend was called before prepare(batch), or after a sequence was freed, truncated or kept in part"
            )
        check_attend(self.config, batch, layer, q, k, v)
        total, count = batch.num_tokens, len(batch.q_lens)
        most = max(batch.q_lens, default=0) if batch.max_seqlen_q is None else batch.max_seqlen_q
        view = {name: buffer.device for name, buffer in self._buffers.items()}
        if k is not None and v is not None:
            reshape_and_cache(k, v, self.k[layer], self.v[layer], view["slots"][:total], **self._impl)  # type: ignore[arg-type]
        table = view["table"][: count * self._columns].view(count, self._columns)
        return self.attention(
            q, self.k[layer], self.v[layer], block_table=table, cu_seqlens_q=view["starts"][: count + 1],
            seqused_k=view["used"][:count], max_seqlen_q=most,
            max_seqlen_k=self._columns * self.block_size, window_size=self.config.window_size(layer),
            tree_mask=batch.tree_mask, **self._impl,
        )  # fmt: skip

    def length(self, seq_id: int) -> int:
        """Tokens kept of a sequence; 0 for an id never seen. Source: chapter 02."""
        return self.manager.length(seq_id)

    def fork(self, parent: int, child: int) -> None:
        """Make ``child`` a sequence that shares all blocks of ``parent``; nothing is copied until one of them writes.

        Raises: ValueError for an unknown parent or a known child.  Source: chapter 02.
        """
        self.manager.fork(parent, child)

    def keep(self, seq_id: int, base: int, indices: Sequence[int]) -> None:
        """Of the tokens after the first ``base`` keep those at ``indices`` (offsets), in this order.

        Raises: ValueError for an unknown id, or offsets that are not distinct kept tokens; OutOfBlocks where a shared
        block has to be copied. Nothing has changed then.  Source: chapter 05.
        """
        self.manager.require(seq_id)
        base, chosen = check_keep(base, indices, self.length(seq_id))
        self._copy_blocks()  # a scheduler may have asked for copies that are still due: what is kept is read from them
        end = base + len(chosen)
        moved = next((n for n, i in enumerate(chosen) if i != n), len(chosen))  # those before stay where they are
        sources = [self.manager.slots(seq_id, base + i, base + i + 1)[0] for i in chosen[moved:]]
        self.manager.writable(seq_id, base + moved, end)
        targets = self.manager.slots(seq_id, base + moved, end)
        if targets:
            at, to = (torch.tensor(x, dtype=torch.long, device=self.k.device) for x in (sources, targets))
            flat_k, flat_v = self.k.flatten(1, 2), self.v.flatten(1, 2)
            k, v = flat_k[:, at], flat_v[:, at]  # read before the copies and the writes change anything
            self._copy_blocks()
            flat_k[:, to], flat_v[:, to] = k, v
        self.truncate(seq_id, end)

    def truncate(self, seq_id: int, length: int) -> None:
        """Forget all but the first ``length`` tokens; whole blocks go back to the pool.

        Raises: ValueError for an unknown id, a negative length or one past the end.  Source: chapter 02.
        """
        self.manager.truncate(seq_id, length)
        self._batch = None  # what was prepared may be gone

    def free(self, seq_id: int) -> None:
        """Give a sequence's blocks back; an unknown id is no error. Source: chapter 02."""
        self.manager.free(seq_id)
        self._batch = None

    def _copy_blocks(self) -> None:
        copies = self.manager.take_copies()
        if copies:
            to, source = (torch.tensor(list(x), device=self.k.device) for x in (copies.keys(), copies.values()))
            self.k[:, to], self.v[:, to] = self.k[:, source], self.v[:, source]

    def _fill(self, batch: Batch) -> None:
        """Write block tables, slots, starts and lengths of a batch into the buffers that ``attend`` reads."""
        size, count = self.block_size, len(batch.q_lens)
        tables = [np.array(self.manager.table(s) if s is not None else (), np.int32) for s in batch.seq_ids]
        self._columns = max(self._least_columns, *map(len, tables)) if tables else self._least_columns
        table = self._buffers["table"].host(count * self._columns).reshape(count, self._columns)
        table[:] = -1
        slots = self._buffers["slots"].host(batch.num_tokens)
        starts, used = self._buffers["starts"].host(count + 1), self._buffers["used"].host(count)
        start = starts[0] = 0
        for b, (seq_id, q_len, past) in enumerate(zip(batch.seq_ids, batch.q_lens, batch.past_lens, strict=True)):
            blocks = tables[b]
            table[b, : len(blocks)] = blocks
            if seq_id is None:
                slots[start : start + q_len] = -1
            elif q_len == 1:
                slots[start] = blocks[past // size] * size + past % size
            else:
                at = np.arange(past, past + q_len)
                slots[start : start + q_len] = blocks[at // size].astype(np.int64) * size + at % size
            start += q_len
            starts[b + 1], used[b] = start, 0 if seq_id is None else past + q_len
        for name, length in (("table", table.size), ("slots", start), ("starts", count + 1), ("used", count)):
            self._buffers[name].send(length)


class Buffer:
    """A flat buffer on the device with a staging copy on the host; it keeps its address until it has to grow.

    Shapes and units: ``kind`` a NumPy type; ``device`` holds what was sent. Source: chapter 02."""

    def __init__(self, kind: type, device: torch.device) -> None:
        self._kind, self._on = torch.from_numpy(np.empty(0, kind)).dtype, device
        self._sent: torch.cuda.Event | None = None
        self._grow(256)

    def _grow(self, length: int) -> None:
        self._staging = torch.zeros(length, dtype=self._kind, pin_memory=self._on.type == "cuda")
        self.device = (
            torch.zeros(length, dtype=self._kind, device=self._on) if self._on.type != "cpu" else self._staging
        )

    def host(self, length: int) -> np.ndarray:
        """The first ``length`` entries of the staging copy, once nothing reads it any more. Source: chapter 02."""
        if self._sent is not None:
            self._sent.synchronize()
        if length > len(self._staging):
            self._grow(1 << (length - 1).bit_length())
        return self._staging.numpy()[:length]

    def send(self, length: int) -> None:
        """Copy the first ``length`` entries to the device, without waiting for it. Source: chapter 02."""
        if self.device is not self._staging:
            self.device[:length].copy_(self._staging[:length], non_blocking=True)
            self._sent = torch.cuda.current_stream(self._on).record_event()
