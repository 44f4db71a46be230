"""Chapter 05: speculative decoding. Cheap proposals, verified in one pass, and not one probability changed.

``_tree`` is the shape of a proposal, ``_drafters`` and ``_heads`` who makes it, ``_rejection`` and ``_kernel`` which of
it is accepted, ``_generate`` the loop, ``_cost`` what it gains.
"""

from __future__ import annotations

from kvlab.speculative._cost import best_gamma, expected_tokens, saturation, speedup
from kvlab.speculative._drafters import Draft, Drafter, ModelDrafter, NGramDrafter
from kvlab.speculative._generate import SpecDecodingStats, generate, step
from kvlab.speculative._heads import HeadDrafter, Heads
from kvlab.speculative._kernel import greedy_kernel, rejection_kernel
from kvlab.speculative._rejection import Accepted, greedy_sample, rejection_sample, residual
from kvlab.speculative._tree import Tree

__all__ = [
    "Accepted",
    "Draft",
    "Drafter",
    "HeadDrafter",
    "Heads",
    "ModelDrafter",
    "NGramDrafter",
    "SpecDecodingStats",
    "Tree",
    "best_gamma",
    "expected_tokens",
    "generate",
    "greedy_kernel",
    "greedy_sample",
    "rejection_kernel",
    "rejection_sample",
    "residual",
    "saturation",
    "speedup",
    "step",
]
