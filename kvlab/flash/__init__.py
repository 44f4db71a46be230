"""Chapter 03: flash attention. One pass over the keys with a running softmax, and no matrix of scores in memory.

``_kernel`` holds the portable Triton kernel, ``_tune`` its tiles, ``_attention`` the public functions and the choice
between PyTorch, that kernel and the one for Hopper GPUs (chapter 03b, ``kvlab.flash_hopper``).
"""

from __future__ import annotations

from kvlab.flash._attention import Choice, attention, explain, flash_attn_func, flash_attn_varlen_func
from kvlab.flash._kernel import flash_attention_kernel

__all__ = [
    "Choice",
    "attention",
    "explain",
    "flash_attention_kernel",
    "flash_attn_func",
    "flash_attn_varlen_func",
]
