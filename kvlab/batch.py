"""Batch: what one forward pass computes. Sequences of any mix of lengths, laid end to end without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


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

        Raises: ValueError where the lists disagree in length, a sequence id stands twice, a token id or a past
        length is negative, a token id is no integer, or a tree has over 63 new tokens.

        Source: chapter 01.
        """
        if not len(seq_ids) == len(new_tokens) == len(past_lens):
            raise ValueError(
                f"seq_ids, new_tokens and past_lens have {len(seq_ids)}, {len(new_tokens)} and {len(past_lens)} "
                "entries; each must have one a sequence"
            )
        real = [s for s in seq_ids if s is not None]
        if len(set(real)) != len(real):
            twice = sorted({s for s in real if real.count(s) > 1})
            raise ValueError(f"seq_ids holds {twice} more than once; a sequence may stand in a batch only once")
        for b, (tokens, past) in enumerate(zip(new_tokens, past_lens, strict=True)):
            if past < 0:
                raise ValueError(f"past_lens[{b}] is {past}; it must be 0 or more")
            if len(tokens) and min(tokens) < 0:
                raise ValueError(f"new_tokens[{b}] holds {min(tokens)}; token ids must be 0 or more")
        q_lens = [len(tokens) for tokens in new_tokens]
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
        flat = torch.tensor([t for tokens in new_tokens for t in tokens])
        if flat.numel() and flat.dtype != torch.int64:
            raise ValueError(f"new_tokens hold {flat.dtype} values; token ids must be integers")
        return cls(
            seq_ids=list(seq_ids),
            token_ids=flat.to(device, torch.int64),
            positions=torch.tensor(positions, dtype=torch.int64, device=device),
            cu_seqlens_q=torch.tensor(starts, dtype=torch.int32, device=device),
            seq_lens=torch.tensor(
                [0 if s is None else p + q for s, p, q in zip(seq_ids, past_lens, q_lens, strict=True)],
                dtype=torch.int32,
                device=device,
            ),
            logits_indices=torch.tensor(wanted, dtype=torch.int64, device=device),
            q_lens=q_lens,
            past_lens=list(past_lens),
            tree_mask=mask,
        )


def _tree_positions(
    tree_mask: Sequence[Sequence[int]], q_lens: Sequence[int], past_lens: Sequence[int]
) -> tuple[list[int], list[int]]:
    positions: list[int] = []
    bits: list[int] = []
    if [len(masks) for masks in tree_mask] != list(q_lens):
        raise ValueError(f"tree_mask has {[len(m) for m in tree_mask]} entries; it must have {list(q_lens)}")
    for b, masks in enumerate(tree_mask):
        if len(masks) > 63:
            raise ValueError(f"tree_mask[{b}] has {len(masks)} tokens; a tree holds 63 at most")
        for i, mask in enumerate(masks):
            if not mask >> i & 1 or mask >> (i + 1):
                raise ValueError(f"tree_mask[{b}][{i}] is {mask:#b}; it must have bit {i} set and none above it")
            positions.append(past_lens[b] + mask.bit_count() - 1)
            bits.append(mask)
    return positions, bits
