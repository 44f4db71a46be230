"""Chapter 04: flash-decoding. The keys of one sequence shared out among programs, and their results merged.

``_kernel`` holds the split-KV kernels, ``_splits`` how the keys are cut, ``_launch`` the memory between programs,
``_attention`` the public functions.
"""

from __future__ import annotations

from kvlab.flash_decoding._attention import attention, explain, merge_states
from kvlab.flash_decoding._kernel import flash_decoding_kernel, merge_kernel, merge_states_kernel
from kvlab.flash_decoding._splits import choose_splits

__all__ = [
    "attention",
    "choose_splits",
    "explain",
    "flash_decoding_kernel",
    "merge_kernel",
    "merge_states",
    "merge_states_kernel",
]
