"""Chapter 04: how other libraries choose the number of splits, each rule as the few lines that it is.

All are for sequences of one length, and take and give plain numbers: ``programs`` is what runs unsplit, sequences times
KV heads; the result is the splits of each sequence.
"""

from __future__ import annotations

import math


def flash_attention(programs: int, length: int, multiprocessors: int, block: int = 128) -> int:
    """FlashAttention-3: if programs fill 80 % of the card, 1; else the fewest splits that fill its rounds well.

    Source: chapter 04; FlashAttention, hopper/heuristics.h.
    """
    blocks = -(-length // block)
    if programs >= 0.8 * multiprocessors or blocks <= 4:
        return 1
    rounds = [programs * splits / multiprocessors for splits in range(1, min(128, multiprocessors, blocks) + 1)]
    full = [x / math.ceil(x) for x in rounds]
    return 1 + next(i for i, x in enumerate(full) if x >= 0.85 * max(full))


def flashinfer(programs: int, length: int, multiprocessors: int, page: int = 16) -> int:
    """FlashInfer: the shortest chunks, of 128 keys or more, with which all programs fit the card at once, two a
    multiprocessor.

    Source: chapter 04; FlashInfer, include/flashinfer/attention/scheduler.cuh.
    """
    pages = -(-length // page)
    chunks = range(max(128 // page, 1), pages + 1)
    fit = (chunk for chunk in chunks if programs * -(-pages // chunk) <= 2 * multiprocessors)
    return -(-pages // next(fit, pages))


def flex_decoding(programs: int, length: int, multiprocessors: int) -> int:
    """PyTorch's FlexDecoding: two programs a multiprocessor, whatever the length.

    Source: chapter 04; PyTorch, torch/_inductor/kernel/flex/flex_decoding.py.
    """
    return max(1, multiprocessors // programs * 2)
