"""What every cache and every kernel of the book must survive, how close is close enough, and proof that tests bite.

``HOSTILE`` is one table of cases: small inputs on which real systems were once wrong. A chapter runs all of it::

    for case in testing.cases(device):
        testing.check_attention(paged.attention, case, device=device, impl="triton")
    for case in testing.CACHES:
        testing.run_cache_case(NaiveCache, case)

``_close`` is the one tolerance rule, ``_attention`` and ``_caches`` are the table, ``_distributions`` says whether
draws come from a distribution, and ``_planted`` copies a function with one mistake in it, which a check must notice.
"""

from __future__ import annotations

from kvlab.testing._attention import ATTENTION, AttentionCase, AttentionInputs, cases, check_attention
from kvlab.testing._caches import CACHES, CacheCase, poison, run_cache_case
from kvlab.testing._close import assert_attention, assert_close, tolerance
from kvlab.testing._distributions import MarkovPair, chi_square
from kvlab.testing._planted import assert_caught, planted

HOSTILE: tuple[AttentionCase | CacheCase, ...] = (*ATTENTION, *CACHES)

__all__ = [
    "ATTENTION",
    "CACHES",
    "HOSTILE",
    "AttentionCase",
    "AttentionInputs",
    "CacheCase",
    "MarkovPair",
    "assert_attention",
    "assert_caught",
    "assert_close",
    "cases",
    "check_attention",
    "chi_square",
    "planted",
    "poison",
    "run_cache_case",
    "tolerance",
]
