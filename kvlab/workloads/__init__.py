"""What a cache, a kernel or a scheduler has to serve.

``_lengths`` draws how long prompts and answers are, ``_memory`` lets memories serve such requests without a model, to
compare what each wastes, ``_arrivals`` lets them come over time, and ``_scores`` takes real rows of scores.
"""

from __future__ import annotations

from kvlab.workloads._arrivals import arriving, bursty, decodes_and_prompts, load_trace, poisson, save_trace, together
from kvlab.workloads._lengths import Request, lognormal, mix
from kvlab.workloads._memory import FILLED, FREE, RESERVED, Contiguous, Pages, Run, Usage, fill, random_history, serve
from kvlab.workloads._scores import last_scores

__all__ = [
    "FILLED",
    "FREE",
    "RESERVED",
    "Contiguous",
    "Pages",
    "Request",
    "Run",
    "Usage",
    "arriving",
    "bursty",
    "decodes_and_prompts",
    "fill",
    "last_scores",
    "load_trace",
    "lognormal",
    "mix",
    "poisson",
    "random_history",
    "save_trace",
    "serve",
    "together",
]
