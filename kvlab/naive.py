"""Chapter 01: the cache everyone writes first, one contiguous row of ``max_seq_len`` slots for each sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvlab import reference, runtime
from kvlab.batch import Batch, as_int
from kvlab.cache import CacheFull, check_attend, check_keep, check_truncate
from kvlab.config import ModelConfig


class NaiveCache:
    """Keys and values in two tensors, preallocated to the longest sequence that might come.

    Shapes and units: k and v are [num_layers, max_num_seqs, max_seq_len, H_kv, D]; a sequence owns one row of every
    layer from its first token until ``free``. ``max_num_seqs`` is a count, ``max_seq_len`` in tokens.

    Raises: ValueError for sizes under 1 or a dtype that is not floating-point; MemoryError with the size that would fit
    where a GPU is too full.

    Source: chapter 01.
    """

    def __init__(
        self,
        config: ModelConfig,
        max_num_seqs: int,
        max_seq_len: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        max_num_seqs, max_seq_len = as_int(max_num_seqs, "max_num_seqs"), as_int(max_seq_len, "max_seq_len")
        if max_num_seqs < 1 or max_seq_len < 1:
            raise ValueError(f"max_num_seqs is {max_num_seqs} and max_seq_len {max_seq_len}; both must be 1 or more")
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(f"dtype is {dtype!r}; it must be a floating-point torch dtype")
        self.config, self.max_num_seqs, self.max_seq_len = config, max_num_seqs, max_seq_len
        shape = (config.num_layers, max_num_seqs, max_seq_len, config.num_kv_heads, config.head_dim)
        per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
        wanted = per_token * max_num_seqs * max_seq_len
        runtime.require_memory(wanted, device, "the KV cache", per_token * max_num_seqs, "tokens a sequence")
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)
        self._rows: dict[int, int] = {}  # sequence id -> row
        self._lengths: dict[int, int] = {}
        self._free_rows = list(range(max_num_seqs))[::-1]
        self._batch: Batch | None = None

    @property
    def nbytes(self) -> int:
        """Bytes reserved for keys and values, used or not. Source: chapter 01."""
        return self.k.nbytes + self.v.nbytes

    @property
    def used_nbytes(self) -> int:
        """Bytes of the slots that hold a token. Source: chapter 01."""
        return sum(self._lengths.values()) * self.nbytes // (self.max_num_seqs * self.max_seq_len)

    def row(self, seq_id: int) -> int:
        """The row that a sequence owns (an index into k's and v's second dimension).

        Raises: ValueError for an unknown id.  Source: chapter 01.
        """
        self._require(seq_id)
        return self._rows[seq_id]

    def prepare(self, batch: Batch) -> None:
        """Check that every sequence continues where it stands and fits its row; give unseen ones a row.

        Raises: ValueError for a duplicate id, a length that does not continue or passes ``max_seq_len``; CacheFull
        where rows are short. Nothing has changed then.  Source: chapter 01.
        """
        ids = [s for s in batch.seq_ids if s is not None]
        if len(set(ids)) != len(ids):
            raise ValueError(f"seq_ids {ids} hold an id twice; a sequence may stand in a batch only once")
        for seq_id, q_len, past in zip(batch.seq_ids, batch.q_lens, batch.past_lens, strict=True):
            if seq_id is None:
                continue
            if past != self.length(seq_id):
                raise ValueError(
                    f"sequence {seq_id} continues at {past}, but the cache holds {self.length(seq_id)} of its tokens"
                )
            if past + q_len > self.max_seq_len:
                raise ValueError(
                    f"sequence {seq_id} would have {past + q_len} tokens; a row holds {self.max_seq_len} (max_seq_len)"
                )
        unseen = [s for s in ids if s not in self._rows]
        if len(unseen) > len(self._free_rows):
            raise CacheFull(len(unseen), len(self._free_rows), "rows", "free a sequence or raise max_num_seqs")
        for seq_id in unseen:
            self._rows[seq_id] = self._free_rows.pop()
        for seq_id, q_len, past in zip(batch.seq_ids, batch.q_lens, batch.past_lens, strict=True):
            if seq_id is not None:
                self._lengths[seq_id] = past + q_len
        self._batch = batch

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        """Store k, v [T, H_kv, D] (None: read only) in their rows and attend q [T, H, D], one sequence at a time.

        Raises: ValueError before ``prepare``, where a sequence was freed or cut since, or as ``check_attend``.

        Source: chapter 01.
        """
        batch = self._batch
        if batch is None:
            raise ValueError("attend was called before prepare(batch)")
        check_attend(self.config, batch, layer, q, k, v)
        self._require_prepared(batch)
        runtime.require_no_grad(q, k, v)
        out = torch.zeros_like(q)
        start = 0
        for seq_id, q_len, past in zip(batch.seq_ids, batch.q_lens, batch.past_lens, strict=True):
            new = slice(start, start + q_len)
            start += q_len
            if seq_id is None or q_len == 0:
                continue
            row, end = self._rows[seq_id], past + q_len
            if k is not None and v is not None:
                self.k[layer, row, past:end] = k[new]
                self.v[layer, row, past:end] = v[new]
            out[new], _ = reference.attend_one(
                q[new], self.k[layer, row, :end], self.v[layer, row, :end], window_size=self.config.window_size(layer),
                tree_mask=None if batch.tree_mask is None else batch.tree_mask[new], dtype=None,
            )  # fmt: skip
        return out

    def __contains__(self, seq_id: int) -> bool:
        """Whether the sequence owns a row, be it an empty one. Source: chapter 01."""
        return seq_id in self._rows

    def length(self, seq_id: int) -> int:
        """Tokens kept of a sequence; 0 for an id never seen. Source: chapter 01."""
        return self._lengths.get(seq_id, 0)

    def fork(self, parent: int, child: int) -> None:
        """Give ``child`` a row of its own and copy ``parent``'s tokens into it: a row cannot be shared.

        Raises: ValueError for an unknown parent or a known child; CacheFull.  Source: chapter 01.
        """
        self._require(parent)
        child = as_int(child, "fork: child")
        if child in self._rows:
            raise ValueError(f"fork: child {child} is already in the cache")
        if not self._free_rows:
            raise CacheFull(1, 0, "rows", "free a sequence or raise max_num_seqs")
        source, target, length = self._rows[parent], self._free_rows[-1], self._lengths[parent]
        self.k[:, target, :length] = self.k[:, source, :length]
        self.v[:, target, :length] = self.v[:, source, :length]
        self._rows[child], self._lengths[child] = self._free_rows.pop(), length  # a copy that failed took nothing

    def keep(self, seq_id: int, base: int, indices: Sequence[int]) -> None:
        """Of the tokens after the first ``base`` keep those at ``indices`` (offsets), in this order.

        Raises: ValueError for an unknown id, or offsets that are not distinct kept tokens.  Source: chapter 05.
        """
        self._require(seq_id)
        base, indices = check_keep(base, indices, self._lengths[seq_id])
        row, chosen = self._rows[seq_id], torch.tensor([base + i for i in indices], device=self.k.device).long()
        self.k[:, row, base : base + len(indices)] = self.k[:, row, chosen]
        self.v[:, row, base : base + len(indices)] = self.v[:, row, chosen]
        self._lengths[seq_id] = base + len(indices)

    def truncate(self, seq_id: int, length: int) -> None:
        """Forget all but the first ``length`` tokens.

        Raises: ValueError for an unknown id, a negative length or one past the end.  Source: chapter 01.
        """
        self._require(seq_id)
        self._lengths[seq_id] = check_truncate(length, self._lengths[seq_id])

    def free(self, seq_id: int) -> None:
        """Give the sequence's row back; an unknown id is no error. Source: chapter 01."""
        if seq_id in self._rows:
            self._free_rows.append(self._rows.pop(seq_id))
            del self._lengths[seq_id]

    def _require_prepared(self, batch: Batch) -> None:
        for seq_id, q_len, past in zip(batch.seq_ids, batch.q_lens, batch.past_lens, strict=True):
            if seq_id is not None and self._lengths.get(seq_id) != past + q_len:
                raise ValueError(
                    f"sequence {seq_id} has {self.length(seq_id)} tokens, and {past + q_len} when the batch was "
                    "prepared; call prepare(batch) again"
                )

    def _require(self, seq_id: int) -> None:
        if seq_id not in self._rows:
            raise ValueError(f"sequence {seq_id} is not in the cache; it holds {sorted(self._rows)}")
