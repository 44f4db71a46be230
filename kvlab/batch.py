"""Batch: what one forward pass computes. Sequences of any mix of lengths, laid end to end without padding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index

import torch
from torch import Tensor


def as_int(value: object, name: str) -> int:
    """A whole number of any kind (of NumPy, a tensor of one) as a Python int; a bool and a float are none.

    Raises: ValueError that begins with ``name``.  Source: chapter 01.
    """
    if type(value) is int:
        return value
    try:
        if isinstance(value, bool) or getattr(value, "dtype", None) == torch.bool:
            raise TypeError
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{name} is {value!r}; it must be an integer") from None


def as_count(value: object, name: str, least: int = 0) -> int:
    """``as_int`` of a number that may not be under ``least``.

    Raises: ValueError that begins with ``name``.  Source: chapter 02.
    """
    count = as_int(value, name)
    if count < least:
        raise ValueError(f"{name} is {count}; it must be {least} or more")
    return count


def as_ints(values: Iterable[object], name: str) -> list[int]:
    """A list, an array or a tensor of whole numbers as a list of Python ints.

    Raises: ValueError that names the first entry that is no integer.  Source: chapter 01.
    """
    try:
        found: list[object] = list(values)
    except TypeError:
        raise ValueError(f"{name} is {values!r}; it must be a list of integers") from None
    if set(map(type, found)) <= {int}:
        return found  # type: ignore[return-value]
    return [as_int(value, f"{name}[{i}]") for i, value in enumerate(found)]


@dataclass
class Batch:
    """The new tokens of B sequences, T in all, and where each sequence stands.

    Shapes and units:
        seq_ids         B ids; None is a spare row of a captured graph
        token_ids       [T] int64
        positions       [T] int64, what RoPE and windows use
        cu_seqlens_q    [B + 1] int32, where each sequence's new tokens start
        seq_lens        [B] int32, tokens of each sequence in the cache once this pass is done (0 for a spare row)
        logits_indices  [R] int64, rows of the T whose logits are wanted
        tree_mask       [T] int64 or None; bit j: this token sees new token j of its own sequence
        q_lens, past_lens   the same facts as Python lists, so that no host code ever reads the device
        max_seqlen_q    a bound on the new tokens of any sequence, None for the largest of q_lens; the batch that a
                        graph captures gives one that holds whenever it is replayed

    Source: chapter 01; vLLM and FlashAttention use the same names.
    """

    seq_ids: list[int | None]
    token_ids: Tensor
    positions: Tensor
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    logits_indices: Tensor
    q_lens: list[int]
    past_lens: list[int]
    tree_mask: Tensor | None = None
    max_seqlen_q: int | None = None

    @property
    def num_tokens(self) -> int:
        """T, the number of new tokens. Source: chapter 01."""
        return sum(self.q_lens)

    @classmethod
    def build(
        cls,
        seq_ids: Sequence[int | None],
        new_tokens: Sequence[Sequence[int]],
        past_lens: Sequence[int],
        *,
        device: torch.device | str = "cpu",
        all_logits: bool = False,
        tree_mask: Sequence[Sequence[int]] | None = None,
    ) -> Batch:
        """Lay B sequences end to end.

        Shapes and units: ``new_tokens[b]`` holds the token ids to compute of sequence b (may be empty),
        ``past_lens[b]`` the tokens of it already in the cache. ``all_logits`` asks for the logits of every new
        token; the default is the last one of each sequence that has any. ``tree_mask[b]`` has one 63-bit integer
        a new token; a token's position is then its depth, the number of bits set below itself.

        Raises: ValueError where the lists disagree in length, a sequence id stands twice, an id, a past length, a
        token id or a mask is no integer, a token id is outside 64 bits or a length outside 32, or is negative, or a
        tree has over 63 new tokens.

        Source: chapter 01.
        """
        if not len(seq_ids) == len(new_tokens) == len(past_lens):
            raise ValueError(
                f"seq_ids, new_tokens and past_lens have {len(seq_ids)}, {len(new_tokens)} and {len(past_lens)} "
                "entries; each must have one a sequence"
            )
        seq_ids = [None if s is None else as_int(s, f"seq_ids[{b}]") for b, s in enumerate(seq_ids)]
        past_lens = as_ints(past_lens, "past_lens")
        tokens = [as_ints(ids, f"new_tokens[{b}]") for b, ids in enumerate(new_tokens)]
        real = [s for s in seq_ids if s is not None]
        if len(set(real)) != len(real):
            twice = sorted({s for s in real if real.count(s) > 1})
            raise ValueError(f"seq_ids holds {twice} more than once; a sequence may stand in a batch only once")
        for b, (ids, past) in enumerate(zip(tokens, past_lens, strict=True)):
            if past < 0:
                raise ValueError(f"past_lens[{b}] is {past}; it must be 0 or more")
            if past + len(ids) >= 2**31:
                raise ValueError(f"past_lens[{b}] is {past}; with {len(ids)} new tokens it must be under 2**31")
            if ids and (min(ids) < 0 or max(ids) >= 2**63):
                wrong = min(ids) if min(ids) < 0 else max(ids)
                raise ValueError(f"new_tokens[{b}] holds {wrong}; token ids must be 0 or more and under 2**63")
        q_lens = [len(ids) for ids in tokens]
        starts = [0]
        for q_len in q_lens:
            starts.append(starts[-1] + q_len)
        if tree_mask is None:
            positions = [past + i for past, q_len in zip(past_lens, q_lens, strict=True) for i in range(q_len)]
            mask = None
        else:
            positions, bits = _tree_positions(tree_mask, q_lens, past_lens)
            mask = torch.tensor(bits, dtype=torch.int64, device=device)
        if all_logits:
            wanted = list(range(starts[-1]))
        else:
            wanted = [starts[b + 1] - 1 for b in range(len(q_lens)) if q_lens[b]]
        return cls(
            seq_ids=seq_ids,
            token_ids=torch.tensor([t for ids in tokens for t in ids], dtype=torch.int64, device=device),
            positions=torch.tensor(positions, dtype=torch.int64, device=device),
            cu_seqlens_q=torch.tensor(starts, dtype=torch.int32, device=device),
            seq_lens=torch.tensor(
                [0 if s is None else p + q for s, p, q in zip(seq_ids, past_lens, q_lens, strict=True)],
                dtype=torch.int32,
                device=device,
            ),
            logits_indices=torch.tensor(wanted, dtype=torch.int64, device=device),
            q_lens=q_lens,
            past_lens=past_lens,
            tree_mask=mask,
        )


def _tree_positions(
    tree_mask: Sequence[Sequence[int]], q_lens: Sequence[int], past_lens: Sequence[int]
) -> tuple[list[int], list[int]]:
    positions: list[int] = []
    bits: list[int] = []
    trees = [as_ints(masks, f"tree_mask[{b}]") for b, masks in enumerate(tree_mask)]
    if [len(masks) for masks in trees] != list(q_lens):
        raise ValueError(f"tree_mask has {[len(m) for m in trees]} entries; it must have {list(q_lens)}")
    for b, masks in enumerate(trees):
        if len(masks) > 63:
            raise ValueError(f"tree_mask[{b}] has {len(masks)} tokens; a tree holds 63 at most")
        for i, mask in enumerate(masks):
            if not mask >> i & 1 or mask >> (i + 1):
                raise ValueError(f"tree_mask[{b}][{i}] is {mask:#b}; it must have bit {i} set and none above it")
            positions.append(past_lens[b] + mask.bit_count() - 1)
            bits.append(mask)
    return positions, bits
