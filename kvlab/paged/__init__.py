"""Chapter 02: keys and values in pages. A pool of blocks, a table for each sequence, and kernels that walk the table.

``_blocks`` keeps the books (no tensor in it), ``_kernels`` moves and reads pages, ``_cache`` joins the two behind
``KVCache``. The split is the chapter's lesson: storage and computation are orthogonal.
"""

from __future__ import annotations

from kvlab.paged._blocks import BlockManager, BlockPool, OutOfBlocks
from kvlab.paged._cache import PagedCache
from kvlab.paged._kernels import (
    attention,
    from_flashinfer,
    gather,
    paged_attention_kernel,
    reshape_and_cache,
    reshape_and_cache_kernel,
    to_flashinfer,
)

__all__ = [
    "BlockManager",
    "BlockPool",
    "OutOfBlocks",
    "PagedCache",
    "attention",
    "from_flashinfer",
    "gather",
    "paged_attention_kernel",
    "reshape_and_cache",
    "reshape_and_cache_kernel",
    "to_flashinfer",
]
