"""KVCache: the protocol that every cache of the book obeys, and NoCache, which keeps nothing.

``model.Decoder`` calls ``attend`` and never asks how keys and values are stored. That one seam is what lets each
chapter replace the storage, or the kernel, and leave the model alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvlab import reference
from kvlab.batch import Batch, as_int, as_ints
from kvlab.config import ModelConfig

_WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class CacheFull(RuntimeError):
    """A cache has no room for what was asked of it; nothing has changed.

    Shapes and units: ``needed`` and ``free`` are counts of ``unit`` (rows, tokens or blocks).

    Source: chapter 01.
    """

    def __init__(self, needed: int, free: int, unit: str, advice: str = "") -> None:
        self.needed, self.free, self.unit = needed, free, unit
        super().__init__(f"the cache needs {needed} {unit} and has {free} free" + (f"; {advice}" if advice else ""))


class KVCache(Protocol):
    """What a decoder, a generation loop and a scheduler may ask of a cache.

    Shapes and units: lengths in tokens; k, v [T, H_kv, D]; q and the result [T, H, D]; ``nbytes`` in bytes.

    Two things a cache may have besides: ``max_seq_len``, the tokens that one sequence can hold at most (the generation
    loop ends a text there), and ``seq_id in cache``, which also knows a sequence of no tokens.

    Source: chapter 01.
    """

    @property
    def nbytes(self) -> int:
        """Bytes reserved for keys and values. Source: chapter 01."""
        ...

    @property
    def used_nbytes(self) -> int:
        """Bytes of the slots that hold a token. Source: chapter 01."""
        ...

    def prepare(self, batch: Batch) -> None:
        """Make room for a batch's new tokens; create unseen ids; on an error nothing has changed.

        Raises: ValueError for a duplicate id or a length that does not continue; CacheFull.  Source: chapter 01.
        """
        ...

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        """Store k and v of the prepared batch and return the attention of q. Source: chapter 01."""
        ...

    def length(self, seq_id: int) -> int:
        """Tokens kept of a sequence, a Python int; 0 for an id never seen. Source: chapter 01."""
        ...

    def fork(self, parent: int, child: int) -> None:
        """Make ``child`` a sequence that has all that ``parent`` has. Source: chapter 02."""
        ...

    def keep(self, seq_id: int, base: int, indices: Sequence[int]) -> None:
        """Of the tokens after the first ``base`` keep those at ``indices``, in this order. Source: chapter 05."""
        ...

    def truncate(self, seq_id: int, length: int) -> None:
        """Forget all but the first ``length`` tokens. Source: chapter 05."""
        ...

    def free(self, seq_id: int) -> None:
        """Forget the sequence. Source: chapter 01."""
        ...


def take_back(cache: KVCache, seq_ids: Sequence[int | None], past_lens: Sequence[int]) -> None:
    """Undo a pass that failed: every sequence has the tokens it had before, and one that had none is freed.

    Shapes and units: ``past_lens`` in tokens, as in the pass's ``Batch``; an id of None is padding.

    Source: chapter 01.
    """
    for seq_id, past in zip(seq_ids, past_lens, strict=True):
        if seq_id is None:
            continue
        if past:
            cache.truncate(seq_id, past)
        else:
            cache.free(seq_id)


def check_truncate(length: int, current: int) -> int:
    """The length in tokens to truncate to, as a Python int; refuses one below 0, beyond the current one, or no integer.

    Raises: ValueError.  Source: chapter 01.
    """
    length = as_int(length, "truncate: length")
    if length < 0 or length > current:
        raise ValueError(f"truncate: length is {length}; it must be between 0 and the {current} tokens kept")
    return length


def check_keep(base: int, indices: Sequence[int], current: int) -> tuple[int, list[int]]:
    """The base and the indices (offsets in tokens after base) of a ``keep``, as Python ints.

    Raises: ValueError where they are no integers or do not name distinct kept tokens.  Source: chapter 05.
    """
    base, indices = as_int(base, "keep: base"), as_ints(indices, "keep: indices")
    if not 0 <= base <= current:
        raise ValueError(f"keep: base is {base}; it must be between 0 and the {current} tokens kept")
    if len(set(indices)) != len(indices) or any(not 0 <= i < current - base for i in indices):
        raise ValueError(f"keep: indices are {indices}; they must be distinct and within 0..{current - base - 1}")
    return base, indices


def check_attend(config: ModelConfig, batch: Batch, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> None:
    """Refuse a layer that the model does not have, and q [T, H, D], k or v [T, H_kv, D] that are not the batch's.

    Shapes and units: T is the batch's number of new tokens; k and v are both given or both None.

    Raises: ValueError.  Source: chapter 01.
    """
    if not 0 <= as_int(layer, "layer") < config.num_layers:
        raise ValueError(f"layer is {layer}; it must be between 0 and {config.num_layers - 1}")
    if (k is None) != (v is None):
        raise ValueError(f"k is {_shape(k)} and v {_shape(v)}; both must be given, or both None")
    tokens, size = batch.num_tokens, config.head_dim
    for name, x, heads in (("q", q, config.num_heads), ("k", k, config.num_kv_heads), ("v", v, config.num_kv_heads)):
        if x is not None and x.shape != (tokens, heads, size):
            raise ValueError(
                f"{name} has shape {_shape(x)}; it must be {[tokens, heads, size]}, as the batch and model"
            )


def _shape(x: Tensor | None) -> list[int] | None:
    return None if x is None else list(x.shape)


class NoCache:
    """A cache that keeps nothing: every pass must bring all tokens of its sequences, and can be differentiated.

    Shapes and units: as ``KVCache``; ``length`` is always 0, so a generation loop recomputes everything.

    Source: chapter 01.
    """

    nbytes = used_nbytes = 0

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self._batch: Batch | None = None

    def prepare(self, batch: Batch) -> None:
        """Take a batch whose sequences all start at position 0.

        Raises: ValueError for a sequence with a past, which this cache cannot have.  Source: chapter 01.
        """
        for seq_id, past in zip(batch.seq_ids, batch.past_lens, strict=True):
            if past:
                raise ValueError(f"sequence {seq_id} claims {past} cached tokens; NoCache keeps none: send them all")
        self._batch = batch

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        """Attention of q [T, H, D] over this pass's own k, v [T, H_kv, D]; gives [T, H, D].

        Raises: ValueError without k and v, before ``prepare``, or as ``check_attend``.  Source: chapter 01.
        """
        batch = self._batch
        if batch is None or k is None or v is None:
            raise ValueError("NoCache attends only to the k and v of the batch it was last prepared for")
        check_attend(self.config, batch, layer, q, k, v)
        window = self.config.window_size(layer)
        q_lens = batch.q_lens
        if q.shape[0] == 0:
            return torch.empty_like(q)
        if len(set(q_lens)) == 1 and window == (-1, -1) and batch.tree_mask is None:
            return _equal_lengths(q, k, v, len(q_lens))
        outs = []
        for rows in torch.arange(q.shape[0], device=q.device).split(q_lens):
            mask = None if batch.tree_mask is None else batch.tree_mask[rows]
            out, _ = reference.attend_one(q[rows], k[rows], v[rows], window_size=window, tree_mask=mask, dtype=None)
            outs.append(out)
        return torch.cat(outs)

    def length(self, seq_id: int) -> int:
        """Always 0 tokens. Source: chapter 01."""
        return 0

    def fork(self, parent: int, child: int) -> None:
        """Nothing to share. Source: chapter 01."""

    def keep(self, seq_id: int, base: int, indices: Sequence[int]) -> None:
        """Nothing to keep (offsets in tokens). Raises: ValueError unless base is 0 and indices empty.

        Source: chapter 01."""
        check_keep(base, indices, 0)

    def truncate(self, seq_id: int, length: int) -> None:
        """Nothing to forget; a length (tokens) other than 0 is an error. Raises: ValueError.  Source: chapter 01."""
        check_truncate(length, 0)

    def free(self, seq_id: int) -> None:
        """Nothing to free. Source: chapter 01."""


def _equal_lengths(q: Tensor, k: Tensor, v: Tensor, num_seqs: int) -> Tensor:
    """One scaled_dot_product_attention over B sequences of the same length (training, and one sequence alone)."""

    def heads_first(x: Tensor) -> Tensor:
        return x.reshape(num_seqs, -1, *x.shape[1:]).transpose(1, 2)

    # cuDNN's attention was slow at every length it had not met (it seems to build a plan for each). Training repeats
    # its lengths; recomputing a text that is one token longer every step does not.
    growing = q.is_cuda and not torch.is_grad_enabled()
    with sdpa_kernel(_WITHOUT_PLANS) if growing else nullcontext():
        out = functional.scaled_dot_product_attention(
            heads_first(q), heads_first(k), heads_first(v), is_causal=True, enable_gqa=True
        )
    return out.transpose(1, 2).reshape(q.shape)
